"""Bring tokens to the ranks of their experts, as rows sorted by expert, and back.

No token is dropped, and no buffer has a fixed capacity. A token goes once to each rank that has any
of its K experts, together with its choices and their weights. There it is copied for each of its
experts on that rank. The copies are sorted by expert, stably, so that the copies of an expert lie
in the order of the ranks, then of the tokens. Rank 0 of two ranks with experts 0 1 | 2 3 and K = 2:

    chosen     token a: 0 3     token b: 2 3
    sent       a | a b                          1 to rank 0, 2 to rank 1
    arrived    a c                              rank 1 sent its token c, which chose 0 and 1
    rows       a0 c0 c1                         2 of expert 0, 1 of expert 1

On the way back a rank adds up its rows of each token, such as c0 and c1, with the router's weights
and sends the sum; the token's result is the sum over its ranks. Rows move by gathers and are added
up in a fixed order, forward and backward, so results are the same bits each time. Each rank takes
part in every exchange, even without tokens. In an ep of one rank, arriving tokens are its own.

Shape suffixes: N tokens of this rank, K experts a token, G ranks of ep, S tokens that are sent, V
that arrive, R rows, E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megafsdp.buffer.comm.activation import exchange_rows, start_exchange
from megafsdp.device.autograd import check_no_second_backward


@dataclass(frozen=True, slots=True)
class Sums:
    """Which rows are added up, for each of many sums.

    Attributes:
        index: The rows of the first sum, then those of the second, and so on.
        starts: Where the rows of each sum start in ``index``; a sum without rows is zero.
    """

    index: Tensor
    starts: Tensor

    @classmethod
    def of(cls, index: Tensor, num_rows: Tensor) -> Sums:
        """Make sums of the given numbers of rows."""
        return cls(index, num_rows.cumsum(0) - num_rows)

    def add_up(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the sums, added in fp32 or wider in the order of ``index``, in the rows' dtype.

        Args:
            rows: 2-D.
            weights: The factor of each entry of ``index``; None for 1.
        """
        return F.embedding_bag(
            self.index, rows, self.starts, mode="sum", per_sample_weights=weights
        )


@dataclass(frozen=True, slots=True)
class Exchange:
    """What goes from rank to rank.

    Attributes:
        group: The ranks of ep.
        sent: Number of tokens that go to each of them.
        received: Number of tokens that come from each.
        token_S: Which token each sent one is, in the order of the ranks they go to.
        sums_N: For each token, which of the rows that come back are its own.
    """

    group: dist.ProcessGroup
    sent: Sequence[int]
    received: Sequence[int]
    token_S: Tensor
    sums_N: Sums


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Where each token goes, and which rows are made of it there.

    Attributes:
        num_choices: K.
        load_E: Rows of each expert of this rank, int64.
        choice_R: Which of the V x K choices of arrived tokens each row is.
        token_R: Which of the arrived tokens each row is a copy of.
        sums_V: For each arrived token, its rows.
        exchange: What goes from rank to rank; None where this rank has all experts.
    """

    num_choices: int
    load_E: Tensor
    choice_R: Tensor
    token_R: Tensor
    sums_V: Sums
    exchange: Exchange | None


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The rows of this rank's experts, one expert after another.

    Attributes:
        rows_RH: The rows.
        weight_R: The factor of each row in its token's sum.
        plan: Which tokens the rows are of; ``plan.load_E`` is the number of rows of each expert.
    """

    rows_RH: Tensor
    weight_R: Tensor
    plan: DispatchPlan


def count_by_expert(experts: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert is chosen, ``(E,)`` int64; the host does not wait."""
    flat = experts.flatten()
    return flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))


def dispatch(
    x_NH: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    num_experts: int,
    group: dist.ProcessGroup | None,
) -> Dispatched:
    """Bring tokens to their experts; collective over ``group``.

    With a group the host waits for the numbers of tokens, which size the exchange. Allocates a copy
    of each arrived token for each of its experts here.

    Args:
        x_NH: The tokens of this rank.
        experts_NK: Their experts, int64, no two of a token the same.
        weights_NK: The experts' factors in the token's sum.
        num_experts: E, of all ranks of ep together, which divide it.
        group: The ranks of ep, each of which has as many experts; None where this rank has all.
    """
    weights_NK = weights_NK.to(x_NH.dtype)
    if group is None or group.size() == 1:
        plan = _sort_rows(experts_NK, num_experts, experts_NK.numel(), None)
        x_VH, weights_VK = x_NH.detach(), weights_NK.detach()
    else:
        num_own = num_experts // group.size()
        exchange, expert_SK, num_rows = _plan_exchange(experts_NK, num_own, group)
        experts_VK, x_VH, weights_VK = _exchange_tokens(x_NH, expert_SK, weights_NK, exchange)
        plan = _sort_rows(experts_VK, num_own, num_rows, exchange)
    rows_RH, weight_R = _Dispatch.apply(x_NH, weights_NK, x_VH, weights_VK, plan)
    return Dispatched(rows_RH, weight_R, plan)


def combine(rows_RH: Tensor, dispatched: Dispatched) -> Tensor:
    """Return the weighted sum of each token's rows, ``(N, H)``; collective over ep.

    The sum of a rank's rows travels in their dtype. Differentiable once.

    Args:
        rows_RH: What the experts made of the dispatched rows, in their order.
        dispatched: The dispatched rows.
    """
    out: Tensor = _Combine.apply(rows_RH, dispatched.weight_R, dispatched.plan)
    return out


def _plan_exchange(
    experts_NK: Tensor, num_own: int, group: dist.ProcessGroup
) -> tuple[Exchange, Tensor, int]:
    """Return the exchange of tokens, the experts of those sent, and the number of rows here.

    Experts are numbered within the rank that a token is sent to; those elsewhere are ``num_own``.

    Args:
        experts_NK: The experts of this rank's tokens.
        num_own: Experts of each rank.
        group: The ranks of ep.
    """
    num_tokens, num_ranks = len(experts_NK), group.size()
    rank_NK = experts_NK // num_own
    goes_NG = experts_NK.new_zeros((num_tokens, num_ranks), dtype=torch.uint8)
    goes_NG.scatter_(1, rank_NK, 1)
    sent_G2 = torch.stack((goes_NG.sum(0), count_by_expert(rank_NK, num_ranks)), dim=1)
    each = [1] * num_ranks
    received_G2, pending = start_exchange(
        sent_G2, each, each, group=group, label="numbers of tokens"
    )
    # During the exchange: the tokens that go to each rank, rank by rank, then those that do not.
    order = goes_NG.t().flatten().argsort(descending=True, stable=True)
    pending.wait()
    (sent, _), (received, copies) = torch.stack((sent_G2, received_G2)).transpose(1, 2).tolist()
    order_S = order[: sum(sent)]
    rank_S, token_S = order_S // num_tokens, order_S % num_tokens
    expert_SK = experts_NK.index_select(0, token_S) - (rank_S * num_own).unsqueeze(1)
    expert_SK.masked_fill_((expert_SK < 0) | (expert_SK >= num_own), num_own)
    sums_N = Sums.of(token_S.argsort(stable=True), goes_NG.sum(1))
    return Exchange(group, sent, received, token_S, sums_N), expert_SK, sum(copies)


@torch.no_grad()
def _exchange_tokens(
    x_NH: Tensor, expert_SK: Tensor, weights_NK: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor]:
    """Return arrived tokens' experts, int64, the tokens themselves, and their weights.

    One exchange for all three, because each exchange makes the ranks wait for each other.
    """
    # Expert numbers travel as bits of the tokens' dtype.
    dtype = torch.int64 if x_NH.itemsize > 4 else torch.int32
    numbers = expert_SK.to(dtype).view(x_NH.dtype)
    widths = [x_NH.shape[1], weights_NK.shape[1], numbers.shape[1]]
    rows = torch.cat((x_NH, weights_NK, x_NH.new_empty(len(x_NH), widths[2])), dim=1)
    sent = rows.index_select(0, exchange.token_S)
    sent[:, -widths[2] :] = numbers
    arrived = _to_ranks(sent, exchange, "tokens to experts")
    x_VH, weights_VK, numbers = arrived.split(widths, dim=1)
    # Always copied: a single row is contiguous in place, but may begin at an odd element.
    numbers = numbers.clone(memory_format=torch.contiguous_format)
    return numbers.view(dtype).long(), x_VH, weights_VK


def _sort_rows(
    experts_VK: Tensor, num_own: int, num_rows: int, exchange: Exchange | None
) -> DispatchPlan:
    """Plan the rows of arrived tokens by expert; experts of other ranks are ``num_own``."""
    # Choices of other ranks' experts sort last and are cut off. Stable, so that rows of an expert,
    # and sums over them, keep the tokens' order.
    choice_R = experts_VK.flatten().argsort(stable=True)[:num_rows]
    is_own_VK = experts_VK < num_own
    # Rows of a token are added up in the order of its choices.
    place_R = (is_own_VK.flatten().cumsum(0) - 1).index_select(0, choice_R)
    num_choices = experts_VK.shape[1]
    return DispatchPlan(
        num_choices,
        count_by_expert(experts_VK, num_own + 1)[:num_own],
        choice_R,
        choice_R // num_choices,
        Sums.of(_inverse(place_R), is_own_VK.sum(1)),
        exchange,
    )


def _inverse(permutation: Tensor) -> Tensor:
    places = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, places)


# One autograd node each: nodes in Python cost more than the small copies between them. Gradients
# are gathers too, where torch's own backward would add to rows in any order.
class _Dispatch(torch.autograd.Function):
    """Rows of arrived tokens; a token's gradient is the sum of its rows', on all ranks."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x_NH: Tensor,
        weights_NK: Tensor,
        x_VH: Tensor,
        weights_VK: Tensor,
        plan: DispatchPlan,
    ) -> tuple[Tensor, Tensor]:
        ctx.plan = plan  # type: ignore[attr-defined]
        weight_R = weights_VK.reshape(-1).index_select(0, plan.choice_R)
        return x_VH.index_select(0, plan.token_R), weight_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_RH: Tensor, weight_grad_R: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        plan: DispatchPlan = ctx.plan  # type: ignore[attr-defined]
        grad_VH = plan.sums_V.add_up(grad_RH)
        weight_grads_VK = grad_VH.new_zeros((len(grad_VH), plan.num_choices))
        weight_grads_VK.view(-1).scatter_(0, plan.choice_R, weight_grad_R)
        if plan.exchange is None:
            return grad_VH, weight_grads_VK, None, None, None
        both = torch.cat((grad_VH, weight_grads_VK), dim=1)
        grads = _from_ranks(both, plan.exchange, "tokens to experts grads")
        return *grads.split([grad_VH.shape[1], plan.num_choices], dim=1), None, None, None


class _Combine(torch.autograd.Function):
    """Rows of experts, added up by the weights of their tokens and brought back."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_RH: Tensor, weight_R: Tensor, plan: DispatchPlan) -> Tensor:
        ctx.plan = plan  # type: ignore[attr-defined]
        ctx.save_for_backward(rows_RH, weight_R)
        weights = weight_R.index_select(0, plan.sums_V.index)
        sums_VH = plan.sums_V.add_up(rows_RH, weights)
        return _from_ranks(sums_VH, plan.exchange, "tokens from experts")

    @staticmethod
    def backward(ctx: FunctionCtx, grad_NH: Tensor) -> tuple[Tensor, Tensor, None]:
        check_no_second_backward(
            where="backward of a layer of experts",
            hint="Leave layers of experts out of what is differentiated twice",
        )
        plan: DispatchPlan = ctx.plan  # type: ignore[attr-defined]
        rows_RH, weight_R = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_VH = grad_NH
        if (exchange := plan.exchange) is not None:
            grad_SH = grad_NH.index_select(0, exchange.token_S)
            grad_VH = _to_ranks(grad_SH, exchange, "tokens from experts grads")
        grad_RH = grad_VH.index_select(0, plan.token_R)
        # A matrix product: its sums are wider than bf16, and no R x H product is stored.
        weight_grad_R = torch.bmm(rows_RH.unsqueeze(1), grad_RH.unsqueeze(2)).flatten()
        return grad_RH.mul_(weight_R.unsqueeze(1)), weight_grad_R, None


def _to_ranks(x_SH: Tensor, exchange: Exchange, label: str) -> Tensor:
    """Send tokens to the ranks of their experts, and return those that arrive."""
    received, sent = exchange.received, exchange.sent
    return exchange_rows(x_SH, received, sent, group=exchange.group, label=label)


def _from_ranks(x_VH: Tensor, exchange: Exchange | None, label: str) -> Tensor:
    """Send arrived tokens back, and return the sum of what comes back for each token."""
    if exchange is None:
        return x_VH
    x_SH = exchange_rows(x_VH, exchange.sent, exchange.received, group=exchange.group, label=label)
    return exchange.sums_N.add_up(x_SH)
