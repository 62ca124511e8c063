"""Host memory: huge and pinned pages for what lives long, a heap that keeps what comes and goes.

Fresh memory in small pages costs a fault every four kilobytes at first and misses of the address
cache for good. Pinned memory is mapped like other memory and registered with CUDA at its exact
size, where torch's allocator rounds up to a power of two and keeps what was freed. What the bytes
mean is decided by the callers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import torch

from megafsdp.device.host_threads import zero_by_threads
from megafsdp.errors import expected

_ALIGNMENT = 256
_HUGE_PAGE_NBYTES = 1 << 21
# Parameters of glibc's mallopt(3), each with its value: free bytes kept at the end of the heap, and
# the size from which a block is mapped by itself, at most 32 MiB.
_TRIM_THRESHOLD, _KEPT_NBYTES = -1, (1 << 31) - 1
_MAPPING_THRESHOLD, _MAPPED_NBYTES = -3, 1 << 25
_MALLOC_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")


def host_bytes(nbytes: int, *, is_pinned: bool, is_meta: bool = False) -> torch.Tensor:
    """Allocate uninitialised host memory, at least ``nbytes`` as a 1-D uint8 tensor.

    It goes back to the system with the last tensor over it.

    Args:
        nbytes: Bytes wanted; rounded up to huge pages unless pinned.
        is_pinned: Lock the pages, so that the current CUDA device copies from and to them on its
            own. Exactly ``nbytes`` are locked, near that device.
        is_meta: Return a tensor on the meta device in place of memory.

    Raises:
        RuntimeError: CUDA cannot lock the pages.
    """
    # A tensor made in inference mode could never be written outside of it.
    with torch.inference_mode(False):
        if is_meta:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        rounded = -(-nbytes // _HUGE_PAGE_NBYTES) * _HUGE_PAGE_NBYTES
        if not rounded:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        pages = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        if is_pinned:
            return _pinned(pages, nbytes)
        return torch.frombuffer(pages, dtype=torch.uint8)


def _pinned(pages: mmap.mmap, nbytes: int) -> torch.Tensor:
    """Lock the first bytes of a mapping for as long as a tensor lies over them."""
    device = torch.device("cuda", torch.cuda.current_device())
    # A forked process would get a copy of every locked page at once, not of those it writes.
    pages.madvise(mmap.MADV_DONTFORK)
    view = memoryview(pages)[:nbytes]
    memory = torch.frombuffer(view, dtype=torch.uint8)
    # First, since CUDA would touch the pages in this thread, wherever it runs.
    zero_by_threads(memory, device)
    address = memory.data_ptr()
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    except RuntimeError as error:
        raise RuntimeError(
            expected(
                f"{nbytes:,} bytes of host memory that CUDA can lock",
                str(error),
                where=f"cudaHostRegister for {device}",
                hint="Offload less, raise the limits of locked memory (ulimit -l, the container's),"
                " or leave memory unpinned, which makes copies wait: pin_cpu_params=False and"
                " pin_cpu_grads=False of HybridDeviceOptimizer, pin_memory=False of OffloadPolicy",
            )
        ) from error
    # torch keeps the view, and the view's end comes before that of the pages, which this keeps.
    released = weakref.finalize(view, _unpin, pages, address, device, os.getpid())
    # At the end of the process the system takes all back, while copies may still be under way.
    released.atexit = False
    return memory


def _unpin(pages: mmap.mmap, address: int, device: torch.device, process_id: int) -> None:
    """Unlock pages, which are unmapped when this returns."""
    if os.getpid() != process_id:
        # A forked process has no such pages: unmapping them would hit what lies there by now.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))
        return
    # This thread's device may be another one, where the calls would make a context.
    with torch.cuda.device(device):
        try:
            # Copies that were queued may still read or write the pages.
            torch.cuda.synchronize(device)
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)


def can_be_pinned(device: torch.device) -> bool:
    """Return whether memory of the host is worth pinning for a device: whether it copies by itself.

    Pinning needs a driver; without CUDA nothing copies beside the host.
    """
    return device.type == "cuda"


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

    Its pages are zeroed by several threads at once.

    Args:
        nbytes: Bytes of the tensors that will be taken, each by :func:`aligned_nbytes`. What does
            not fit lies in memory of its own.
        is_pinned: As for :func:`host_bytes`.
        is_meta: As for :func:`host_bytes`.

    Attributes:
        is_pinned: As given.

    Raises:
        RuntimeError: As :func:`host_bytes`.
    """

    def __init__(self, nbytes: int, *, is_pinned: bool, is_meta: bool = False) -> None:
        self.is_pinned = is_pinned
        self._is_meta = is_meta
        self._memory = host_bytes(nbytes, is_pinned=is_pinned, is_meta=is_meta)
        if not (is_pinned or is_meta):
            zero_by_threads(self._memory[:nbytes], self._memory.device)
        self._end = 0

    @property
    def pinned_nbytes(self) -> int:
        """Return the bytes that are locked."""
        return self._memory.nbytes if self.is_pinned else 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor of zeros behind those taken before, with its own count of writes."""
        nbytes = numel * dtype.itemsize
        start, stop = self._end, self._end + nbytes
        if stop > self._memory.nbytes:
            memory = host_bytes(nbytes, is_pinned=self.is_pinned, is_meta=self._is_meta)
            return memory[:nbytes].view(dtype)
        self._end += aligned_nbytes(nbytes)
        # By .data: a write to the cast of a weight, which lies beside it, is none to the weight.
        return self._memory[start:stop].view(dtype).data
