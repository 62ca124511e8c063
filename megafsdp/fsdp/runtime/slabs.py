"""Let the gathered storages of units share slabs, if gathers fill registered memory.

Storages that the same ranks gather are put into size classes: a class has the sizes above half of
its largest size, which is the size of its slabs. With layers of 400 bytes, a root of 300, and norms
of 20 that compute in fp32, under prefetch 1::

    4 slabs of 400   the layer at work, the next, the last one, kept for backward, and the root
    3 slabs of  20   the norms of such layers

These numbers are upper limits. A slab is made only when no other is free, and the last layer is
mostly one of the two at work. A storage that finds all slabs of its class in use takes plain memory
that time. The schedule decides when a storage is allocated and released.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.user_buffers import registered_pools, why_not_registered
from megafsdp.device.memory import ByteLedger, Category, FlatStorage, Slabs
from megafsdp.errors import expected
from megafsdp.fsdp.runtime.schedule import ScheduledUnit

_LOGGER = logging.getLogger("megafsdp.fsdp")

# Storages with the unit of each.
_Members = list[tuple[ScheduledUnit, FlatStorage]]


def share_slabs(units: Sequence[ScheduledUnit], ledger: ByteLedger) -> None:
    """Make the gathers of units that ask for it fill registered memory.

    Collective over the ranks of these units, before any of them runs. If the memory of one cannot
    be registered, all stay in plain memory, with one warning.

    Args:
        units: All units under one root, the root first.
        ledger: Counts the slabs.
    """
    # Key by device too: a process group may serve several device types.
    members: dict[tuple[dist.ProcessGroup, torch.device], _Members] = {}
    for unit in units:
        for group in unit.groups if unit.options.nccl_user_buffers else ():
            of_ranks = members.setdefault((group.axes.group, group.device), [])
            of_ranks += [(unit, s) for s in group.compute_weight.gathered_storages]
    # Check before the first collective, and register all or none: one warning says what is lost.
    reasons = [why_not_registered(*ranks) for ranks in members]
    for reason in reasons:
        if reason is not None:
            _warn(reason, units[0])
            return
    for ranks, found in members.items():
        new_pool = registered_pools(*ranks)
        for nbytes, in_class in _by_class(found).items():
            slabs = Slabs(
                nbytes,
                max_slabs=_max_slabs(in_class, units[0]),
                new_pool=new_pool,
                ledger=ledger,
                category=Category.UNSHARDED,
            )
            for _, storage in in_class:
                storage.slabs = slabs


def _warn(reason: str, root: ScheduledUnit) -> None:
    _LOGGER.warning(
        expected(
            "a process group of NCCL that registers memory, for nccl_user_buffers",
            reason,
            where=f"the units under '{root.name}', whose gathers fill plain memory instead",
            hint="Leave nccl_user_buffers out, or train on CUDA with NCCL",
        )
    )


def _by_class(found: _Members) -> dict[int, _Members]:
    """Return the storages by the size of their slabs."""
    classes: dict[int, _Members] = {}
    largest = 0
    # With one class for each exact size, a model whose units all differ would be in slabs whole.
    for unit, storage in sorted(found, key=lambda each: -each[1].nbytes):
        if not classes or 2 * storage.nbytes <= largest:
            largest = storage.nbytes
        classes.setdefault(largest, []).append((unit, storage))
    return classes


def _max_slabs(in_class: _Members, root: ScheduledUnit) -> int:
    """Return how many storages of a class are in use at once; more only if units nest deeper."""
    of_unit = Counter(id(unit) for unit, _ in in_class)
    prefetch = max(unit.options.prefetch for unit, _ in in_class)
    # The unit at work, those gathered ahead, and the last unit, which is kept for backward.
    at_work = (prefetch + 2) * max(of_unit.values())
    kept = sum(u is root or u.options.reshard_after_forward is False for u, _ in in_class)
    return min(len(in_class), at_work + kept)
