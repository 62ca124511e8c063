"""All calls of ``torch.distributed`` collectives.

Every exchange between ranks goes through this file, except those that an object of the user's makes
(:mod:`megafsdp.buffer.comm.custom`). So it alone handles differences between torch
versions and backends, makes byte views of dtypes that a backend refuses, and counts calls and bytes
(:func:`record_collectives`). In a process group of size 1 a function does its work on the rank
itself, and no collective is issued or counted. This file takes tensors and process groups; layouts,
units and the order of collectives are decided above.

Collectives of flat buffers return a :class:`Pending`; waiting for it blocks the thread on gloo, the
stream on NCCL. Those of small tensors and objects return when their result may be read.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megafsdp.buffer.comm import trace
from megafsdp.buffer.comm.gloo import look_out, sum_shards, wait_for_rest
from megafsdp.buffer.comm.scaling import start_scaling, write_scaled
from megafsdp.buffer.comm.trace import CollectiveRecord as CollectiveRecord
from megafsdp.buffer.comm.trace import record_collectives as record_collectives
from megafsdp.device.profiling import profiler_range
from megafsdp.device.torch_private import is_fake
from megafsdp.errors import expected, listed
from megafsdp.mesh.torch_private import coalesce_collectives


class Pending:
    """A collective that was issued and may not be complete.

    Args:
        works: Handles to wait for.
        finish: A function to call once they are complete, on the thread that waits.
        is_on_gloo: Whether the works are gloo's, so that the thread waits instead of a stream.
    """

    __slots__ = ("_finish", "_is_on_gloo", "_works")

    def __init__(
        self,
        works: Sequence[dist.Work | None] = (),
        finish: Callable[[], None] | None = None,
        *,
        is_on_gloo: bool = False,
    ) -> None:
        self._works = [work for work in works if work is not None]
        self._finish = finish
        self._is_on_gloo = is_on_gloo

    def wait(self) -> None:
        """Wait for completion and run the finishing step; later calls return at once.

        Raises:
            RuntimeError: A collective failed. The other works have ended by then, so the caller may
                free the memory that they use.
        """
        # Empty both first: a second wait() neither repeats an error nor the finishing step.
        works, self._works = self._works, []
        finish, self._finish = self._finish, None
        for index, work in enumerate(works):
            if self._is_on_gloo:
                look_out(work)
            try:
                work.wait()
            except RuntimeError:
                # The caller will free the buffers of all works: the other works must end first.
                Pending(works[index + 1 :], is_on_gloo=self._is_on_gloo).wait()
                raise
        if finish is not None:
            finish()

    def discard(self) -> None:
        """Wait for completion and drop the result: the finishing step never runs."""
        self._finish = None
        self.wait()


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend of each device type that a group serves."""
    return _parse(dist.get_backend_config(group))


@functools.cache
def _parse(config: str) -> dict[str, str]:
    # The text is like cpu:gloo,cuda:nccl. Cached, because every gather and sum calls this.
    return dict(item.split(":") for item in config.split(","))


def is_gloo(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group serves a device by gloo."""
    return backends(group).get(device.type) == "gloo"


def _can_scale(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether a group's library can multiply what it sums; only NCCL can."""
    return backends(group).get(device.type) == "nccl"


def _is_alone(group: dist.ProcessGroup | None) -> bool:
    """Return whether a group has only one rank; None means the group of all ranks."""
    if group is None:
        return not dist.is_initialized() or dist.get_world_size() == 1
    return group.size() == 1


def small_device(group: dist.ProcessGroup) -> str:
    """Return a device on which a group can exchange small data that has no device yet."""
    return "cpu" if "cpu" in backends(group) else "cuda"


T = TypeVar("T")
Splits = tuple[Sequence[int], Sequence[int]]

# torch 2.13 renames the single-tensor collectives and warns about the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}
# The bytes of an all-to-all differ between ranks, so MEGAFSDP_DEBUG=1 must not compare them.
_UNEVEN = "all_to_all"

# A gloo thread that still frees tensors when the interpreter ends would abort the process.
atexit.register(wait_for_rest)


def note_issued(kind: str, label: str, nbytes: int, group: dist.ProcessGroup | None) -> None:
    """Count a collective that is about to be issued; MEGAFSDP_DEBUG=1 compares it between ranks."""
    name = "" if group is None else group.group_name
    if name not in trace.issued.members:
        trace.issued.members[name] = dist.get_process_group_ranks(group)
    trace.note(kind, label, nbytes, name)
    if trace.is_enabled():
        _compare_labels(kind, label, 0 if kind == _UNEVEN else nbytes, group)


def _compare_labels(kind: str, label: str, nbytes: int, group: dist.ProcessGroup | None) -> None:
    everyone = group or dist.group.WORLD
    assert everyone is not None, "a collective has a process group"
    mine = trace.encode(kind, label, nbytes).to(small_device(everyone))
    # Not all_gather(): it would count this exchange and compare labels first, in endless recursion.
    labels = mine.new_empty(everyone.size() * mine.numel())
    _all_gather_single(labels, mine, group=everyone)
    ranks = dist.get_process_group_ranks(everyone)
    trace.require_same(labels.cpu().view(len(ranks), -1), ranks)


def all_gather(
    output: Sequence[torch.Tensor],
    shards: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    label: str,
) -> Pending:
    """Gather this rank's shard of each sub-buffer from all ranks.

    NCCL gathers them in one coalesced launch, gloo one by one.

    Args:
        output: For each sub-buffer a 1-D tensor of ``group.size() * S`` elements.
        shards: For each sub-buffer this rank's 1-D shard of ``S`` elements, of the same dtype; it
            may alias this rank's part of the output.
        group: Ranks whose shards are gathered, in shard order.
        label: FQN of the unit, for counters and profilers.

    Returns:
        The pending collective. Neither side may be touched before ``wait()``.
    """
    if _is_alone(group):
        for out, shard in zip(output, shards, strict=True):
            # In an in-place gather the shard is there already.
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
        return Pending()
    note_issued("all_gather", label, sum(o.numel() * o.element_size() for o in output), group)
    # NCCL coalesces only tensors of one dtype, but codes and scales of a format have two.
    as_bytes = len({o.dtype for o in output}) > 1
    pairs = [
        (_wire_view(o, as_bytes), _wire_view(s, as_bytes))
        for o, s in zip(output, shards, strict=True)
    ]
    with profiler_range("all_gather", label):
        # Not coalesced on gloo: torch's gloo threads write the name of the last work without a
        # lock. The name of a coalesced gather is too long for the string's inline storage, so two
        # works that end together would free its heap memory twice.
        if is_gloo(group, output[0].device):
            works = [_gather_on_gloo(out, shard, group) for out, shard in pairs]
            return Pending(works, is_on_gloo=True)
        return Pending(_launch(_all_gather_single, pairs, group=group))


def _launch(
    collective: Callable[..., dist.Work | None],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    group: dist.ProcessGroup,
    **options: Any,
) -> list[dist.Work | None]:
    """Issue a collective of (output, input) pairs in one launch of the backend's library."""
    # torch has no coalesced collectives for meta tensors.
    if len(pairs) == 1 or pairs[0][0].is_meta:
        return [collective(*pair, group=group, async_op=True, **options) for pair in pairs]
    with coalesce_collectives(group) as coalesced:
        for pair in pairs:
            collective(*pair, group=group, **options)
    return [coalesced]


def _gather_on_gloo(
    out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work | None:
    if group.size() != 2:
        return _all_gather_single(out, shard, group=group, async_op=True)
    # Two ranks exchange halves straight into the output: gloo's all-gather would copy it twice.
    halves = out.chunk(2)
    # In an in-place gather the shard is in this half already.
    if halves[group.rank()].data_ptr() != shard.data_ptr():
        halves[group.rank()].copy_(shard)
    return _swap(halves[1 - group.rank()], shard, group)


def _swap(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    other = 1 - group.rank()
    outs = [received.numel() * (r == other) for r in range(2)]
    pieces = [sent.numel() * (r == other) for r in range(2)]
    return dist.all_to_all_single(received, sent, outs, pieces, group=group, async_op=True)


def reduce_scatter(
    output: Sequence[torch.Tensor],
    partials: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    scale: float,
    accumulate: bool,
    reduce_dtype: torch.dtype,
    label: str,
    force_sum: bool = False,
) -> Pending:
    """Sum the ranks' partial buffers and keep this rank's shard of each sub-buffer.

    ``output = [output +] scale * sum over ranks of partial[own shard]``. On gloo the shards are
    sent in the partials' dtype by all-to-all and summed on this rank in rank order, in fp32 or
    wider, straight into ``output``. Any other backend's library sums in ``reduce_dtype``, in one
    coalesced launch: straight into ``output`` if nothing accumulates and the dtypes agree, else
    into a buffer of its own that one more pass writes to ``output``.

    Args:
        output: For each sub-buffer a 1-D tensor of ``S`` elements, in the main gradients' dtype.
        partials: For each sub-buffer a 1-D tensor of ``group.size() * S`` elements. A library may
            overwrite partials of ``reduce_dtype``; others are cast to a copy first.
        group: Ranks that own the shards, in shard order.
        scale: Factor on the sum.
        accumulate: True to add to ``output``, False to overwrite it.
        reduce_dtype: Dtype of the sum if a library makes it.
        label: FQN of the unit, for counters and profilers.
        force_sum: Whether a library only sums, without a factor; separate passes then scale.

    Returns:
        The pending collective; ``output`` may be read after its ``wait()``. A discarded sum leaves
        ``output`` unchanged if it was to accumulate, else undefined.
    """
    if _is_alone(group):
        return Pending(finish=_writing(output, [[p] for p in partials], scale, accumulate, group))
    is_exchanged = is_gloo(group, output[0].device)
    wires = partials if is_exchanged else [partial.to(reduce_dtype) for partial in partials]
    note_issued("reduce_scatter", label, sum(wire.nbytes for wire in wires), group)
    with profiler_range("reduce_scatter", label):
        if is_exchanged:
            exchanges = [_exchange(wire, group) for wire in wires]
            shards = [received for _, received in exchanges]
            # The sums read the received shards, so they run in wait(), after the exchanges.
            finish = _writing(output, shards, scale, accumulate, group)
            return Pending([work for work, _ in exchanges], finish, is_on_gloo=True)
        is_direct = not accumulate and output[0].dtype == reduce_dtype
        can_scale = not force_sum and _can_scale(group, output[0].device)
        op, factor = start_scaling(wires, scale, group, is_direct=is_direct, can_scale=can_scale)
        sums = output if is_direct else [wires[0].new_empty(out.shape) for out in output]
        pairs = list(zip(sums, wires, strict=True))
        works = _launch(_reduce_scatter_single, pairs, group=group, op=op)
    if is_direct and factor == 1.0:
        return Pending(works)
    return Pending(works, _writing(output, [[s] for s in sums], factor, accumulate, group))


def all_to_all(
    output: torch.Tensor, source: torch.Tensor, splits: Splits, group: dist.ProcessGroup, label: str
) -> None:
    """Send each rank its piece of a 1-D ``source`` and receive one from each, of any lengths.

    Returns when ``output`` may be read. ``splits``: numels received from, and sent to, each rank.
    """
    start_all_to_all(output, source, splits, group, label).wait()


def start_all_to_all(
    output: torch.Tensor, source: torch.Tensor, splits: Splits, group: dist.ProcessGroup, label: str
) -> Pending:
    """Issue :func:`all_to_all`; ``output`` may be read after the result's ``wait()``."""
    if _is_alone(group):
        output.copy_(source)
        return Pending()
    note_issued(_UNEVEN, label, source.numel() * source.element_size(), group)
    received, sent = map(list, splits)
    is_on_gloo = is_gloo(group, output.device)
    if group.size() == 2 and is_on_gloo:
        rank = group.rank()
        outs, pieces = output.split(received), source.split(sent)
        work = _swap(outs[1 - rank], pieces[1 - rank], group)
        # Copy the own piece while the other one travels: gloo itself would copy it first.
        outs[rank].copy_(pieces[rank])
    else:
        work = dist.all_to_all_single(output, source, received, sent, group=group, async_op=True)
    return Pending([work], is_on_gloo=is_on_gloo)


def _writing(
    output: Sequence[torch.Tensor],
    addends: Sequence[Sequence[torch.Tensor]],
    scale: float,
    accumulate: bool,
    group: dist.ProcessGroup,
) -> Callable[[], None]:
    """Return a function that writes to each output the scaled sum of its addends."""
    write = _write_sum if is_gloo(group, output[0].device) else write_scaled

    def finish() -> None:
        for out, parts in zip(output, addends, strict=True):
            write(out, parts, scale, accumulate)

    return finish


def _write_sum(
    out: torch.Tensor, shards: Sequence[torch.Tensor], scale: float, accumulate: bool
) -> None:
    sum_shards(shards, out, scale=scale, accumulate=accumulate)


def _exchange(
    partial: torch.Tensor, group: dist.ProcessGroup
) -> tuple[dist.Work | None, list[torch.Tensor]]:
    """Send each rank its shard of the addends; return those of this rank, in rank order."""
    rank, parts = group.rank(), list(partial.chunk(group.size()))
    if len(parts) == 2:
        # This rank's part is not sent, which halves the bytes. With more ranks it lies between
        # parts that are sent, and all_to_all_single sends one contiguous tensor.
        received = torch.empty_like(parts[0])
        work = _swap(received, parts[1 - rank], group)
        return work, [parts[r] if r == rank else received for r in range(2)]
    received = torch.empty_like(partial)
    work = dist.all_to_all_single(received, partial, group=group, async_op=True)
    return work, list(received.chunk(len(parts)))


def all_reduce_partials(
    output: torch.Tensor,
    partial: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    scale: float,
    accumulate: bool,
    reduce_dtype: torch.dtype,
    label: str,
    force_sum: bool = False,
) -> Pending:
    """Sum a flat partial buffer over ranks: ``output = [output +] scale * sum``.

    Args:
        output: 1-D, in the main gradients' dtype.
        partial: 1-D of the same length; overwritten if its dtype is ``reduce_dtype``.
        group: Ranks to sum over.
        scale: Factor on the sum.
        accumulate: True to add to ``output``, False to overwrite it.
        reduce_dtype: Dtype of the sum.
        label: FQN of the unit, for counters and profilers.
        force_sum: Whether a library only sums, without a factor; separate passes then scale.

    Returns:
        The pending collective; ``output`` is written by its ``wait()``.
    """
    if _is_alone(group):
        return Pending(finish=_writing([output], [[partial]], scale, accumulate, group))
    # In place if the dtypes agree: nothing reads the partials after the sum.
    wire = partial.to(reduce_dtype)
    note_issued("all_reduce", label, wire.numel() * wire.element_size(), group)
    with profiler_range("all_reduce", label):
        can_scale = not force_sum and _can_scale(group, wire.device)
        op, factor = start_scaling([wire], scale, group, is_direct=False, can_scale=can_scale)
        work = dist.all_reduce(wire, op=op, group=group, async_op=True)
    finish = _writing([output], [[wire]], factor, accumulate, group)
    return Pending([work], finish, is_on_gloo=is_gloo(group, output.device))


def all_reduce(
    tensor: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    label: str = "",
) -> None:
    """Reduce a small tensor over ranks in place; returns when the result may be used.

    The arguments are those of :func:`start_all_reduce`.
    """
    start_all_reduce(tensor, op=op, group=group, label=label).wait()


def start_all_reduce(
    tensor: torch.Tensor,
    *,
    op: str = "sum",
    group: dist.ProcessGroup | None = None,
    label: str = "",
) -> Pending:
    """Issue the reduction of a small tensor over ranks in place.

    Args:
        tensor: Any shape, equal on all ranks.
        op: ``"sum"``, ``"max"``, ``"min"`` or ``"avg"``.
        group: Ranks to reduce over; None means all.
        label: The purpose, for counters.

    Returns:
        The pending collective; on one rank it is complete at once.
    """
    if _is_alone(group):
        return Pending()
    note_issued("all_reduce", label, tensor.numel() * tensor.element_size(), group)
    everyone = group or dist.group.WORLD
    assert everyone is not None, "a collective has a process group"
    # Gradients on the host give a norm on the host, which a group with only NCCL cannot reduce.
    is_there = tensor.is_meta or tensor.device.type in backends(everyone)
    sent = tensor if is_there else tensor.to(small_device(everyone))
    work = dist.all_reduce(sent, op=_REDUCE_OPS[op], group=group, async_op=True)

    def bring_back() -> None:
        tensor.copy_(sent)

    finish = None if sent is tensor else bring_back
    return Pending([work], finish, is_on_gloo=is_gloo(everyone, sent.device))


def all_gather_equal(shard: torch.Tensor, *, group: dist.ProcessGroup, label: str) -> torch.Tensor:
    """Gather equally long 1-D tensors and return them as ``(group.size(), numel)``.

    Raises:
        NotImplementedError: ``torch.compile`` traces the caller; it runs eagerly then.
    """
    # The tracer ends its graph for this error alone.
    if is_fake(shard):
        raise NotImplementedError(
            expected(
                "a tensor with memory",
                "one that stands for others in a graph",
                where=label,
                hint="Leave out fullgraph=True",
            )
        )
    output = shard.new_empty(group.size() * shard.numel())
    all_gather([output], [shard.contiguous()], group=group, label=label).wait()
    return output.view(group.size(), shard.numel())


def all_gather_objects(obj: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's small object in rank order; ``[obj]`` itself on one rank."""
    if _is_alone(group):
        return [obj]
    note_issued("all_gather_objects", "", 0, group)
    # torch overwrites each entry; these only give the list its length.
    objects: list[T] = [obj] * dist.get_world_size(group)
    dist.all_gather_object(objects, obj, group=group)
    return objects


def gather_objects(obj: T, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Return every rank's small object in rank order on rank 0, None on other ranks."""
    if _is_alone(group):
        return [obj]
    note_issued("gather_objects", "", 0, group)
    size = dist.get_world_size(group)
    objects: list[T] | None = [obj] * size if dist.get_rank(group) == 0 else None
    dist.gather_object(obj, objects, group=group, group_dst=0)
    return objects


def broadcast_object(obj: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the small object of rank ``src`` (numbered within ``group``) on all ranks."""
    if _is_alone(group):
        return obj
    note_issued("broadcast_object", "", 0, group)
    holder = [obj]
    dist.broadcast_object_list(holder, group=group, group_src=src)
    return holder[0]


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return when all ranks have called it."""
    if not _is_alone(group):
        note_issued("barrier", "", 0, group)
        dist.barrier(group=group)


def open_communicator(group: dist.ProcessGroup, device: torch.device) -> None:
    """Create the communicator of a library's process group by a first collective."""
    # Issued on one rank too: only an existing communicator can register memory.
    note_issued("all_reduce", "open communicator", 4, group)
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device), group=group)


def require_equal(
    value: str,
    *,
    what: str,
    group: dist.ProcessGroup,
    hint: str,
    where: str = "the first forward",
) -> None:
    """Raise on all ranks if a string differs between ranks.

    Args:
        value: This rank's value.
        what: What the value is, for the message.
        group: Ranks that compare.
        hint: How to mend a difference.
        where: The operation that needs equal values.

    Raises:
        ValueError: The values differ.
    """
    if _is_alone(group):
        return
    # Compare digests: with thousands of ranks the whole values would be megabytes on each rank.
    digest = hashlib.sha256(value.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=small_device(group))
    digests = mine.new_empty(group.size() * mine.numel())
    note_issued("require_equal", what, digests.numel(), group)
    _all_gather_single(digests, mine, group=group)
    # Compare with rank 0's value instead of this rank's, so that all ranks raise or none.
    is_odd = (digests.view(group.size(), -1) != digests[: mine.numel()]).any(dim=1)
    if is_odd.any():
        odd = is_odd.nonzero().flatten().tolist()
        raise ValueError(
            expected(
                f"the same {what} on all ranks",
                f"another one on ranks [{listed([str(rank) for rank in odd])}] than on rank 0",
                where=where,
                hint=hint,
            )
        )


def _wire_view(tensor: torch.Tensor, as_bytes: bool) -> torch.Tensor:
    """Return a byte view if wanted, or if no backend supports the dtype (FP8, FP4)."""
    is_narrow_float = tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point
    return tensor.view(torch.uint8) if as_bytes or is_narrow_float else tensor
