"""One handle over ``torch.cuda`` and ``torch.cpu``: streams, events and waits.

The engine uses a :class:`DeviceHandle`, so that its code is the same on any device. On CUDA the
handle's streams and events are real. On CPU they are ``None`` and every wait returns at once: the
only asynchronous work there is collectives, which are awaited through their own handles. This file
has no buffers and issues no collectives.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megafsdp.errors import expected


@dataclass(frozen=True, slots=True)
class TimeMark:
    """A moment on a device: a CUDA event, or seconds of a clock."""

    moment: float | torch.cuda.Event

    def seconds_until(self, later: TimeMark) -> float:
        """Return the seconds from this mark to a later one; waits until the device reaches it."""
        if isinstance(self.moment, float) and isinstance(later.moment, float):
            return later.moment - self.moment
        assert not isinstance(self.moment, float), "marks of one device"
        assert not isinstance(later.moment, float), "marks of one device"
        later.moment.synchronize()
        return float(self.moment.elapsed_time(later.moment)) / 1e3


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """Streams and events of one device.

    Attributes:
        device: ``cpu``, ``cuda:<index>`` or ``meta``.
    """

    device: torch.device

    @property
    def is_asynchronous(self) -> bool:
        """Return whether kernels run on streams, beside the calling thread."""
        return self.device.type == "cuda"

    def stream(self, priority: int = 0) -> torch.cuda.Stream | None:
        """Create a side stream; None on CPU."""
        return torch.cuda.Stream(self.device, priority) if self.is_asynchronous else None

    @property
    def to_host_stream(self) -> torch.cuda.Stream | None:
        """Return the device's single stream for copies to the host; None on CPU."""
        return self.shared_stream("copies to the host")

    @property
    def to_device_stream(self) -> torch.cuda.Stream | None:
        """Return the device's single stream for copies from the host; None on CPU."""
        return self.shared_stream("copies from the host")

    def shared_stream(self, purpose: str) -> torch.cuda.Stream | None:
        """Return the device's single stream for a purpose; None on CPU."""
        return _shared_stream(self.device, purpose) if self.is_asynchronous else None

    def adopt_thread(self) -> None:
        """Make this device the calling thread's current one; threads that wait for events call it.

        A new thread's device is GPU 0, and querying an event there makes a context of 0.5 GB.
        """
        if self.is_asynchronous:
            torch.cuda.set_device(self.device)

    def current_stream(self) -> torch.cuda.Stream | None:
        """Return the stream that kernels of the calling thread go to; None on CPU."""
        return torch.cuda.current_stream(self.device) if self.is_asynchronous else None

    @contextlib.contextmanager
    def use(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue kernels of the calling thread on ``stream`` in this context."""
        if stream is None:
            yield
            return
        # A new thread's current device is GPU 0. torch.cuda.stream() alone would create a CUDA
        # context there, which takes memory.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    @contextlib.contextmanager
    def behind_current(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue kernels on ``stream`` in this context, behind what the current one has to do.

        If the context raises, the current stream waits for what was queued.
        """
        current = self.current_stream()
        self.wait_stream(stream, current)
        try:
            with self.use(stream):
                yield
        except BaseException:
            # The caller frees memory that these kernels may still read or write.
            self.wait_stream(current, stream)
            raise

    def record_event(
        self, stream: torch.cuda.Stream | None = None, *, is_blocking: bool = False
    ) -> torch.cuda.Event | None:
        """Record an event after the work queued so far on ``stream`` (default: current).

        Args:
            stream: A stream of this device.
            is_blocking: True to make a host thread that waits for the event sleep instead of spin.
        """
        if not self.is_asynchronous:
            return None
        event = torch.cuda.Event(blocking=is_blocking)
        event.record(stream or torch.cuda.current_stream(self.device))
        return event

    def mark_time(self) -> TimeMark:
        """Mark the time at which the device will have done the work queued so far."""
        if not self.is_asynchronous:
            return TimeMark(time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return TimeMark(event)

    def wait_event(
        self, event: torch.Event | None, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Make ``stream`` (default: current) wait for ``event``; the host does not wait."""
        if event is not None:
            (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def wait_stream(self, waiting: torch.cuda.Stream | None, other: object) -> None:
        """Make ``waiting`` wait for all work queued so far on ``other``."""
        if waiting is not None and isinstance(other, torch.cuda.Stream):
            waiting.wait_stream(other)

    def synchronize(self) -> None:
        """Make the host wait for all work queued on the device."""
        if self.is_asynchronous:
            torch.cuda.synchronize(self.device)

    def unused_nbytes(self) -> int | None:
        """Return the bytes that no allocation has needed yet; None if they are not counted."""
        if not self.is_asynchronous:
            return None
        free_nbytes, _ = torch.cuda.mem_get_info(self.device)
        reserved_nbytes = torch.cuda.memory_reserved(self.device)
        return free_nbytes + reserved_nbytes - torch.cuda.max_memory_allocated(self.device)

    def peak_nbytes(self) -> int | None:
        """Return the allocator's peak in bytes; None if the device has no such counter."""
        return torch.cuda.max_memory_allocated(self.device) if self.is_asynchronous else None


# torch has 32 streams per device, which all callers share. With a stream for each group, copies of
# both directions, and collectives, would come to share a stream and wait for each other.
@functools.cache
def _shared_stream(device: torch.device, purpose: str) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def device_handle(device_type: str) -> DeviceHandle:
    """Return the handle of the calling process's device of a type.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` (the current device), or ``"meta"`` for buffers without
            memory.

    Raises:
        NotImplementedError: The device type is another one.
    """
    if device_type in ("cpu", "meta"):
        return DeviceHandle(torch.device(device_type))
    if device_type == "cuda":
        return DeviceHandle(torch.device("cuda", torch.cuda.current_device()))
    raise NotImplementedError(
        expected(
            "a mesh of cpu or cuda devices",
            device_type,
            where="device_handle()",
            hint="Build the mesh with device_type 'cpu' or 'cuda'",
        )
    )
