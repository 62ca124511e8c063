"""The transform of 16 tokens: its matrix, its inverse, and products that it leaves as they are."""

from __future__ import annotations

import pytest
import torch

from megafsdp.quantize.hadamard import transform_tokens

_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def _sylvester() -> torch.Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def test_the_transform_is_the_matrix_of_the_recipe() -> None:
    """Sylvester's matrix times the fixed signs, over 4; its rows are orthonormal."""
    matrix = transform_tokens(torch.eye(16))
    assert torch.equal(matrix, _sylvester() @ torch.diag(torch.tensor(_SIGNS).float()) / 4)
    assert torch.equal(matrix @ matrix.t(), torch.eye(16))


@pytest.mark.parametrize("num_tokens", [1, 16, 21, 48])
def test_the_weight_gradient_is_unchanged(num_tokens: int) -> None:
    """With integers, whose sums are exact: also where tokens are no multiple of 16."""
    generator = torch.Generator().manual_seed(num_tokens)
    grad = torch.randint(-8, 9, (num_tokens, 6), generator=generator).float()
    x = torch.randint(-8, 9, (num_tokens, 10), generator=generator).float()
    of_grad, of_x = transform_tokens(grad), transform_tokens(x)
    assert of_x.shape == (-(-num_tokens // 16) * 16, 10)
    assert torch.equal(of_grad.t() @ of_x, grad.t() @ x)
    assert not torch.equal(of_x[:num_tokens], x)


def test_blocks_are_transformed_each_by_itself() -> None:
    """An outlier is spread over its own block, equally; a NaN stays in its block and feature."""
    x = torch.zeros(32, 3, dtype=torch.bfloat16)
    x[18, 1] = 64.0
    transformed = transform_tokens(x)
    assert transformed.dtype == torch.float32
    assert torch.equal(transformed[16:, 1].abs(), torch.full((16,), 16.0))
    assert not transformed[:16].any() and not transformed[:, [0, 2]].any()
    x[3, 0] = torch.nan
    is_nan = transform_tokens(x).isnan()
    assert is_nan[:16, 0].all() and is_nan.sum() == 16
