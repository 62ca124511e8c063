"""Exchange what ranks share besides weights and gradients: maxima, and which gradients exist.

Each exchange is made once for all parameter groups of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending, all_reduce, start_all_reduce
from megafsdp.device.memory import Category, FlatStorage
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.quantized_weight import QuantizedWeight
from megafsdp.quantize.kernels import clear_maxima

# The most bytes of one all-reduce of maxima: larger ones make the backend's buffers grow, smaller
# ones are bound by latency. NVFP4 of 4,000 M elements on a rank has this many bytes.
MAX_PIECE_NBYTES = 64 * 2**20


def refresh_with_maxima(groups: Sequence[ParameterGroup]) -> None:
    """Encode stale quantized weights, with one all-reduce for all groups of one mesh.

    One more all-reduce runs over each model axis whose ranks have parts of a weight under one
    scale. Collective over the ranks of every quantized group with stale weights or recorded maxima.
    The maxima of all groups are in memory during the call.

    Args:
        groups: The groups of all units under one root.
    """
    by_ranks: dict[tuple[dist.ProcessGroup, ...], list[tuple[ParameterGroup, QuantizedWeight]]] = {}
    for group in groups:
        weight = group.compute_weight
        if isinstance(weight, QuantizedWeight) and weight.joins_refresh:
            by_ranks.setdefault(group.maxima_groups, []).append((group, weight))
    # Groups whose first process group is the same are combined over it together.
    for first in dict.fromkeys(ranks[:1] for ranks in by_ranks):
        members = {ranks: found for ranks, found in by_ranks.items() if ranks[:1] == first}
        owner = members[next(iter(members))][0][0]
        weights = {ranks: [weight for _, weight in found] for ranks, found in members.items()}
        _refresh_together(first, weights, owner)


def _refresh_together(
    first: tuple[dist.ProcessGroup, ...],
    weights: dict[tuple[dist.ProcessGroup, ...], list[QuantizedWeight]],
    owner: ParameterGroup,
) -> None:
    """Combine maxima over ranks, then encode.

    Args:
        first: A tuple of the process group over which all maxima are combined; empty if no other
            ranks are needed.
        weights: The weights, by the process groups over which their maxima are combined in turn.
            All keys begin with ``first``.
        owner: A group with the device and the ledger for the maxima.
    """
    every = [weight for found in weights.values() for weight in found]
    sizes = [weight.scales.num_maxima for weight in every]
    storage = FlatStorage(
        sum(sizes),
        torch.int32,
        device=owner.device,
        ledger=owner.buffers.ledger,
        category=Category.SCALES,
    )
    # Reduce bit patterns: for integers every backend's maximum is exact, while for floats some lose
    # a NaN. Bit patterns of magnitudes have the same order as these, and NaN is above all.
    combined = storage.tensor
    clear_maxima(combined)
    parts = combined.split(sizes)
    for weight, part in zip(every, parts, strict=True):
        weight.add_maxima(part)
    numels = {ranks: sum(w.scales.num_maxima for w in found) for ranks, found in weights.items()}
    take_largest_together(combined, first, numels)
    for weight, part in zip(every, parts, strict=True):
        weight.refresh_from(part)
    storage.release()


def take_largest_together(
    maxima: torch.Tensor,
    first: tuple[dist.ProcessGroup, ...],
    numels: Mapping[tuple[dist.ProcessGroup, ...], int],
) -> None:
    """Take the maximum of int32 bits over several tuples of process groups, in place; collective.

    Args:
        maxima: The maxima of all tuples, one after the other.
        first: The common start of all tuples: reduced once for all maxima.
        numels: How many maxima each tuple of process groups has, in the order of ``maxima``.
    """
    for process_group in first:
        take_largest(maxima, process_group)
    for ranks, part in zip(numels, maxima.split(list(numels.values())), strict=True):
        # A maximum over several axes can be taken one axis after the other.
        for process_group in ranks[1:]:
            take_largest(part, process_group)


def take_largest(maxima: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Take the maximum of int32 bits over ranks, in place and in pieces; collective."""
    for piece in maxima.split(MAX_PIECE_NBYTES // maxima.itemsize):
        all_reduce(piece, op="max", group=process_group, label="maxima")


def agree_on_usage(groups: Sequence[ParameterGroup]) -> list[Pending]:
    """Exchange one byte per trainable parameter; only ranks with undecided sums read the answer.

    Returns:
        The exchanges whose answer this rank does not read; wait for them later.
    """
    unread = []
    groups = [g for g in groups if g.is_trainable]
    # The model axis takes part: a sum over it gives a gradient to ranks that computed none.
    for everyone in dict.fromkeys(g.axes.everyone for g in groups):
        members = [g for g in groups if g.axes.everyone == everyone]
        main_grads = [g.gradients.main_grad for g in members]
        flags = [flag for main_grad in main_grads for flag in main_grad.usage()]
        is_asking = any(main_grad.has_undecided for main_grad in main_grads)
        if everyone.size() > 1:
            device = members[0].device
            # A copy from pageable memory would make the host wait until the device reaches it.
            is_pinned = device.type == "cuda"
            votes = torch.tensor(flags, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            votes = votes.to(device, non_blocking=True)
            # Every rank issues it: otherwise a rank with undecided sums would wait forever.
            exchange = start_all_reduce(votes, op="max", group=everyone, label="usage")
            if is_asking:
                exchange.wait()
                flags = votes.bool().tolist()
            else:
                unread.append(exchange)
        if is_asking:
            answer = iter(flags)
            for group, main_grad in zip(members, main_grads, strict=True):
                main_grad.resolve_usage([next(answer) for _ in group.parameters])
    return unread
