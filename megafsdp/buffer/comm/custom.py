"""All-gathers and reduce-scatters that objects of the user's make, in the form that torch defines.

torch's ``AllGather`` and ``ReduceScatter`` take one contiguous tensor on each side, in memory that
they allocate themselves, for example memory that ranks share. So shards are copied into that memory
before the call, and out of it after: one copy on each side, as in torch. With two ranks and two
sub-buffers ``a`` and ``b``::

    shards          a0 | b0             on rank 0
    object's memory a0 b0 a1 b1         filled by one call
    output          a0 a1 | b0 b1

On CUDA copies and calls run on a stream of their own, which the stream of forward and backward
waits for when it reads the result. All memory of an object is allocated and freed on that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending, note_issued
from megafsdp.buffer.comm.scaling import start_scaling, write_scaled
from megafsdp.device.profiling import profiler_range
from megafsdp.device.streams import DeviceHandle
from megafsdp.errors import expected


class Allocator(Protocol):
    """Allocates the memory of a collective; torch's ``Comm``."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a contiguous tensor of ``size``, whose content is undefined."""


class AllGather(Allocator, Protocol):
    """An all-gather; torch's class of this name, or anything like it."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` with the inputs of all ranks, in their order.

        Args:
            output_tensor: 1-D, ``group.size() * S`` elements.
            input_tensor: This rank's ``S`` elements: a view of its part of the output.
            group: Ranks that gather.
            async_op: False.

        Returns:
            A handle to wait for, or None. Work on a device is queued on the current stream.
        """


class ReduceScatter(Allocator, Protocol):
    """A reduce-scatter; torch's class of this name, or anything like it."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum the inputs of all ranks, and write this rank's part of the sum.

        Args:
            output_tensor: 1-D, ``S`` elements.
            input_tensor: 1-D, ``group.size() * S`` elements of the same dtype; may be overwritten.
            group: Ranks that sum.
            op: ``ReduceOp.SUM``. A factor is applied before or after.
            async_op: False.

        Returns:
            As for :class:`AllGather`.
        """


class _OnStream(Pending):
    """Work on a stream of its own; ``wait()`` makes the current stream wait for it.

    Args:
        handle: The device.
        event: The end of the work; None on CPU, where it has ended.
        finish: A function to call once it is complete.
    """

    __slots__ = ("_event", "_handle")

    def __init__(
        self,
        handle: DeviceHandle,
        event: torch.cuda.Event | None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__((), finish)
        self._handle, self._event = handle, event

    def wait(self) -> None:
        """Wait for the work and run the finishing step; later calls return at once."""
        event, self._event = self._event, None
        self._handle.wait_event(event)
        super().wait()


def all_gather_by(
    comm: AllGather,
    output: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    label: str,
) -> Pending:
    """Gather as :func:`~megafsdp.buffer.comm.collectives.all_gather` does, by one call of ``comm``.

    Args:
        comm: The user's object.
        output: As there; all of one dtype.
        shards: As there.
        group: As there, of several ranks.
        label: As there.

    Raises:
        TypeError: ``comm.allocate()`` returned another tensor than was asked for.
    """
    numels = [shard.numel() for shard in shards]
    note_issued("all_gather", label, sum(out.nbytes for out in output), group)
    handle = DeviceHandle(output[0].device)
    stream = handle.shared_stream("all-gathers of users' objects")
    with profiler_range("all_gather", label), torch.no_grad(), handle.behind_current(stream):
        gathered = _allocate(comm, group.size() * sum(numels), output[0].dtype, handle.device)
        rows = gathered.view(group.size(), -1)
        own = rows[group.rank()]
        torch._foreach_copy_(own.split(numels), list(shards))
        _call(comm, output_tensor=gathered, input_tensor=own, group=group, async_op=False)
        torch._foreach_copy_(_by_rank(output, group), rows.split(numels, dim=1))
        return _OnStream(handle, handle.record_event(stream))


def reduce_scatter_by(
    comm: ReduceScatter,
    output: Sequence[torch.Tensor],
    partials: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    scale: float,
    accumulate: bool,
    reduce_dtype: torch.dtype,
    label: str,
) -> Pending:
    """Sum as :func:`~megafsdp.buffer.comm.collectives.reduce_scatter` does, by a call of ``comm``.

    Args:
        comm: The user's object.
        output: As there.
        partials: As there; never overwritten.
        group: As there, of several ranks.
        scale: As there; never a part of the reduction.
        accumulate: As there.
        reduce_dtype: Dtype of the sum, on any backend.
        label: As there.

    Raises:
        TypeError: ``comm.allocate()`` returned another tensor than was asked for.
    """
    numels = [out.numel() for out in output]
    numel = group.size() * sum(numels)
    note_issued("reduce_scatter", label, numel * reduce_dtype.itemsize, group)
    handle = DeviceHandle(output[0].device)
    stream = handle.shared_stream("reduce-scatters of users' objects")
    with profiler_range("reduce_scatter", label), torch.no_grad(), handle.behind_current(stream):
        wire = _allocate(comm, numel, reduce_dtype, handle.device)
        rows = wire.view(group.size(), -1)
        torch._foreach_copy_(rows.split(numels, dim=1), _by_rank(partials, group))
        op, factor = start_scaling([wire], scale, group, is_direct=False, can_scale=False)
        total = _allocate(comm, sum(numels), reduce_dtype, handle.device)
        _call(comm, output_tensor=total, input_tensor=wire, group=group, op=op)
        event = handle.record_event(stream)

    def finish() -> None:
        with torch.no_grad(), handle.behind_current(stream):
            for out, part in zip(output, total.split(numels), strict=True):
                write_scaled(out, [part], factor, accumulate)
        handle.wait_stream(handle.current_stream(), stream)

    return _OnStream(handle, event, finish)


def _by_rank(buffers: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return whole sub-buffers as matrices of one row a rank."""
    return [buffer.view(group.size(), -1) for buffer in buffers]


def _call(comm: Callable[..., dist.Work | None], **arguments: object) -> None:
    """Call the user's object and wait for its work on the current stream."""
    # By the names of torch's interface: users' classes may have the parameters in another order.
    work = comm(**arguments)
    if work is not None:
        work.wait()


def _allocate(
    comm: Allocator, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    tensor = comm.allocate((numel,), dtype=dtype, device=device)
    if not isinstance(tensor, torch.Tensor):
        found = repr(tensor)
    elif (tensor.shape, tensor.dtype, tensor.device) != ((numel,), dtype, device):
        found = f"one of {tuple(tensor.shape)} elements, {tensor.dtype} on {tensor.device}"
    elif not tensor.is_contiguous():
        found = "one that is not contiguous"
    else:
        return tensor
    raise TypeError(
        expected(
            f"a contiguous tensor of {(numel,)} elements, {dtype} on {device}",
            found,
            where=f"{type(comm).__name__}.allocate()",
            hint="Return memory of the size, dtype and device that it is asked for",
        )
    )
