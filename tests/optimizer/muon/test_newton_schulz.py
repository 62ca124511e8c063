"""Newton-Schulz moves singular values as the quintic does, and fused parts are found."""

from __future__ import annotations

import pytest
import torch

from megafsdp.mesh.annotation import FusedParts
from megafsdp.optimizer.muon.newton_schulz import (
    MUON_COEFFICIENTS,
    lr_ratio,
    orthogonalize,
    part_shapes,
    part_views,
)


@pytest.mark.parametrize("shape", [(7, 7), (5, 30), (30, 5), (1, 6), (6, 1)])
def test_singular_values_move_as_the_quintic(shape: tuple[int, int]) -> None:
    """Singular vectors stay, each value goes through five quintics; the matrix itself stays."""
    a, b, c = MUON_COEFFICIENTS
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = matrix.clone()
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    result = orthogonalize(matrix, MUON_COEFFICIENTS, 5, 1e-7)
    torch.testing.assert_close(result, (u * s) @ vh, rtol=1e-9, atol=1e-9)
    assert torch.equal(matrix, before)


def test_a_zero_matrix_stays_zero() -> None:
    """The floor of the norm keeps it from becoming NaN."""
    result = orthogonalize(torch.zeros(3, 4), MUON_COEFFICIENTS, 5, 1e-7)
    assert torch.equal(result, torch.zeros(3, 4))


def test_rate_rules_are_torchs() -> None:
    """Tall, wide and square matrices under each name."""
    assert lr_ratio("original", 8, 2) == lr_ratio(None, 8, 2) == 2.0
    assert lr_ratio("original", 2, 8) == 1.0
    assert lr_ratio("match_rms_adamw", 2, 25) == lr_ratio("match_rms_adamw", 25, 2) == 1.0


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("by_group", [False, True])
def test_parts_are_found_along_either_dimension(dim: int, by_group: bool) -> None:
    """Lines [a a b | a a b] become a and b, or each group's a and b; writes go through."""
    fused = FusedParts(("a", "b"), (2, 1), dim=dim, num_groups=2)
    matrix = torch.arange(24.0).view((6, 4) if dim == 0 else (4, 6))
    lines = matrix.clone() if dim == 0 else matrix.T.clone()
    wanted = [[0, 1], [3, 4], [2], [5]] if by_group else [[0, 1, 3, 4], [2, 5]]
    views = part_views(matrix, fused, dim, by_group=by_group)
    parts = [view.flatten(dim, dim + 1) for view in views]
    assert len(parts) == len(wanted)
    for part, indices in zip(parts, wanted, strict=True):
        assert torch.equal(part if dim == 0 else part.T, lines[indices])
    shapes = part_shapes(tuple(matrix.shape), fused, dim, by_group=by_group)
    assert sorted(shapes) == sorted(tuple(part.shape) for part in parts)
    for view in views:
        view.zero_()
    assert not matrix.any()
