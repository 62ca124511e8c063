"""From the gradients of unsharded parameters to ``.grad`` of sharded ones.

After a unit's backward its gradients are packed into one flat *partial* buffer in their own dtype,
gaps and missing gradients zeroed, and the whole buffer is reduced, whichever parameters had a
gradient: so all ranks issue the same collectives. The sum lands in the *main gradient*, whose rows
are ``.grad`` of the sharded parameters.

Usage. A parameter that no rank used keeps ``.grad`` None, as in a single process; one that another
rank used gets ``.grad`` here too. A rank that used it assigns at once, the others learn it from one
small exchange at the end of the backward (``pending`` until then).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import Enum

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending, all_reduce_partials
from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.memory import Category
from megafsdp.device.torch_private import post_accumulate_hooks
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.mesh.placement import Residence


class _State(Enum):
    """What the main gradient holds for one parameter."""

    CLEAR = "clear"  # Nothing: the next sum overwrites it.
    PENDING = "pending"  # A sum that may be other ranks' alone; .grad is None.
    HELD = "held"  # A sum that .grad shows.


def place_of_grad(grad: torch.Tensor) -> tuple[DBuffer, int] | None:
    """Return the flat main gradient that a gradient is a part of, and its index there.

    The buffer lies like the main weight and its gaps hold zeros. None for a gradient that no
    reduction has made.
    """
    buffer = getattr(grad, "_megafsdp_buffer", None)
    return None if buffer is None else (buffer, grad._megafsdp_index)  # type: ignore[attr-defined]


def common_buffer(grads: Sequence[torch.Tensor | None], indices: list[int]) -> DBuffer | None:
    """Return the flat main gradient that holds all gradients at these indices, if one does."""
    try:
        buffers = [grad._megafsdp_buffer for grad in grads]  # type: ignore[union-attr]
        found = [grad._megafsdp_index for grad in grads]  # type: ignore[union-attr]
    except AttributeError:
        return None
    is_common = found == indices and buffers.count(buffers[0]) == len(buffers)
    return buffers[0] if is_common else None


class GradientReducer:
    """Packs, reduces and accumulates the gradients of one parameter group.

    Args:
        group: The group; the reducer lives as long as it.
    """

    def __init__(self, group: ParameterGroup) -> None:
        self.group = group
        # The shown gradients own the main gradient: it is freed when the last of them is.
        self._main_grad: weakref.ref[DBuffer] | None = None
        self._shown: list[weakref.ref[torch.Tensor] | None] = [None] * len(group.parameters)
        self._working_grad: DBuffer | None = None
        self._views: list[torch.Tensor] = []  # Of the working gradient.
        self._before: list[torch.Tensor | None] = []  # What ``.grad`` was when it was made ready.
        self._states = [_State.CLEAR] * len(group.parameters)
        self._reduce_group = group.axes.group
        self._outer_group = group.axes.outer_group
        self._accumulated: DBuffer | None = None
        self._used = [False] * len(group.parameters)
        self._partial: DBuffer | None = None
        self._idle: dict[torch.dtype, DBuffer] = {}
        self._inner_sum: DBuffer | None = None
        self._is_final = True
        self._optimizer_may_start = False
        self._is_at_outer_axis = False
        self._pending: Pending | None = None

    def choose_groups(
        self, reduce_group: dist.ProcessGroup, outer_group: dist.ProcessGroup | None
    ) -> None:
        """Reduce over these groups, of the same ranks as the group's own; local."""
        self._reduce_group, self._outer_group = reduce_group, outer_group

    @property
    def main_grad(self) -> torch.Tensor | None:
        """Return the flat main gradient of this rank, gaps included; None if there is none."""
        buffer = self.main_grad_buffer
        return None if buffer is None else buffer.flat

    @property
    def main_grad_buffer(self) -> DBuffer | None:
        """Return the buffer of the main gradient; None if there is none."""
        return None if self._main_grad is None else self._main_grad()

    def accumulate(self) -> None:
        """Add this backward's gradients to a local buffer of the main gradient's dtype; local."""
        buffer = self._accumulated
        if buffer is None:
            buffer = self._new_partial(self.group.dtypes.grad)
            self._accumulated = buffer
            self._pack(buffer)
        else:
            self._add(buffer)

    def is_left_over(self, *, is_final: bool) -> bool:
        """Tell whether sums of earlier backwards wait for a reduction that nobody has issued.

        Args:
            is_final: Whether sums that only lack the outer axis count as well.
        """
        has_inner_sum = is_final and self._inner_sum is not None
        return self._pending is None and (self._accumulated is not None or has_inner_sum)

    def start_reduce(self, *, is_final: bool, optimizer_may_start: bool = False) -> None:
        """Pack the gradients and issue the reduction; collective over the group's ranks.

        Args:
            is_final: False leaves the sum over the outer axis, if there is one, for a later
                backward.
            optimizer_may_start: Whether the user has said that the optimizer's step comes next.
        """
        assert self._pending is None, "the reduction before is finished"
        partial, self._accumulated = self._accumulated, None
        if partial is None:
            partial = self._new_partial(self.group.dtypes.compute)
            self._pack(partial)
        else:
            self._add(partial)
        axes = self.group.axes
        self._is_final = is_final
        self._optimizer_may_start = is_final and optimizer_may_start
        self._is_at_outer_axis = False
        target, is_accumulating = self._target_of_sum()
        self._partial = partial
        self._issue_sum(
            target,
            partial,
            group=self._reduce_group,
            is_scattered=axes.is_sharded,
            scale=self.group.gradient_scale,
            accumulate=is_accumulating,
        )

    def _target_of_sum(self) -> tuple[DBuffer, bool]:
        """Return the buffer that the first sum goes to, and whether it adds."""
        if self.group.axes.outer_group is None:
            return self._prepare_main_grad()
        # Sums over the inner axis wait here for the last microbatch: main gradients of steps before
        # are complete already and must not be summed over the outer axis again.
        is_accumulating = self._inner_sum is not None
        if self._inner_sum is None:
            group = self.group
            self._inner_sum = group.new_gathered_shard(group.dtypes.grad, Category.MAIN_GRAD)
        return self._inner_sum, is_accumulating

    def finish_reduce(self) -> bool:
        """Wait for the reduction and show ``.grad`` of the parameters that this rank used.

        Returns:
            False if another sum, over the outer axis, was issued and must be finished too.
        """
        assert self._pending is not None, "a reduction was issued"
        self._pending.wait()
        self._pending = None
        self._free_partial()
        if self._outer_group is not None and not self._is_at_outer_axis:
            if self._is_final:
                self._start_outer_sum(self._outer_group)
            return not self._is_final
        self._show_grads()
        return True

    def _start_outer_sum(self, outer_group: dist.ProcessGroup) -> None:
        """Add this rank's shard over the ranks that have the same one, or its piece of it."""
        main_grad, is_accumulating = self._prepare_main_grad()
        inner_sum, self._inner_sum = self._inner_sum, None
        assert inner_sum is not None, "the inner sum is there"
        self._is_at_outer_axis = True
        self._partial = inner_sum
        self._issue_sum(
            main_grad,
            inner_sum,
            group=outer_group,
            is_scattered=self.group.axes.is_divided,
            scale=1.0,
            accumulate=is_accumulating,
        )

    def _issue_sum(
        self,
        target: DBuffer,
        addends: DBuffer,
        *,
        group: dist.ProcessGroup,
        is_scattered: bool,
        scale: float,
        accumulate: bool,
    ) -> None:
        """Issue the sum over one axis, each rank keeping its shard of it or the whole."""
        dtype, label = self.group.dtypes.reduce, self.group.label
        if is_scattered:
            self._pending = target.reduce_scatter_from(
                addends,
                group=group,
                scale=scale,
                accumulate=accumulate,
                reduce_dtype=dtype,
                label=label,
            )
        else:
            self._pending = all_reduce_partials(
                target.flat,
                addends.flat,
                group=group,
                scale=scale,
                accumulate=accumulate,
                reduce_dtype=dtype,
                label=label,
            )

    def _show_grads(self) -> None:
        for i, parameter in enumerate(self.group.parameters):
            if not parameter.sharded.requires_grad:
                continue
            if self._used[i] or self._states[i] is _State.HELD:
                self._publish_grad(i)
            else:
                self._states[i] = _State.PENDING
        self._used = [False] * len(self._used)
        self._release_working_buffer()

    def _release_working_buffer(self) -> None:
        """Leave the main gradient to the gradients shown, unless some are still to be shown."""
        if self.has_pending:
            return
        grads, self._working_grad, self._views, self._before = self._working_grad, None, [], []
        if self._optimizer_may_start and self.group.work_ahead is not None and grads is not None:
            self.group.work_ahead.grads_are_final(grads.flat)

    def usage(self) -> list[bool]:
        """Tell for each parameter whether this rank shows its ``.grad``."""
        return [state is _State.HELD for state in self._states]

    @property
    def has_pending(self) -> bool:
        """Tell whether some parameter waits for the other ranks' usage."""
        return _State.PENDING in self._states

    def resolve_usage(self, is_used_anywhere: list[bool]) -> None:
        """Show ``.grad`` of pending parameters that another rank used, clear the others."""
        for i, state in enumerate(self._states):
            if state is _State.PENDING:
                if is_used_anywhere[i]:
                    self._publish_grad(i)
                else:
                    self._states[i] = _State.CLEAR
        self._release_working_buffer()

    def abort(self) -> None:
        """Forget what is not in ``.grad`` yet: unsharded gradients, waiting sums, a reduction."""
        if self._pending is not None:
            self._pending.discard()
        self._pending = self._accumulated = None
        self._free_partial()
        self._inner_sum = self._working_grad = None
        self._views, self._before = [], []
        self._used = [False] * len(self._used)
        held = _State.HELD
        self._states = [s if s is held else _State.CLEAR for s in self._states]
        for parameter in self.group.parameters:
            parameter.unsharded.grad = None

    def _new_main_grad(self) -> DBuffer:
        residence = Residence.SHARD if self.group.axes.is_sharded else Residence.REPLICATE
        return self.group.new_buffer(residence, self.group.dtypes.grad, Category.MAIN_GRAD)

    def _new_partial(self, dtype: torch.dtype) -> DBuffer:
        """Return a full buffer that lives until its reduction, made once for each dtype."""
        buffer = self._idle.pop(dtype, None)
        if buffer is None:
            return self.group.new_buffer(Residence.PARTIAL, dtype, Category.PARTIAL_GRAD)
        buffer.storage.allocate()
        return buffer

    def _free_partial(self) -> None:
        partial, self._partial = self._partial, None
        if partial is not None and partial.residence is Residence.PARTIAL:
            partial.storage.release()
            self._idle[partial.flat.dtype] = partial

    def _take_grads(
        self, buffer: DBuffer
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
        """Take the gradients off the parameters: (views, gradients, indices without one)."""
        views, grads, missing = [], [], []
        all_views = buffer.full_views()
        for i, parameter in enumerate(self.group.parameters):
            unsharded = parameter.unsharded
            grad = unsharded.grad
            if grad is None:
                missing.append(i)
                continue
            unsharded.grad = None
            self._used[i] = True
            views.append(all_views[i])
            grads.append(grad)
        return views, grads, missing

    def _pack(self, buffer: DBuffer) -> None:
        with torch.no_grad():
            views, grads, missing = self._take_grads(buffer)
            if grads:
                torch._foreach_copy_(views, grads)
            for i in missing:
                buffer.tensor(i).zero_()
            buffer.zero_gaps()

    def _add(self, buffer: DBuffer) -> None:
        with torch.no_grad():
            views, grads, _ = self._take_grads(buffer)
            if grads:
                torch._foreach_add_(views, grads)

    def _sync_with_user_grads(self) -> None:
        """Follow what the user did to ``.grad``: cleared ones are clear from here on."""
        held = [i for i, state in enumerate(self._states) if state is _State.HELD]
        cleared = [i for i in held if self.group.parameters[i].sharded.grad is None]
        for i in cleared:
            self._states[i] = _State.CLEAR
        if cleared and len(cleared) == len(held):
            self._states = [_State.CLEAR] * len(self._states)

    def _prepare_main_grad(self) -> tuple[DBuffer, bool]:
        """Return the main gradient, ready for a sum, and whether the sum adds to it.

        Once the user has cleared every ``.grad`` a fresh buffer is made, so that references to the
        old ones stay valid.
        """
        self._sync_with_user_grads()
        group = self.group
        grads = [p.sharded.grad for p in group.parameters]
        is_clear = all(s is _State.CLEAR for s in self._states) and not any(
            g is not None for g in grads
        )
        buffer = self.main_grad_buffer
        if buffer is None or is_clear:
            buffer = self._new_main_grad()
            self._main_grad = weakref.ref(buffer)
            self._shown = [None] * len(grads)
        self._working_grad, self._views, self._before = buffer, [], grads
        if is_clear:
            return buffer, False
        if group.work_ahead is not None:
            group.work_ahead.grads_will_change()
        # Sums are written by address, which nobody counts.
        torch.autograd.graph.increment_version(buffer.flat)
        with torch.no_grad():
            for i, grad in enumerate(grads):
                if grad is not None and not self._is_shown(i, grad):
                    # The user assigned a gradient of their own: the sum adds to it.
                    buffer.tensor(i).copy_(local_tensor(grad).reshape(-1))
                    self._states[i] = _State.HELD
                elif self._states[i] is _State.CLEAR:
                    buffer.tensor(i).zero_()
            buffer.zero_gaps()
        return buffer, True

    def _is_shown(self, index: int, grad: torch.Tensor) -> bool:
        reference = self._shown[index]
        return reference is not None and reference() is grad

    def _publish_grad(self, index: int) -> None:
        parameter = self.group.parameters[index].sharded
        if parameter.grad is None or not self._is_shown(index, parameter.grad):
            assert self._working_grad is not None, "the sum was made"
            if not self._views:
                self._views = self.group.views_of(self._working_grad)
            if parameter.grad is not None and parameter.grad is not self._before[index]:
                # Autograd made it while the sum was under way, of a loss on the parameter itself.
                self._views[index].view(-1).add_(local_tensor(parameter.grad).reshape(-1))
            grad = self.group.as_sharded_dtensor(index, self._views[index])
            grad._megafsdp_buffer = self._working_grad  # type: ignore[attr-defined]
            grad._megafsdp_index = index  # type: ignore[attr-defined]
            self._shown[index] = weakref.ref(grad)
            parameter.grad = grad
        self._states[index] = _State.HELD
        for hook in post_accumulate_hooks(parameter):
            hook(parameter)
