"""Gradients of parameters that live on the host: summed on the device, copied to the host at last.

The sum over ranks lands in a shard on the device. With the last microbatch it is copied into the
main gradient on the host, or added to what is there, and freed. Sums of the microbatches before
stay on the device: one copy over the link and one pass over the host's memory a step instead of one
a microbatch, with the arithmetic of a main gradient on the device. A plain loop, which does not say
which microbatch is the last, has every backward complete by itself: each is copied and added on the
host, and no sum stays on the device between backwards, which is the least memory.

On CUDA the copy runs on a stream of its own while the next unit's backward computes; ``.grad`` is
shown when the copy is complete, since hooks and optimizers on the host read it at once.
"""

from __future__ import annotations

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import Category
from megafsdp.device.streams import DeviceHandle
from megafsdp.fsdp.params.gradient_reducer import GradientReducer
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def reducer_of(group: ParameterGroup) -> GradientReducer:
    """Return a reducer that leaves the gradients of a group where its parameters live."""
    return HostGradientReducer(group) if group.lives_on_host else GradientReducer(group)


class HostGradientReducer(GradientReducer):
    """A reducer whose main gradient is on the host.

    Args:
        group: The group; its parameters live on the host.
    """

    def __init__(self, group: ParameterGroup) -> None:
        super().__init__(group)
        self._handle = DeviceHandle(group.device)
        self._stream = self._handle.stream()
        # The sum of microbatches so far, on the device.
        self._sum: DBuffer | None = None
        # Where the sum is being copied to: the main gradient, or beside it if it adds to that.
        self._arriving: DBuffer | None = None
        self._copied: torch.cuda.Event | None = None

    def is_left_over(self, *, is_final: bool) -> bool:
        """Tell whether sums wait, on the device too, that nobody reduces or copies."""
        has_sum = self._sum is not None and self._pending is None and self._arriving is None
        return has_sum or super().is_left_over(is_final=is_final)

    def finish_reduce(self) -> bool:
        """Wait for the reduction and begin the copy, or end the copy and show ``.grad``.

        Returns:
            False if it must be called again.
        """
        if self._arriving is None:
            if not super().finish_reduce():
                return False
            if self._arriving is None:
                return True
            if not self._is_at_outer_axis:
                return False
        self._finish_copy()
        return True

    def abort(self) -> None:
        """Forget what is not in ``.grad`` yet, on the device and on its way."""
        self._handle.wait_event(self._copied)
        self._sum = self._arriving = self._copied = None
        super().abort()

    def _new_main_grad(self) -> DBuffer:
        return self.group.new_host_gradient()

    def _prepare_main_grad(self) -> tuple[DBuffer, bool]:
        """Return the sum on the device, and whether it holds microbatches before this one."""
        is_accumulating = self._sum is not None
        if self._sum is None:
            group = self.group
            self._sum = group.new_buffer(group.residence, group.dtypes.grad, Category.MAIN_GRAD)
        return self._sum, is_accumulating

    def _show_grads(self) -> None:
        if self._is_final:
            self._start_copy()

    def _start_copy(self) -> None:
        """Queue the copy to the host behind the sum."""
        main_grad, is_adding = super()._prepare_main_grad()
        self._arriving = self.group.new_host_gradient() if is_adding else main_grad
        assert self._sum is not None, "the sum was made"
        self._handle.wait_stream(self._stream, self._handle.current_stream())
        with torch.no_grad(), self._handle.use(self._stream):
            self._arriving.flat.copy_(self._sum.flat, non_blocking=True)
        self._copied = self._handle.record_event(self._stream)

    def _finish_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        main_grad, arriving = self._working_grad, self._arriving
        assert main_grad is not None and arriving is not None, "the copy was begun"
        if arriving is not main_grad:
            with torch.no_grad():
                main_grad.flat.add_(arriving.flat)
        self._sum = self._arriving = self._copied = None
        super()._show_grads()
