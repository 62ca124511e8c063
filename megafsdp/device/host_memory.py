"""Host memory: huge or pinned pages for what lives long, a heap that keeps what comes and goes.

Fresh memory in small pages costs a fault every four kilobytes at first and misses of the address
cache for good. What the bytes mean is decided by the callers.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_ALIGNMENT = 256
_HUGE_PAGE_NBYTES = 1 << 21
# Parameters of glibc's mallopt(3), each with its value: free bytes kept at the end of the heap, and
# the size from which a block is mapped by itself, at most 32 MiB.
_TRIM_THRESHOLD, _KEPT_NBYTES = -1, (1 << 31) - 1
_MAPPING_THRESHOLD, _MAPPED_NBYTES = -3, 1 << 25
_MALLOC_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")


def host_bytes(nbytes: int, *, is_pinned: bool, is_meta: bool = False) -> torch.Tensor:
    """Allocate uninitialised host memory, at least ``nbytes`` as a 1-D uint8 tensor.

    Args:
        nbytes: Bytes wanted; rounded up to huge pages unless pinned.
        is_pinned: Lock the pages, so that a CUDA device copies from and to them on its own.
        is_meta: Return a tensor on the meta device in place of memory.
    """
    # A tensor made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        if is_meta:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        if is_pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        if not rounded:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=torch.uint8)


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory, up to 2 GiB, for the next allocations; process-wide.

    glibc gives the end of its heap and its largest blocks back to the system as soon as they are
    free. Training on a CPU frees activations and gradients in every step: each step would fault
    them in again, four kilobytes at a time.

    Returns:
        False if nothing was changed: the environment says how to allocate, or the C library is not
        glibc.
    """
    if any(name.startswith(_MALLOC_SETTINGS) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_TRIM_THRESHOLD, _KEPT_NBYTES), (_MAPPING_THRESHOLD, _MAPPED_NBYTES))
    # A list, not a generator: the second setting is made even if the first is refused.
    return all([mallopt(name, value) == 1 for name, value in settings])


def aligned_nbytes(nbytes: int) -> int:
    """Return the bytes that ``nbytes`` take in a slab, where the next tensor begins."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """One piece of host memory from which tensors are taken, from its start to its end.

    Args:
        nbytes: Bytes of the tensors that will be taken, each by :func:`aligned_nbytes`. What does
            not fit lies in memory of its own.
        is_pinned: As for :func:`host_bytes`.
        is_meta: As for :func:`host_bytes`.

    Attributes:
        is_pinned: As given.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool, is_meta: bool = False) -> None:
        self.is_pinned = is_pinned
        self._is_meta = is_meta
        self._memory = host_bytes(nbytes, is_pinned=is_pinned, is_meta=is_meta)
        self._end = 0

    @property
    def memory(self) -> torch.Tensor:
        """Return the whole memory as a 1-D uint8 tensor."""
        return self._memory

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised 1-D tensor behind those taken before."""
        nbytes = numel * dtype.itemsize
        start, stop = self._end, self._end + nbytes
        if stop > self._memory.nbytes:
            memory = host_bytes(nbytes, is_pinned=self.is_pinned, is_meta=self._is_meta)
            return memory[:nbytes].view(dtype)
        self._end += aligned_nbytes(nbytes)
        return self._memory[start:stop].view(dtype)
