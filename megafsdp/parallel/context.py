"""Context parallelism: every sequence is shared out among the ranks of cp, inside attention too.

A sequence is cut into twice as many chunks as there are ranks, and each rank has one from its
beginning and one from its end, so that causal attention is as much work on all of them. With two
ranks:

    chunk     0 1 2 3
    rank 0    x     x
    rank 1      x x

All ranks of cp are given the same tokens, and each computes with its :func:`own_part`. Tokens of
different ranks meet in these exchanges:

    exchange         forward                                   backward
    whole_sequence   all tokens, in their order                sum over cp, keep the own part
    heads_of         all tokens of a part of the heads         own tokens of all heads
    tokens_of        own tokens of all heads                   all tokens of a part of the heads
    sum_over_cp      sum                                       the gradient, cp times
    whole_logits     as whole_sequence                         the own part, cp times

The ranks of cp are data-parallel ranks for parameters: gradients are averaged over them. They share
one loss, of which each rank's gradient covers only its own tokens, so the average would be too
small by the factor cp. The last two rows make up for that.

Source: Llama Team, The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.2: keys and values
are gathered, and chunks are paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megafsdp.buffer.comm.activation import (
    exchange_rows,
    gather_dim,
    reduce_scatter_dim,
    sum_over_ranks,
)
from megafsdp.errors import expected
from megafsdp.parallel.mappings import run_exchange


def own_chunks(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return which of the ``2 * cp`` chunks of a sequence this rank has."""
    return group.rank(), 2 * group.size() - 1 - group.rank()


def own_part(whole: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Return this rank's two chunks of a sequence that all ranks have: T to T / cp; local.

    Args:
        whole: Tokens, labels, a mask, a table of positions: alike on all ranks of cp.
        group: The ranks of cp.
        dim: The dim of the sequence.

    Raises:
        ValueError: ``2 * cp`` does not divide the sequence.
    """
    num_chunks = 2 * group.size()
    if whole.shape[dim] % num_chunks:
        raise ValueError(
            expected(
                f"a length that the {num_chunks} chunks of {group.size()} ranks of cp divide",
                whole.shape[dim],
                where=f"dim {dim} given to own_part()",
                hint="Pad the sequence on the right, with a mask of the padding for the loss",
            )
        )
    return _take(whole, own_chunks(group), dim, num_chunks)


def whole_sequence(own: Tensor, group: dist.ProcessGroup, *, dim: int) -> Tensor:
    """Join the ranks' parts into the sequence: T / cp to T; collective over cp.

    Each rank uses the result for its own tokens, so gradients are summed.
    """
    cut = partial(_cut_sum, group=group, dim=dim)
    return run_exchange(own, partial(_join, group=group, dim=dim), cut, group)


def whole_logits(own_BTV: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Join the ranks' logits along the sequence, for a loss that all ranks compute alike."""

    def keep_own(grad: Tensor) -> Tensor:
        return own_part(grad, group, dim=1) * group.size()

    return run_exchange(own_BTV, partial(_join, group=group, dim=1), keep_own, group)


def heads_of(own_BTX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange tokens for heads: (B, T / cp, X) to (B, T, X / cp); collective over cp.

    Rank r gets the r-th of cp equal parts of the last dim, of all tokens in their order.
    """
    to_heads, to_tokens = partial(_to_heads, group=group), partial(_to_tokens, group=group)
    return run_exchange(own_BTX, to_heads, to_tokens, group)


def tokens_of(heads_BTX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Undo :func:`heads_of`: (B, T, X / cp) to (B, T / cp, X); collective over cp."""
    to_heads, to_tokens = partial(_to_heads, group=group), partial(_to_tokens, group=group)
    return run_exchange(heads_BTX, to_tokens, to_heads, group)


def sum_over_cp(loss: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum the ranks' shares of a loss; collective over cp."""
    add = partial(sum_over_ranks, group=group, label="loss of a sequence")
    return run_exchange(loss, add, lambda grad: grad * group.size(), group)


def _join(own: Tensor, *, group: dist.ProcessGroup, dim: int) -> Tensor:
    gathered = gather_dim(own, dim, group=group, label="context")
    return _in_order(gathered, group.size(), dim)


def _cut_sum(grad: Tensor, *, group: dist.ProcessGroup, dim: int) -> Tensor:
    by_rank = _take(grad, _chunks_by_rank(group.size()), dim)
    return reduce_scatter_dim(by_rank, dim, group=group, label="context grads")


def _to_heads(own_BTX: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    num_ranks = group.size()
    parts = own_BTX.unflatten(-1, (num_ranks, -1)).movedim(-2, 0)
    tokens = _exchange(parts, group).movedim(0, 1).flatten(1, 2)
    return _in_order(tokens, num_ranks, 1)


def _to_tokens(heads_BTX: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    num_ranks = group.size()
    by_rank = _take(heads_BTX, _chunks_by_rank(num_ranks), 1)
    parts = _exchange(by_rank.unflatten(1, (num_ranks, -1)).movedim(1, 0), group)
    return parts.movedim(0, -2).flatten(-2)


def _exchange(for_ranks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send each rank one row along dim 0, and return the rows from all ranks."""
    one_each = [1] * group.size()
    return exchange_rows(for_ranks, one_each, one_each, group=group, label="tokens for heads")


def _chunks_by_rank(num_ranks: int) -> list[int]:
    """Return the chunks of a sequence in the order in which the ranks have them."""
    return [chunk for rank in range(num_ranks) for chunk in (rank, 2 * num_ranks - 1 - rank)]


def _in_order(by_rank: Tensor, num_ranks: int, dim: int) -> Tensor:
    """Put a sequence that lies in the order of the ranks into its own order."""
    chunks = _chunks_by_rank(num_ranks)
    return _take(by_rank, [chunks.index(chunk) for chunk in range(len(chunks))], dim)


def _take(x: Tensor, wanted: Sequence[int], dim: int, num_chunks: int | None = None) -> Tensor:
    """Return equal chunks of a tensor along a dim, in the order in which they are named."""
    chunks = x.chunk(num_chunks or len(wanted), dim)
    return torch.cat([chunks[index] for index in wanted], dim)
