"""Collectives of activations: tensors of any shape, cut or joined along a dim, or rows exchanged.

They go through collectives.py, so they are counted, labelled and profiled like those of buffers,
and a reduce-scatter on gloo is an exchange and a sum in fp32 or wider. This file adds the shapes.
A function returns when its result may be read, unless its name begins with "start", and does
nothing in a group of one rank. megafsdp/parallel/mappings.py decides which collective is the
gradient of which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megafsdp.buffer.comm import collectives
from megafsdp.device.profiling import profiler_range
from megafsdp.errors import expected


def gather_dim(
    shard: torch.Tensor, dim: int, *, group: dist.ProcessGroup, label: str
) -> torch.Tensor:
    """Join the ranks' equally shaped shards along a dim, in rank order; collective.

    Allocates the result and, unless ``dim`` is the first dim with more than one element, the same
    again for a reordered copy.
    """
    if group.size() == 1:
        return shard
    gathered = shard.new_empty(group.size() * shard.numel())
    # A gradient may be an expanded tensor, with strides of 0.
    flat = shard.contiguous().view(-1)
    collectives.all_gather([gathered], [flat], group=group, label=label).wait()
    by_rank = gathered.view(group.size(), *shard.shape)
    return by_rank.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter_dim(
    partial: torch.Tensor, dim: int, *, group: dist.ProcessGroup, label: str
) -> torch.Tensor:
    """Sum the ranks' tensors and return this rank's equal part along a dim; collective.

    Raises:
        ValueError: The ranks do not divide the dim.
    """
    num_ranks = group.size()
    if num_ranks == 1:
        return partial
    if partial.shape[dim] % num_ranks:
        raise ValueError(
            expected(
                f"an extent that {num_ranks} ranks divide along dim {dim}",
                f"shape {tuple(partial.shape)}",
                where=f"the reduce-scatter of '{label}'",
                hint="Pad the sequence on the right to a multiple of the tensor-parallel degree",
            )
        )
    by_rank = partial.unflatten(dim, (num_ranks, -1)).movedim(dim, 0).contiguous()
    output = partial.new_empty(by_rank.shape[1:])
    collectives.reduce_scatter(
        [output.view(-1)],
        [by_rank.view(-1)],
        group=group,
        # A library overwrites its input only to scale it; 1.0 keeps the caller's tensor unchanged.
        scale=1.0,
        accumulate=False,
        reduce_dtype=partial.dtype,
        label=label,
    ).wait()
    return output


def sum_over_ranks(partial: torch.Tensor, *, group: dist.ProcessGroup, label: str) -> torch.Tensor:
    """Return the sum of the ranks' tensors as a new tensor; collective."""
    if group.size() == 1:
        return partial
    total = partial.clone(memory_format=torch.contiguous_format)
    with profiler_range("all_reduce", label):
        collectives.all_reduce(total, group=group, label=label)
    return total


def exchange_rows(
    rows: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    *,
    group: dist.ProcessGroup,
    label: str,
) -> torch.Tensor:
    """Send each rank its rows along dim 0, return the rows from all ranks in order; collective.

    Args:
        rows: The rows to send, in the order of the ranks that they go to.
        received: How many rows come from each rank; zeros are exchanged too.
        sent: How many rows go to each rank.
        group: The ranks.
        label: The purpose, for counters and profilers.
    """
    output, pending = start_exchange(rows, received, sent, group=group, label=label)
    pending.wait()
    return output


def start_exchange(
    rows: torch.Tensor,
    received: Sequence[int],
    sent: Sequence[int],
    *,
    group: dist.ProcessGroup,
    label: str,
) -> tuple[torch.Tensor, collectives.Pending]:
    """Issue :func:`exchange_rows`; the rows may be read after waiting for the pending exchange."""
    if group.size() == 1:
        return rows, collectives.Pending()
    output = rows.new_empty((sum(received), *rows.shape[1:]))
    numel = math.prod(rows.shape[1:])
    splits = [numel * num for num in received], [numel * num for num in sent]
    with profiler_range("all_to_all", label):
        flat = rows.contiguous().view(-1)
        pending = collectives.start_all_to_all(output.view(-1), flat, splits, group, label)
    return output, pending
