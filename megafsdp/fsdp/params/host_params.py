"""A main weight that lives on the host, as gathers read it: cast there, copied to the device.

The cast is kept on the host until the main weight changes, so that all gathers of a step, in
forward, backward and every microbatch, cost one cast and then half the bytes of the link. Where the
compute dtype is the main dtype there is none, and the main weight itself is copied.

On CUDA copies run on a stream of their own, behind what the device was given before and beside what
it is given next: a unit that is gathered ahead arrives while the unit before computes. What reads
the copy is issued within :meth:`HostWeight.beside`, the others wait by :meth:`HostWeight.arrive`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import Category, FlatStorage
from megafsdp.device.streams import DeviceHandle
from megafsdp.fsdp.params.unit_ledger import HostMemory


class HostWeight:
    """The source of a group's compute weight on the host.

    Args:
        main_weight: The group's main weight, on the host.
        dtype: The compute weight's.
        memory: Where the cast is kept.
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
        self._stream = handle.stream()
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
        self._copy: DBuffer | None = None
        self._is_current = False
        self._copied: torch.cuda.Event | None = None

    def mark_stale(self) -> None:
        """Note that the main weight changed: the next copy casts it first."""
        self._is_current = False

    def start_encoding(self) -> torch.Tensor | None:
        """Return where the cast may be written while the main weight is changed; None for none."""
        if self._cast is None:
            return None
        self._wait_for_copy()
        return self._cast.tensor

    def mark_encoded(self) -> None:
        """Note that what was returned to write to holds the cast."""
        self._is_current = True

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the weight to the device, 1-D like the main weight, in the compute dtype; local."""
        source = self._main.flat
        if self._cast is not None:
            source = self._cast.tensor
            if not self._is_current:
                self._wait_for_copy()
                source.copy_(self._main.flat)
                self._is_current = True
        with self.on_copy_stream():
            target.copy_(source, non_blocking=True)
            self._copied = self._handle.record_event()

    @torch.no_grad()
    def copied(self, make: Callable[[], DBuffer]) -> DBuffer:
        """Return a copy on the device for a gather to read, until :meth:`release_copy`; local.

        Args:
            make: Makes its buffer, which is kept for the next copy.
        """
        if self._copy is None:
            self._copy = make()
        self._copy.storage.allocate()
        self.copy_to(self._copy.flat)
        return self._copy

    def release_copy(self) -> None:
        """Free what :meth:`copied` returned: the gather is complete."""
        if self._copy is not None:
            self._copy.storage.release()

    @contextlib.contextmanager
    def on_copy_stream(self) -> Iterator[None]:
        """Queue work behind the copy, and beside what the device is given afterwards."""
        self._handle.wait_stream(self._stream, self._handle.current_stream())
        with self._handle.use(self._stream):
            yield

    def wait_for_copy(self) -> None:
        """Make work queued from here on wait for the copy.

        Where the main weight itself is copied the host waits too: anyone may write to it next.
        """
        self._handle.wait_event(self._copied)
        if self._is_direct:
            self._wait_for_copy()

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
