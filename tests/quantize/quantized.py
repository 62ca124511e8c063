"""Quantized tensors made as an engine makes them, for the tests of formats and kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.tiles import Fragment

FORMATS = [recipe_of(name).weight for name in RECIPE_NAMES]
BY_NAME = {weight_format.name: weight_format for weight_format in FORMATS}
# For each format: several rows and columns of tiles, the last ones cut short where it may be.
SHAPES: dict[str, tuple[int, int]] = {
    "fp8_current": (48, 80),
    "fp8_delayed": (48, 80),
    "fp8_block": (300, 201),
    "mxfp8": (96, 160),
    "nvfp4": (64, 80),
}
# Behind each output, what a kernel must not write to.
GUARD_NBYTES = 16
_GUARD = 0x5A


@dataclass(frozen=True)
class Quantized:
    """The bytes of one tensor.

    Attributes:
        codes: 1-D uint8.
        table: 1-D uint8.
        maxima: 1-D int32.
    """

    codes: torch.Tensor
    table: torch.Tensor
    maxima: torch.Tensor

    def equals(self, other: Quantized) -> bool:
        """Return whether all bytes are the same."""
        mine, others = (vars(q).values() for q in (self, other))
        return all(torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def guarded(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return 1-D memory full of rubbish, with more of it behind."""
    nbytes = numel * dtype.itemsize
    memory = torch.full((nbytes + GUARD_NBYTES,), _GUARD, dtype=torch.uint8)
    return memory[:nbytes].view(dtype)


def assert_guard_holds(tensor: torch.Tensor) -> None:
    """Assert that what lies behind memory of :func:`guarded` is as it was."""
    memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert memory[tensor.numel() * tensor.dtype.itemsize :].eq(_GUARD).all()


def fragments_of(values: torch.Tensor, cuts: Sequence[int]) -> list[Fragment]:
    """Return the parts of a tensor between cuts, which are rows of the stack."""
    shape, cols = tuple(values.shape), values.shape[-1]
    rows = values.reshape(-1, cols)
    bounds = [0, *sorted(cuts), math.prod(shape[:-1])]
    return [
        Fragment(rows[start:stop].reshape(-1), shape, start)
        for start, stop in itertools.pairwise(bounds)
    ]


def quantize(
    weight_format: WeightFormat,
    values: torch.Tensor,
    *,
    cuts: Sequence[int] = (),
    through: torch.dtype | None = None,
) -> Quantized:
    """Quantize a tensor whose parts are on several ranks; the MAX is the only thing they share."""
    shape = tuple(values.shape)
    fragments = fragments_of(values, cuts)
    num_maxima = weight_format.num_maxima(shape)
    partial = [torch.zeros(num_maxima, dtype=torch.int32) for _ in fragments]
    weight_format.add_maxima(fragments, partial, through=through)
    maxima = torch.stack(partial).amax(0)
    table = guarded(weight_format.table_nbytes(shape), torch.uint8)
    weight_format.fill_tables([shape], [maxima], [table])
    codes = [
        guarded(f.values.numel() // weight_format.codes_per_byte, torch.uint8) for f in fragments
    ]
    weight_format.encode(fragments, [maxima] * len(fragments), codes, through=through)
    for written in (table, *codes):
        assert_guard_holds(written)
    return Quantized(torch.cat(codes), table, maxima)


def dequantize(
    weight_format: WeightFormat,
    found: Quantized,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the values of a tensor's bytes."""
    out = guarded(math.prod(shape), dtype)
    weight_format.decode(found.codes, found.table, shape, dtype, out.view(*shape))
    assert_guard_holds(out)
    return out.view(*shape)


def same_values(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether all bits are the same, but for those of NaN."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(
        left.nan_to_num(0.0, math.inf, -math.inf), right.nan_to_num(0.0, math.inf, -math.inf)
    )
