"""The events of a dry run's step on one axis: bars of units in three lanes, memory by category.

A dry run has no times. Each forward of a unit is one wide and each backward two; between them stand
the events that take place there. A gather that is issued ahead lasts while the units before its own
are computed; one that is not delays its unit; a reduction lasts until its input is freed. With
prefetch 1 and units a, b, c::

    gather    a b   c                 b   a
    compute     a   b   c | c  b   a
    reduce                    c   b   a
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafsdp.fsdp.estimate.step_recorder import (
    BACKWARD,
    FORWARD,
    MEMORY,
    OPTIMIZER_STEP,
    Moment,
)

GATHER, COMPUTE = "gather", "compute"
_WIDTHS = {FORWARD: 1.0, BACKWARD: 2.0, OPTIMIZER_STEP: 2.0}
# Lane of each kind of reduction; the second one sums over replicas or whole gradients.
_REDUCTIONS = {
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "reduce-scatter",
    "all_reduce": "all-reduce",
}
LANES = (GATHER, COMPUTE, "reduce-scatter", "all-reduce")
# Width of what happens between two computations, and of a gather that delays its unit.
_BETWEEN, _EXPOSED = 0.3, 0.7


@dataclass(frozen=True, slots=True)
class Bar:
    """What a unit does in one lane.

    Attributes:
        lane: One of LANES.
        kind: forward, backward, optimizer step, or the kind of the collective.
        unit: Name of the unit.
        start: Where it begins.
        stop: Where it ends.
    """

    lane: str
    kind: str
    unit: str
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Bytes alive from one place on the axis to the next level.

    Attributes:
        start: Where it begins.
        live: Bytes in the order of Category.
        during: What is computed then, or what comes before and after.
    """

    start: float
    live: tuple[int, ...]
    during: str


@dataclass(frozen=True, slots=True)
class StepPicture:
    """A step on one axis.

    Attributes:
        bars: The bars of all lanes.
        levels: Memory, in order.
        length: Where the axis ends.
        skipped_at: Where microbatches are left out; None if all are there.
    """

    bars: Sequence[Bar]
    levels: Sequence[MemoryLevel]
    length: float
    skipped_at: float | None


@dataclass(slots=True)
class _Stretch:
    """What happens before one computation.

    Attributes:
        events: Memory and collectives, in order.
        compute: The computation; None at the end of the step.
        start: Where the stretch begins.
        compute_start: Where it ends.
        stop: Where the computation ends.
    """

    events: list[Moment]
    compute: Moment | None
    start: float = 0.0
    compute_start: float = 0.0
    stop: float = 0.0


def step_picture(moments: Sequence[Moment]) -> StepPicture:
    """Lay out the moments of a step on an axis."""
    units = {moment.label for moment in moments if moment.kind in (FORWARD, BACKWARD)}
    stretches, skipped_at = _stretches(moments)
    bars = [_compute_bar(s.compute, s) for s in stretches if s.compute is not None]
    bars += _gather_bars(stretches, units)
    bars += _reduce_bars(stretches, units)
    length = stretches[-1].stop if stretches else 0.0
    return StepPicture(bars, _levels(stretches), length, skipped_at)


def _stretches(moments: Sequence[Moment]) -> tuple[list[_Stretch], float | None]:
    """Cut the moments at the computations and give each part its place."""
    found: list[_Stretch] = []
    events: list[Moment] = []
    for moment in moments:
        if moment.kind in _WIDTHS:
            found.append(_Stretch(events, moment))
            events = []
        else:
            events.append(moment)
    if events:
        found.append(_Stretch(events, None))
    place, microbatch, skipped_at = 0.0, 0, None
    for stretch in found:
        compute = stretch.compute
        if compute is not None and compute.microbatch > microbatch + 1:
            skipped_at = place
        microbatch = compute.microbatch if compute is not None else microbatch
        stretch.start = place
        is_held_up = any(
            event.kind == "all_gather" and compute is not None and event.label == compute.label
            for event in stretch.events
        )
        place += _EXPOSED if is_held_up else _BETWEEN if stretch.events else 0.0
        stretch.compute_start = place
        place += _WIDTHS[compute.kind] if compute is not None else 0.0
        stretch.stop = place
    return found, skipped_at


def _compute_bar(compute: Moment, stretch: _Stretch) -> Bar:
    name = compute.label or OPTIMIZER_STEP
    return Bar(COMPUTE, compute.kind, name, stretch.compute_start, stretch.stop)


def _gather_bars(stretches: Sequence[_Stretch], units: set[str]) -> list[Bar]:
    """Return a bar for the gathers of each unit, from their issue to the unit's computation."""
    bars: list[Bar] = []
    # Where each unit's first gather was issued; a unit with several groups has one bar.
    pending: dict[str, float] = {}
    for stretch in stretches:
        compute = stretch.compute
        for event in stretch.events:
            if event.kind == "all_gather" and event.label in units:
                is_own = compute is not None and event.label == compute.label
                pending.setdefault(event.label, stretch.start if is_own else stretch.compute_start)
        if compute is not None and compute.label in pending:
            start, stop = pending.pop(compute.label), stretch.compute_start
            free = bars[-1].stop if bars else 0.0
            start = min(max(start, free), stop)
            bars.append(Bar(GATHER, "all_gather", compute.label, start, stop))
    return bars


def _reduce_bars(stretches: Sequence[_Stretch], units: set[str]) -> list[Bar]:
    """Return a bar for the reductions of each unit and kind, beside the computation that follows.

    Several groups of a unit have one bar.
    """
    bars = []
    for stretch in stretches:
        issued = {
            (event.kind, event.label): None
            for event in stretch.events
            if event.kind in _REDUCTIONS and event.label in units
        }
        is_followed = stretch.compute is not None and stretch.compute.kind == BACKWARD
        # After the last backward the step waits.
        stop = stretch.stop if is_followed else stretch.compute_start
        for kind, unit in issued:
            bars.append(Bar(_REDUCTIONS[kind], kind, unit, stretch.start, stop))
    return bars


def _levels(stretches: Sequence[_Stretch]) -> list[MemoryLevel]:
    """Return memory where it changes; changes between computations share the space there.

    No two levels are at one place, where a stacked chart would add them up.
    """
    levels: list[MemoryLevel] = []
    for stretch in stretches:
        changes = [event for event in stretch.events if event.kind == MEMORY]
        name = "" if stretch.compute is None else _named(stretch.compute)
        width = stretch.compute_start - stretch.start
        for index, change in enumerate(changes):
            start = stretch.start + width * index / len(changes)
            what = f"before {name}" if name else "after the step"
            levels.append(MemoryLevel(start, change.live, what))
        if stretch.compute is not None:
            levels.append(MemoryLevel(stretch.compute_start, stretch.compute.live, name))
    return levels


def _named(compute: Moment) -> str:
    return f"{compute.kind} of {compute.label}" if compute.label else compute.kind
