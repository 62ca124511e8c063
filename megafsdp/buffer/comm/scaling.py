"""Factors on sums over ranks: before the sum, within it, or with one pass after it.

A mean is a sum times 1 / ranks. Where the factor is applied decides what is rounded, and whether
fp16 overflows. This file issues no collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megafsdp.mesh.torch_private import premultiplied_sum


def start_scaling(
    wires: Sequence[torch.Tensor],
    scale: float,
    group: dist.ProcessGroup,
    *,
    is_direct: bool,
    can_scale: bool,
) -> tuple[Any, float]:
    """Return the reduction of ``wires``, and the factor that remains to be applied to the sum.

    Args:
        wires: The inputs; scaled in place if fp16 needs it and the reduction cannot scale.
        scale: Factor on the sum.
        group: Ranks that sum.
        is_direct: Whether the sum is the result, so that a remaining factor costs a pass.
        can_scale: Whether the reduction may be one that multiplies, as NCCL's may.
    """
    dtype = wires[0].dtype
    if dtype == torch.float16 and scale < 1.0:
        # The sum of many ranks may exceed 65504 although their mean does not. Divide first only by
        # about the square root: the full divisor would lose small gradients, below 2**-24.
        divisor = 2.0 ** math.ceil(-math.log2(scale) / 2)
        if can_scale:
            return premultiplied_sum(1 / divisor), scale * divisor
        for wire in wires:
            wire.mul_(1 / divisor)
        return dist.ReduceOp.SUM, scale * divisor
    # In narrow dtypes scaled addends would be rounded, and torch up to 2.13 scales bf16 by zero.
    if can_scale and is_direct and scale != 1.0 and dtype in (torch.float32, torch.float64):
        is_mean = scale == 1 / group.size()
        return dist.ReduceOp.AVG if is_mean else premultiplied_sum(scale), 1.0
    return dist.ReduceOp.SUM, scale


@torch.no_grad()
def write_scaled(
    out: torch.Tensor, sums: Sequence[torch.Tensor], scale: float, accumulate: bool
) -> None:
    """Write a scaled tensor to another one in one kernel, in the wider dtype of the two."""
    (total,) = sums
    if accumulate:
        out.add_(total, alpha=scale)
    elif scale == 1.0:
        out.copy_(total)
    elif total.dtype.itemsize < out.dtype.itemsize:
        # torch would multiply by a number in the narrow dtype, but by a tensor in the wide one.
        torch.mul(total, out.new_full((1,), scale), out=out)
    else:
        torch.mul(total, scale, out=out)
