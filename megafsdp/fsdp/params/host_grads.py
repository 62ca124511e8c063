"""Gradients of parameters that live on the host: summed on the device, then copied to the host.

The sum over ranks lands in a shard on the device. In the last microbatch it is copied into the main
gradient on the host, or added to a gradient that is already there, and then freed. Sums of earlier
microbatches stay on the device. That takes one copy over the link and one pass over the host's
memory per step instead of per microbatch, with the same arithmetic as a main gradient on the
device. In a plain loop, which does not say which microbatch is the last, every backward is complete
by itself: its sum is copied and added on the host. No sum then stays on the device between
backwards, which takes the least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.host_threads import default_host_threads, torch_threads
from megafsdp.device.streams import DeviceHandle
from megafsdp.fsdp.params.gradient_reducer import GradientReducer, Reduction, Stage
from megafsdp.fsdp.params.group_buffers import GroupBuffers, LocalRows
from megafsdp.fsdp.params.main_gradient import MainGradient
from megafsdp.fsdp.params.model_gradients import ModelGradients
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from megafsdp.fsdp.params.unit_ledger import HostMemory


def make_reducer(
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]],
    buffers: GroupBuffers,
    rows: LocalRows,
    host: HostMemory | None,
    *,
    scale: float,
    defers: bool,
    model: ModelGradients | None,
) -> GradientReducer:
    """Return a reducer whose main gradient lies where the parameters live.

    Args:
        pairs: The sharded and the unsharded form of each parameter.
        buffers: Allocates the group's buffers.
        rows: Finds the rows of the sharded parameters in a buffer.
        host: Memory of parameters that live on the host; None for the device.
        scale: Factor on the sum over ranks.
        defers: Whether reductions wait for the last microbatch.
        model: Sums over a model axis; None without one.
    """
    sharded = [parameter for parameter, _ in pairs]
    unsharded = [parameter for _, parameter in pairs]
    if host is None:
        main_grad = MainGradient(sharded, rows, buffers.new_main_grad)
        return GradientReducer(
            unsharded, buffers, main_grad, scale=scale, defers=defers, model=model
        )
    main_grad = MainGradient(sharded, rows, partial(buffers.new_host_grad, host))
    return HostGradientReducer(
        unsharded, buffers, main_grad, scale=scale, defers=defers, model=model, host=host
    )


class HostGradientReducer(GradientReducer):
    """A reducer whose main gradient is on the host.

    On CUDA the copy runs on the device's stream of copies to the host, while the next unit's
    backward computes. ``.grad`` is published when the copy is complete: hooks and optimizers on the
    host read it at once.

    Args:
        parameters: The unsharded parameters, whose ``.grad`` is taken.
        buffers: Allocates the group's buffers.
        main_grad: Where the sums go.
        scale: Factor on the sum over ranks.
        defers: Whether reductions wait for the last microbatch.
        model: Sums over a model axis; None without one.
        host: Memory of the parameters.
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
        host: HostMemory,
    ) -> None:
        super().__init__(parameters, buffers, main_grad, scale=scale, defers=defers, model=model)
        self._host = host
        self._handle = DeviceHandle(buffers.device)
        self._stream = self._handle.to_host_stream
        # The sum of microbatches so far, on the device.
        self._sum: DBuffer | None = None
        # The main gradient, and the buffer that the sum is copied to: the same one, or a second one
        # that the host adds to it.
        self._copy: tuple[DBuffer, DBuffer] | None = None
        self._copied: torch.cuda.Event | None = None
        self._hook: ReducedHook | None = None

    def call_on_sums(self, hook: ReducedHook | None) -> None:
        """Call a hook on each sum of all microbatches, on the device, before it is copied."""
        self._hook = hook

    def is_left_over(self, *, is_final: bool) -> bool:
        """Return whether sums wait to be reduced, or wait on the device to be copied."""
        has_sum = self._sum is not None and self._reduction is None
        return has_sum or super().is_left_over(is_final=is_final)

    def advance(self, reduction: Reduction) -> None:
        """Wait for a reduction's stage; issue the next one, or publish the copy."""
        if reduction.stage is Stage.HOST_COPY:
            self._end_copy(reduction)
        else:
            super().advance(reduction)

    def abort(self) -> None:
        """Drop all that is not in ``.grad`` yet, on the device and on its way to the host."""
        # Work queued from here on may take over the memory that the copy still reads.
        self._handle.wait_event(self._copied)
        self._sum = self._copy = self._copied = None
        super().abort()

    def _waiting_sums(self) -> list[DBuffer]:
        return [*super()._waiting_sums(), *([] if self._sum is None else [self._sum])]

    def _sum_target(self) -> tuple[DBuffer, bool]:
        """Return the sum on the device, and whether it already contains earlier microbatches."""
        is_accumulating = self._sum is not None
        if self._sum is None:
            self._sum = self._buffers.new_main_grad()
        return self._sum, is_accumulating

    def _end_sums(self, reduction: Reduction) -> None:
        """Copy the sum to the host if it is final, else keep it on the device for later."""
        if not reduction.is_final:
            self._end(reduction)
            return
        is_outer = reduction.stage is Stage.OUTER_SUM
        if self._hook is not None and self._sum is not None:
            self._hook.start(self._sum.flat)
            self._hook.finish()
        self._start_copy()
        reduction.stage = Stage.HOST_COPY
        # Only one stage after the inner sum runs beside the backward, which bounds the memory:
        # after an outer sum, wait for the copy here.
        if is_outer:
            self._end_copy(reduction)

    def _start_copy(self) -> None:
        """Queue the copy to the host behind the sum."""
        main_grad, is_adding = self.main_grad.prepare()
        # A copy cannot add: it goes to a second buffer, which the host adds later.
        target = self._buffers.new_host_grad(self._host) if is_adding else main_grad
        assert self._sum is not None, "the sum was made"
        # The sum is made on the current stream; the copy must not begin before it is complete.
        with torch.no_grad(), self._handle.behind_current(self._stream):
            target.flat.copy_(self._sum.flat, non_blocking=True)
        self._copy = main_grad, target
        self._copied = self._handle.record_event(self._stream, is_blocking=True)

    def _end_copy(self, reduction: Reduction) -> None:
        # The host reads the copy next. Streams do not order that, so the host must wait.
        if self._copied is not None:
            self._copied.synchronize()
        assert self._copy is not None, "the copy was begun"
        main_grad, copied = self._copy
        if copied is not main_grad:
            with torch.no_grad(), torch_threads(default_host_threads(self._handle.device.type)):
                main_grad.flat.add_(copied.flat)
        self._sum = self._copy = self._copied = None
        self._end(reduction)
        self._publish(reduction)
