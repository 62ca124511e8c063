"""The cast of a main weight that lives on the host, and its copies to the device.

The cast is kept on the host until the main weight changes. So all gathers of a step, in forward,
backward and every microbatch, cost one cast and send half the bytes over the link. If the compute
dtype is the main dtype there is no cast, and the main weight itself is copied.

On CUDA copies run on the device's stream of copies from the host: after the work queued before,
and beside the work queued later. So a unit that is gathered ahead arrives while the unit before it
computes. Collectives that read a copy are issued within :meth:`HostWeight.on_copy_stream`; all
other readers wait by :meth:`HostWeight.wait_for_copy`. Which buffers are filled, and when, is
decided elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.host_threads import default_host_threads, torch_threads
from megafsdp.device.memory import Category, FlatStorage
from megafsdp.device.streams import DeviceHandle
from megafsdp.fsdp.params.unit_ledger import HostMemory


class HostWeight:
    """The main weight of one group on the host, and its cast there.

    Args:
        main_weight: The group's main weight, on the host.
        dtype: The compute dtype.
        memory: Host memory for the cast.
        handle: The device that copies it.
    """

    def __init__(
        self,
        main_weight: DBuffer,
        dtype: torch.dtype,
        *,
        memory: HostMemory,
        handle: DeviceHandle,
    ) -> None:
        self._main = main_weight
        self._handle = handle
        self._stream = handle.to_device_stream
        self._is_direct = dtype == main_weight.flat.dtype
        self._cast: FlatStorage | None = None
        if not self._is_direct:
            numel = main_weight.flat.numel()
            self._cast = FlatStorage(
                numel,
                dtype,
                device=torch.device("cpu"),
                ledger=memory.ledger,
                category=Category.COMPUTE_WEIGHT,
                memory=memory.arena.take(numel, dtype),
            )
        self._is_current = False
        # Recorded after the last work on the stream; None once the host has waited for it.
        self._copied: torch.cuda.Event | None = None

    def mark_stale(self) -> None:
        """Mark the cast as out of date: the next copy casts first."""
        self._is_current = False

    def start_encoding(self) -> torch.Tensor | None:
        """Return the memory of the cast, for a step to fill; None if there is no cast."""
        if self._cast is None:
            return None
        # A copy under way reads that memory.
        self._wait_for_copy()
        return self._cast.tensor

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` as filled."""
        self._is_current = True

    def encode(self, target: DBuffer) -> None:
        """Copy the weight to a buffer on the device, in the compute dtype; local.

        The copy may be under way on return.

        Args:
            target: The buffer, which is cut like the main weight.
        """
        source = self._main.flat
        with torch.no_grad():
            if self._cast is not None:
                source = self._cast.tensor
                if not self._is_current:
                    # The previous copy may still read the memory that the cast is written to.
                    self._wait_for_copy()
                    # Use several threads: the caller has one core, and its next kernel waits for
                    # this cast.
                    with torch_threads(default_host_threads(self._handle.device.type)):
                        source.copy_(self._main.flat)
                    self._is_current = True
            with self.on_copy_stream():
                target.flat.copy_(source, non_blocking=True)

    @contextlib.contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Queue work on the stream of the copy, beside the work that is queued later elsewhere."""
        # The current stream may still read or free the memory that the copy writes to.
        with self._handle.behind_current(self._stream):
            yield
            # Record also after a gather: over one rank it is a mere copy that nothing else awaits.
            self._copied = self._handle.record_event()

    def wait_for_copy(self) -> None:
        """Make work queued from here on wait for what :meth:`on_copy_stream` has queued.

        If the main weight itself is copied, the host waits too.
        """
        self._handle.wait_event(self._copied)
        # An optimizer may next write to the main weight on the host, which no stream orders.
        if self._is_direct:
            self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
