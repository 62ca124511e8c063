"""What megafsdp sees of the stand-in device: streams, storages, collectives.

Streams are those of megafsdp/device/streams.py, whose ``torch.cuda`` is replaced, so what that file
does is tested too. Collectives are queued, each process group on a stream of its own, and run by
gloo; as those of NCCL they keep their tensors until they are waited for, and order the current
stream, not the host.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megafsdp.buffer.comm import collectives
from megafsdp.checkpoint.background import pending_save, staging
from megafsdp.device import streams
from tests.stand_in.device import DEVICE, Event, Moment, Order, StandInDevice, Stream

# Names of the door to collectives, and of torch.distributed.
_SINGLE = ("_all_gather_single", "_reduce_scatter_single")
_COLLECTIVES = {
    "all_reduce",
    "all_to_all_single",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "barrier",
}


@contextlib.contextmanager
def stand_in(order: Order) -> Iterator[StandInDevice]:
    """Have megafsdp take a new stand-in for its device.

    Args:
        order: What runs before it must.

    Raises:
        AssertionError: In the end: work came too late to memory that was freed.
    """
    device = StandInDevice(order)
    with contextlib.ExitStack() as stack:
        for patch in _patches(device):
            stack.enter_context(patch)
        # The streams of the device before, if there was one, and of this one.
        streams._shared_stream.cache_clear()
        stack.callback(streams._shared_stream.cache_clear)
        stack.enter_context(device.use_thread())
        yield device
        device.end()


def _patches(device: StandInDevice) -> Iterator[contextlib.AbstractContextManager[Any]]:
    def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> object:
        return (device.resize if device.has_storage(storage) else resize)(storage, nbytes)

    def read(tensor: torch.Tensor) -> object:
        if device.has(tensor):
            device.stream.synchronize()
        return to_list(tensor)

    def host_bytes(nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        return allocate(nbytes, is_pinned=False)

    allocate, where = staging.host_bytes, torch.Tensor.device.__get__
    resize, to_list = torch.UntypedStorage.resize_, torch.Tensor.tolist
    queued = _QueuedCollectives(device)
    patch = mock.patch.object
    yield patch(StandInDevice, "current", device)
    yield mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0")
    yield patch(streams, "torch", types.SimpleNamespace(cuda=_Cuda(device), device=_device))
    yield patch(
        streams.DeviceHandle, "is_asynchronous", property(lambda handle: handle.device == DEVICE)
    )
    yield patch(torch.UntypedStorage, "resize_", resize_storage)
    yield patch(torch.Tensor, "tolist", read)
    yield patch(torch.Tensor, "is_cuda", property(device.has))
    # What is made "where this tensor is" must lie on the device too.
    yield patch(torch.Tensor, "device", property(lambda t: DEVICE if device.has(t) else where(t)))
    yield patch(staging, "host_bytes", host_bytes)
    # Later saves must not wait for events of a device that is gone.
    yield patch(pending_save.SAVES, "_last", None)
    yield patch(collectives, "dist", queued)
    # As NCCL does: one collective of the library where gloo takes several of ours.
    yield patch(collectives, "backends", lambda group: {"cpu": "library"})
    yield patch(collectives, "coalesce_collectives", queued.coalesce)
    for name in _SINGLE:
        yield patch(collectives, name, queued.queued(getattr(collectives, name)))


class _Cuda:
    """The names of ``torch.cuda`` that megafsdp/device/streams.py uses."""

    Stream, Event = Stream, Event

    def __init__(self, device: StandInDevice) -> None:
        self.synchronize = lambda which: device.synchronize()
        self.set_device = lambda which: device.adopt_thread()
        self.current_device = lambda: 0
        self.current_stream = lambda which: device.stream
        self.device = lambda which: device.use_thread()
        self.stream = device.use_stream


def _device(name: str, index: int = 0) -> torch.device:
    return torch.device("meta") if name == "meta" else DEVICE


class _Work:
    """Collectives that are waited for together."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._moments: list[Moment] = []
        self._kept: list[torch.Tensor] = []

    def add(self, stream: Stream, tensors: list[torch.Tensor]) -> None:
        """Add the collective that was queued last on a stream."""
        self._moments.append(Moment(stream))
        self._kept += tensors

    def wait(self) -> None:
        """Make the current stream wait, not the host; the tensors may be freed in its order."""
        for moment in self._moments:
            self._device.enqueue(moment, self._device.stream)
        self._kept = []


class _QueuedCollectives:
    """``torch.distributed`` as the door to collectives uses it; what it does not queue is torch's.

    Args:
        device: The device.
    """

    def __init__(self, device: StandInDevice) -> None:
        self._device = device
        self._streams: dict[str, Stream] = {}
        self._coalesced: _Work | None = None

    def __getattr__(self, name: str) -> Any:
        """Return a name of ``torch.distributed``."""
        found = getattr(dist, name)
        return self.queued(found) if name in _COLLECTIVES else found

    def queued(self, collective: Callable[..., object]) -> Callable[..., Any]:
        """Return a function that queues a collective, which torch would run."""

        def issue(*args: Any, async_op: bool = False, **kwargs: Any) -> object:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if not any(map(self._device.has, tensors)):
                # Ranks that wait for each other on the host have done what was queued before.
                self._device.synchronize()
                options = {"async_op": True} if async_op else {}
                return collective(*args, **kwargs, **options)
            stream = self._stream_of(kwargs["group"])
            self._device.launch(collective, args, kwargs, stream)
            work = self._coalesced or _Work(self._device)
            work.add(stream, tensors)
            if not async_op and self._coalesced is None:
                work.wait()
            return work if async_op else None

        return issue

    def _stream_of(self, group: dist.ProcessGroup) -> Stream:
        if group.group_name not in self._streams:
            self._streams[group.group_name] = Stream(DEVICE)
        return self._streams[group.group_name]

    @contextlib.contextmanager
    def coalesce(self, group: dist.ProcessGroup) -> Iterator[_Work]:
        """Have collectives issued in this context be waited for together."""
        self._coalesced = _Work(self._device)
        try:
            yield self._coalesced
        finally:
            self._coalesced = None
