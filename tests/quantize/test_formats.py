"""Weight formats: fragments against the whole, and what codes and scales mean."""

from __future__ import annotations

import math

import pytest
import torch

from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.tiles import Fragment

FORMATS = [recipe_of(name).weight for name in RECIPE_NAMES]
SHAPES = {1: (200, 72), 16: (48, 80), 32: (96, 64)}


def maxima_of(weight_format: WeightFormat, shape: tuple[int, ...]) -> torch.Tensor:
    """Return fresh maxima of a tensor."""
    return torch.zeros(weight_format.num_maxima(shape), dtype=torch.int32)


def quantized(
    weight_format: WeightFormat,
    values: torch.Tensor,
    *,
    cuts: tuple[int, ...] = (),
    through: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, table and maxima of a tensor whose rows are cut at ``cuts``."""
    shape, cols = tuple(values.shape), values.shape[-1]
    bounds = [0, *cuts, math.prod(shape[:-1])]
    rows = values.reshape(-1, cols)
    fragments = [
        Fragment(rows[start:stop].reshape(-1), shape, start)
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    partial = [maxima_of(weight_format, shape) for _ in fragments]
    weight_format.add_maxima(fragments, partial, through=through)
    maxima = torch.stack(partial).amax(0)
    table = torch.empty(weight_format.table_nbytes(shape), dtype=torch.uint8)
    weight_format.fill_tables([shape], [maxima], [table])
    codes = [
        torch.empty(f.values.numel() // weight_format.codes_per_byte, dtype=torch.uint8)
        for f in fragments
    ]
    weight_format.encode(fragments, [maxima] * len(fragments), codes, through=through)
    return torch.cat(codes), table, maxima


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_decoded_values_are_near(weight_format: WeightFormat) -> None:
    """Nearer than half the distance of neighbouring codes, in a stack of matrices too."""
    rows, cols = SHAPES[weight_format.multiple]
    values = torch.randn(3, rows, cols, generator=torch.Generator().manual_seed(0))
    codes, table, _ = quantized(weight_format, values)
    decoded = weight_format.decode(codes, table, values.shape, torch.float32)
    bound = 0.3 if weight_format.name == "nvfp4" else 0.05
    distance = ((decoded - values).norm() / values.norm()).item()
    assert 0.01 < distance < bound


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_fragments_equal_the_whole(weight_format: WeightFormat) -> None:
    """Cut anywhere, with an empty part and one of one row."""
    rows, cols = SHAPES[weight_format.multiple]
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    whole = quantized(weight_format, values)
    parts = quantized(weight_format, values, cuts=(0, 17, 18, 18, 41))
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
