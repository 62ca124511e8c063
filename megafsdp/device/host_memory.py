"""Host memory for what is large and lives long: huge pages, or pinned for copies by a device.

Fresh memory in small pages costs a fault every four kilobytes at first and misses of the address
cache for good. This file knows nothing of what the bytes mean.
"""

from __future__ import annotations

import mmap

import torch

_ALIGNMENT = 256
_HUGE_PAGE_NBYTES = 1 << 21


def host_bytes(nbytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Allocate uninitialised host memory, at least ``nbytes`` as a 1-D uint8 tensor.

    Args:
        nbytes: Bytes wanted; rounded up to huge pages unless pinned.
        is_pinned: Lock the pages, so that a CUDA device copies from and to them on its own.
    """
    # A tensor made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        if is_pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        if not rounded:
            return torch.empty(0, dtype=torch.uint8)
        pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)


def aligned_nbytes(nbytes: int) -> int:
    """Return the bytes that ``nbytes`` take in a slab, where the next tensor begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """One piece of host memory that is handed out from its start to its end.

    Args:
        nbytes: Bytes of the tensors that will be taken, each by :func:`aligned_nbytes`. What does
            not fit lies in memory of its own.
        is_pinned: As for :func:`host_bytes`.

    Attributes:
        is_pinned: As given.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self._memory = host_bytes(nbytes, is_pinned=is_pinned)
        self._end = 0

    @property
    def memory(self) -> torch.Tensor:
        """Return all of it, 1-D uint8."""
        return self._memory

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor behind those that were taken before."""
        nbytes = numel * dtype.itemsize
        start, stop = self._end, self._end + nbytes
        if stop > self._memory.nbytes:
            return host_bytes(nbytes, is_pinned=self.is_pinned)[:nbytes].view(dtype)
        self._end += aligned_nbytes(nbytes)
        return self._memory[start:stop].view(dtype)
