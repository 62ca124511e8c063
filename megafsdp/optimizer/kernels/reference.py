"""Adam and AdamW in plain torch, operation by operation: the definition of every kernel's bits.

Kernels are tested against this file, and it runs where nothing is compiled. It takes flat tensors
and one set of constants; segments, checks and the choice of a kernel are in adam_kernel.py, states
of optimizers in optimizer/states.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator

import torch

from megafsdp.optimizer.kernels.hyper import AdamConstants

# torch runs an operation on fewer than 32768 elements in the calling thread; set_flush_denormal()
# has effect only in that thread.
_CHUNK_NUMEL = 1 << 14
# Bounds what an update allocates on a device: a few times 8 bytes per element.
_DEVICE_CHUNK_NUMEL = 1 << 22
_NUM_LANES = 16
_LANE_NUMEL = 256
_RUN = 256


def update(
    weight: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    constants: AdamConstants,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the weight and both moments after one step; all tensors fp32, none is changed.

    Constants except ``l2`` and ``lerp`` may also be 0-dim fp32 tensors.

    Every line rounds as often as it has operations; ``_fma`` counts as one.
    """
    c = constants
    if c.l2 != 0:
        grad = _fma(weight, c.l2, grad)
    weight = weight * c.decay
    exp_avg = _fma(grad - exp_avg, c.lerp, exp_avg if c.lerp > 0 else grad)
    exp_avg_sq = _fma(grad * c.square, grad, exp_avg_sq * c.beta2)
    # Through fp64: MKL's fp32 root ignores the flushing mode. Rounding twice changes no root.
    root = exp_avg_sq.double().sqrt().float()
    # Divided by a tensor: CUDA would multiply by the reciprocal of a number instead.
    divisor = root.new_full((), c.root) if isinstance(c.root, float) else c.root
    denominator = root / divisor + c.eps
    return weight - exp_avg * c.step_size / denominator, exp_avg, exp_avg_sq


def _fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """Return ``a * b + c`` rounded to fp32 once.

    The product is exact in fp64. The sum is rounded to odd; rounding that to fp32 gives the same as
    rounding the exact sum.
    """
    # 24 bits times 24 bits fit into the 53 bits of fp64.
    product, addend = a.double() * b, c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    must_move = (error != 0) & total.isfinite() & (bits & 1 == 0)
    towards = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(must_move, bits + towards, bits).view(torch.float64).float()


@contextlib.contextmanager
def denormal_mode(flushes: bool) -> Iterator[None]:
    """Flush subnormal numbers to zero on this thread, or keep them; restore the mode at the end."""
    # torch has no getter for the mode: a product that would be subnormal shows it.
    small = torch.full((1,), 2.0**-120, dtype=torch.float32, device="cpu")
    was_on = small.mul_(2.0**-20).item() == 0
    torch.set_flush_denormal(flushes)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)


def fp32_to_halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split fp32 values into bf16 values and int16 remainders, without loss.

    The bf16 value is the nearest one; a tie goes away from zero.
    """
    bits = values.view(torch.int32)
    # The cast to int16 wraps: the remainder is negative if the high half was rounded up.
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def plain_nans(values: torch.Tensor) -> torch.Tensor:
    """Return fp32 values with one NaN for all: rounding the bits of others may give no NaN."""
    return values.masked_fill(values.isnan(), torch.nan)


def halves_to_fp32(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values that :func:`fp32_to_halves` split, bit for bit."""
    bits = (high.view(torch.int16).to(torch.int32) << 16) + remainder
    return bits.view(torch.float32)


def join_weights(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weights of two halves; the high one may have been changed by others.

    A high half of zero with a negative remainder counts as zero: no number splits into these
    halves, and their bits are those of a NaN. They arise when others set the weight to zero.
    """
    is_another = (high == 0) & (remainder < 0)
    return halves_to_fp32(high, remainder.masked_fill(is_another, 0))


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares as a ``()`` fp64 tensor, added in a fixed order; waits for nothing.

    Element ``i`` of a block of 4096 belongs to lane ``i % 16``. Each lane is added in rising order,
    then the lanes in order give the sum of the block. Each run of 256 sums is added in order to one
    sum, and so on until one is left.
    """
    block_numel = _NUM_LANES * _LANE_NUMEL
    squares = values.double().square()
    # Pad with zeros, which change no sum, so that every block has all lanes.
    squares = torch.nn.functional.pad(squares, (0, -values.numel() % block_numel))
    rows = squares.view(-1, _LANE_NUMEL, _NUM_LANES)
    lanes = functools.reduce(operator.add, rows.unbind(1), torch.zeros_like(rows[:, 0]))
    sums = functools.reduce(operator.add, lanes.unbind(1))
    while sums.numel() > 1:
        runs = torch.nn.functional.pad(sums, (0, -sums.numel() % _RUN)).view(-1, _RUN)
        sums = functools.reduce(operator.add, runs.unbind(1))
    return sums.sum()


def chunks(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """Yield slices, which on a CPU are small enough for torch to stay on the calling thread."""
    numel = _CHUNK_NUMEL if device.type == "cpu" else _DEVICE_CHUNK_NUMEL
    for first in range(start, stop, numel):
        yield slice(first, min(first + numel, stop))
