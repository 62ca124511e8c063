"""Orthogonalisation of a matrix, or of the logical matrices fused in it, by Newton-Schulz.

Every function works on whole matrices of one rank; exchange.py brings them there.
"""

from __future__ import annotations

import math

import torch

from megafsdp.mesh.annotation import FusedParts

# Quintic coefficients that grow small singular values fastest and keep all within [0.7, 1.2].
# Source: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks".
MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LR_RULES = (None, "original", "match_rms_adamw")

Coefficients = tuple[float, float, float]


def orthogonalize(
    matrix: torch.Tensor, coefficients: Coefficients, num_steps: int, eps: float
) -> torch.Tensor:
    """Return approximately ``U V^T`` for a matrix ``U S V^T``, in its own dtype.

    Each step maps every singular value s to ``a s + b s^3 + c s^5`` without a decomposition.
    Allocates a matrix and two squares of its shorter side.
    """
    a, b, c = coefficients
    # Transposed if tall, so that the Gram matrix has the shorter side: far less work.
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def lr_ratio(rule: str | None, rows: int, cols: int) -> float:
    """Return the factor on the learning rate of a matrix.

    ``"original"`` (or None) keeps the update's spectral norm in proportion to the shape;
    ``"match_rms_adamw"`` gives every element AdamW's usual RMS of about 0.2. The names are those of
    ``torch.optim.Muon``.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def part_views(
    matrix: torch.Tensor, fused: FusedParts | None, dim: int, *, by_group: bool
) -> list[torch.Tensor]:
    """Return a view of each logical matrix: ``(groups, rows, cols)`` or ``(rows, groups, cols)``.

    Args:
        matrix: 2-D, contiguous.
        fused: The logical tensors along ``dim``; None means that the matrix is a single one.
        dim: 0 or 1.
        by_group: True gives the piece of a part in each group by itself, as one group.
    """
    if fused is None:
        return [matrix.unflatten(dim, (1, -1))]
    grouped = matrix.unflatten(dim, (fused.num_groups, -1))
    parts = list(grouped.split(fused.sizes, dim + 1))
    return [g for p in parts for g in p.split(1, dim)] if by_group else parts


def part_shapes(
    shape: tuple[int, int], fused: FusedParts | None, dim: int, *, by_group: bool
) -> list[tuple[int, int]]:
    """Return ``(rows, cols)`` of each logical matrix that :func:`part_views` gives."""
    if fused is None:
        return [shape]
    repeats = 1 if by_group else fused.num_groups
    extents = [size * repeats for size in fused.sizes]
    extents *= fused.num_groups if by_group else 1
    return [(e, shape[1]) if dim == 0 else (shape[0], e) for e in extents]
