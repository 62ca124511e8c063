"""One whole tensor at a time: gathered from the shards to the rank that writes it.

Every element goes to the writer alone, by one all-to-all whose other lengths are 0, so the ranks
that do not write hold nothing beside their shards. What is allocated here is counted by a ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.agreement import rank_and_world_size
from megafsdp.buffer.comm.collectives import all_to_all
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.device.memory import ByteLedger, Category, FlatStorage


@dataclass(slots=True)
class Scratch:
    """Memory for one tensor's way into a file, counted and freed together.

    Attributes:
        ledger: Counts the bytes, as unsharded ones.
        device: Where the memory lies.
        storages: What is allocated.
    """

    ledger: ByteLedger
    device: torch.device
    storages: list[FlatStorage] = field(default_factory=list)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, alive until it is freed."""
        storage = FlatStorage(
            math.prod(shape),
            dtype,
            device=self.device,
            ledger=self.ledger,
            category=Category.UNSHARDED,
        )
        self.storages.append(storage)
        return storage.tensor.view(shape)

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in a dtype: a counted copy, or the tensor itself."""
        if tensor.dtype == dtype:
            return tensor
        copy = self.allocate(tuple(tensor.shape), dtype)
        copy.copy_(tensor)
        return copy

    def free(self, kept: torch.Tensor | None = None) -> None:
        """Free everything but the storage under one tensor."""
        keep = None if kept is None else kept.untyped_storage().data_ptr()
        for storage in self.storages:
            if storage.tensor.untyped_storage().data_ptr() != keep:
                storage.release()
        self.storages = [s for s in self.storages if s.is_allocated]


def nbytes_to_gather(writer: int, tensor: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return what :func:`gather_to` allocates on this rank: the result, and on the way to it."""
    local = local_tensor(tensor)
    cast_nbytes = 0 if local.dtype == dtype else local.numel() * dtype.itemsize
    is_writer = rank_and_world_size()[0] == writer
    if not isinstance(tensor, DTensor):
        return cast_nbytes, 0
    whole_nbytes = tensor.numel() * dtype.itemsize
    if not isinstance(tensor, UnevenDTensor):
        return tensor.nbytes, whole_nbytes if is_writer and cast_nbytes else 0
    if writer not in dist.get_process_group_ranks(tensor.shard_group):
        return 0, 0
    if not is_writer:
        return 0, cast_nbytes
    shards = tensor.shards_by_rank()
    return whole_nbytes, cast_nbytes if shards == sorted(shards) else whole_nbytes


@torch.no_grad()
def gather_to(
    writer: int, tensor: torch.Tensor, *, dtype: torch.dtype, is_rank_zeros: bool, scratch: Scratch
) -> torch.Tensor | None:
    """Return the whole of a tensor on one rank; collective over all ranks.

    Args:
        writer: The rank that receives it.
        tensor: A sharded, replicated or plain tensor, alike on all ranks.
        dtype: The result's; elements are cast before they travel.
        is_rank_zeros: A plain tensor may differ between ranks, and rank 0's is wanted.
        scratch: Holds the result and what is needed on the way, whose peak is two results.

    Returns:
        On the writer the tensor, contiguous, possibly the given one's memory; None elsewhere.

    Raises:
        NotImplementedError: The tensor is a part of a tensor-parallel one.
    """
    rank, world_size = rank_and_world_size()
    if isinstance(tensor, UnevenDTensor):
        return _gather_uneven(writer, tensor, dtype, scratch)
    if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
        whole = full_tensor(tensor)
        return scratch.cast(whole, dtype).contiguous() if rank == writer else None
    local = local_tensor(tensor)
    if is_rank_zeros and writer != 0:
        counts = [local.numel() if r == 0 else 0 for r in range(world_size)]
        mine = scratch.cast(local, dtype).reshape(-1) if rank == 0 else local.new_empty(0)
        world = dist.group.WORLD
        assert world is not None, "a writer other than rank 0 is one of several"
        whole = _receive(writer, mine.to(dtype), counts, group=world, scratch=scratch)
        return whole.view(local.shape) if rank == writer else None
    return scratch.cast(local, dtype).contiguous() if rank == writer else None


def _gather_uneven(
    writer: int, tensor: UnevenDTensor, dtype: torch.dtype, scratch: Scratch
) -> torch.Tensor | None:
    layout, group = tensor.uneven_layout, tensor.shard_group
    ranks = dist.get_process_group_ranks(group)
    if writer not in ranks:
        return None
    shards = tensor.shards_by_rank()
    counts = [stop - start for start, stop in map(layout.element_range, shards)]
    mine = scratch.cast(tensor.local.reshape(-1), dtype)
    index = ranks.index(writer)
    whole = _receive(index, mine, counts, group=group, scratch=scratch)
    if group.rank() != index:
        return None
    scratch.free(kept=whole)
    if shards != sorted(shards):
        received = whole
        whole = scratch.allocate((layout.numel,), dtype)
        for shard, piece in zip(shards, received.split(counts), strict=True):
            start, stop = layout.element_range(shard)
            whole[start:stop] = piece
        scratch.free(kept=whole)
    return whole.view(layout.shape)


def _receive(
    index: int,
    mine: torch.Tensor,
    counts: Sequence[int],
    *,
    group: dist.ProcessGroup,
    scratch: Scratch,
) -> torch.Tensor:
    """Send 1-D pieces of known lengths to one rank of a group; it returns them in rank order."""
    is_receiver = group.rank() == index
    received = list(counts) if is_receiver else [0] * len(counts)
    sent = [mine.numel() if r == index else 0 for r in range(len(counts))]
    output = scratch.allocate((sum(received),), mine.dtype)
    all_to_all(output, mine, (received, sent), group, "export_hf")
    return output
