"""From tokens at their places to rows in the order of experts, on the ranks of these, and back.

No token is dropped, and no buffer has a fixed capacity. With K experts a token, each of the N
tokens of a rank is copied K times; copies are sorted by expert, stably, and so lie in the order of
the ranks of ep too. One exchange brings them to their ranks, where a second sort joins what came
from several ranks. Two ranks with experts 0 1 | 2 3, K = 2, of which rank 0 is shown:

    chosen     token a: 0 3     token b: 3 1
    sorted     a0 b1 | a3 b3                    sent: 2 to rank 0, 2 to rank 1
    arrived    a0 b1 | c0                       rank 1 sent its token c to expert 0
    rows       a0 c0 b1                         2 of expert 0, 1 of expert 1

The way back inverts each of these steps, and a token is the sum of its copies by the router's
weights. Every step is a gather, forward and backward, so results are the same bits each time. Each
rank takes part in every exchange, also one without tokens. In an ep of one rank, the rows are the
sorted copies.

Shape suffixes: N tokens of this rank, K experts a token, C = N * K copies, R rows that arrived, E
experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megafsdp.buffer.comm.activation import exchange_rows
from megafsdp.parallel.mappings import exchange_tokens


@dataclass(frozen=True, slots=True)
class Exchange:
    """What goes from rank to rank, and how arrived rows are sorted by expert.

    Attributes:
        group: The ranks of ep.
        sent: Number of copies that go to each of them.
        received: Number of rows that come from each.
        arrival_R: Where each row in the order of experts arrived.
        place_R: The place in the order of experts of each row that arrived.
    """

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]
    arrival_R: Tensor
    place_R: Tensor


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Where each copy of a token goes.

    Attributes:
        num_choices: K.
        copy_C: Which copy is at each place of the sorted ones; copy n * K + k is the k-th of token
            n.
        place_C: The place of each copy among the sorted ones.
        load_E: Rows of each expert of this rank, int64.
        exchange: What goes from rank to rank; None where this rank has all experts.
    """

    num_choices: int
    copy_C: Tensor
    place_C: Tensor
    load_E: Tensor
    exchange: Exchange | None


def count_by_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is chosen, ``(E,)`` int64; the host does not wait."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


def plan_dispatch(
    experts_NK: Tensor, num_experts: int, group: dist.ProcessGroup | None
) -> DispatchPlan:
    """Find where the copies of this rank's tokens go, and what comes from other ranks.

    Collective over ``group``. With a group the host waits for the counts, which size the exchange.

    Args:
        experts_NK: The experts of each token, int64.
        num_experts: E, of all ranks of ep together, which divide it.
        group: The ranks of ep, each of which has as many experts; None where this rank has all.
    """
    chosen_C = experts_NK.flatten()
    # Stable, so that rows of an expert keep the tokens' order: sums over them do, too.
    copy_C = chosen_C.argsort(stable=True)
    load_E = count_by_expert(chosen_C, num_experts)
    exchange = None
    if group is not None and group.size() > 1:
        exchange, load_E = _plan_exchange(load_E, group)
    return DispatchPlan(experts_NK.shape[1], copy_C, _inverse(copy_C), load_E, exchange)


def _plan_exchange(load_E: Tensor, group: dist.ProcessGroup) -> tuple[Exchange, Tensor]:
    """Exchange the counts; return the plan, and the rows of each expert of this rank."""
    num_ranks = group.size()
    num_own = load_E.numel() // num_ranks
    splits = [num_own] * num_ranks
    arriving = exchange_rows(load_E, splits, splits, group=group, label="tokens of experts")
    by_rank = torch.stack((load_E, arriving)).view(2, num_ranks, num_own).sum(-1)
    sent, received = by_rank.tolist()
    own = torch.arange(num_own, device=load_E.device).repeat(num_ranks)
    expert_R = own.repeat_interleave(arriving, output_size=sum(received))
    arrival_R = expert_R.argsort(stable=True)
    exchange = Exchange(group, sent, received, arrival_R, _inverse(arrival_R))
    return exchange, arriving.view(num_ranks, num_own).sum(0)


def dispatch(x_NH: Tensor, plan: DispatchPlan) -> Tensor:
    """Return the rows of this rank's experts, one expert after another; collective over ep.

    Allocates a copy of each token for each of its experts, and as much again with an exchange.
    """
    rows_CH = _gather(x_NH, plan.copy_C // plan.num_choices, plan.place_C, plan.num_choices)
    if (exchange := plan.exchange) is None:
        return rows_CH
    arrived_RH = exchange_tokens(
        rows_CH, exchange.received, exchange.sent, exchange.group, "tokens to experts"
    )
    return _gather(arrived_RH, exchange.arrival_R, exchange.place_R)


def combine(rows_RH: Tensor, plan: DispatchPlan, weights_NK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, ``(N, H)``; collective over ep.

    Args:
        rows_RH: What the experts made of the rows of :func:`dispatch`, in their order.
        plan: That of the dispatch.
        weights_NK: The factors of a token's experts, in any dtype.
    """
    if (exchange := plan.exchange) is not None:
        leaving_RH = _gather(rows_RH, exchange.place_R, exchange.arrival_R)
        rows_RH = exchange_tokens(
            leaving_RH, exchange.sent, exchange.received, exchange.group, "tokens from experts"
        )
    copies_CH = _gather(rows_RH, plan.place_C, plan.copy_C)
    num_tokens, num_choices = weights_NK.shape
    copies_NKH = copies_CH.view(num_tokens, num_choices, rows_RH.shape[1])
    # A product of matrices: sums are wider than bf16, and no product of C x H is stored.
    return torch.bmm(weights_NK.to(rows_RH.dtype).unsqueeze(1), copies_NKH).squeeze(1)


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


def _gather(x: Tensor, index: Tensor, inverse: Tensor, num_copies: int = 1) -> Tensor:
    """Return ``x[index]``, in which each row of ``x`` appears ``num_copies`` times.

    Args:
        x: Rows along dim 0.
        index: The row at each place.
        inverse: Where the copies of row 0 are, then those of row 1, and so on.
        num_copies: How often each row appears.
    """
    gathered: Tensor = _Gather.apply(x, index, inverse, num_copies)
    return gathered


class _Gather(torch.autograd.Function):
    """Rows by index, with a gradient that gathers too: torch's would add to rows in any order."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, index: Tensor, inverse: Tensor, num_copies: int
    ) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_copies = num_copies  # type: ignore[attr-defined]
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors  # type: ignore[attr-defined]
        num_copies: int = ctx.num_copies  # type: ignore[attr-defined]
        grads = grad.index_select(0, inverse)
        if num_copies > 1:
            grads = grads.view(len(grads) // num_copies, num_copies, grads.shape[1]).sum(1)
        return grads, None, None, None
