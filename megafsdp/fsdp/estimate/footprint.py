"""Bytes and collectives of one training step on each rank, for ranks that need not exist.

:func:`footprint_of` runs the third step of the real engine on meta devices
(:mod:`megafsdp.fsdp.estimate.meta_engine`) and reads its ledger and its counters. The table has the
collectives of a step for n groups that communicate, r of them in units that keep their storage for
backward (the root and the last unit by default), and m microbatches inside ``microbatch()`` (in a
plain loop every reduction is made m times):

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

A unit with quantized weights has one more group. Their maxima take one all-reduce after the step,
and another for experts on a mesh of their own (:mod:`megafsdp.fsdp.runtime.agreement`).

Flat buffers and the full-size side of collectives are counted, for a model whose units run one
after another inside the root. Activations, the backend's own buffers and the allocator's slack are
not counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megafsdp.buffer.comm.collectives import CollectiveRecord, record_collectives
from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.meta_engine import MetaEngine, PlannedUnit
from megafsdp.fsdp.estimate.step_recorder import OPTIMIZER_STEP, Moment, StepRecorder
from megafsdp.mesh.parallel_dims import DP_SHARD

NEIGHBOURS = "neighbours"  # Ranks of the inner axis that divide a unit between its uses.
_NORM_NBYTES = 8  # One fp64 number.


@dataclass(frozen=True)
class StepPlan:
    """How a step is run.

    Attributes:
        num_microbatches: Forwards and backwards before the optimizer's step.
        in_microbatch: Whether they run inside ``microbatch()``.
        num_states: Optimizer states of the main weight's shape, without gaps: 2 for Adam.
        state_nbytes: Bytes of optimizer states on the rank that has the most; replaces num_states.
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
    """What a step costs each rank, after the first steps have recorded the order of units.

    Attributes:
        resting: Bytes by category on the device between steps, gradients cleared. Optimizer state
            is that of the rank that owns the most rows; other categories are equal on all ranks.
        peak: Largest bytes by category during a step.
        peak_total: Largest sum over categories.
        traffic: Collectives of a step by (mesh axis, kind).
        moments: The events of a step, in order, in its first and last microbatch.
    """

    resting: dict[Category, int]
    peak: dict[Category, int]
    peak_total: int
    traffic: dict[tuple[str, str], Traffic]
    moments: tuple[Moment, ...] = ()


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
    for _ in range(2):
        with record_collectives():
            _run_step(engine, plan, num_microbatches=1)
    ledger.reset_peak()
    with record_collectives() as record:
        recorder = StepRecorder(record=record)
        ledger.merge_into(recorder)
        _run_step(engine, plan, num_microbatches=plan.num_microbatches, recorder=recorder)
    traffic = _traffic(engine, record, plan)
    moments = tuple(recorder.moments)
    return Footprint(dict(ledger.live), dict(ledger.peak), ledger.peak_total, traffic, moments)


def _run_step(
    engine: MetaEngine,
    plan: StepPlan,
    *,
    num_microbatches: int,
    recorder: StepRecorder | None = None,
) -> None:
    """Run the microbatches of a step, then do to the units what an optimizer's step does."""
    engine.recorder = recorder
    for index in range(num_microbatches):
        is_last = index == num_microbatches - 1
        if recorder is not None:
            # Microbatches in between are like the first, and there may be hundreds.
            recorder.microbatch, recorder.is_recording = index, index == 0 or is_last
        engine.run_microbatch(is_last=not plan.in_microbatch or is_last)
        if recorder is not None:
            recorder.take_collectives()
    if recorder is not None:
        recorder.note(OPTIMIZER_STEP, "")
    engine.step(plan.casts_from)


def _traffic(
    engine: MetaEngine, record: CollectiveRecord, plan: StepPlan
) -> dict[tuple[str, str], Traffic]:
    """Return collectives by (mesh axis, kind), including those that no unit issues."""
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
        # A single rank issues no collective.
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


def most_on_a_rank(by_shard: Mapping[int, Sequence[int]], units: Sequence[PlannedUnit]) -> int:
    """Return the largest sum of numbers that one rank has.

    Experts may have another number of shards than other groups. Each rank has one shard of both,
    and the largest of both may lie on different ranks.

    Args:
        by_shard: A number for each shard, by how many shards there are.
        units: What is divided.
    """
    num_pieces = max((group.num_pieces for unit in units for group in unit.groups), default=1)
    inner = {n: max(1, n // num_pieces) for n in by_shard}
    # Neighbours in one division are neighbours in all, and the outer rank varies fastest.
    num_places = math.lcm(*inner.values())
    sums = [0] * (num_places * num_pieces)
    for num_shards, numbers in by_shard.items():
        for index in range(len(sums)):
            place, piece = divmod(index, num_pieces)
            shard = place * inner[num_shards] // num_places
            sums[index] += numbers[shard * num_pieces + piece if num_shards > 1 else 0]
    return max(sums)


def _most_owned_nbytes(units: Sequence[PlannedUnit]) -> int:
    """Return the main weights' bytes, without gaps, on the rank that owns the most of them."""
    by_layout: Counter[tuple[int, int]] = Counter()
    layouts = {}
    for group in (g for unit in units for g in unit.groups if g.is_trainable):
        by_layout[id(group.layout), group.dtypes.main.itemsize] += 1
        layouts[id(group.layout)] = group.layout
    owned = {1: [0]}
    for (which, itemsize), count in by_layout.items():
        num_shards = layouts[which].num_shards
        of_shards = owned.setdefault(num_shards, [0] * num_shards)
        for shard, numel in enumerate(owned_numels(layouts[which])):
            of_shards[shard] += count * itemsize * numel
    return most_on_a_rank(owned, units)
