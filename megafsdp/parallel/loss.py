"""Cross entropy of logits of which each rank of tp may have some columns.

The arithmetic is fp32 on blocks of rows (fp64 for fp64 logits). Forward saves the logits as they
came and one number a row; backward writes the gradient. With tp each block costs two all-reduces of
numbers a row: the largest logit; then the sum of exponentials and the label's logit together.

Shape suffixes: N rows, V vocabulary, or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.device.autograd import check_no_second_backward

# fp32 blocks of 512 MiB, ten for a step of 8k tokens over 150k words: the launches of some twenty
# kernels a block are then negligible. On a CPU 2 MiB, which stay in its caches.
_BLOCK_NUMEL = 2**27
_BLOCK_NUMEL_ON_CPU = 2**19


def cross_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    weights_N: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum the rows' weighted negative log-likelihoods; collective over ``group``.

    Differentiable once: a backward with ``create_graph=True`` raises ``NotImplementedError``.

    Args:
        logits_NV: Scores, any floating dtype: all columns, or rank r's V columns from r * V on.
        labels_N: Ids in the whole vocabulary, equal on all ranks.
        weights_N: Factor of each row in the sum, equal on all ranks; takes no gradient.
        group: Ranks that have the other columns; None if there are none.

    Returns:
        A scalar in the dtype of ``weights_N``, on every rank the same.
    """
    result: Tensor = _WeightedCrossEntropy.apply(logits_NV, labels_N, weights_N, group)
    return result


class _WeightedCrossEntropy(torch.autograd.Function):
    """Sum of row weight times negative log-likelihood, differentiable once, in the logits only."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits_NV: Tensor,
        labels_N: Tensor,
        weights_N: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        losses_N = torch.empty_like(weights_N)
        log_sums_N = torch.empty_like(weights_N)
        columns_N, is_own_N = _own_columns(logits_NV, labels_N, group)
        for rows in _blocks(logits_NV):
            scores = logits_NV[rows].to(weights_N.dtype)
            picked = scores.gather(1, columns_N[rows, None]).squeeze(1)
            if group is None:
                log_sums_N[rows] = scores.logsumexp(dim=-1)
            else:
                picked = picked.masked_fill_(~is_own_N[rows], 0.0)
                log_sums_N[rows] = _sum_over_vocabulary(scores, picked, group)
            losses_N[rows] = log_sums_N[rows] - picked
        ctx.save_for_backward(logits_NV, columns_N, is_own_N, weights_N, log_sums_N)
        return torch.dot(losses_N, weights_N)

    @staticmethod
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        check_no_second_backward(
            where="backward of the cross entropy",
            hint="Take torch.nn.functional.cross_entropy() of the logits",
        )
        logits_NV, columns_N, is_own_N, weights_N, log_sums_N = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_logits_NV = torch.empty_like(logits_NV)
        scales_N = weights_N * grad_loss
        for rows in _blocks(logits_NV):
            # Softmax minus one-hot, scaled by the row's weight.
            grad = (logits_NV[rows] - log_sums_N[rows, None]).exp_()
            picked = columns_N[rows, None]
            hot = is_own_N[rows, None].to(grad.dtype)
            grad.scatter_(1, picked, grad.gather(1, picked) - hot).mul_(scales_N[rows, None])
            grad_logits_NV[rows] = grad
        return grad_logits_NV, None, None, None


def _own_columns(
    logits_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return each label's column on this rank, 0 if another has it, and whether this rank does."""
    if group is None:
        return labels_N, torch.ones_like(labels_N, dtype=torch.bool)
    num_columns = logits_NV.shape[1]
    columns_N = labels_N - group.rank() * num_columns
    is_own_N = (columns_N >= 0) & (columns_N < num_columns)
    return columns_N.masked_fill(~is_own_N, 0), is_own_N


def _sum_over_vocabulary(scores: Tensor, picked_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows' log-sum-exp over all columns; sum ``picked_N`` over ranks in place."""
    largest_N = scores.amax(dim=-1)
    all_reduce(largest_N, op="max", group=group, label="largest logits")
    sums_N = (scores - largest_N.unsqueeze(1)).exp_().sum(dim=-1)
    both = torch.stack((sums_N, picked_N))
    all_reduce(both, group=group, label="sums of logits")
    picked_N.copy_(both[1])
    return both[0].log_().add_(largest_N)


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    num_rows, num_columns = logits_NV.shape
    block_numel = _BLOCK_NUMEL_ON_CPU if logits_NV.device.type == "cpu" else _BLOCK_NUMEL
    block_rows = max(1, block_numel // num_columns)
    for start in range(0, num_rows, block_rows):
        yield slice(start, start + block_rows)
