"""Copies of what a background save writes, in host memory that later saves use again.

Fresh memory costs a page fault every few kilobytes, more than the copy itself; so there is one
slab, which grows when it must. On CUDA the slab is pinned, and the copies run on a side stream
behind the work that was queued before. Code that changes the originals makes its own stream wait;
the host waits for nothing. On the CPU the background thread copies, and code that changes the
originals waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from megafsdp.device.host_memory import aligned_nbytes, host_bytes
from megafsdp.device.streams import device_handle


class HostSlab:
    """Host memory for the copies of one save after another; it grows and gets pinned on demand."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._is_pinned = False

    @property
    def nbytes(self) -> int:
        """Return the size of the memory."""
        return self._memory.nbytes

    def like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return an uninitialised contiguous host tensor for each tensor, side by side.

        They lie in the memory of the tensors that an earlier call returned.
        """
        starts, end = [], 0
        for tensor in tensors:
            starts.append(end)
            end += aligned_nbytes(tensor.nbytes)
        self._reserve(end, is_pinned=any(tensor.is_cuda for tensor in tensors))
        # The thread that writes to the views is not in inference mode, though its caller may be.
        with torch.inference_mode(False):
            return [
                self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for start, tensor in zip(starts, tensors, strict=True)
            ]

    def release(self) -> None:
        """Give the memory back to the system; it is freed when the last copy in it is dropped."""
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _reserve(self, nbytes: int, *, is_pinned: bool) -> None:
        if nbytes <= self.nbytes and (self._is_pinned or not is_pinned):
            return
        self.release()
        self._memory, self._is_pinned = host_bytes(nbytes, is_pinned=is_pinned), is_pinned


class Staging:
    """The copies of one save.

    Args:
        tensors: Plain tensors on any device; must not change until :meth:`wait` has returned.
        slab: Memory of the copies, until the next save.

    Attributes:
        copies: Host tensors, valid once :meth:`copy` has returned; none after :meth:`release`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slab: HostSlab) -> None:
        self.copies = slab.like(tensors)
        pairs = list(zip(self.copies, tensors, strict=True))
        self._on_host = [pair for pair in pairs if not pair[1].is_cuda]
        self._is_copied = threading.Event()
        self._event: torch.cuda.Event | None = None
        # Perhaps the last references: the caller replaces the originals by the copies, and the
        # allocator would reuse their memory while the stream still reads it.
        self._on_device = [pair for pair in pairs if pair[1].is_cuda]
        self._handle = device_handle("cuda" if self._on_device else "cpu")
        if self._on_device:
            stream = self._handle.stream()
            # Steps that are queued already must have run before their results are copied.
            with self._handle.behind_current(stream):
                for copy, tensor in self._on_device:
                    copy.copy_(tensor, non_blocking=True)
            self._event = self._handle.record_event(stream, is_blocking=True)

    def copy(self) -> None:
        """Make the copies; in the background thread."""
        self._handle.adopt_thread()
        for copy, tensor in self._on_host:
            copy.copy_(tensor)
        # The originals need not outlive their copies.
        self._on_host.clear()
        self._is_copied.set()
        if self._event is not None:
            self._event.synchronize()
        self._on_device.clear()

    def release(self) -> None:
        """End every wait and drop the copies; called when the save ends or could not copy."""
        if self._on_device and self._event is not None:
            self._event.synchronize()
        self._on_device.clear()
        self._on_host.clear()
        self.copies.clear()
        self._is_copied.set()

    def detach_from_parent(self) -> None:
        """End every wait in a forked process, which has no background thread to end it."""
        # The lock inside the old event may have been held when the process was forked.
        self._is_copied = threading.Event()
        self._event = None
        self.release()

    def wait(self) -> None:
        """Return when the host, or work queued after this call, may change the originals."""
        self._is_copied.wait()
        if self._event is not None:
            self._handle.wait_event(self._event)
