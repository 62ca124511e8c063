"""Memory that NCCL has registered, so that its collectives read and write it without a copy.

A pool of the device's allocator is registered with a communicator. What is allocated from the pool,
and what travels over the communicator, is decided elsewhere: a collective on a registered range is
issued like any other.

Source: PyTorch, torch.cuda.MemPool; NCCL user guide, "User Buffer Registration".
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import backends, open_communicator
from megafsdp.device.memory import MemoryPool
from megafsdp.mesh.torch_private import DeviceBackend, backend_of


class PlannedPool:
    """A pool on the meta device, whose memory does not exist.

    Args:
        nbytes: Size of its block.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def allocating(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing."""
        return contextlib.nullcontext()


class RegisteredPool:
    """A pool with one block that a communicator has registered; deregistered when it is deleted.

    Args:
        backend: The backend that allocates and registers it.
        device: The device of the memory.
        nbytes: Size of its block.
    """

    def __init__(self, backend: DeviceBackend, device: torch.device, nbytes: int) -> None:
        self._device = device
        # In memory from NCCL's allocator switches can reduce and multicast; torch offers it only if
        # a switch can multicast. Other memory is registered too, for links and networks.
        has_own = backend.supports_tensor_alloc(device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator if has_own else None)
        with self.allocating():
            # Freed at once: the pool keeps the block for the next allocation of the same size.
            torch.empty(nbytes, dtype=torch.uint8, device=device)
        backend.register_mem_pool(self._pool)
        # Not at exit: communicators may be gone, and the process's end frees all memory.
        weakref.finalize(self, _deregister, backend, self._pool, device).atexit = False

    def allocating(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's allocations take memory of the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)


def _deregister(backend: DeviceBackend, pool: torch.cuda.MemPool, device: torch.device) -> None:
    # The last collective that was queued may still use the memory.
    torch.cuda.synchronize(device)
    # After destroy_process_group() everything is deregistered, and a further call raises.
    with contextlib.suppress(RuntimeError):
        backend.deregister_mem_pool(pool)


def why_not_registered(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why memory of a device cannot be registered with a group; None if it can."""
    if device.type == "meta":
        return None
    backend = backends(group).get(device.type)
    if backend != "nccl":
        return f"a process group of {backend} on {device.type}"
    if not hasattr(backend_of(group, device), "register_mem_pool"):
        return f"a backend of torch {torch.__version__} without register_mem_pool()"
    return None


def registered_pools(group: dist.ProcessGroup, device: torch.device) -> Callable[[int], MemoryPool]:
    """Return a function that makes a pool with a block of given bytes; collective over the group.

    Call it only if :func:`why_not_registered` is None. All ranks must make and use their pools in
    the same order: NCCL wants each buffer registered on all ranks or on none.
    """
    if device.type == "meta":
        return PlannedPool
    open_communicator(group, device)
    return functools.partial(RegisteredPool, backend_of(group, device), device)
