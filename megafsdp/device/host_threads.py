"""The host threads that work for a device: their number, and the cores they run on.

torch's own number of threads does not serve: torchrun sets ``OMP_NUM_THREADS=1``, so that a step on
the host of a GPU would use one core of many. The callers decide what the threads compute; the
results do not depend on their number, bit for bit.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from megafsdp.errors import expected

_LOGGER = logging.getLogger("megafsdp.device")
_SYSTEM = Path("/sys")
# Ranges of whole huge pages: the thread that touches a page first zeroes all of it.
_RANGE_NBYTES = 1 << 24


# Cached, since hooks call it: a process stays on the cores to which its launcher bound it.
@functools.cache
def share_of_cores() -> int:
    """Return how many cores this rank may take: its share of those of its machine's ranks.

    ::

        8 ranks, 128 cores, none bound:                           128 // 8 = 16
        8 ranks, each bound to the 64 cores of its GPU's node:    min(64, 128 // 8) = 16
        8 ranks, each bound to 16 cores of its own:               min(16, 128 // 8) = 16

    The number of ranks is torchrun's ``LOCAL_WORLD_SIZE``; without it this rank is the only one.
    """
    own = len(os.sched_getaffinity(0))
    num_cores, num_ranks = _cores_and_ranks()
    return max(1, min(own, num_cores // num_ranks))


@functools.cache
def is_core_shared() -> bool:
    """Return whether this machine's ranks are more than its cores, so that they take turns."""
    num_cores, num_ranks = _cores_and_ranks()
    return num_cores < num_ranks


def _cores_and_ranks() -> tuple[int, int]:
    """Return how many cores this machine's ranks share, and how many ranks there are."""
    # A launcher binds its ranks but not itself: the ranks share the launcher's cores.
    cores = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        cores = cores | os.sched_getaffinity(os.getppid())
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return len(cores), max(1, int(text)) if text.isdecimal() else 1


def default_host_threads(device_type: str) -> int:
    """Return the default number of host threads that work for a device.

    Args:
        device_type: Device type of the model. On a CPU the model computes on the same cores, so
            torch's own number already says how many of them a rank takes.
    """
    return share_of_cores() if device_type == "cuda" else torch.get_num_threads()


def check_host_threads(given: object, *, where: str) -> None:
    """Check a number of threads, and warn if it exceeds the number of cores.

    Args:
        given: The user's value; None for the default.
        where: The argument's name, for messages.

    Raises:
        ValueError: It is not a whole number above 0.
    """
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        hint = "Leave it out for this rank's share of the machine's cores"
        raise ValueError(
            expected("a number of threads above 0", repr(given), where=where, hint=hint)
        )
    num_cores = len(os.sched_getaffinity(0))
    if given > num_cores:
        _LOGGER.warning("%s is %d, but this process has %d cores.", where, given, num_cores)


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Let torch's operators on the host use ``number`` threads in this context."""
    before = torch.get_num_threads()
    # Cheap: two calls into C++ of 0.1 us each.
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def cores_near(device: torch.device) -> frozenset[int]:
    """Return the cores of this process on a GPU's NUMA node; empty means any core.

    Memory of another node is read and written over the link between processors. A rank whose share
    of the cores exceeds those of its node (the only rank of a machine with two nodes) uses both
    nodes and their memory. So does a rank if the system does not say which cores are near.
    """
    if device.type != "cuda":
        return frozenset()
    found = torch.cuda.get_device_properties(device)
    try:
        address = (found.pci_domain_id, found.pci_bus_id, found.pci_device_id)  # type: ignore[attr-defined]
        bus_name = "{:04x}:{:02x}:{:02x}.0".format(*address)
        node = int((_SYSTEM / f"bus/pci/devices/{bus_name}/numa_node").read_text())
        listed = (_SYSTEM / f"devices/system/node/node{node}/cpulist").read_text()
    # numa_node is -1 on a machine without nodes, which has no cpulist.
    except (AttributeError, OSError, ValueError) as error:
        _LOGGER.info("The system does not say which cores are near %s (%s).", device, error)
        return frozenset()
    near = frozenset(_parsed(listed) & os.sched_getaffinity(0))
    are_enough = len(near) >= share_of_cores()
    where = "those alone" if are_enough else "any"
    text = "%d cores are near %s, on node %d; threads of the host run on %s."
    _LOGGER.info(text, len(near), device, node, where)
    return near if are_enough else frozenset()


def _parsed(cores: str) -> set[int]:
    """Return the numbers in one of the kernel's lists, such as ``0-3,8``."""
    bounds = [[int(bound) for bound in part.split("-")] for part in cores.split(",")]
    return {core for bound in bounds for core in range(bound[0], bound[-1] + 1)}


def stay_near(device: torch.device) -> None:
    """Keep the calling thread, and threads that it starts, on the cores near a GPU."""
    cores = cores_near(device)
    if cores:
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            _LOGGER.info("A thread for %s cannot be kept near it (%s).", device, error)


def zero_by_threads(memory: torch.Tensor, device: torch.device) -> None:
    """Zero host memory by threads near a device, so that its pages lie near it.

    A page belongs to the node of the core that first writes it, for as long as it lives.

    Args:
        memory: 1-D, contiguous, and not touched yet: touched pages stay where they are.
        device: The device that uses the memory.
    """
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    # Cut at the ends of huge pages, whatever the start address.
    cuts = range(start - start % _RANGE_NBYTES + _RANGE_NBYTES, stop, _RANGE_NBYTES)
    bounds = [start, *cuts, stop]

    def zero(first: int, end: int) -> None:
        ctypes.memset(first, 0, end - first)

    num_threads = min(default_host_threads(device.type), len(bounds) - 1)
    with ThreadPoolExecutor(num_threads, initializer=stay_near, initargs=(device,)) as threads:
        # list() raises the errors of the threads.
        list(threads.map(zero, bounds[:-1], bounds[1:]))
