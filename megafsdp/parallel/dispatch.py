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
weights. Rows move by gathers, forward and backward, so results are the same bits each time. Each
rank takes part in every exchange, also one without tokens. In an ep of one rank, the rows are the
sorted copies.

Shape suffixes: N tokens of this rank, K experts a token, C = N * K copies, R rows that arrived, E
experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megafsdp.buffer.comm.activation import exchange_rows, start_exchange
from megafsdp.buffer.comm.collectives import Pending


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
        token_C: The token of each of the sorted ones.
        load_E: Rows of each expert of this rank, int64.
        exchange: What goes from rank to rank; None where this rank has all experts.
    """

    num_choices: int
    copy_C: Tensor
    place_C: Tensor
    token_C: Tensor
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
    load_E = arriving = count_by_expert(chosen_C, num_experts)
    pending = Pending()
    if group is not None:
        # It runs beside the sort.
        splits = [num_experts // group.size()] * group.size()
        arriving, pending = start_exchange(
            load_E, splits, splits, group=group, label="tokens of experts"
        )
    # Stable, so that rows of an expert keep the tokens' order: sums over them do, too.
    num_choices = experts_NK.shape[1]
    copy_C = chosen_C.argsort(stable=True)
    place_C, token_C = _inverse(copy_C), copy_C // num_choices
    pending.wait()
    exchange = None
    if group is not None and group.size() > 1:
        exchange, load_E = _plan_exchange(load_E, arriving, group)
    return DispatchPlan(num_choices, copy_C, place_C, token_C, load_E, exchange)


def _plan_exchange(
    load_E: Tensor, arriving: Tensor, group: dist.ProcessGroup
) -> tuple[Exchange, Tensor]:
    """Return the exchange, and the rows of each expert of this rank.

    Args:
        load_E: This rank's copies for each expert.
        arriving: Copies for this rank's experts, of one rank after another.
        group: The ranks of ep.
    """
    num_ranks = group.size()
    num_own = load_E.numel() // num_ranks
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
    rows: Tensor = _Dispatch.apply(x_NH, plan)
    return rows


def combine(rows_RH: Tensor, plan: DispatchPlan, weights_NK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, ``(N, H)``; collective over ep.

    Args:
        rows_RH: What the experts made of the rows of :func:`dispatch`, in their order.
        plan: That of the dispatch.
        weights_NK: The factors of a token's experts, in any dtype.
    """
    out: Tensor = _Combine.apply(rows_RH, weights_NK.to(rows_RH.dtype), plan)
    return out


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


# One node of autograd each: nodes in Python cost more than the small copies between them, and their
# gradients are gathers too, where torch's own would add to rows in any order.
class _Dispatch(torch.autograd.Function):
    """Copies of tokens, brought to their experts; a token's gradient is the sum of its copies'."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_NH: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan  # type: ignore[attr-defined]
        rows_CH = x_NH.index_select(0, plan.token_C)
        return _start_to_experts(rows_CH, plan, "tokens to experts")()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_RH: Tensor) -> tuple[Tensor, None]:
        plan: DispatchPlan = ctx.plan  # type: ignore[attr-defined]
        grad_CH = _from_experts(grad_RH, plan, "tokens to experts grads")
        return _by_token(grad_CH, plan).sum(1), None


class _Combine(torch.autograd.Function):
    """Rows of experts, brought back and added up by the weights of their tokens."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows_RH: Tensor, weights_NK: Tensor, plan: DispatchPlan
    ) -> Tensor:
        ctx.plan = plan  # type: ignore[attr-defined]
        copies_NKH = _by_token(_from_experts(rows_RH, plan, "tokens from experts"), plan)
        ctx.save_for_backward(copies_NKH, weights_NK)
        # A product of matrices: sums are wider than bf16, and no product of C x H is stored.
        return torch.bmm(weights_NK.unsqueeze(1), copies_NKH).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_NH: Tensor) -> tuple[Tensor, Tensor, None]:
        plan: DispatchPlan = ctx.plan  # type: ignore[attr-defined]
        copies_NKH, weights_NK = ctx.saved_tensors  # type: ignore[attr-defined]
        weight_C1 = weights_NK.reshape(-1, 1).index_select(0, plan.copy_C)
        grad_CH = grad_NH.index_select(0, plan.token_C).mul_(weight_C1)
        end = _start_to_experts(grad_CH, plan, "tokens from experts grads")
        # Beside the exchange.
        weight_grads_NK = torch.bmm(copies_NKH, grad_NH.unsqueeze(2)).squeeze(2)
        return end(), weight_grads_NK, None


def _start_to_experts(rows_CH: Tensor, plan: DispatchPlan, label: str) -> Callable[[], Tensor]:
    """Send sorted copies to the ranks of their experts; return what waits and sorts the rows."""
    if (exchange := plan.exchange) is None:
        return lambda: rows_CH
    arrived_RH, pending = start_exchange(
        rows_CH, exchange.received, exchange.sent, group=exchange.group, label=label
    )

    def end() -> Tensor:
        pending.wait()
        return arrived_RH.index_select(0, exchange.arrival_R)

    return end


def _from_experts(rows_RH: Tensor, plan: DispatchPlan, label: str) -> Tensor:
    """Bring rows back to the ranks of their tokens: the sorted copies."""
    if (exchange := plan.exchange) is None:
        return rows_RH
    leaving_RH = rows_RH.index_select(0, exchange.place_R)
    return exchange_rows(
        leaving_RH, exchange.sent, exchange.received, group=exchange.group, label=label
    )


def _by_token(rows_CH: Tensor, plan: DispatchPlan) -> Tensor:
    """Return the copies of each token side by side, ``(N, K, H)``."""
    num_tokens, width = len(rows_CH) // plan.num_choices, rows_CH.shape[1]
    return rows_CH.index_select(0, plan.place_C).view(num_tokens, plan.num_choices, width)
