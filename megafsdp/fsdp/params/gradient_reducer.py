"""Pack the gradients of unsharded parameters, and sum them over ranks into the main gradient.

After a unit's backward its gradients are packed into one flat *partial* buffer, in which gaps and
missing gradients are zero. The whole buffer is reduced, whichever parameters had a gradient, so all
ranks issue the same collectives. Partials keep the gradients' dtype if the ranks themselves sum
what they exchange (gloo); if a library sums (NCCL), packing casts them to the dtype of the sum. The
sum goes to the group's :class:`~megafsdp.fsdp.params.main_gradient.MainGradient`, which publishes
it as ``.grad``. On gloo a group of one rank packs nothing; experts that no other rank has form such
a group.

A :class:`Reduction` is one of these sums under way, and has these stages::

    one axis                 INNER_SUM                           publish
    inner and outer axis     INNER_SUM -> OUTER_SUM              publish
    a hook on the sum        INNER_SUM (-> OUTER_SUM) -> hook    publish
    parameters on the host   INNER_SUM (-> OUTER_SUM) -> copy    publish

Before the first stage, gradients that are addends of a sum over a model axis are summed over it
(:mod:`megafsdp.fsdp.params.model_gradients`). The schedule decides when a reduction is issued, and
when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.collectives import (
    Pending,
    all_reduce_partials,
    is_gloo,
    reduce_scatter,
)
from megafsdp.buffer.comm.custom import ReduceScatter, reduce_scatter_by
from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import Category
from megafsdp.fsdp.params.group_buffers import GroupBuffers
from megafsdp.fsdp.params.main_gradient import MainGradient
from megafsdp.fsdp.params.model_gradients import ModelGradients
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from megafsdp.mesh.placement import Residence


@dataclass
class Summing:
    """How the sums over ranks of one group's gradients are made.

    Attributes:
        in_library: Whether the backend's library makes them; an estimate sets it directly.
        force_sum: Whether the library only sums, and separate passes do all scaling.
        reduce_scatter_comm: The user's object that makes those over the inner axis if they are
            scattered; None for the default.
    """

    in_library: bool
    force_sum: bool = False
    reduce_scatter_comm: ReduceScatter | None = None


class Stage(Enum):
    """What a reduction waits for."""

    INNER_SUM = "inner sum"
    OUTER_SUM = "outer sum"
    HOOK = "hook"
    HOST_COPY = "host copy"
    DONE = "done"  # Nothing: published, or kept in the inner sum for the last microbatch.


class Reduction:
    """One reduction of a group's gradients, from its issue to its end.

    Args:
        reducer: The group's reducer.
        is_final: Whether no later microbatch adds to it, so that it goes through all stages.
        optimizer_may_start: Whether the user said that the optimizer's step comes next.

    Attributes:
        stage: What it waits for.
    """

    __slots__ = (
        "_addends",
        "_pending",
        "is_final",
        "optimizer_may_start",
        "reducer",
        "stage",
    )

    def __init__(
        self, reducer: GradientReducer, *, is_final: bool, optimizer_may_start: bool
    ) -> None:
        self.reducer = reducer
        self.is_final = is_final
        self.optimizer_may_start = is_final and optimizer_may_start
        self.stage = Stage.INNER_SUM
        # The collective reads the addends until it has been awaited.
        self._addends: DBuffer | None = None
        self._pending: Pending | None = None

    def wait_for(self, stage: Stage, addends: DBuffer | None, pending: Pending) -> None:
        """Enter a stage after its sum was issued; ``addends`` is None if nothing was packed."""
        self.stage, self._addends, self._pending = stage, addends, pending

    def end_sum(self) -> DBuffer | None:
        """Wait for the sum and return its addends, which may be freed."""
        assert self._pending is not None, "a sum was issued"
        self._pending.wait()
        addends, self._addends, self._pending = self._addends, None, None
        return addends

    def discard_sum(self) -> DBuffer | None:
        """Wait for the sum, if one is under way, drop it and return its addends."""
        if self._pending is not None:
            self._pending.discard()
        addends, self._addends, self._pending = self._addends, None, None
        return addends


class GradientReducer:
    """Packs, reduces and accumulates the gradients of one parameter group.

    Args:
        parameters: The unsharded parameters, whose ``.grad`` is taken.
        buffers: Allocates the group's buffers.
        main_grad: Where the sums go.
        scale: Factor on the sum over ranks.
        defers: Whether reductions wait for the last microbatch.
        model: Sums over a model axis; None without one.

    Attributes:
        summing: How its sums are made.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: GroupBuffers,
        main_grad: MainGradient,
        *,
        scale: float,
        defers: bool,
        model: ModelGradients | None,
    ) -> None:
        self.summing = Summing(in_library=not is_gloo(buffers.axes.group, buffers.device))
        self.main_grad = main_grad
        self.scale = scale
        self.defers = defers
        self.label = ""
        self._parameters = parameters
        self._buffers = buffers
        self._model = model
        # choose_groups() may replace these by groups of the same ranks with their own
        # communicators, so that sums run beside gathers.
        self._inner_group = buffers.axes.group
        self._outer_group = buffers.axes.outer_group
        self._reduction: Reduction | None = None
        # For each parameter, whether this rank has contributed to the next published sum.
        self._used = [False] * len(parameters)
        # Gradients of microbatches that are not reduced yet, in full size.
        self._accumulated: DBuffer | None = None
        # Sums over the inner axis that wait for the last microbatch.
        self._inner_sum: DBuffer | None = None
        # Partial buffers whose memory was freed, by dtype; kept, so that views are made once.
        self._released: dict[torch.dtype, DBuffer] = {}

    def choose_groups(
        self, inner_group: dist.ProcessGroup, outer_group: dist.ProcessGroup | None
    ) -> None:
        """Reduce over these process groups, which have the same ranks as the axes' own; local."""
        self._inner_group, self._outer_group = inner_group, outer_group

    def call_on_sums(self, hook: ReducedHook | None) -> None:
        """Call a hook on each sum over all axes before it is published; None: no more; local."""
        self.main_grad.hook = hook

    @property
    def has_grads(self) -> bool:
        """Return whether backward has left gradients that are not packed yet."""
        return any(p.grad is not None for p in self._parameters)

    @property
    def has_any(self) -> bool:
        """Return whether this rank has any gradient, in ``.grad`` or on the way there."""
        is_shown = any(p.grad is not None for p in self.main_grad.parameters)
        return is_shown or self.has_grads or any(self._used)

    @property
    def _packs(self) -> bool:
        """Return whether sums read a packed buffer: several ranks or a library make them."""
        # On a device one kernel for each parameter would cost more than the saved pass.
        is_exchanged = self._inner_group.size() > 1 or self.summing.in_library
        return is_exchanged or (self._model is not None and self._model.has_sums)

    @property
    def is_reducing(self) -> bool:
        """Return whether a reduction is under way."""
        return self._reduction is not None

    def drop_frozen(self) -> None:
        """Drop gradients of parameters frozen since their forward, as autograd does; local."""
        for unsharded, sharded in zip(self._parameters, self.main_grad.parameters, strict=True):
            if not sharded.requires_grad:
                unsharded.grad = None

    def accumulate(self) -> None:
        """Add this backward's gradients to a local buffer of the main gradient's dtype; local."""
        buffer = self._accumulated
        if buffer is None:
            # Not in the compute dtype: sums of many microbatches in bf16 would lose small addends.
            self._accumulated = buffer = self._new_partial(self._buffers.dtypes.grad)
            self._pack(buffer)
        else:
            self._add(buffer)

    def is_left_over(self, *, is_final: bool) -> bool:
        """Return whether sums of earlier backwards wait, and no reduction of them is under way.

        Args:
            is_final: Whether sums over the inner axis alone count as well.
        """
        has_inner_sum = is_final and self._inner_sum is not None
        return self._reduction is None and (self._accumulated is not None or has_inner_sum)

    @property
    def lacks_any(self) -> bool:
        """Return whether a trainable parameter has no ``.grad``, and no reduction brings one."""
        shown = self.main_grad.parameters
        return self._reduction is None and any(p.requires_grad and p.grad is None for p in shown)

    def count_unused(self) -> None:
        """Let the next published sum give trainable parameters that no rank used zeros; local."""
        shown = self.main_grad.parameters
        self._used = [u or p.requires_grad for u, p in zip(self._used, shown, strict=True)]

    def start_reduce(self, *, is_final: bool, optimizer_may_start: bool = False) -> Reduction:
        """Pack the gradients and issue the sum over the inner axis; collective over its ranks.

        Args:
            is_final: False leaves the sum over the outer axis, if there is one, for a later
                backward.
            optimizer_may_start: Whether the user said that the optimizer's step comes next.
        """
        assert self._reduction is None, "the reduction before has ended"
        reduction = Reduction(self, is_final=is_final, optimizer_may_start=optimizer_may_start)
        if self._accumulated is None and not self._packs:
            reduction.wait_for(Stage.INNER_SUM, None, self._issue_unpacked())
        else:
            partial = self._packed()
            target, is_accumulating = self._inner_target()
            pending = self._issue_sum(
                target,
                partial,
                group=self._inner_group,
                is_scattered=self._buffers.axes.is_sharded,
                scale=self.scale,
                accumulate=is_accumulating,
            )
            reduction.wait_for(Stage.INNER_SUM, partial, pending)
        self._reduction = reduction
        return reduction

    def _packed(self) -> DBuffer:
        """Return the gradients in a partial buffer, added to those that were accumulated."""
        partial, self._accumulated = self._accumulated, None
        if partial is None:
            dtypes = self._buffers.dtypes
            # Gradients have the compute dtype, so packing in it rounds nothing. A library reduces
            # in the dtype of its input; a single rank gives it no input.
            is_cast = self.summing.in_library and self._inner_group.size() > 1
            partial = self._new_partial(dtypes.reduce if is_cast else dtypes.compute)
            self._pack(partial)
        else:
            self._add(partial)
        if self._model is not None:
            self._model.sum_over_axis(partial, self._buffers.dtypes.reduce, self.label)
        return partial

    def _issue_unpacked(self) -> Pending:
        """Issue the sum over a single rank, reading gradients where autograd left them; local."""
        target, is_accumulating = self._inner_target()
        parts = [target.tensor(i) for i in range(len(self._parameters))]
        with torch.no_grad():
            outputs, grads, missing = self._take_grads(parts)
            if not is_accumulating:
                # Missing gradients and gaps must be zero, as in a packed buffer.
                for i in missing:
                    parts[i].zero_()
                target.zero_gaps()
            dtype = self._buffers.dtypes.compute
            # The output is written when the reduction ends: an earlier error leaves it unchanged.
            flat = [grad.reshape(-1).to(dtype) for grad in grads]
        if not outputs:
            return Pending()
        return self._reduce_scatter(
            outputs, flat, group=self._inner_group, scale=self.scale, accumulate=is_accumulating
        )

    def advance(self, reduction: Reduction) -> None:
        """Wait for a reduction's stage; issue the next one, or publish the sum.

        The sum over the outer axis is issued here, since it reads the inner sum; it runs beside
        what the caller does next.
        """
        if reduction.stage is Stage.HOOK:
            self._end(reduction)
            self._publish(reduction)
            return
        is_inner = reduction.stage is Stage.INNER_SUM
        # Free the addends before the next stage allocates its target: never have both in memory.
        self._release_partial(reduction.end_sum())
        if not is_inner or self._outer_group is None:
            self._end_sums(reduction)
        elif reduction.is_final:
            self._start_outer_sum(reduction, self._outer_group)
        else:
            self._end(reduction)

    def abort(self) -> None:
        """Drop all that is not in ``.grad`` yet: unsharded gradients, waiting sums, a reduction."""
        if self._reduction is not None:
            # Wait first: the memory of a collective under way must not be freed.
            self._release_partial(self._reduction.discard_sum())
        self._reduction = self._accumulated = self._inner_sum = None
        self._used = [False] * len(self._used)
        self.main_grad.abort()
        for parameter in self._parameters:
            parameter.grad = None

    def discard(self, indices: Sequence[int]) -> None:
        """Drop some parameters' sums that are not in ``.grad`` yet; no reduction is under way."""
        for sums in self._waiting_sums():
            for i in indices:
                sums.tensor(i).zero_()
        for i in indices:
            self._used[i] = False
            self._parameters[i].grad = None
        self.main_grad.discard(indices)

    def _waiting_sums(self) -> list[DBuffer]:
        return [sums for sums in (self._accumulated, self._inner_sum) if sums is not None]

    def _inner_target(self) -> tuple[DBuffer, bool]:
        """Return the target of the sum over the inner axis, and whether the sum adds to it."""
        if self._outer_group is None:
            return self._sum_target()
        # Sums over the inner axis wait in a buffer of their own for the last microbatch: the main
        # gradient may hold complete sums, which must not be summed over the outer axis again.
        is_accumulating = self._inner_sum is not None
        if self._inner_sum is None:
            self._inner_sum = self._buffers.new_inner_sum()
        return self._inner_sum, is_accumulating

    def _sum_target(self) -> tuple[DBuffer, bool]:
        """Return the target of the sum over all axes, and whether the sum adds to it."""
        return self.main_grad.prepare()

    def _start_outer_sum(self, reduction: Reduction, outer_group: dist.ProcessGroup) -> None:
        """Issue the sum of this rank's shard, or of its piece of it, over the outer axis."""
        target, is_accumulating = self._sum_target()
        # The reduction owns the addends from here on, until the sum has read them.
        inner_sum, self._inner_sum = self._inner_sum, None
        assert inner_sum is not None, "the inner sum is there"
        pending = self._issue_sum(
            target,
            inner_sum,
            group=outer_group,
            is_scattered=self._buffers.axes.is_divided,
            scale=1.0,
            accumulate=is_accumulating,
        )
        reduction.wait_for(Stage.OUTER_SUM, inner_sum, pending)

    def _issue_sum(
        self,
        target: DBuffer,
        addends: DBuffer,
        *,
        group: dist.ProcessGroup,
        is_scattered: bool,
        scale: float,
        accumulate: bool,
    ) -> Pending:
        """Issue the sum over one axis; each rank gets its shard of it, or the whole."""
        if is_scattered:
            pieces = target.pieces(), addends.pieces()
            comm = self.summing.reduce_scatter_comm
            # As in torch, a user's object makes no sums over an outer axis.
            if comm is not None and group is self._inner_group and group.size() > 1:
                return reduce_scatter_by(
                    comm,
                    *pieces,
                    group=group,
                    scale=scale,
                    accumulate=accumulate,
                    reduce_dtype=self._buffers.dtypes.reduce,
                    label=self.label,
                )
            return self._reduce_scatter(*pieces, group=group, scale=scale, accumulate=accumulate)
        return all_reduce_partials(
            target.flat,
            addends.flat,
            group=group,
            scale=scale,
            accumulate=accumulate,
            reduce_dtype=self._buffers.dtypes.reduce,
            label=self.label,
            force_sum=self.summing.force_sum,
        )

    def _reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        addends: Sequence[torch.Tensor],
        *,
        group: dist.ProcessGroup,
        scale: float,
        accumulate: bool,
    ) -> Pending:
        return reduce_scatter(
            outputs,
            addends,
            group=group,
            scale=scale,
            accumulate=accumulate,
            # On gloo ranks send gradients in their own dtype. ``in_library`` is asked, not the
            # backend: an estimate of gloo runs on another one.
            reduce_dtype=(
                self._buffers.dtypes.reduce if self.summing.in_library else addends[0].dtype
            ),
            label=self.label,
            force_sum=self.summing.force_sum,
        )

    def _end_sums(self, reduction: Reduction) -> None:
        """Call the hook on the sum over all axes, and publish it, at once or when that is done."""
        is_inner = reduction.stage is Stage.INNER_SUM
        self._end(reduction)
        runs_beside = self.main_grad.start_hook()
        # Only one stage after the inner sum runs beside the backward, which bounds the memory.
        if runs_beside and is_inner:
            reduction.stage, self._reduction = Stage.HOOK, reduction
        else:
            self._publish(reduction)

    def _end(self, reduction: Reduction) -> None:
        # End it before users' hooks run on the gradient: if one raises, no reduction is under way.
        reduction.stage, self._reduction = Stage.DONE, None

    def _publish(self, reduction: Reduction) -> None:
        self.main_grad.publish(self._used, optimizer_may_start=reduction.optimizer_may_start)
        self._used = [False] * len(self._used)

    def _new_partial(self, dtype: torch.dtype) -> DBuffer:
        """Return a full buffer that lives until its reduction; one object is reused per dtype."""
        buffer = self._released.pop(dtype, None)
        if buffer is None:
            return self._buffers.new(Residence.PARTIAL, dtype, Category.PARTIAL_GRAD)
        buffer.storage.allocate()
        return buffer

    def _release_partial(self, addends: DBuffer | None) -> None:
        """Free the memory of partial addends; inner sums are freed with their last reference."""
        if addends is not None and addends.residence is Residence.PARTIAL:
            addends.storage.release()
            self._released[addends.flat.dtype] = addends

    def _take_grads(
        self, all_views: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
        """Take the gradients off the parameters: (views, gradients, indices without one)."""
        views, grads, missing = [], [], []
        for i, parameter in enumerate(self._parameters):
            grad = parameter.grad
            if grad is None:
                missing.append(i)
                continue
            # The list then has the last reference: the memory is freed once it is packed.
            parameter.grad = None
            self._used[i] = True
            views.append(all_views[i])
            if grad.is_sparse:  # nn.Embedding(sparse=True) makes such gradients.
                grad = grad.to_dense()
            grads.append(grad if self._model is None else self._model.addend(i, grad))
        return views, grads, missing

    def _pack(self, buffer: DBuffer) -> None:
        with torch.no_grad():
            views, grads, missing = self._take_grads(buffer.full_views())
            if grads:
                torch._foreach_copy_(views, grads)
            # Sums and norms read the whole buffer, so unwritten elements must be zero.
            for i in missing:
                buffer.tensor(i).zero_()
            buffer.zero_gaps()

    def _add(self, buffer: DBuffer) -> None:
        with torch.no_grad():
            views, grads, _ = self._take_grads(buffer.full_views())
            if grads:
                torch._foreach_add_(views, grads)


class ReductionQueue:
    """Reductions under way, oldest first.

    Attributes:
        max_waiting: How many may be under way in each stage while the next unit's backward runs.
            Each keeps one unit's gradients alive.
    """

    def __init__(self) -> None:
        self.max_waiting = 1
        self._inner_sums: list[Reduction] = []
        # Reductions after their inner sum: in the sum over the outer axis, or the copy to the host.
        self._second_stages: list[Reduction] = []

    def make_room(self) -> None:
        """Wait for the oldest reductions, which frees their inputs, before one more is packed."""
        self.finish(self.max_waiting - 1, self.max_waiting)

    def add(self, reduction: Reduction) -> None:
        """Add a reduction that was issued, and wait for the oldest ones if there are too many."""
        self._inner_sums.append(reduction)
        self.finish(self.max_waiting, self.max_waiting)

    def finish(self, num_inner: int = 0, num_second: int = 0) -> None:
        """Wait for the oldest reductions, until at most these numbers are left in each stage.

        All ranks wait in the same order, which is that of the collectives of the second stage.
        """
        while len(self._inner_sums) > num_inner:
            # Remove it first: a user's hook on a gradient may raise after the reduction has ended.
            reduction = self._inner_sums.pop(0)
            reduction.reducer.advance(reduction)
            if reduction.stage is not Stage.DONE:
                self._second_stages.append(reduction)
        while len(self._second_stages) > num_second:
            reduction = self._second_stages.pop(0)
            reduction.reducer.advance(reduction)

    def clear(self) -> None:
        """Drop all reductions; their reducers discard the sums."""
        self._inner_sums.clear()
        self._second_stages.clear()
