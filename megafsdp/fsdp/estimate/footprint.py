"""Bytes and collectives of one training step on each rank, for ranks that need not exist.

:func:`footprint_of` runs the third step of the real engine on meta devices
(:mod:`megafsdp.fsdp.estimate.meta_engine`) and reads its ledger and its counters. With n groups
that communicate, r of them in units whose storage is reserved for backward (the root and the last
one by default), and m microbatches inside ``microbatch()`` (in a plain loop every reduction is made
m times):

==================  =================  ==============  =====================
strategy            all-gather         reduce-scatter  all-reduce
==================  =================  ==============  =====================
no_shard                                               n
optim               n after the step   n
optim_grads         n after the step   nm
optim_grads_params  (2n - r)m          nm
outer no_shard      (2n - r)m          nm              n over the outer axis
outer optim         (2n - r)m, and n   nm, and n over
                    over the outer     the outer axis
==================  =================  ==============  =====================

Flat buffers and the full-size side of collectives are counted, for a model whose units run one
after another inside the root. Activations, the backend's own buffers and the allocator's slack are
not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.meta_engine import MetaEngine, PlannedGroup, PlannedUnit
from megafsdp.mesh.parallel_dims import DP_SHARD

NEIGHBOURS = "neighbours"  # Ranks of the inner axis among which a unit's slices lie.
_NORM_NBYTES = 8  # One fp64 number.


@dataclass(frozen=True)
class StepPlan:
    """How a step is run.

    Attributes:
        num_microbatches: Forwards and backwards before the optimizer's step.
        in_microbatch: Whether they run inside ``microbatch()``.
        num_states: Optimizer states of the main weight's shape, without gaps: 2 for Adam.
        state_nbytes: Bytes of optimizer states on the rank that has most, in place of num_states.
        casts_from: Dtype of the main weights that the optimizer casts to the compute dtype as it
            steps, as FusedAdam does; None for none.
        measures_norm: Whether the norm of all gradients is taken.
        loop_all_reduces: Bytes of each all-reduce over all ranks that the loop adds to a step.
    """

    num_microbatches: int = 1
    in_microbatch: bool = True
    num_states: int = 2
    state_nbytes: int | None = None
    casts_from: torch.dtype | None = None
    measures_norm: bool = True
    loop_all_reduces: tuple[int, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over one axis in a step.

    Attributes:
        calls: Their number.
        nbytes: Their bytes, on the full-size side.
    """

    calls: int
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """What a step costs each rank, once the first ones have recorded the order of units.

    Attributes:
        resting: Bytes by category on the device between steps, gradients cleared. Optimizer state
            is that of the rank that owns most rows; the others are equal on all ranks.
        peak: Largest bytes by category during a step.
        peak_total: Largest sum over categories.
        traffic: Collectives of a step by (mesh axis, kind).
    """

    resting: dict[Category, int]
    peak: dict[Category, int]
    peak_total: int
    traffic: dict[tuple[str, str], Traffic]


def footprint_of(engine: MetaEngine, plan: StepPlan = StepPlan()) -> Footprint:
    """Run the third step of an engine on meta devices and return what it costs; local.

    Args:
        engine: The units; each footprint needs a fresh engine.
        plan: How the step is run.
    """
    ledger, units = engine.ledger, engine.plan()
    states = plan.state_nbytes
    if states is None:
        states = plan.num_states * _most_owned_nbytes(units)
    ledger.debit(Category.OPTIMIZER_STATE, states)
    # One step records the order of units, the next begins to follow it.
    for num_microbatches in (1, 1, plan.num_microbatches):
        ledger.reset_peak()
        with record_collectives() as record:
            for index in range(num_microbatches):
                is_last = not plan.in_microbatch or index == num_microbatches - 1
                engine.run_microbatch(is_last=is_last)
        engine.step(plan.casts_from)
    traffic = _traffic(engine, record, plan)
    return Footprint(dict(ledger.live), dict(ledger.peak), ledger.peak_total, traffic)


def _traffic(
    engine: MetaEngine, record: CollectiveRecord, plan: StepPlan
) -> dict[tuple[str, str], Traffic]:
    """Return collectives by (mesh axis, kind), with those that no unit issues."""
    axes = engine.axes
    calls: Counter[tuple[str, str]] = Counter()
    nbytes: Counter[tuple[str, str]] = Counter()
    for (kind, group_name), count in record.calls_by_group.items():
        key = axes.names.get(group_name, NEIGHBOURS), kind
        calls[key] += count
        nbytes[key] += record.nbytes_by_group[kind, group_name]
    extra = [(axes.with_tp(axes.data), size) for size in plan.loop_all_reduces]
    groups = [group for unit in engine.units for group in unit.groups]
    sharded = [group for group in groups if group.axes.is_sharded and group.is_trainable]
    if plan.measures_norm and sharded:
        axis = axes.data if any(group.axes.is_divided for group in sharded) else DP_SHARD
        extra.append((axes.with_tp(axis), _NORM_NBYTES))
    for axis, size in extra:
        # One rank issues none.
        if axes.num_ranks(axis) == 1:
            continue
        calls[axis, "all_reduce"] += 1
        nbytes[axis, "all_reduce"] += size
    return {key: Traffic(calls[key], nbytes[key]) for key in sorted(calls)}


def owned_numels(layout: FlatLayout) -> list[int]:
    """Return how many elements of tensors, without gaps, lie in each shard."""
    owned = [0] * layout.num_shards
    for slot in layout.slots:
        length = layout.sub_buffers[slot.sub_buffer].shard_numel
        stop = slot.offset + slot.spec.numel
        for shard in range(slot.offset // length, -(-stop // length)):
            owned[shard] += min(stop, (shard + 1) * length) - max(slot.offset, shard * length)
    return owned


def most_of_a_rank(amounts: Iterable[tuple[PlannedGroup, Sequence[int]]]) -> int:
    """Return the largest sum on one rank of what groups have in each of their shards.

    Neighbours that a model axis divides have the same shard, and experts other neighbours than
    other groups. With tp 2, ep 4 and ranks 0 to 7, one digit a rank::

        shards of dense groups   0 0 1 1 2 2 3 3
        shards of experts        0 0 0 0 1 1 1 1

    Args:
        amounts: Each group with a number for each shard of its layout.
    """
    everywhere = 0
    # By the ranks of the inner axis and the pieces that outer ranks have of a shard.
    by_shape: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for group, of_shards in amounts:
        if len(of_shards) == 1:
            everywhere += of_shards[0]
            continue
        table = np.asarray(of_shards, dtype=np.int64).reshape(-1, group.num_pieces)
        known = by_shape.get(table.shape)
        by_shape[table.shape] = table if known is None else known + table
    num_ranks = math.lcm(*(shape[0] for shape in by_shape))
    tables = [table.repeat(num_ranks // len(table), axis=0) for table in by_shape.values()]
    return everywhere + int(np.sum(tables, axis=0).max())


def _most_owned_nbytes(units: Sequence[PlannedUnit]) -> int:
    """Return the main weights' bytes, without gaps, of the rank that owns most of them."""
    groups = [group for unit in units for group in unit.groups if group.is_trainable]
    counts = Counter((id(group.layout), group.dtypes.main.itemsize) for group in groups)
    first = {(id(group.layout), group.dtypes.main.itemsize): group for group in reversed(groups)}
    return most_of_a_rank(
        (group, [counts[key] * key[1] * numel for numel in owned_numels(group.layout)])
        for key, group in first.items()
    )
