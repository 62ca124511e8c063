"""A device with streams, made of CPU memory: queued work, events, an allocator that poisons.

Within :meth:`StandInDevice.active` megafsdp takes the CPU for an asynchronous device. Every
operator on a tensor of the device goes into the queue of the current stream and returns at once; its
output is NaN until the queue has come to it. So a missing wait, or memory that is freed too early,
shows as a wrong value::

    host      issue op 1   issue copy   wait_event   issue op 2   item()
    compute   [op 1]                    [wait]       [op 2]         runs what it depends on
    copies                 [copy]

Only what is waited for has to run; what runs besides, and when, is the choice of an
:class:`Order`, of which a test tries several. The tensors are plain CPU tensors whose storages lie
in one arena. When the last reference to a storage is gone, or megafsdp shrinks it to zero bytes, its
bytes become poison, in the order of the stream that allocated it. Work that comes to such a block
too late reads NaN, and :meth:`StandInDevice.active` raises in the end, since what such work writes
would be another tensor's.

Two details are those of CUDA: a collective keeps its tensors alive until it is waited for, and a
copy from memory that is not pinned would be read at once; here all host memory is taken for pinned,
which is the harder case. Native kernels read addresses, which no queue can see, so they are off.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any
from unittest import mock

import numpy
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm import collectives
from megafsdp.checkpoint.background import pending_save, staging
from megafsdp.device import streams

# The index sets the device apart from the host in arguments; tensors of both say "cpu".
DEVICE = torch.device("cpu", 0)
_ARENA_NBYTES = 1 << 30
_ALIGNMENT = 256
# NaN in every floating-point dtype, -1 in integers.
_POISON = 0xFF

# They read values on the host.
_READERS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
}
# They change a tensor's shape or storage, not its memory.
_SHAPERS = {"set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
_SINGLE = ("_all_gather_single", "_reduce_scatter_single")
_COLLECTIVES = {
    "all_reduce",
    "all_to_all_single",
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "barrier",
}


class Order(Enum):
    """What runs before it must."""

    LAZY = "lazy"  # Nothing.
    COMPUTE_FIRST = "compute first"  # The default stream, until it waits: copies are late.
    COPIES_FIRST = "copies first"  # All other streams, until they wait: compute is late.
    RANDOM = "random"  # A few steps of any stream, by chance.


class Stream:
    """A queue of work, the oldest first.

    Args:
        device: The device; the stand-in ignores which one is named.
        priority: Ignored.
    """

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.queue: deque[_Task | Moment] = deque()
        self.num_issued = self.num_done = 0
        # The default stream is made before there is a device.
        if device is not None:
            _active().add_stream(self)

    def query(self) -> bool:
        """Return whether all that was queued has run; it runs before the next call."""
        device = StandInDevice.current
        is_done = self.num_done == self.num_issued
        if device is not None and not is_done:
            device.run_until(Moment(self))
        return is_done

    def wait_event(self, event: Event) -> None:
        """Make what is queued from here on wait for an event."""
        if event.moment is not None:
            _active().enqueue(event.moment, self)

    def wait_stream(self, other: Stream) -> None:
        """Make what is queued from here on wait for what is queued on another stream."""
        _active().enqueue(Moment(other), self)

    def synchronize(self) -> None:
        """Run all that is queued."""
        _active().run_until(Moment(self))


class Moment:
    """The place in a stream's queue behind all that is queued."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.position = stream, stream.num_issued

    @property
    def is_past(self) -> bool:
        """Return whether the stream has come to it."""
        return self.stream.num_done >= self.position


class _Block:
    """Memory of one storage.

    Args:
        place: In the arena.
        stream: The stream whose order its end follows.
    """

    def __init__(self, place: slice, stream: Stream) -> None:
        self.place, self.stream = place, stream
        # How often it was freed as the host sees it, and as the streams have come to it.
        self.num_freed = self.num_poisoned = 0
        self.is_free = False


class _Task:
    """Work of a stream.

    Args:
        run: Does it.
        blocks: What it reads and writes.
    """

    def __init__(self, run: Callable[[], object], blocks: Sequence[_Block] = ()) -> None:
        self.run = run
        self._blocks = [(block, block.num_freed) for block in blocks]

    @property
    def is_too_late(self) -> bool:
        """Return whether a block was freed meanwhile."""
        return any(block.num_poisoned > num_freed for block, num_freed in self._blocks)


class Event:
    """A moment, once recorded; without one nothing waits."""

    def __init__(self, *, blocking: bool = False, enable_timing: bool = False) -> None:
        self.moment: Moment | None = None

    def record(self, stream: Stream) -> None:
        """Record the moment behind all that is queued on a stream."""
        self.moment = Moment(stream)

    def query(self) -> bool:
        """Return whether the moment is past."""
        _active().require_thread()
        return self.moment is None or self.moment.is_past

    def synchronize(self) -> None:
        """Run what comes before the moment."""
        _active().require_thread()
        if self.moment is not None:
            _active().run_until(self.moment)

    def elapsed_time(self, later: Event) -> float:
        """Return a time in milliseconds; the stand-in measures none."""
        return 1.0


class _Mode(TorchDispatchMode):
    """Passes the operators of one thread to the device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # A DTensor's own rules run first, and come back with its local tensors.
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        device = StandInDevice.current
        if device is None:
            return func(*args, **(kwargs or {}))
        return device.call(func, args, kwargs or {})


class _Thread(threading.local):
    """What CUDA knows of each thread."""

    has_device = False
    # Work of a queue runs here: its operators are not queued again.
    is_running = False
    stream: Stream | None = None


class StandInDevice:
    """The device; one of a process is active at a time.

    Args:
        order: What runs before it must.
        seed: Of chance.
        gathers_apart: Whether the collectives of each process group have a stream of their own.
    """

    current: StandInDevice | None = None

    def __init__(self, order: Order, *, seed: int = 0, gathers_apart: bool = True) -> None:
        self.order = order
        self.default_stream = Stream()
        self._streams = [self.default_stream]
        self._of_groups: dict[str, Stream] = {}
        self._gathers_apart = gathers_apart
        self._chance = random.Random(seed)
        self._thread = _Thread()
        self._lock = threading.RLock()
        self._arena = numpy.empty(_ARENA_NBYTES, numpy.uint8)
        self._base = self._arena.ctypes.data
        self._end = 0
        # By the place where each begins.
        self._blocks: dict[int, _Block] = {}
        # Addresses of storages whose last reference is gone; any thread adds to it.
        self._dropped: deque[int] = deque()
        self._num_too_late = 0
        self._coalesced: list[_Work] | None = None

    # Streams and their queues.

    def add_stream(self, stream: Stream) -> None:
        """Add a stream that was made."""
        self._streams.append(stream)

    @property
    def stream(self) -> Stream:
        """Return the calling thread's current stream."""
        return self._thread.stream or self.default_stream

    def require_thread(self) -> None:
        """Check that the calling thread has chosen its device: it would make a context on GPU 0."""
        assert self._thread.has_device, "a thread asks an event of a device that it did not adopt"

    def enqueue(self, entry: _Task | Moment, stream: Stream) -> None:
        """Queue work, or a wait, and run what the order wants."""
        with self._lock:
            self._free_dropped()
            self._put(entry, stream)
            if not self._thread.is_running:
                self._run_early()

    def _put(self, entry: _Task | Moment, stream: Stream) -> None:
        stream.queue.append(entry)
        stream.num_issued += 1

    def _run_early(self) -> None:
        if self.order is Order.COMPUTE_FIRST:
            self._run_ready(self.default_stream)
        elif self.order is Order.COPIES_FIRST:
            # The newest first, which is the order of least regard for the others.
            for stream in reversed(self._streams[1:]):
                self._run_ready(stream)
        elif self.order is Order.RANDOM:
            stream = self._chance.choice(self._streams)
            self._run_ready(stream, self._chance.choice([0, 1, 4, 16]))

    def _run_ready(self, stream: Stream, count: int | None = None) -> None:
        """Run the oldest work of a stream, up to a wait for what has not run."""
        while stream.queue and count != 0:
            head = stream.queue[0]
            if isinstance(head, Moment) and not head.is_past:
                return
            self._run_oldest(stream)
            count = None if count is None else count - 1

    def run_until(self, moment: Moment) -> None:
        """Run what must run before a moment, and nothing else."""
        with self._lock:
            self._free_dropped()
            while not moment.is_past:
                head = moment.stream.queue[0]
                if isinstance(head, Moment):
                    self.run_until(head)
                self._run_oldest(moment.stream)

    def _run_oldest(self, stream: Stream) -> None:
        entry = stream.queue.popleft()
        if not isinstance(entry, Moment):
            is_running, self._thread.is_running = self._thread.is_running, True
            self._num_too_late += entry.is_too_late
            try:
                with torch.no_grad():
                    entry.run()
            finally:
                self._thread.is_running = is_running
        stream.num_done += 1

    def synchronize(self) -> None:
        """Run all that is queued."""
        with self._lock:
            self._free_dropped()
            for stream in self._streams:
                self.run_until(Moment(stream))

    # Memory.

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies on the device."""
        if type(tensor) not in _PLAIN:
            return False
        address = tensor.untyped_storage().data_ptr() - self._base
        return 0 <= address < _ARENA_NBYTES

    def _allocate(self, size: Sequence[int], stride: Sequence[int], dtype: Any) -> torch.Tensor:
        """Return a tensor of poison; its end follows the current stream."""
        numel = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = 1 if 0 in size else numel * dtype.itemsize
        place = slice(self._end, self._end + nbytes)
        self._end = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        assert self._end <= _ARENA_NBYTES, "a test's tensors fit in the arena"
        memory = self._arena[place]
        memory.fill(_POISON)
        self._blocks[place.start] = _Block(place, self.stream)
        weakref.finalize(memory, self._dropped.append, place.start).atexit = False
        storage = torch.from_numpy(memory).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)

    def _free_dropped(self) -> None:
        while self._dropped:
            self._free(self._blocks[self._dropped.popleft()])

    def _free(self, block: _Block) -> None:
        """Poison a block when the stream that allocated it has come to this moment."""
        if block.is_free:
            return
        block.is_free = True
        block.num_freed += 1

        def poison() -> None:
            self._arena[block.place].fill(_POISON)
            block.num_poisoned += 1

        self._put(_Task(poison), block.stream)

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the block of a storage, or take it back, in the order of the streams."""
        with self._lock:
            self._free_dropped()
            block = self._blocks[storage.data_ptr() - self._base]
            if nbytes == 0:
                self._free(block)
            else:
                block.is_free, block.stream = False, self.stream

    def _block_of(self, tensor: torch.Tensor) -> _Block:
        block = self._blocks[tensor.untyped_storage().data_ptr() - self._base]
        assert not block.is_free, "work is given memory that was freed"
        return block

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the same memory without a reference to the storage, if it is the device's."""
        storage = tensor.untyped_storage()
        if self.has(tensor):
            memory = self._arena[self._block_of(tensor).place]
            storage = torch.from_numpy(memory).untyped_storage()
        # A version counter of its own: the write was counted when it was issued.
        return torch.empty(0, dtype=tensor.dtype).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    # Operators.

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Queue an operator on the device; run one on the host."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        on_device = [isinstance(leaf, torch.Tensor) and self.has(leaf) for leaf in leaves]
        is_new = kwargs.get("device") == DEVICE
        kind = _kind_of(func)
        if self._thread.is_running or kind == "view" or not (is_new or any(on_device)):
            return func(*args, **kwargs)
        self.require_thread()
        with self._lock:
            self._free_dropped()
            waits = func in _COPIES and not _is_non_blocking(func, args, kwargs)
            aliases = [
                self._argument(leaf, func, is_target=number == 0, is_read_late=not waits)
                for number, leaf in enumerate(leaves)
            ]
            args, kwargs = pytree.tree_unflatten(aliases, spec)
            blocks = [self._block_of(leaf) for leaf, its in zip(leaves, on_device) if its]
            if kwargs.get("device") is not None:
                # Autograd names the device of a gradient that it casts: "cpu" is the device too.
                kwargs["device"] = torch.device("cpu")
            if kind == "reader":
                self.run_until(Moment(self.stream))
                return func(*args, **kwargs)
            if kind == "maker":
                return self._make(func, args, kwargs, blocks)
            self.enqueue(_Task(functools.partial(func, *args, **kwargs), blocks), self.stream)
            if waits and not on_device[0]:
                self.run_until(Moment(self.stream))
            return _written(func, leaves, spec)

    def _argument(self, leaf: Any, func: Any, *, is_target: bool, is_read_late: bool) -> Any:
        """Return what the queue has of an argument."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        is_copied = func in _COPIES
        assert self.has(leaf) or is_copied or leaf.ndim == 0, f"{func} has tensors of one device"
        # Numbers on the host are read at the launch, and by a copy that blocks its source is.
        is_late = is_target or is_read_late if is_copied else False
        return self._alias(leaf) if self.has(leaf) or is_late else leaf.clone()

    def _make(self, func: Any, args: Any, kwargs: Any, blocks: list[_Block]) -> Any:
        """Queue an operator that makes tensors, and return them as poison."""
        leaves, spec = pytree.tree_flatten(_like_results(func, args, kwargs))
        made = [self._allocate(leaf.shape, leaf.stride(), leaf.dtype) for leaf in leaves]
        if "empty" not in func.__name__:
            outputs = [self._alias(output) for output in made]

            def run() -> None:
                for output, found in zip(
                    outputs, pytree.tree_leaves(func(*args, **kwargs)), strict=True
                ):
                    output.copy_(found)

            self.enqueue(_Task(run, [*blocks, *map(self._block_of, made)]), self.stream)
        return pytree.tree_unflatten(made, spec)

    # Collectives.

    def issue(
        self, collective: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Work | None:
        """Queue a collective behind the current stream; what it takes lives until it is awaited."""
        is_async = kwargs.pop("async_op", False)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not any(map(self.has, tensors)):
            # Ranks that wait for each other on the host have done what was queued before.
            self.synchronize()
            return collective(*args, async_op=is_async, **kwargs)  # type: ignore[return-value]
        group = kwargs["group"].group_name if self._gathers_apart else ""
        with self._lock:
            stream = self._of_groups.get(group)
            if stream is None:
                stream = self._of_groups[group] = Stream(DEVICE)
            aliases = [self._alias(a) if isinstance(a, torch.Tensor) else a for a in args]
            self.enqueue(Moment(self.stream), stream)
            task = functools.partial(collective, *aliases, **kwargs)
            blocks = [self._block_of(tensor) for tensor in tensors if self.has(tensor)]
            self.enqueue(_Task(task, blocks), stream)
            work = _Work(Moment(stream), tensors)
        if self._coalesced is not None:
            self._coalesced.append(work)
        elif not is_async:
            work.wait()
        return work if is_async else None

    @contextlib.contextmanager
    def coalesce(self, group: object) -> Iterator[_Coalesced]:
        """Have collectives issued in this context be waited for together."""
        works = _Coalesced()
        self._coalesced = works.works
        yield works
        self._coalesced = None

    # What megafsdp sees of it.

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Have megafsdp take this for its device; in the end all must be as a device wants it."""
        with contextlib.ExitStack() as stack:
            for patch in self._patches():
                stack.enter_context(patch)
            StandInDevice.current = self
            stack.callback(setattr, StandInDevice, "current", None)
            for _ in range(2):
                streams._copy_streams.cache_clear()
                stack.callback(streams._copy_streams.cache_clear)
            stack.enter_context(self.use_thread())
            yield
            while any(stream.queue for stream in self._streams):
                self.synchronize()
            assert not self._num_too_late, "work came too late to memory that was freed"

    def _patches(self) -> list[contextlib.AbstractContextManager[Any]]:
        def resize(storage: torch.UntypedStorage, nbytes: int) -> object:
            if 0 <= storage.data_ptr() - self._base < _ARENA_NBYTES:
                return self.resize(storage, nbytes)
            return grow(storage, nbytes)

        def read(tensor: torch.Tensor) -> object:
            if self.has(tensor):
                self.run_until(Moment(self.stream))
            return to_list(tensor)

        allocate = staging.host_bytes
        grow, to_list = torch.UntypedStorage.resize_, torch.Tensor.tolist
        door, is_asynchronous = mock.patch.object, property(lambda handle: handle.device == DEVICE)
        return [
            mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"),
            door(streams, "torch", types.SimpleNamespace(cuda=_Cuda(self), device=_device)),
            door(streams.DeviceHandle, "is_asynchronous", is_asynchronous),
            door(torch.UntypedStorage, "resize_", resize),
            door(torch.Tensor, "tolist", read),
            door(torch.Tensor, "is_cuda", property(self.has), create=True),
            door(staging, "host_bytes", lambda nbytes, is_pinned: allocate(nbytes, is_pinned=False)),
            # Later saves must not wait for events of a device that is gone.
            door(pending_save.SAVES, "_last", None),
            door(collectives, "dist", _Distributed(self)),
            # As NCCL does: one collective of the library where gloo takes several of ours.
            door(collectives, "is_gloo", lambda group, device: False),
            door(collectives, "coalesce_collectives", self.coalesce),
            *(door(collectives, n, _issuing(self, getattr(collectives, n))) for n in _SINGLE),
        ]

    @contextlib.contextmanager
    def use_thread(self) -> Iterator[None]:
        """Make the device the calling thread's, within this context."""
        had_device, self._thread.has_device = self._thread.has_device, True
        with contextlib.nullcontext() if had_device else _Mode():
            yield
        self._thread.has_device = had_device

    def adopt_thread(self) -> None:
        """Make the device the calling thread's for good."""
        if not self._thread.has_device:
            self._thread.has_device = True
            _Mode().__enter__()

    @contextlib.contextmanager
    def use_stream(self, stream: Stream) -> Iterator[None]:
        """Queue what the calling thread issues on a stream."""
        before, self._thread.stream = self._thread.stream, stream
        yield
        self._thread.stream = before


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


class _Work:
    """A collective under way."""

    def __init__(self, moment: Moment, tensors: list[torch.Tensor]) -> None:
        self._moment, self._kept = moment, tensors

    def wait(self) -> None:
        """Make the current stream wait, not the host; the tensors may be freed in its order."""
        device = _active()
        device.enqueue(self._moment, device.stream)
        self._kept = []


class _Coalesced:
    """Collectives that are waited for together."""

    def __init__(self) -> None:
        self.works: list[_Work] = []

    def wait(self) -> None:
        """Make the current stream wait for all."""
        for work in self.works:
            work.wait()


class _Distributed:
    """``torch.distributed`` as the door to collectives uses it."""

    def __init__(self, device: StandInDevice) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(dist, name)
        if name in _COLLECTIVES:
            return _issuing(self._device, found)
        return found


def _issuing(device: StandInDevice, collective: Callable[..., object]) -> Callable[..., Any]:
    def issue(*args: Any, **kwargs: Any) -> object:
        return device.issue(collective, args, kwargs)

    return issue


def _active() -> StandInDevice:
    device = StandInDevice.current
    assert device is not None, "the stand-in is active"
    return device


def _device(name: str, index: int = 0) -> torch.device:
    return torch.device("meta") if name == "meta" else DEVICE


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the host on the device."""
    return tensor.to(DEVICE)


@functools.cache
def _kind_of(func: Any) -> str:
    """Return whether an operator is a reader, a view, a writer or a maker of tensors."""
    if func in _READERS:
        return "reader"
    schema = func._schema
    if any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments):
        return "view" if schema.name.removeprefix("aten::") in _SHAPERS else "writer"
    return "view" if any(result.alias_info for result in schema.returns) else "maker"


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.copy_.default and len(args) > 2:
        return bool(args[2])
    return bool(kwargs.get("non_blocking", False))


def _written(func: Any, leaves: list[Any], spec: Any) -> Any:
    """Return what an operator that writes its arguments returns: these."""
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    schema = func._schema
    by_name = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    of_sets = {
        frozenset(a.alias_info.before_set): by_name.get(a.name)
        for a in schema.arguments
        if a.alias_info
    }
    found = [of_sets[frozenset(result.alias_info.before_set)] for result in schema.returns]
    return found[0] if len(found) == 1 else tuple(found) if found else None


def _like_results(func: Any, args: Any, kwargs: Any) -> Any:
    """Return tensors like the results of an operator.

    Of zeros, in the place of values that are not there yet: kernels for tensors without memory
    differ from those of the CPU in the dtypes of some results.
    """
    assert torch.Tag.nondeterministic_seeded not in func.tags, f"{func} would draw twice"

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()

    args, kwargs = pytree.tree_map(convert, (args, kwargs))
    return func(*args, **kwargs)
