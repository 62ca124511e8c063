"""Asynchronous copies between a device and the host, independent in each direction.

A :class:`StreamLink` is for CUDA: one stream for each direction. For a CPU a :class:`ThreadLink`
makes the same copies between host buffers, in one thread for each direction, so that order and
waits are those of a device. Given a speed and a device's clock, it simulates a device's link. The
caller decides what is copied, and when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megafsdp.device.background import BackgroundThread
from megafsdp.device.streams import DeviceHandle
from megafsdp.errors import expected

# close() gives up after this time: a copy may be queued after a collective that another rank never
# enters.
_PATIENCE_S = 10.0

# Pairs of a target and a source of the same shape, contiguous. Only targets on the host may have
# another dtype.
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Transfer(Protocol):
    """Copies in one direction that were issued together."""

    @property
    def is_done(self) -> bool:
        """Return whether the copies are complete."""

    def wait(self) -> None:
        """Wait until the copies are complete; from any thread.

        Raises:
            RuntimeError: A copy failed.
        """

    def order(self) -> None:
        """Make work that the calling thread queues on the device from here on follow the copies.

        Raises:
            RuntimeError: A copy failed.
        """


class CopyLink(Protocol):
    """Issues copies; those of one direction run in the order in which they were issued."""

    def fence(self) -> None:
        """Make copies issued from here on wait for work this thread has queued on the device."""

    def to_host(self, copies: Copies) -> Transfer:
        """Issue copies of device tensors into host tensors."""

    def to_device(self, copies: Copies) -> Transfer:
        """Issue copies of host tensors into device tensors."""

    def close(self) -> None:
        """Wait until all copies are made; none may be issued afterwards."""


class _StreamTransfer:
    """Copies on a stream."""

    def __init__(self, handle: DeviceHandle, event: torch.cuda.Event | None) -> None:
        assert event is not None, "a stream records events"
        self._handle, self._event = handle, event

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def order(self) -> None:
        self._handle.wait_event(self._event)


class StreamLink:
    """The link of a CUDA device; host tensors should be pinned.

    Args:
        handle: The device.
    """

    def __init__(self, handle: DeviceHandle) -> None:
        self._handle = handle
        self._streams = (handle.to_host_stream, handle.to_device_stream)

    def fence(self) -> None:
        """Make copies issued from here on wait for work this thread has queued on the device."""
        event = self._handle.record_event()
        for stream in self._streams:
            self._handle.wait_event(event, stream)

    def to_host(self, copies: Copies) -> Transfer:
        """Issue copies of device tensors into host tensors."""
        return self._copy(copies, self._streams[0])

    def to_device(self, copies: Copies) -> Transfer:
        """Issue copies of host tensors into device tensors."""
        return self._copy(copies, self._streams[1])

    def _copy(self, copies: Copies, stream: torch.cuda.Stream | None) -> Transfer:
        with self._handle.use(stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)
        event = self._handle.record_event(stream, is_blocking=True)
        return _StreamTransfer(self._handle, event)

    def close(self) -> None:
        """Wait until all copies are made, at most about ten seconds."""
        end_s = time.perf_counter() + _PATIENCE_S
        for stream in self._streams:
            while stream is not None and not stream.query() and time.perf_counter() < end_s:
                time.sleep(1e-4)


class _ThreadTransfer:
    """Copies made by a thread, as a job of it."""

    urgency = 0
    can_begin = True

    def __init__(self, copies: Copies, bytes_per_s: float | None, begin_s: float) -> None:
        self._copies = list(copies)
        self._bytes_per_s = bytes_per_s
        self._begin_s = begin_s
        self._has_ended = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:
            self._error = error
        finally:
            self._copies.clear()
            self._has_ended.set()

    def _run(self) -> None:
        time.sleep(max(0.0, self._begin_s - time.perf_counter()))
        begin_s = time.perf_counter()
        nbytes = 0
        with torch.no_grad():
            for target, source in self._copies:
                target.copy_(source)
                nbytes += source.nbytes
        if self._bytes_per_s is not None:
            # The copy has taken part of the simulated link's time: sleep only for the rest.
            time.sleep(max(0.0, begin_s + nbytes / self._bytes_per_s - time.perf_counter()))

    @property
    def is_done(self) -> bool:
        return self._has_ended.is_set()

    def wait(self) -> None:
        self._has_ended.wait()
        if self._error is not None:
            raise RuntimeError(
                expected(
                    "a copy between device and host that ends",
                    f"{type(self._error).__name__}: {self._error}",
                    where="the link of a device that is a CPU",
                    hint="Mend the cause; what was to be copied is not there",
                )
            ) from self._error

    order = wait


class ThreadLink:
    """Copies between host buffers by one thread per direction, at full or at a simulated speed.

    Args:
        bytes_per_s: Speed of a simulated link, in each direction; None copies as fast as the memory
            does. The thread sleeps for the rest of a copy's time, so that the cores are free.
        device_time: Returns the time, in seconds of ``time.perf_counter``, at which a simulated
            device will have done the work queued so far: copies issued after a fence begin later.

    Raises:
        ValueError: The speed is not positive.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        *,
        device_time: Callable[[], float] | None = None,
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise ValueError(
                expected(
                    "a positive number of bytes a second",
                    bytes_per_s,
                    where="bytes_per_s of ThreadLink",
                    hint="Give the speed of one direction, or None for no limit",
                )
            )
        self._bytes_per_s = bytes_per_s
        self._device_time = device_time
        self._begin_s = 0.0
        self._to_host = BackgroundThread("megafsdp-to-host")
        self._to_device = BackgroundThread("megafsdp-to-device")

    def fence(self) -> None:
        """Make copies issued from here on wait for the work queued on a simulated device.

        A real CPU has nothing queued.
        """
        if self._device_time is not None:
            self._begin_s = self._device_time()

    def to_host(self, copies: Copies) -> Transfer:
        """Issue copies of device tensors into host tensors."""
        return self._submit(self._to_host, copies)

    def to_device(self, copies: Copies) -> Transfer:
        """Issue copies of host tensors into device tensors."""
        return self._submit(self._to_device, copies)

    def _submit(self, thread: BackgroundThread, copies: Copies) -> Transfer:
        transfer = _ThreadTransfer(copies, self._bytes_per_s, self._begin_s)
        thread.submit(transfer)
        return transfer

    def close(self) -> None:
        """Wait until all copies are made and the threads have ended."""
        self._to_host.close()
        self._to_device.close()


class LateNumbers:
    """Numbers that a device computes and the host reads when it needs them.

    Args:
        numbers: A tensor; its copy is queued at once on the current stream.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        handle = DeviceHandle(numbers.device)
        # Pinned: a copy to pageable memory would make the host wait for the device here.
        self._on_host = torch.empty(
            numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=handle.is_asynchronous
        )
        self._on_host.copy_(numbers, non_blocking=True)
        self._event = handle.record_event(is_blocking=True)
        self._read: list[float] | None = None

    def read(self) -> list[float]:
        """Wait until the device has computed the numbers, but not for work queued after them."""
        if self._read is None:
            if self._event is not None:
                self._event.synchronize()
            self._read = self._on_host.tolist()
        return self._read


def link_of(handle: DeviceHandle) -> CopyLink:
    """Make the link of a device."""
    return StreamLink(handle) if handle.is_asynchronous else ThreadLink()
