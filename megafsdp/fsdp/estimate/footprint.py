"""Bytes and collectives of one training step, from a blueprint: arithmetic, no memory, no ranks.

:func:`footprint_of` rehearses a step with the real schedule
(:mod:`megafsdp.fsdp.estimate.rehearsal`), so that peaks follow from it and not from a second
description of it. With n groups that communicate, r of them in units kept between forward and
backward (the root and the last one by default), and m microbatches inside ``microbatch()`` (in a
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

Counted is what :func:`~megafsdp.buffer.comm.collectives.record_collectives` and the ledger count:
flat buffers, the full-size side of collectives, a model whose units run one after another inside
the root. Activations, the backend's own buffers and the allocator's slack are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.blueprint import PlannedUnit, ShardDegrees
from megafsdp.fsdp.estimate.rehearsal import Rehearsal, RehearsedUnit
from megafsdp.fsdp.estimate.rehearsed_weight import Meter
from megafsdp.mesh.parallel_dims import DP_SHARD

_NORM_NBYTES = 8  # One fp64 number.


@dataclass(frozen=True)
class StepPlan:
    """How a step is run.

    Attributes:
        num_microbatches: Forwards and backwards before the optimizer's step.
        in_microbatch: Whether they run inside ``microbatch()``.
        prefetch: How many units are gathered ahead.
        reshard_after_forward: As for ``fully_shard``.
        num_states: Optimizer states of the main weight's shape, without gaps: 2 for Adam.
        state_nbytes: Bytes of optimizer states on the rank that has most, in place of num_states.
        casts_from: Dtype of the main weights that the optimizer casts to the compute dtype as it
            steps, as FusedAdam does; None for none.
        measures_norm: Whether the norm of all gradients is taken.
        loop_all_reduces: Bytes of each all-reduce over all ranks that the loop adds to a step.
    """

    num_microbatches: int = 1
    in_microbatch: bool = True
    prefetch: int = 1
    reshard_after_forward: bool | int | None = None
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


def footprint_of(
    units: Sequence[PlannedUnit], degrees: ShardDegrees, plan: StepPlan = StepPlan()
) -> Footprint:
    """Rehearse the third step of a run and say what it costs; local.

    Args:
        units: The root first, then the others in the order in which they run.
        degrees: The ranks.
        plan: How the step is run.
    """
    meter = Meter(degrees)
    rehearsed = [
        RehearsedUnit(
            unit,
            meter,
            prefetch=plan.prefetch,
            reshard_after_forward=plan.reshard_after_forward,
        )
        for unit in units
    ]
    rehearsal = Rehearsal(rehearsed, meter)
    states = plan.state_nbytes
    if states is None:
        states = plan.num_states * _most_owned_nbytes(units)
    meter.ledger.debit(Category.OPTIMIZER_STATE, states)
    # One step records the order, the next begins to follow it.
    for num_microbatches in (1, 1, plan.num_microbatches):
        meter.start()
        for index in range(num_microbatches):
            is_last = not plan.in_microbatch or index == num_microbatches - 1
            rehearsal.run_microbatch(is_last=is_last)
        rehearsal.end_step(casts_from=plan.casts_from)
    if plan.measures_norm and any(g.is_sharded and g.is_trainable for u in units for g in u.groups):
        meter.count(
            meter.all_axes if degrees.is_outer_sharded else DP_SHARD, "all_reduce", _NORM_NBYTES
        )
    for nbytes in plan.loop_all_reduces:
        meter.count(meter.all_axes, "all_reduce", nbytes)
    traffic = {key: Traffic(meter.calls[key], meter.nbytes[key]) for key in sorted(meter.calls)}
    ledger = meter.ledger
    return Footprint(dict(ledger.live), dict(ledger.peak), ledger.peak_total, traffic)


def owned_numels(layout: FlatLayout) -> list[int]:
    """Return how many elements of tensors, without gaps, each shard holds."""
    owned = [0] * layout.num_shards
    for slot in layout.slots:
        length = layout.sub_buffers[slot.sub_buffer].shard_numel
        stop = slot.offset + slot.spec.numel
        for shard in range(slot.offset // length, -(-stop // length)):
            owned[shard] += min(stop, (shard + 1) * length) - max(slot.offset, shard * length)
    return owned


def _most_owned_nbytes(units: Sequence[PlannedUnit]) -> int:
    """Return the main weights' bytes, without gaps, of the rank that owns most of them."""
    by_layout: Counter[tuple[int, int]] = Counter()
    layouts = {}
    for group in (g for unit in units for g in unit.groups if g.is_trainable):
        by_layout[id(group.layout), group.dtypes.main.itemsize] += 1
        layouts[id(group.layout)] = group.layout
    everywhere = 0
    owned: Counter[int] = Counter()
    for (which, itemsize), count in by_layout.items():
        numels = owned_numels(layouts[which])
        if len(numels) == 1:
            everywhere += count * itemsize * numels[0]
            continue
        for shard, numel in enumerate(numels):
            owned[shard] += count * itemsize * numel
    return everywhere + max(owned.values(), default=0)
