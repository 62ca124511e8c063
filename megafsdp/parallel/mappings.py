"""Exchanges of activations between ranks that share out a layer, each with its gradient.

    exchange                     forward                      backward
    copy_to_tp                   nothing                      sum over tp
    reduce_from_tp               sum over tp                  nothing
    gather_sequence              join along the sequence      sum, keep the own part
    reduce_scatter_sequence      sum, keep the own part       join along the sequence
    gather_vocabulary            join along the last dim      keep the own part

The sequence is the last dim but one. A layer of a transformer uses either the first two or the
next two, twice: with the sequence cut, four exchanges forward and four backward. The third and the
fourth row are each other's transposes, as are the first two. In a group of one rank each function
returns its argument.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from megafsdp.buffer.comm.activation import (
    gather_dim,
    reduce_scatter_dim,
    sum_over_ranks,
)
from megafsdp.device.torch_private import without_dynamo

Exchange = Callable[[Tensor], Tensor]


class _Paired(torch.autograd.Function):
    """An exchange whose backward is another exchange, and the reverse."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.swapped = backward, forward  # type: ignore[attr-defined]
        return forward(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Paired.apply(grad, *ctx.swapped), None, None  # type: ignore[attr-defined]


def copy_to_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give each rank of tp the same input; its gradient is the sum of the ranks' gradients."""
    return run_exchange(
        x, _unchanged, partial(sum_over_ranks, group=group, label="input grads"), group
    )


def reduce_from_tp(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum what the ranks of tp computed; its gradient reaches each of them unchanged."""
    return run_exchange(x, partial(sum_over_ranks, group=group, label="outputs"), _unchanged, group)


def gather_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' parts of the sequence: ``(..., T / tp, H)`` to ``(..., T, H)``."""
    dim = x.ndim - 2
    join = partial(gather_dim, dim=dim, group=group, label="sequence")
    cut = partial(reduce_scatter_dim, dim=dim, group=group, label="sequence grads")
    return run_exchange(x, join, cut, group)


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over tp and keep the own part of the sequence: ``(..., T, H)`` to ``(..., T / tp, H)``.

    Raises:
        ValueError: The ranks of tp do not divide the sequence.
    """
    dim = x.ndim - 2
    cut = partial(reduce_scatter_dim, dim=dim, group=group, label="sequence")
    join = partial(gather_dim, dim=dim, group=group, label="sequence grads")
    return run_exchange(x, cut, join, group)


def gather_vocabulary(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' columns of the logits: ``(..., V / tp)`` to ``(..., V)``.

    Every rank computes the same with the result, so its gradient is on every rank already.
    """
    width, first = logits.shape[-1], group.rank() * logits.shape[-1]

    def keep_own(grad: Tensor) -> Tensor:
        return grad.narrow(-1, first, width)

    join = partial(gather_dim, dim=logits.ndim - 1, group=group, label="logits")
    return run_exchange(logits, join, keep_own, group)


# A compiled layer ends its graph here: counting collectives and waiting for them is work of the
# host.
@without_dynamo
def run_exchange(
    x: Tensor, forward: Exchange, backward: Exchange, group: dist.ProcessGroup
) -> Tensor:
    """Exchange a tensor by ``forward``, and its gradient by ``backward``."""
    if group.size() == 1:
        return x
    result: Tensor = _Paired.apply(x, forward, backward)
    return result


def _unchanged(x: Tensor) -> Tensor:
    return x
