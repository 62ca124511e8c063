"""Stand-ins that let the real schedule run without buffers, autograd and ranks.

A :class:`Rehearsal` is an :class:`~megafsdp.fsdp.runtime.schedule.FSDPContext` over units that hold
no
memory: they count in a ledger the bytes that units of a blueprint would allocate and free, and note
the collectives they would issue. What is gathered and reduced when is decided by the real schedule;
the stand-ins repeat only what a unit, a compute weight and a gradient reducer do when told.
:mod:`megafsdp.fsdp.estimate.footprint` drives them through a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.blueprint import PlannedGroup, PlannedUnit
from megafsdp.fsdp.estimate.rehearsed_weight import Meter, RehearsedWeight
from megafsdp.fsdp.params.gradient_reducer import GradientReducer, Reduction, Stage
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.runtime.forward_passes import ForwardToken, PendingForwards
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit, UnitOptions
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD


class RehearsedReducer(GradientReducer):
    """Stands in for the weights and gradients of a group; nothing of its base class is used.

    Args:
        group: The group.
        meter: Counts.
    """

    def __init__(self, group: PlannedGroup, meter: Meter) -> None:
        self.planned, self._meter = group, meter
        self.weight = RehearsedWeight(group, meter)
        layout, dtypes, degrees = group.layout, group.dtypes, meter.degrees
        self._has_outer_axis = group.is_sharded and degrees.dp_outer > 1
        self._inner_numel = layout.gathered_numel
        if group.is_sharded:
            self._inner_numel //= degrees.dp_shard
        self._main_grad_nbytes = layout.shard_numel * dtypes.grad.itemsize
        self._inner_nbytes = self._inner_numel * dtypes.grad.itemsize
        self.defers = group.strategy.defers_reduction
        self._reduction = None
        self._has_main_grad = self._has_inner_sum = False
        self._accumulated_nbytes: int | None = None
        self._partial_nbytes = 0

    def accumulate(self) -> None:
        """Keep this backward's gradients in full, once a step."""
        if self._accumulated_nbytes is None:
            numel = self.planned.layout.gathered_numel
            self._accumulated_nbytes = self._note_partial(numel * self.planned.dtypes.grad.itemsize)

    def is_left_over(self, *, is_final: bool) -> bool:
        """Tell that nothing is: every microbatch runs every unit."""
        return False

    def _note_partial(self, nbytes: int) -> int:
        self._meter.ledger.debit(Category.PARTIAL_GRAD, nbytes)
        return nbytes

    @property
    def has_grads(self) -> bool:
        """Tell that none come past the outputs."""
        return False

    def start_reduce(self, *, is_final: bool, optimizer_may_start: bool = False) -> Reduction:
        """Note the reduction, and allocate what it reads and writes."""
        numel, dtypes = self.planned.layout.gathered_numel, self.planned.dtypes
        nbytes, self._accumulated_nbytes = self._accumulated_nbytes, None
        if nbytes is None:
            nbytes = self._note_partial(numel * dtypes.compute.itemsize)
        self._partial_nbytes = nbytes
        if not self._has_outer_axis:
            self._need_main_grad()
        elif not self._has_inner_sum:
            self._meter.ledger.debit(Category.MAIN_GRAD, self._inner_nbytes)
            self._has_inner_sum = True
        if self.planned.is_sharded:
            self._meter.count(DP_SHARD, "reduce_scatter", nbytes)
        else:
            self._meter.count(self._meter.all_axes, "all_reduce", numel * dtypes.reduce.itemsize)
        return Reduction(self, is_final=is_final, optimizer_may_start=optimizer_may_start)

    def advance(self, reduction: Reduction) -> None:
        """Free what the reduction read; note the one over the outer axis if it follows."""
        ledger = self._meter.ledger
        is_outer = reduction.stage is Stage.OUTER_SUM
        reduction.stage = Stage.DONE
        if is_outer:
            ledger.credit(Category.MAIN_GRAD, self._inner_nbytes)
            self._has_inner_sum = False
            return
        ledger.credit(Category.PARTIAL_GRAD, self._partial_nbytes)
        if not self._has_outer_axis or not reduction.is_final:
            return
        self._need_main_grad()
        reduction.stage = Stage.OUTER_SUM
        if self._meter.degrees.is_outer_sharded:
            self._meter.count(DP_OUTER, "reduce_scatter", self._inner_nbytes)
        else:
            nbytes = self._inner_numel * self.planned.dtypes.reduce.itemsize
            self._meter.count(DP_OUTER, "all_reduce", nbytes)

    def _need_main_grad(self) -> None:
        if not self._has_main_grad:
            self._meter.ledger.debit(Category.MAIN_GRAD, self._main_grad_nbytes)
            self._has_main_grad = True

    def clear(self) -> None:
        """Free the main gradient, as clearing every ``.grad`` does."""
        if self._has_main_grad:
            self._meter.ledger.credit(Category.MAIN_GRAD, self._main_grad_nbytes)
            self._has_main_grad = False


class RehearsedGroup(ParameterGroup):
    """Stands in for a group in what the schedule asks of it.

    That units which are stepped on the host are not gathered ahead lowers no peak: the backward of
    the same step gathers as many.

    Args:
        reducer: Stands in for its weights and gradients.
    """

    def __init__(self, reducer: RehearsedReducer) -> None:
        self.gradients = reducer
        self.step_in_flight = None
        self._is_trainable = reducer.planned.is_trainable

    @property
    def is_trainable(self) -> bool:
        """Tell whether its parameters require gradients."""
        return self._is_trainable


class RehearsedUnit(ScheduledUnit):
    """Stands in for a unit: what its hooks do to weights and gradients, without modules.

    Args:
        planned: The unit.
        meter: Counts.
        prefetch: How many units are gathered ahead.
        reshard_after_forward: As for ``fully_shard``.
    """

    def __init__(
        self,
        planned: PlannedUnit,
        meter: Meter,
        *,
        prefetch: int,
        reshard_after_forward: bool | int | None,
    ) -> None:
        self.name = planned.name
        self.options = UnitOptions(prefetch, reshard_after_forward)
        self.context = None
        self.outstanding = PendingForwards()
        self.rehearsed = [RehearsedReducer(group, meter) for group in planned.groups]
        self._groups = list[ParameterGroup](map(RehearsedGroup, self.rehearsed))
        self._is_at_work = self._is_in_backward = False

    @property
    def is_unsharded(self) -> bool:
        """Tell whether full storage is allocated that is not kept anyway."""
        return any(r.weight.is_allocated and not r.weight.is_kept for r in self.rehearsed)

    @property
    def groups(self) -> list[ParameterGroup]:
        """Return the stand-ins of the unit's groups."""
        return self._groups

    def needs_statistics(self) -> bool:
        """Tell that none of the recipes does."""
        return False

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Note the gathers of all groups."""
        for reducer in self.rehearsed:
            reducer.weight.start_unshard(in_backward=in_backward)

    def finish_unshard(self) -> None:
        """Free what the gathers read."""
        for reducer in self.rehearsed:
            reducer.weight.finish_unshard()

    def release(self) -> None:
        """Free the full storage, unless the unit is at work."""
        if not self._is_at_work:
            for reducer in self.rehearsed:
                reducer.weight.release()

    def begin_forward(self, context: Rehearsal) -> None:
        """Do what the unit's hook does before forward."""
        self._is_at_work = True
        context.unshard_for_forward(self)

    def end_forward(self, context: Rehearsal) -> None:
        """Do what the unit's hook does after forward."""
        self._is_at_work = False
        if context.is_reserved_for_backward(self):
            return
        num_ranks = self.options.reshard_after_forward
        if not isinstance(num_ranks, bool | None):
            for reducer in self.rehearsed:
                reducer.weight.release_to_slices(num_ranks)
        self.release()

    def enter_backward(self) -> None:
        """Begin the unit's backward."""
        self._is_at_work = self._is_in_backward = True

    def show_unsharded(self) -> None:
        """Do nothing: there are no modules."""
        return

    def leave_backward(self) -> None:
        """End the unit's backward and reshard."""
        self._is_at_work = self._is_in_backward = False
        self.release()

    def end_partial_forward(self) -> None:
        """Do nothing: all modules run."""

    @property
    def is_in_backward(self) -> bool:
        """Tell whether the unit's backward has begun and not ended."""
        return self._is_in_backward

    @property
    def is_at_work(self) -> bool:
        """Tell whether a forward or backward has begun and not ended."""
        return self._is_at_work

    def reset_after_error(self, *, keep_accumulated: bool) -> None:
        """Refuse: nothing cuts a rehearsal short."""
        raise AssertionError("a rehearsal is never cut short")


class Rehearsal(FSDPContext):
    """The schedule itself, without an autograd engine to call it back.

    Args:
        units: The root first, then the others in the order in which they run.
        meter: Counts.
    """

    def __init__(self, units: Sequence[RehearsedUnit], meter: Meter) -> None:
        super().__init__(units[0], units)
        self._run_order = units
        self._meter = meter
        groups = [r.planned for unit in units for r in unit.rehearsed if r.planned.is_trainable]
        self._num_flags = sum(len(group.layout.slots) for group in groups)

    def run_microbatch(self, *, is_last: bool) -> None:
        """Run a forward of the root and its backward."""
        self.is_last_microbatch = is_last
        root, *others = self._run_order
        self.begin_forward(root)
        root.begin_forward(self)
        for unit in others:
            unit.begin_forward(self)
            unit.end_forward(self)
        root.end_forward(self)
        self.end_forward(is_graph_built=True)
        token = ForwardToken(forward_pass=self.forward_pass)
        self.begin_backward(root, token)
        self.prefetch_after_loss()
        for unit in reversed(others):
            self.begin_backward(unit, token)
            self._end_unit(unit)
        # The root takes tokens, which need no gradient: it ends with the whole backward.
        self.end_backward()

    def end_step(self, *, casts_from: torch.dtype | None = None) -> None:
        """Take an optimizer step and clear the gradients.

        Args:
            casts_from: Dtype of the main weights that the optimizer casts as it steps.
        """
        reducers = [reducer for unit in self._run_order for reducer in unit.rehearsed]
        for reducer in reducers:
            reducer.weight.is_stale = False
            # A frozen group is in no optimizer.
            if reducer.planned.is_trainable:
                reducer.weight.note_step(casts_from=casts_from)
        for reducer in reducers:
            reducer.clear()

    def _begin_whole_backward(self) -> None:
        """Follow the recorded order; no engine calls back."""
        if not self._is_backward_running:
            self._is_backward_running = True
            self._backward.start(guess=self._forward)

    def _join_divided(self) -> None:
        for unit in self._run_order:
            for reducer in unit.rehearsed:
                reducer.weight.join()

    def _agree_on_usage(self) -> None:
        if self._num_flags and self._meter.degrees.num_ranks > 1:
            self._meter.count(self._meter.all_axes, "all_reduce", self._num_flags)
