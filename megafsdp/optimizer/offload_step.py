"""One step of one bucket on the host: gradients in, Adam, compute weights out, and who waits.

A *bucket* is what this rank holds of a parameter group. Its step passes three places::

    device   main gradient ----+                        +----> device copy -> next gather
    copies                     | to the host            | to the device
    host                       +----> Adam, cast -------+

Between submission and :meth:`BucketStep.wait` the host's main weight and moments belong to the
worker. Where the device is a CPU the copies are real ones between buffers of the host. This file
does not know which parameters are stepped, nor who runs the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.host_memory import HostArena, aligned_nbytes
from megafsdp.device.streams import DeviceHandle
from megafsdp.errors import expected
from megafsdp.fsdp.parameter_group import ParameterGroup
from megafsdp.optimizer.flat_states import FlatStates
from megafsdp.optimizer.kernels import AdamBuffers, AdamKernel, AdamSegment


class CopyStreams:
    """The streams that copies of one device run on: one each way.

    Args:
        handle: The device.
    """

    def __init__(self, handle: DeviceHandle) -> None:
        self.handle = handle
        self.to_host = handle.stream()
        self.to_device = handle.stream()


class Bucket:
    """Host memory of one offloaded parameter group besides its main weight and states.

    Args:
        group: The group, whose main weight is on the host.
        streams: Of its device.
        is_grad_pinned: Whether the host's gradients are pinned.
        is_param_pinned: Whether what is copied to the device is pinned.
    """

    def __init__(
        self,
        group: ParameterGroup,
        streams: CopyStreams,
        *,
        is_grad_pinned: bool,
        is_param_pinned: bool,
    ) -> None:
        self.streams = streams
        numel, dtypes = group.main_weight.flat.numel(), group.dtypes
        self.grad = _host_tensor(numel, dtypes.grad, is_pinned=is_grad_pinned)
        self.copy_out: torch.Tensor | None = None
        if dtypes.compute != dtypes.main:
            self.copy_out = _host_tensor(numel, dtypes.compute, is_pinned=is_param_pinned)
        self.uploaded: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the memory."""
        return self.grad.nbytes + (0 if self.copy_out is None else self.copy_out.nbytes)


def _host_tensor(numel: int, dtype: torch.dtype, *, is_pinned: bool) -> torch.Tensor:
    arena = HostArena(aligned_nbytes(numel * dtype.itemsize), is_pinned=is_pinned)
    return arena.take(numel, dtype)


@dataclass(frozen=True, slots=True)
class _Part:
    """Segments of a bucket whose gradients lie in one buffer and whose counts of steps agree."""

    grads: torch.Tensor
    segments: list[AdamSegment]
    step: int


@dataclass(eq=False)
class BucketStep:
    """What one step does to one bucket; a job of the worker.

    Attributes:
        bucket: The bucket.
        states: Its moments.
        scale: Factor on the gradients: a number, or 0-dim fp32 on the device.
        num_threads: Threads of the kernel.
        ftz: Whether denormal numbers are flushed.
    """

    bucket: Bucket
    states: FlatStates
    scale: float | torch.Tensor
    num_threads: int
    ftz: bool
    _parts: list[_Part] = field(default_factory=list)
    _has_read: threading.Event = field(default_factory=threading.Event)
    _has_ended: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _read: torch.cuda.Event | None = None
    _host_scale: torch.Tensor | None = None
    _numel: int = 0
    urgency = 0
    can_begin = True

    def add(self, grads: DBuffer, segments: list[AdamSegment], *, step: int, numel: int) -> None:
        """Note segments to step, with the elements of parameters in them."""
        self.add_part(grads.flat, segments, step=step, numel=numel)

    def add_part(
        self, grads: torch.Tensor, segments: list[AdamSegment], *, step: int, numel: int
    ) -> None:
        """Note segments, and a tensor with their gradients."""
        self._parts.append(_Part(grads, segments, step))
        self._numel += numel

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to step."""
        return not self._parts

    @property
    def factor(self) -> float:
        """Return the factor on gradients; in the worker's thread, once they are there."""
        scale = self.scale if self._host_scale is None else self._host_scale.item()
        assert isinstance(scale, float), "a scale on a device was copied with the gradients"
        return scale

    def start(self) -> None:
        """Take the buffers and queue the copies to the host, if the device copies on its own."""
        group, streams = self.states.group, self.bucket.streams
        self._name = group.label
        self._weight = group.main_weight.flat
        self._moments = {n: buffer.flat for n, buffer in self.states.buffers.items()}
        self._target = group.compute_weight.start_copy()
        group.step_in_flight = self
        handle = streams.handle
        # Behind the reductions of the gradients, and the gathers from the copy to be overwritten.
        before = handle.record_event()
        for stream in (streams.to_host, streams.to_device):
            handle.wait_event(before, stream)
        if handle.is_asynchronous:
            with handle.use(streams.to_host):
                self._copy_grads()
                if isinstance(self.scale, torch.Tensor):
                    self._host_scale = self.scale.to("cpu", non_blocking=True)
            self._read = handle.record_event(streams.to_host)

    def finish(self) -> None:
        """Tell the group, which has been told that its main weight changed, what needs no cast."""
        if self._numel == self.states.numel:
            self.states.group.compute_weight.finish_encoding()

    def run(self) -> None:
        """Do the step; in the worker's thread. An error is kept for :meth:`wait`."""
        try:
            with torch.no_grad():
                self._run()
        except BaseException as error:
            self._error = error
        finally:
            # Gradients need not outlive their copies.
            self._parts.clear()
            self._has_read.set()
            self._has_ended.set()

    def _run(self) -> None:
        if self._read is not None:
            self._read.synchronize()
        else:
            self._copy_grads()
        self._has_read.set()
        if self.bucket.uploaded is not None:
            self.bucket.uploaded.synchronize()
        self._update()
        self._upload()

    def _copy_grads(self) -> None:
        for part in self._parts:
            for own, there in self._ranges(part, self.bucket.grad, part.grads):
                own.copy_(there, non_blocking=True)

    def _update(self) -> None:
        """Step the weights and moments on the host, with a cast for the device."""
        kernel = AdamKernel(
            self._weight.device,
            grad_scale=self.factor,
            flush_denormals=self.ftz,
            num_threads=self.num_threads,
        )
        buffers = AdamBuffers(
            self._weight, self.bucket.grad, **self._moments, copy_out=self.bucket.copy_out
        )
        for part in self._parts:
            kernel(buffers, part.segments, step=part.step)

    def _upload(self) -> None:
        """Copy the new compute weights to the device."""
        streams = self.bucket.streams
        copy_out = self.bucket.copy_out
        source = self._weight if copy_out is None else copy_out
        # The version counter of what forward reads belongs to the thread that runs it.
        target = self._target.data
        with streams.handle.use(streams.to_device):
            for part in self._parts:
                for there, own in self._ranges(part, target, source):
                    there.copy_(own, non_blocking=True)
        self.bucket.uploaded = streams.handle.record_event(streams.to_device)

    @staticmethod
    def _ranges(part: _Part, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        for segment in part.segments:
            yield tuple(tensor[segment.start : segment.stop] for tensor in tensors)

    def wait_for_grads(self) -> None:
        """Return when gradients may change: by the host, or by work queued after this call."""
        if self._read is not None:
            self.bucket.streams.handle.wait_event(self._read)
        else:
            self._has_read.wait()

    def wait(self) -> None:
        """Return when the host's memory, and for work queued after it the device's, is current.

        Raises:
            RuntimeError: The step failed.
        """
        self._has_ended.wait()
        if self._error is not None:
            raise RuntimeError(
                expected(
                    "a step of the optimizer on the host that ends",
                    f"{type(self._error).__name__}: {self._error}",
                    where=f"unit '{self._name}'",
                    mend="Mend the cause and load the last checkpoint: weights are half stepped",
                )
            ) from self._error
        self.bucket.streams.handle.wait_event(self.bucket.uploaded)
