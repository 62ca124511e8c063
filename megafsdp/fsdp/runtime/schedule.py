"""When units are gathered, and how many at a time.

A :class:`FSDPContext` is shared by all units under one root. It records the order in which units
run, in forward and in backward, and from the next run on gathers the next ``prefetch`` units while
one computes. At most ``prefetch + 1`` units are unsharded, besides those kept between forward and
backward (the root and the last unit, or what the user asks for). It also holds the reductions under
way, at most two inputs of which are alive, and ends every backward in one callback of the autograd
engine.

With prefetch 1 and units a, b, c::

    gather    a b   c                 b   a
    compute     a   b   c | c  b   a
    reduce                    c   b   a


The order in which units run: recorded, followed, and given up when a run departs from it.

What the schedule must be able to ask of a unit, real or rehearsed; nothing is done here.

What ranks tell each other besides weights and gradients: statistics, and which gradients exist.

Both are small and made once for all parameter groups of a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import torch

from megafsdp.buffer.comm.collectives import Pending, all_reduce, start_all_reduce
from megafsdp.device.torch_private import call_after_backward, without_dynamo
from megafsdp.fsdp.params.gradient_reducer import GradientReducer
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.runtime.autograd_hooks import ForwardPass
from megafsdp.fsdp.runtime.process_groups import ExtraGroups, separate_reductions

T = TypeVar("T")


class RecordedOrder(Generic[T]):
    """The order in which units ran last time, followed until a run departs from it.

    A run is recorded from :meth:`start` to the next. While it agrees with the record,
    :meth:`arrive` names the units that come next; after the first difference it names none, and the
    new order is what the next run follows.
    """

    def __init__(self) -> None:
        self._record: list[weakref.ref[T]] = []
        self._running: list[weakref.ref[T]] = []
        self._is_followed = False

    def start(self, guess: RecordedOrder[T] | None = None) -> None:
        """Begin a run; without a record the reverse of ``guess`` is followed."""
        if self._running:
            self._record = self._running
        elif guess is not None and not self._record:
            self._record = list(reversed(guess._running))
        self._running = []
        self._is_followed = bool(self._record)

    def arrive(self, unit: T, count: int) -> list[T]:
        """Note that ``unit`` runs and return up to ``count`` units expected after it."""
        position = len(self._running)
        self._running.append(weakref.ref(unit))
        expected = self._record[position] if position < len(self._record) else None
        if expected is None or expected() is not unit:
            self._is_followed = False
        return self.upcoming(count)

    def upcoming(self, count: int) -> list[T]:
        """Return up to ``count`` units expected after the last one that arrived."""
        position = len(self._running)
        expected = self._record[position : position + count] if self._is_followed else []
        return [u for u in (r() for r in expected) if u is not None]

    def is_last(self, unit: T) -> bool:
        """Tell whether ``unit`` is the last of the record, and the run agrees with it so far."""
        return self._is_followed and self._record[-1]() is unit


class ScheduledUnit(Protocol):
    """What the schedule must be able to ask of a unit."""

    prefetch: int
    reshard_after_forward: bool | int | None
    reshard_after_backward: bool
    requires_gradient_sync: bool
    requires_all_reduce: bool
    reducers: list[GradientReducer]

    @property
    def is_unsharded(self) -> bool:
        """Tell whether full storage is allocated."""

    @property
    def groups(self) -> list[ParameterGroup]:
        """Return the unit's parameter groups."""

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Issue the gathers of the unit."""

    def finish_unshard(self) -> None:
        """Wait for the gathers of the unit."""

    def release(self) -> None:
        """Free the full storage unless the unit is at work."""

    def finish_backward(self) -> None:
        """End the unit's backward if it is in one."""

    def end_partial_forward(self) -> None:
        """End a forward in which some of the unit's modules did not run."""

    def forget_forwards(self) -> None:
        """Stop waiting for the gradients of forwards so far."""

    @property
    def is_at_work(self) -> bool:
        """Tell whether a forward or backward has begun and not ended."""

    def reset_after_error(self, *, keep_accumulated: bool) -> None:
        """Return to rest after an exception, with or without the sums of earlier microbatches."""

    def prefetch_override(self, *, is_backward: bool) -> list[ScheduledUnit] | None:
        """Return the units the user chose to prefetch after this one."""


def refresh_with_statistics(groups: Sequence[ParameterGroup]) -> None:
    """Encode stale compute weights that need statistics; one all-reduce for all of one mesh."""
    waiting = [g for g in groups if g.compute_weight.needs_statistics]
    for process_group in dict.fromkeys(g.axes.shard_group for g in waiting):
        members = [g for g in waiting if g.axes.shard_group == process_group]
        statistics = [g.compute_weight.statistics() for g in members]
        combined = torch.cat(statistics)
        all_reduce(combined, op="max", group=process_group, label="statistics")
        parts = combined.split([s.numel() for s in statistics])
        for group, part in zip(members, parts, strict=True):
            group.compute_weight.refresh(part)


def agree_on_usage(reducers: Sequence[GradientReducer]) -> list[Pending]:
    """Exchange one byte a trainable parameter; only a rank that waits for it reads the answer.

    Returns:
        The exchanges whose answer this rank has no use for, to be waited for at leisure.
    """
    unread = []
    reducers = [r for r in reducers if r.group.is_trainable]
    for everyone in dict.fromkeys(r.group.axes.all_ranks for r in reducers):
        members = [r for r in reducers if r.group.axes.all_ranks == everyone]
        flags = [flag for reducer in members for flag in reducer.usage()]
        if members[0].group.axes.num_ranks > 1:
            device = members[0].group.device
            # Of pageable memory the host would wait until the device has come to the copy.
            is_pinned = device.type == "cuda"
            votes = torch.tensor(flags, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
            votes = votes.to(device, non_blocking=True)
            exchange = start_all_reduce(votes, op="max", group=everyone, label="usage")
            if any(reducer.has_pending for reducer in members):
                exchange.wait()
                flags = votes.bool().tolist()
            else:
                unread.append(exchange)
        answer = iter(flags)
        for reducer in members:
            reducer.resolve_usage([next(answer) for _ in reducer.group.parameters])
    return unread


class FSDPContext:
    """What the units under one root share.

    Args:
        root: The outermost unit.
        units: All units, the root first, in the order of ``named_modules``.
    """

    def __init__(self, root: ScheduledUnit, units: Iterable[ScheduledUnit]) -> None:
        # Units own their context: weak references let a deleted model free its buffers at once.
        self._root = weakref.ref(root)
        self._units = [weakref.ref(u) for u in units]
        self.is_last_microbatch = True
        self.optimizer_may_start = False  # The user has said so of the microbatch.
        self.forward_pass = ForwardPass()  # The last one.
        self.passes_in_backward: set[ForwardPass] = set()
        self.max_reductions_waiting = 1  # Beside the one that is being packed.
        self._forward: RecordedOrder[ScheduledUnit] = RecordedOrder()
        self._backward: RecordedOrder[ScheduledUnit] = RecordedOrder()
        self._is_backward_running = False
        self._is_in_loss_backward = (
            False  # Only the root's backward has begun, and gathered nothing.
        )
        self._reductions: list[GradientReducer] = []
        self._outer_reductions: list[GradientReducer] = []
        # Units gathered ahead that have not run, by id: a reference would keep a deleted model.
        self._ahead: set[int] = set()
        self._exchanges: list[Pending] = []
        self.extra_groups = ExtraGroups()

    def separate_reductions(self, is_separate: bool) -> None:
        """Choose whether reductions have communicators of their own; collective if they do."""
        reducers = [r for unit in self.units for r in unit.reducers]
        separate_reductions(reducers, self.extra_groups, is_separate=is_separate)

    @property
    def units(self) -> list[ScheduledUnit]:
        """Return the units that are alive, the root first."""
        return [unit for unit in (reference() for reference in self._units) if unit is not None]

    def is_root(self, unit: ScheduledUnit) -> bool:
        """Tell whether ``unit`` is the outermost one."""
        return self._root() is unit

    def begin_forward(self, unit: ScheduledUnit) -> None:
        """Begin a pass with a forward of the root, or of a unit that runs without the root."""
        root = self._root()
        if root is unit:
            self._begin_root()
        elif self.has_backward_begun:
            self.reset_after_error()  # An exception cut it short: none runs on this thread.
        if root is unit or root is None or not root.is_at_work:
            self.forward_pass = ForwardPass()

    def _begin_root(self) -> None:
        self.reset_after_error()
        self._finish_exchanges()
        self._forward.start()
        self._join_divided()

    def _join_divided(self) -> None:
        """Issue what the outer axis gathers once a step, all at once and in one order.

        A unit waits for its part when it is gathered, and joins what a step is to bring.
        """
        for unit in self.units:
            for group in unit.groups:
                weight = group.compute_weight
                is_ready = not (group.is_moved or weight.needs_statistics)
                if group.axes.is_divided and weight.is_stale and is_ready:
                    weight.refresh()

    def end_forward(self, *, is_graph_built: bool) -> None:
        """End a forward of the root: without a graph nothing stays unsharded."""
        for unit in self.units:
            unit.end_partial_forward()
        if not is_graph_built:
            self._release_all()

    def begin_backward(self) -> None:
        """Have the autograd engine call :meth:`end_backward` when it is done; once a backward."""
        if self._is_backward_running:
            return
        self._is_backward_running = True
        self._backward.start(guess=self._forward)
        call_after_backward(self.end_backward)

    def end_backward(self) -> None:
        """End the units whose inputs needed no gradient, finish reductions, agree on usage."""
        self._is_backward_running = self._is_in_loss_backward = False
        for unit in reversed(self.units):
            unit.finish_backward()
        if self.is_last_microbatch:
            self._reduce_leftovers()
        self._finish_reductions(keep=0)
        self._release_all(is_after_backward=True)
        if self.is_last_microbatch:
            self._finish_exchanges()
            self._agree_on_usage()
        self.passes_in_backward.clear()
        for unit in self.units:
            unit.forget_forwards()

    def _agree_on_usage(self) -> None:
        self._exchanges = agree_on_usage([r for unit in self.units for r in unit.reducers])

    def _finish_exchanges(self) -> None:
        """Wait for what the last backward exchanged and nobody here reads."""
        while self._exchanges:
            self._exchanges.pop().wait()

    def _reduce_leftovers(self) -> None:
        """Issue the reductions that waited for this backward, of units that it did not run."""
        for unit in reversed(self.units):
            for reducer in unit.reducers if unit.requires_gradient_sync else ():
                if reducer.is_left_over(is_final=unit.requires_all_reduce):
                    self.add_reduction(reducer, is_final=unit.requires_all_reduce)

    def _release_all(self, *, is_after_backward: bool = False) -> None:
        self._ahead.clear()
        for unit in self.units:
            if unit.reshard_after_backward or not is_after_backward:
                unit.release()

    @property
    def has_backward_begun(self) -> bool:
        """Tell whether a backward has not ended: it runs, or an exception cut it short."""
        return self._is_backward_running or bool(self._reductions or self._outer_reductions)

    def reset_after_error(self) -> None:
        """Undo what an exception cut short; sums of earlier microbatches outlive a forward."""
        is_backward = self.has_backward_begun
        if not (is_backward or any(unit.is_at_work for unit in self.units)):
            return
        self._is_backward_running = self._is_in_loss_backward = False
        self.passes_in_backward.clear()
        self._reductions.clear()
        self._outer_reductions.clear()
        for unit in self.units:
            unit.reset_after_error(keep_accumulated=not is_backward)

    def unshard_for_forward(self, unit: ScheduledUnit) -> None:
        """Gather a unit for its forward, and issue the gathers of those expected next."""
        self._unshard(unit, self._forward)

    def unshard_for_backward(self, unit: ScheduledUnit) -> None:
        """Gather a unit for its backward, and issue the gathers of those expected next.

        The root's backward begins with the loss, when most bytes are alive: what comes after it is
        gathered when that is over (:meth:`prefetch_after_loss`).
        """
        self._unshard(unit, self._backward)

    def watch_root(self, unit: ScheduledUnit, output: torch.Tensor) -> None:
        """Call :meth:`prefetch_after_loss` in backward, if the output is the root's."""
        if self.is_root(unit) and output.grad_fn is not None:
            output.grad_fn.register_hook(self.prefetch_after_loss)

    @without_dynamo
    def prefetch_after_loss(self, *unused: object) -> None:
        """Issue the gathers expected after the root: its first backward operator is done."""
        if self._is_in_loss_backward:
            root = self._root()
            assert root is not None, "a unit at work is alive"
            self._gather_ahead(root, self._backward.upcoming(root.prefetch), in_backward=True)

    def is_kept_after_forward(self, unit: ScheduledUnit) -> bool:
        """Tell whether a unit's storage stays for backward: the root, the last unit, or by wish."""
        if unit.reshard_after_forward is not None:
            return not unit.reshard_after_forward
        return self.is_root(unit) or self._forward.is_last(unit)

    def _unshard(self, unit: ScheduledUnit, order: RecordedOrder[ScheduledUnit]) -> None:
        in_backward = order is self._backward
        self._ahead.discard(id(unit))
        unit.start_unshard(in_backward=in_backward)
        root = self._root()
        is_recorded = in_backward or (root is not None and root.is_at_work)
        recorded = order.arrive(unit, unit.prefetch) if is_recorded else []
        self._is_in_loss_backward = in_backward and self.is_root(unit)
        if not self._is_in_loss_backward:
            self._gather_ahead(unit, recorded, in_backward=in_backward)
        unit.finish_unshard()

    def _gather_ahead(
        self, unit: ScheduledUnit, recorded: list[ScheduledUnit], *, in_backward: bool
    ) -> None:
        """Issue the gathers of what comes after a unit: recorded units or those the user chose."""
        self._is_in_loss_backward = False
        upcoming = unit.prefetch_override(is_backward=in_backward)
        for other in recorded if upcoming is None else upcoming:
            if any(group.step_in_flight for group in other.groups):
                break  # Its weights may be under way: this unit must not wait for them.
            if upcoming is not None or len(self._ahead) < unit.prefetch:
                if not other.is_unsharded:
                    self._ahead.add(id(other))
                other.start_unshard(in_backward=in_backward)

    def add_reduction(self, reducer: GradientReducer, *, is_final: bool) -> None:
        """Issue a reduction and finish older ones, so that few inputs are alive."""
        if reducer in self._reductions or reducer in self._outer_reductions:
            # An earlier forward of the same unit ends in the same backward.
            self._finish_reductions(keep=0)
        is_final = is_final and self.is_last_microbatch
        reducer.start_reduce(is_final=is_final, optimizer_may_start=self.optimizer_may_start)
        self._reductions.append(reducer)
        self._finish_reductions(keep=self.max_reductions_waiting)

    def _finish_reductions(self, keep: int) -> None:
        while len(self._reductions) > keep:
            reducer = self._reductions.pop(0)
            if not reducer.finish_reduce():
                self._outer_reductions.append(reducer)
        while len(self._outer_reductions) > keep:
            self._outer_reductions.pop(0).finish_reduce()

    def refresh_with_statistics(self) -> None:
        """Encode stale compute weights that need statistics; one all-reduce for all."""
        refresh_with_statistics([g for unit in self.units for g in unit.groups])
