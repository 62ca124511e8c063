"""Decide when units are gathered and reduced, and how many at a time.

All units under one root share a :class:`FSDPContext`. It records the order in which units run, in
forward and in backward, and from the next run on gathers the next ``prefetch`` units while one
computes. At most ``prefetch + 1`` units are unsharded, besides those reserved for backward (the
root and the last unit, or those the user chose). Reductions run beside the next unit's backward,
with one or two inputs alive, and every backward ends in one callback of the autograd engine.

With prefetch 1 and units a, b, c::

    gather    a b   c                 b   a
    compute     a   b   c | c  b   a
    reduce                    c   b   a

Calls go one way. In backward, autograd's hooks call the schedule, and the schedule calls its units
and their gradients; a unit that is called does not call back. In forward, a unit's hooks on its
modules call the schedule, which calls the unit. What a unit or a gradient then does is decided
elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.comm.trace import read_environment
from megafsdp.device.profiling import profiler_range
from megafsdp.device.torch_private import call_after_backward, untraced_hook
from megafsdp.fsdp.params.gradient_reducer import GradientReducer, ReductionQueue
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.runtime.agreement import agree_on_usage, refresh_with_maxima
from megafsdp.fsdp.runtime.anchors import Anchors
from megafsdp.fsdp.runtime.forward_passes import ForwardPass, ForwardToken, PendingForwards
from megafsdp.fsdp.runtime.guards import refuse_replaced
from megafsdp.fsdp.runtime.iteration import Iteration, WholeBackward
from megafsdp.fsdp.runtime.process_groups import ExtraGroups, separate_reductions
from megafsdp.fsdp.runtime.recorded_order import RecordedOrder


@dataclass(frozen=True)
class UnitOptions:
    """The user's choices for a unit's schedule; a change replaces the whole object.

    Attributes:
        prefetch: How many units to gather ahead.
        reshard_after_forward: Whether storage is freed between forward and backward; a number
            keeps a slice on each of that many neighbours; None lets the schedule decide.
        nccl_user_buffers: Whether gathers fill memory that is registered with NCCL.
        reshard_after_backward: Whether storage is freed when the unit's backward ends.
        unshard_in_backward: Whether backward gathers the unit.
        requires_gradient_sync: Whether backward reduces gradients; False adds them up locally.
        requires_all_reduce: Whether sums go over the outer axis too, if there is one.
        max_reductions: How many reductions may be under way; the largest value under one root
            counts, since units share one queue.
        separates_reductions: Whether reductions have communicators of their own; None takes the
            default of the device. If one unit wants them, all under its root get them.
        reduces_unused: Whether the unit takes part in each backward, and gives zeros to parameters
            that no rank used.
        forward_prefetch: Units to gather ahead in forward; None follows the recorded order.
        backward_prefetch: The same in backward.
    """

    prefetch: int
    reshard_after_forward: bool | int | None
    nccl_user_buffers: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    requires_gradient_sync: bool = True
    requires_all_reduce: bool = True
    max_reductions: int = 1
    separates_reductions: bool | None = None
    reduces_unused: bool = False
    forward_prefetch: tuple[weakref.ref[ScheduledUnit], ...] | None = None
    backward_prefetch: tuple[weakref.ref[ScheduledUnit], ...] | None = None

    def prefetched(self, *, in_backward: bool) -> list[ScheduledUnit] | None:
        """Return the units that the user chose to gather ahead; None follows the record."""
        chosen = self.backward_prefetch if in_backward else self.forward_prefetch
        return None if chosen is None else [u for u in (r() for r in chosen) if u is not None]


class ScheduledUnit(Protocol):
    """The part of a unit that the schedule calls; it never calls the schedule back."""

    name: str
    options: UnitOptions
    context: FSDPContext | None
    outstanding: PendingForwards
    is_hidden: bool

    @property
    def groups(self) -> list[ParameterGroup]:
        """Return the unit's parameter groups."""

    @property
    def is_unsharded(self) -> bool:
        """Return whether full storage is allocated."""

    @property
    def is_at_work(self) -> bool:
        """Return whether a forward or backward has begun and not ended."""

    @property
    def is_in_backward(self) -> bool:
        """Return whether the unit's backward has begun and not ended."""

    @property
    def is_list(self) -> bool:
        """Return whether the unit has several modules."""

    def needs_maxima(self, *, in_backward: bool = False) -> bool:
        """Return whether a stale weight needs the maxima of other ranks.

        Before a forward, this first marks weights stale that were written to.
        """

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Issue the gathers of the unit."""

    def finish_unshard(self) -> None:
        """Wait for the gathers of the unit."""

    def release(self) -> None:
        """Free the full storage unless the unit is at work."""

    def enter_backward(self) -> None:
        """Begin the unit's backward."""

    def freeze_as_in(self, token: ForwardToken) -> None:
        """Set ``requires_grad`` of the unsharded parameters as it was in a forward."""

    def show_unsharded(self, *, in_backward: bool = False) -> None:
        """Put the unsharded parameters into the modules; in backward, frozen as in forward."""

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules."""

    def leave_backward(self) -> None:
        """End the unit's backward: put the sharded parameters into the modules, and reshard."""

    def end_partial_forward(self) -> None:
        """End a forward in which some of the unit's modules did not run."""

    def reset_after_error(self, *, keep_accumulated: bool) -> None:
        """Return to rest after an exception, with or without the sums of earlier microbatches."""


def references(units: Iterable[ScheduledUnit]) -> tuple[weakref.ref[ScheduledUnit], ...]:
    """Return weak references to units, the form that options hold."""
    return tuple(weakref.ref(unit) for unit in units)


class FSDPContext:
    """The state that the units under one root share.

    Args:
        root: The outermost unit.
        units: All units, the root first, in the order of ``named_modules``.

    Attributes:
        iteration: The backwards before the optimizer's step.
        forward_pass: The last pass that began.
        passes_in_backward: Passes whose backward has begun in the backward under way.
        reductions: The reductions under way.
        extra_groups: Process groups besides those of the mesh.
        anchors: Outputs that take part in the backward although nothing may read them.
    """

    def __init__(self, root: ScheduledUnit, units: Iterable[ScheduledUnit]) -> None:
        # Units own their context: weak references let a deleted model free its buffers at once.
        self._root = weakref.ref(root)
        self._units = [weakref.ref(u) for u in units]
        self.iteration = Iteration()
        self.forward_pass = ForwardPass()
        self.passes_in_backward: set[ForwardPass] = set()
        self.reductions = ReductionQueue()
        self.extra_groups = ExtraGroups()
        self.anchors = Anchors()
        self._forward: RecordedOrder[ScheduledUnit] = RecordedOrder()
        self._backward: RecordedOrder[ScheduledUnit] = RecordedOrder()
        self._whole_backward = WholeBackward(is_running=False, is_complete=True)
        # Ids of units gathered ahead that have not run: references keep a deleted model alive.
        self._ahead: set[int] = set()
        # Units with ``reduces_unused`` whose backward has begun, in that order.
        self._open: list[ScheduledUnit] = []
        self._exchanges: list[Pending] = []
        # The number of marks of changed main weights when histories were last rolled.
        self._num_marks_rolled = 0
        # The number of registrations when the modules below the root were last checked.
        self.num_registrations = 0

    @property
    def units(self) -> list[ScheduledUnit]:
        """Return the units that are alive, the root first."""
        return [unit for unit in (reference() for reference in self._units) if unit is not None]

    @property
    def groups(self) -> list[ParameterGroup]:
        """Return the parameter groups of all units."""
        return [group for unit in self.units for group in unit.groups]

    def is_root(self, unit: ScheduledUnit) -> bool:
        """Return whether ``unit`` is the outermost one."""
        return self._root() is unit

    def separate_reductions(self, is_separate: bool) -> None:
        """Choose whether reductions have communicators of their own; collective if they do."""
        separate_reductions(self.groups, self.extra_groups, is_separate=is_separate)

    def begin_forward(self, unit: ScheduledUnit) -> None:
        """Begin a pass with a forward of the root, or of a unit that runs without the root."""
        root = self._root()
        if root is unit or self.is_without_root(unit):
            refuse_replaced(self.groups if root is unit else unit.groups)
            self.iteration.refuse_within_end()
        if root is unit:
            self._begin_root()
        elif self.has_backward_begun:
            self.reset_after_error()  # An exception cut it short: none runs on this thread.
        # A module of a list that runs after the root, such as a head on chunks of its output, is a
        # part of the root's pass: the list's other modules wait for the same backward.
        if root is unit or (self.is_without_root(unit) and not unit.is_list):
            self.forward_pass = ForwardPass()

    def begin_part(self, unit: ScheduledUnit) -> None:
        """Begin a forward that is a part of a forward of the same unit; the pass goes on."""
        if self.is_root(unit):
            # A method may run the root any number of times, as to generate text. The order of one
            # such run is that of the next.
            self._forward.start_again(unit)

    def is_without_root(self, unit: ScheduledUnit) -> bool:
        """Return whether a unit that runs now runs outside of the root's forward."""
        root = self._root()
        return root is not unit and (root is None or not root.is_at_work)

    def _begin_root(self) -> None:
        self.reset_after_error()
        read_environment()
        # Exchanges that only other ranks read. Waiting this late costs next to nothing.
        self._finish_exchanges()
        self.anchors.clear()
        self._forward.start()
        self.roll_histories()
        self._join_divided()

    def roll_histories(self) -> None:
        """Roll the histories of delayed scaling, once after each change of weights; collective.

        A step that changes only other weights, such as adapters on frozen ones, rolls them too,
        since layers record maxima all the same. Call it before any layer of the pass records more.
        """
        groups = self.groups
        with_history = [group for group in groups if group.has_history]
        if not with_history:
            return
        for group in with_history:
            group.mark_stale_if_written()
        # Count only the marks of other groups: a rank without rows of a weight sees no writes.
        num_marks = sum(group.num_marks for group in groups)
        is_stale = any(group.compute_weight.is_stale for group in with_history)
        if is_stale or num_marks != self._num_marks_rolled:
            self._num_marks_rolled = num_marks
            refresh_with_maxima(groups)

    def _join_divided(self) -> None:
        """Issue all gathers over the outer axis that are made once a step, in one order.

        A unit waits for its own when it is gathered. A weight that an optimizer has moved, or that
        needs maxima, is joined later, when it is refreshed.
        """
        for group in self.groups:
            weight = group.compute_weight
            is_ready = not (group.is_moved or weight.needs_maxima)
            if group.axes.is_divided and weight.is_stale and is_ready:
                weight.refresh()

    def unshard_for_forward(self, unit: ScheduledUnit) -> None:
        """Gather a unit for its forward, and issue the gathers of those expected next."""
        unit.outstanding.had_any = True
        root = self._root()
        # A unit that runs without the root has no place in the forward order.
        is_in_order = root is not None and root.is_at_work
        self._unshard(unit, self._forward, is_in_order=is_in_order)

    def is_reserved_for_backward(self, unit: ScheduledUnit) -> bool:
        """Return whether a unit stays unsharded after forward: the root, the last unit, or chosen.

        Backward needs the root and the last unit first: if freed, they would be gathered again.
        """
        if unit.options.reshard_after_forward is not None:
            return not unit.options.reshard_after_forward
        return self.is_root(unit) or self._forward.is_last(unit)

    def end_forward(self, *, is_graph_built: bool) -> None:
        """End a forward of the root: without a graph nothing stays unsharded."""
        for unit in self.units:
            unit.end_partial_forward()
        if not is_graph_built:
            self._release_all()

    def end_unseen_backward(self) -> None:
        """End a backward that no output of a unit began, in the root's forward or of weights."""
        if any(group.gradients.has_grads for group in self.groups):
            self.iteration.is_unfinished = True
            self.end_backward()

    @untraced_hook
    def begin_backward(self, unit: ScheduledUnit, token: ForwardToken) -> None:
        """Begin a unit's backward: a gradient of one of its outputs has arrived."""
        with profiler_range("pre_backward", unit.name):
            self.begin_whole_backward()
            self.passes_in_backward.add(token.forward_pass)
            self._end_units_after(token)
            unit.outstanding.begin(token)
            # Forwards of one backward may differ in what was frozen.
            unit.freeze_as_in(token)
            # Each output of each forward calls this; the first call begins the backward.
            if unit.is_in_backward:
                return
            unit.enter_backward()
            if unit.options.reduces_unused:
                self._open.append(unit)
            if token.is_in_order and not self._whole_backward.is_order_begun:
                self._whole_backward.is_order_begun = True
                self._backward.start(guess=self._forward)
            if unit.options.unshard_in_backward:
                self._unshard(unit, self._backward, is_in_order=token.is_in_order)
            unit.show_unsharded(in_backward=True)

    def begin_whole_backward(self) -> None:
        """Make the autograd engine call :meth:`end_backward` at its end; once per backward."""
        if self._whole_backward.is_running:
            return
        self.iteration.refuse_within_end()
        self._whole_backward = WholeBackward()
        self.iteration.is_unfinished = True
        chosen = (unit.options.max_reductions for unit in self.units)
        # The model, and with it all units, may be gone before its backward.
        self.reductions.max_waiting = max(chosen, default=1)
        show_sharded = partial(self._show_sharded_after, self._whole_backward)
        # The engine calls this on the same thread, after the last node, before backward() returns.
        call_after_backward(self.end_backward, when_freed=show_sharded)

    def _show_sharded_after(self, backward: WholeBackward) -> None:
        """Show the sharded parameters of units whose backward was cut short; local.

        Users then clear gradients, through the parameters that the modules have. The rest of the
        reset waits for the next forward, which all ranks run.
        """
        if backward is not self._whole_backward:
            return  # Another backward has begun: a thread of the engine was late.
        for unit in self.units:
            if unit.is_in_backward:
                unit.show_sharded()

    @untraced_hook
    def inputs_done(self, unit: ScheduledUnit, token: ForwardToken) -> None:
        """End a unit's backward if no other forward of it waits in the passes under way.

        Passes that may follow do not count: a graph that is alive on one rank alone would make that
        rank wait.
        """
        # Begin here too: the outputs of the unit and of the root may have been hidden from hooks.
        self.begin_whole_backward()
        unit.outstanding.discard(token)
        if not unit.outstanding.has_any_of(self.passes_in_backward):
            self._end_unit(unit)

    def _end_units_after(self, token: ForwardToken) -> None:
        """End units that ran after a forward whose backward begins now.

        Whether a unit's inputs need gradients, which would end it, may depend on what a rank used.
        Without them it ends here, and on the other ranks just before: autograd visits the last
        forwards first. In the callback at the end it would come after units that ran before it.
        """
        for unit in reversed(self._open):
            is_over = unit.outstanding.are_over_before(token, self.passes_in_backward)
            if unit.is_in_backward and is_over:
                self._end_unit(unit)
        self._open = [unit for unit in self._open if unit.is_in_backward]

    @untraced_hook
    def end_backward(self) -> None:
        """End the units whose inputs needed no gradient, finish reductions, agree on usage."""
        # A user's hook on a gradient may raise here, and may also begin a backward of its own.
        backward = self._whole_backward
        backward.is_running = backward.is_complete = False
        units, root = self.units, self._root()
        # All ranks end the remaining units in this order, whichever gradients arrived on them.
        for unit in (*reversed(self._open), *reversed(units)):
            self._end_unit(unit)
        self._open.clear()
        # A recomputation may have run only some modules of a list: the others will not follow.
        if root is None or not root.is_at_work:
            for unit in units:
                unit.end_partial_forward()
        if self.iteration.ends_with_backward:
            self._reduce_leftovers(units)
        for unit in units:
            unit.is_hidden = False
        # Finish before backward() returns: users read .grad at once.
        self.reductions.finish()
        self._release_all(is_after_backward=True)
        if self.iteration.ends_with_backward:
            self._end_iteration()
        self.passes_in_backward.clear()
        # A retained graph is not lost: its next begin_backward() counts the forward again.
        for unit in units:
            unit.outstanding.clear()
        backward.is_complete = True

    def _end_unit(self, unit: ScheduledUnit) -> None:
        """Reshard a unit after its backward, and reduce its gradients or add them up; collective.

        A unit may have gradients although its backward did not begin: an object hid its outputs
        from the hooks, or a user's hook made them.
        """
        if not unit.is_in_backward and not any(g.gradients.has_grads for g in unit.groups):
            return
        with profiler_range("post_backward", unit.name):
            # Free storage before the partial gradients are packed, which is the peak of memory.
            unit.leave_backward()
            options = unit.options
            for group in unit.groups:
                gradients = group.gradients
                gradients.drop_frozen()
                if not group.is_trainable:
                    continue
                is_deferred = gradients.defers and not self.iteration.is_last_microbatch
                if is_deferred or not options.requires_gradient_sync:
                    gradients.accumulate()
                else:
                    self._reduce(gradients, options)

    def _reduce(self, gradients: GradientReducer, options: UnitOptions) -> None:
        """Issue a reduction, and finish older ones so that few inputs are alive."""
        if options.reduces_unused:
            gradients.count_unused()
        if gradients.is_reducing:
            # An earlier forward of the same unit ended in the same backward.
            self.reductions.finish()
        elif gradients.summing.in_library:
            # This keeps one input less alive. Not on gloo: there the thread itself would wait,
            # while the exchange can run beside the packing.
            self.reductions.make_room()
        self.reductions.add(
            gradients.start_reduce(
                is_final=options.requires_all_reduce and self.iteration.is_last_microbatch,
                optimizer_may_start=self.iteration.optimizer_may_start,
            )
        )

    def _reduce_leftovers(self, units: list[ScheduledUnit]) -> None:
        """Issue reductions that waited for this backward, for units that did not run in it."""
        for unit in reversed(units):
            options = unit.options
            is_final = options.requires_all_reduce
            # As in torch, a unit that has never run has no gradients.
            adds_zeros = is_final and options.reduces_unused and unit.outstanding.had_any
            for group in unit.groups if options.requires_gradient_sync else ():
                gradients = group.gradients
                if gradients.is_left_over(is_final=is_final) or (
                    adds_zeros and gradients.lacks_any
                ):
                    self._reduce(gradients, options)

    def _end_iteration(self) -> None:
        self._finish_exchanges()
        self._exchanges = agree_on_usage(self.groups)
        self.iteration.is_unfinished = False

    def start_finalizing(self) -> object:
        """Issue the reductions that wait for the end of the iteration; collective.

        Returns:
            What to give to :meth:`finish_finalizing`.
        """
        # Incomplete, so that zero_grad() drops the reductions under way too.
        self._whole_backward = WholeBackward(is_running=False)
        iteration = self.iteration
        was_last, iteration.is_last_microbatch = iteration.is_last_microbatch, True
        try:
            self._reduce_leftovers(self.units)
        finally:
            iteration.is_last_microbatch = was_last
        iteration.end = object()
        return iteration.end

    def finish_finalizing(self, end: object) -> None:
        """End an iteration that the user ends: finish its reductions, agree on usage; collective.

        Raises:
            RuntimeError: It was dropped, by ``zero_grad()`` or ``reset_iter_state()``.
        """
        self.iteration.end_with(end)
        self.reductions.finish()
        self._release_all(is_after_backward=True)
        self._end_iteration()
        self._whole_backward.is_complete = True

    def _finish_exchanges(self) -> None:
        """Wait for the exchanges of the last backward that this rank does not read."""
        while self._exchanges:
            self._exchanges.pop().wait()

    def start_unshard(self, unit: ScheduledUnit, *, in_backward: bool = False) -> None:
        """Issue the gathers of a unit; ranks may first have to agree on maxima."""
        if unit.needs_maxima(in_backward=in_backward):
            # Do it for all units at once: one small all-reduce per step instead of per unit.
            for group in () if in_backward else self.groups:
                group.mark_stale_if_written()
            refresh_with_maxima(self.groups)
        unit.start_unshard(in_backward=in_backward)

    def _unshard(
        self, unit: ScheduledUnit, order: RecordedOrder[ScheduledUnit], *, is_in_order: bool
    ) -> None:
        """Gather a unit, and issue the gathers of those expected next before waiting for it.

        The root's backward begins with the loss and the head, when most bytes are alive: only units
        that the user chose are gathered ahead beside them.
        """
        in_backward = order is self._backward
        self._ahead.discard(id(unit))
        self.start_unshard(unit, in_backward=in_backward)
        recorded = order.arrive(unit, unit.options.prefetch) if is_in_order else []
        if in_backward and self.is_root(unit):
            recorded = []
        self._gather_ahead(unit, recorded, in_backward=in_backward)
        # Wait last, while the gathers ahead are under way.
        unit.finish_unshard()

    def _gather_ahead(
        self, unit: ScheduledUnit, recorded: list[ScheduledUnit], *, in_backward: bool
    ) -> None:
        """Issue the gathers of the next units: the recorded ones or those the user chose."""
        chosen = unit.options.prefetched(in_backward=in_backward)
        for other in recorded if chosen is None else chosen:
            if any(group.step_in_flight for group in other.groups):
                break  # A step may still change its weights: this unit must not wait for that.
            # Units that were gathered ahead earlier and have not run count: they hold storage too.
            if chosen is not None or len(self._ahead) < unit.options.prefetch:
                # A unit that is already unsharded takes no new storage, so it does not count.
                if not other.is_unsharded:
                    self._ahead.add(id(other))
                self.start_unshard(other, in_backward=in_backward)

    def _release_all(self, *, is_after_backward: bool = False) -> None:
        self._ahead.clear()
        for unit in self.units:
            if unit.options.reshard_after_backward or not is_after_backward:
                unit.release()

    @property
    def has_backward_begun(self) -> bool:
        """Return whether a backward has begun and not ended: running or cut short by an error."""
        return not self._whole_backward.is_complete

    def reset_after_error(self) -> None:
        """Undo a pass that an exception cut short; after a forward, earlier sums are kept."""
        is_backward = self.has_backward_begun
        if not (is_backward or any(unit.is_at_work for unit in self.units)):
            return
        if is_backward:
            self.iteration.is_unfinished, self.iteration.end = False, None
        self._whole_backward = WholeBackward(is_running=False, is_complete=True)
        self.passes_in_backward.clear()
        self._open.clear()
        self.reductions.clear()
        for unit in self.units:
            unit.reset_after_error(keep_accumulated=not is_backward)
