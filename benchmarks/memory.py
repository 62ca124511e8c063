"""Bytes of tensors: those alive at rest, and the peak within a call.

At rest: the distinct storages of all tensors that Python can reach. Within a call: the allocation
events of torch's profiler, which see every allocation, release and resize of a storage, autograd's
and the collectives' included. Both sides of a comparison are counted alike.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

_MEMORY_EVENT = "[memory]"


def resting_nbytes() -> int:
    """Return the bytes of all storages that tensors reachable from Python share among them."""
    gc.collect()
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        # Walking all objects touches lazy modules, which warn.
        warnings.simplefilter("ignore")
        for obj in gc.get_objects():
            if type(obj) is torch.nn.Parameter or issubclass(type(obj), torch.Tensor):
                local = obj._local_tensor if isinstance(obj, DTensor) else obj
                storage = local.untyped_storage()
                if storage.nbytes():
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_nbytes(call: Callable[[], object]) -> int:
    """Return the largest number of bytes that a call has allocated and not yet freed."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = [e for e in results.events() if e.name() == _MEMORY_EVENT]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
