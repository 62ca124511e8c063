"""A device with streams, made of CPU memory: queued work, events, an allocator that poisons.

Within ``stand_in()`` of connect.py megafsdp takes the CPU for an asynchronous device. Every
operator on a tensor of the device goes into the queue of the current stream and returns at once.
Its output is NaN until the queue has come to it. So a missing wait, or memory that is freed too
early, shows as a wrong value::

    host      issue op 1   issue copy   wait_event   issue op 2   item()
    compute   [op 1]                    [wait]       [op 2]         runs what it depends on
    copies                 [copy]

Only what is waited for has to run; what runs besides, and when, is the choice of an
:class:`Order`, of which a test tries several. The tensors are plain CPU tensors whose storages lie
in one arena. When the last reference to a storage is gone, or megafsdp shrinks it to zero bytes,
its bytes become poison, in the order of the stream that allocated it. Work that comes to such a
block too late reads NaN, and :meth:`StandInDevice.end` raises, since what such work writes would be
another tensor's.

All host memory is taken for pinned, so a copy reads it late. Native kernels read addresses, which
no queue can see, so they are off. What megafsdp sees of the device is in connect.py.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.mesh.torch_private import local_of

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
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
# Subclasses have rules of their own, which come back with these.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    """

    current: StandInDevice | None = None

    def __init__(self, order: Order, *, seed: int = 0) -> None:
        self.order = order
        self.default_stream = Stream()
        self._streams = [self.default_stream]
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
        if isinstance(tensor, DTensor):
            tensor = local_of(tensor)
        return type(tensor) in _PLAIN and self.has_storage(tensor.untyped_storage())

    def has_storage(self, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage lies on the device."""
        return 0 <= storage.data_ptr() - self._base < _ARENA_NBYTES

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
            blocks = [self._block_of(leaves[i]) for i, its in enumerate(on_device) if its]
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

    def launch(
        self, function: Callable[..., object], args: tuple[Any, ...], kwargs: Any, stream: Stream
    ) -> None:
        """Queue a call with tensors of the device on a stream, behind the current one."""
        with self._lock:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            aliases = [self._alias(a) if isinstance(a, torch.Tensor) else a for a in args]
            self.enqueue(Moment(self.stream), stream)
            task = functools.partial(function, *aliases, **kwargs)
            self.enqueue(_Task(task, list(map(self._block_of, tensors))), stream)

    # Threads.

    def end(self) -> None:
        """Run all that is queued, and what that queues.

        Raises:
            AssertionError: Some work came too late.
        """
        while any(stream.queue for stream in self._streams):
            self.synchronize()
        assert not self._num_too_late, "work came too late to memory that was freed"

    @contextlib.contextmanager
    def use_thread(self) -> Iterator[None]:
        """Make the device the calling thread's, within this context."""
        had_device, self._thread.has_device = self._thread.has_device, True
        try:
            with contextlib.nullcontext() if had_device else _Mode():
                yield
        finally:
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
        try:
            yield
        finally:
            self._thread.stream = before


def _active() -> StandInDevice:
    device = StandInDevice.current
    assert device is not None, "the stand-in is active"
    return device


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
