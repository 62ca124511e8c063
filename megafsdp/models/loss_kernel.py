"""Cross entropy of a row of logits and its gradient in one Triton kernel.

Imported only where triton is installed. The definition in torch, which this must equal up to
rounding, is the fallback in loss.py; that file also decides which of the two runs. Under
``TRITON_INTERPRET=1`` the kernels run on a CPU, which is how they are tested without a GPU.

Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Columns that a program has in registers, 16 for each of its threads.
_BLOCK = 8192
_NUM_WARPS = 16


@triton.jit  # type: ignore[untyped-decorator]
def _score_row(
    logits_NV: tl.tensor,
    labels_N: tl.tensor,
    weights_N: tl.tensor,
    losses_N: tl.tensor,
    grads_NV: tl.tensor,
    num_columns: tl.constexpr,
    has_grads: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the loss of one row and, if ``has_grads``, the row's gradient."""
    # 64 bits: 16k rows of 150k columns are more than 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_NV + row * num_columns
    columns = tl.arange(0, block)
    label = tl.load(labels_N + row)
    # Read before the first reduction, whose barrier comes before any thread writes a gradient: the
    # gradient may take the logits' place. A label that is not a column must not read beyond them.
    is_column = (label >= 0) & (label < num_columns)
    picked = tl.load(logits_V + label, mask=is_column, other=float("nan")).to(tl.float32)
    # Finite: with -inf, a first block of scores that are all -inf would compute -inf - -inf, NaN.
    largest = -3.0e38
    total = 0.0
    for start in range(0, num_columns, block):
        is_there = start + columns < num_columns
        x = tl.load(logits_V + start + columns, mask=is_there, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        # The sum so far is in units of the old maximum.
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    log_sum = largest + tl.log(total)
    tl.store(losses_N + row, log_sum - picked)
    if has_grads:
        weight = tl.load(weights_N + row)
        grads_V = grads_NV + row * num_columns
        for start in range(0, num_columns, block):
            is_there = start + columns < num_columns
            x = tl.load(logits_V + start + columns, mask=is_there, other=0.0).to(tl.float32)
            # Softmax minus one-hot, scaled by the row's weight.
            grad = (tl.exp(x - log_sum) - (start + columns == label).to(tl.float32)) * weight
            tl.store(grads_V + start + columns, grad, mask=is_there)


@triton.jit  # type: ignore[untyped-decorator]
def _scale(values: tl.tensor, factor: tl.tensor, numel: tl.tensor, block: tl.constexpr) -> None:
    """Multiply values by a factor on the device; touches none of them if it is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        x = tl.load(values + at, mask=at < numel, other=0.0).to(tl.float32)
        tl.store(values + at, x * by, mask=at < numel)


def score_rows(
    logits_NV: Tensor, labels_N: Tensor, weights_N: Tensor, grads_NV: Tensor | None
) -> Tensor:
    """Return the negative log-likelihood of each row's label, ``(N,)`` fp32.

    Args:
        logits_NV: Contiguous fp32 or bf16; sums are fp32.
        labels_N: int64.
        weights_N: fp32 factor on each row's gradient.
        grads_NV: Receives the gradient of the weighted sum in its dtype, may be ``logits_NV``; None
            for no gradient.
    """
    num_rows, num_columns = logits_NV.shape
    losses_N = torch.empty_like(weights_N)
    _score_row[(num_rows,)](
        logits_NV,
        labels_N,
        weights_N,
        losses_N,
        logits_NV if grads_NV is None else grads_NV,
        # A constant: a model has one vocabulary, and its rows are then known to be aligned.
        num_columns=num_columns,
        has_grads=grads_NV is not None,
        block=_BLOCK,
        num_warps=_NUM_WARPS,
    )
    return losses_N


def scale_in_place(values: Tensor, factor: Tensor) -> None:
    """Multiply contiguous values by a 0-dim factor, which the host does not read."""
    numel = values.numel()
    _scale[(triton.cdiv(numel, _BLOCK),)](values, factor, numel, block=_BLOCK, num_warps=_NUM_WARPS)
