"""Host memory: huge and pinned pages for long-lived buffers, and a heap that keeps freed memory.

Fresh memory in small pages costs a page fault every four kilobytes at first, and TLB misses from
then on. Pinned memory is mapped like other memory and registered with CUDA at its exact size;
torch's allocator would round up to a power of two and keep freed memory. The callers decide what
the bytes mean.
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
# Parameters of glibc's mallopt(3) and the values set here: free bytes kept at the end of the heap,
# and the size from which a block gets its own mapping (at most 32 MiB).
_TRIM_THRESHOLD, _KEPT_NBYTES = -1, (1 << 31) - 1
_MAPPING_THRESHOLD, _MAPPED_NBYTES = -3, 1 << 25
_MALLOC_SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")


def host_bytes(nbytes: int, *, is_pinned: bool, is_meta: bool = False) -> torch.Tensor:
    """Allocate uninitialised host memory: at least ``nbytes``, as a 1-D uint8 tensor.

    The memory goes back to the system with the last tensor over it.

    Args:
        nbytes: Bytes wanted; rounded up to huge pages unless pinned.
        is_pinned: Lock the pages, so that the current CUDA device copies from and to them by
            itself. Exactly ``nbytes`` are locked, near that device.
        is_meta: Return a tensor on the meta device instead.

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
    # A fork would copy all locked pages at once, instead of those that are written.
    pages.madvise(mmap.MADV_DONTFORK)
    view = memoryview(pages)[:nbytes]
    memory = torch.frombuffer(view, dtype=torch.uint8)
    # Touch the pages first: CUDA would touch them in this thread, wherever it runs.
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
    # torch keeps the view alive, and this finalizer the pages, so the view ends before them.
    released = weakref.finalize(view, _unpin, pages, address, device, os.getpid())
    # Not at exit: copies may still be under way, and the system takes everything back.
    released.atexit = False
    return memory


def _unpin(pages: mmap.mmap, address: int, device: torch.device, process_id: int) -> None:
    """Unlock pages; they are unmapped when this returns."""
    if os.getpid() != process_id:
        # A forked process does not have these pages: unmapping would hit whatever is there now.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))
        return
    # This thread's current device may be another one, on which the calls would make a context.
    with torch.cuda.device(device):
        try:
            # Queued copies may still read or write the pages.
            torch.cuda.synchronize(device)
        finally:
            torch.cuda.cudart().cudaHostUnregister(address)


def can_be_pinned(device: torch.device) -> bool:
    """Return whether pinning host memory helps a device, which it does if it copies by itself.

    Pinning needs a driver; without CUDA all copies are made by the host.
    """
    return device.type == "cuda"


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory, up to 2 GiB, for later allocations; process-wide.

    glibc gives the end of its heap and its largest blocks back to the system as soon as they are
    free. Training on a CPU frees activations and gradients in every step, and each next step would
    fault them in again, four kilobytes at a time.

    Returns:
        False if nothing was changed: the environment already sets malloc's options, or the C
        library is not glibc.
    """
    if any(name.startswith(_MALLOC_SETTINGS) for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_TRIM_THRESHOLD, _KEPT_NBYTES), (_MAPPING_THRESHOLD, _MAPPED_NBYTES))
    # A list, not a generator: make the second setting even if the first is refused.
    return all([mallopt(name, value) == 1 for name, value in settings])


def aligned_nbytes(nbytes: int) -> int:
    """Return the bytes that ``nbytes`` take in an arena, up to the start of the next tensor."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class HostArena:
    """One piece of host memory from which tensors are taken one after the other.

    Several threads zero its pages at once.

    Args:
        nbytes: Total bytes of the tensors that will be taken, each by :func:`aligned_nbytes`. A
            tensor that does not fit gets memory of its own.
        is_pinned: As for :func:`host_bytes`.
        is_meta: As for :func:`host_bytes`.

    Attributes:
        is_pinned: The argument.

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
        """Return a 1-D tensor of zeros after those taken before, with its own count of writes."""
        nbytes = numel * dtype.itemsize
        start, stop = self._end, self._end + nbytes
        if stop > self._memory.nbytes:
            memory = host_bytes(nbytes, is_pinned=self.is_pinned, is_meta=self._is_meta)
            return memory[:nbytes].view(dtype)
        self._end += aligned_nbytes(nbytes)
        # .data gives it its own count: a write to the cast of a weight must not count as one to the
        # weight that lies beside it.
        return self._memory[start:stop].view(dtype).data
