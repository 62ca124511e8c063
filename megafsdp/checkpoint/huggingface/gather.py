"""One whole tensor at a time: gathered from the shards to the rank that writes it.

Every element goes to the writer alone, by one all-to-all whose other lengths are 0, so the ranks
that do not write need no memory beside their shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.agreement import rank_and_world_size
from megafsdp.buffer.comm.collectives import all_to_all
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor


def nbytes_to_gather(writer: int, tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the most bytes that :func:`gather_to` allocates on this rank at one time."""
    local = local_tensor(tensor)
    cast_nbytes = 0 if local.dtype == dtype else local.numel() * dtype.itemsize
    is_writer = rank_and_world_size()[0] == writer
    if not isinstance(tensor, DTensor):
        return cast_nbytes
    whole_nbytes = tensor.numel() * dtype.itemsize
    if not isinstance(tensor, UnevenDTensor):
        return tensor.nbytes + (whole_nbytes if is_writer and cast_nbytes else 0)
    if writer not in dist.get_process_group_ranks(tensor.shard_group):
        return 0
    if not is_writer:
        return cast_nbytes
    shards = tensor.shards_by_rank()
    # A thread of the process group may have the sent piece a little longer than the gather lasts.
    return whole_nbytes + cast_nbytes + (0 if shards == sorted(shards) else whole_nbytes)


@torch.no_grad()
def gather_to(
    writer: int, tensor: torch.Tensor, *, dtype: torch.dtype, is_rank_zeros: bool
) -> torch.Tensor | None:
    """Return the whole of a tensor on one rank; collective over all ranks.

    Args:
        writer: The rank that receives it.
        tensor: A sharded, replicated or plain tensor, alike on all ranks.
        dtype: The result's; elements are cast before they travel.
        is_rank_zeros: A plain tensor may differ between ranks, and rank 0's is wanted.

    Returns:
        On the writer the tensor, contiguous, possibly the given one's memory; None elsewhere. What
        is allocated on the way is given by :func:`nbytes_to_gather`.

    Raises:
        NotImplementedError: The tensor is a part of a tensor-parallel one.
    """
    rank, world_size = rank_and_world_size()
    if isinstance(tensor, UnevenDTensor):
        return _gather_uneven(writer, tensor, dtype)
    if isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements):
        tensor = full_tensor(tensor)
    local = local_tensor(tensor)
    if is_rank_zeros and writer != 0:
        counts = [local.numel() if r == 0 else 0 for r in range(world_size)]
        mine = local.to(dtype).reshape(-1)[: counts[rank]]
        world = dist.group.WORLD
        assert world is not None, "a writer other than rank 0 is one of several"
        local = _receive(writer, mine, counts, world).view(local.shape if rank == writer else 0)
    return local.to(dtype).contiguous() if rank == writer else None


def _gather_uneven(writer: int, tensor: UnevenDTensor, dtype: torch.dtype) -> torch.Tensor | None:
    layout, group = tensor.uneven_layout, tensor.shard_group
    ranks = dist.get_process_group_ranks(group)
    if writer not in ranks:
        return None
    shards = tensor.shards_by_rank()
    counts = [stop - start for start, stop in map(layout.element_range, shards)]
    index = ranks.index(writer)
    received = _receive(index, tensor.local.reshape(-1).to(dtype), counts, group)
    if group.rank() != index:
        return None
    if shards == sorted(shards):
        return received.view(layout.shape)
    # Ranks of a group over two mesh axes do not own the shards in their own order.
    whole = received.new_empty(layout.numel)
    for shard, piece in zip(shards, received.split(counts), strict=True):
        start, stop = layout.element_range(shard)
        whole[start:stop] = piece
    # A thread of the process group may have the tensor for a little longer.
    received.untyped_storage().resize_(0)
    return whole.view(layout.shape)


def _receive(
    index: int, mine: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send 1-D pieces of known lengths to one rank of a group; it returns them in rank order."""
    is_receiver = group.rank() == index
    received = list(counts) if is_receiver else [0] * len(counts)
    sent = [mine.numel() if r == index else 0 for r in range(len(counts))]
    output = mine.new_empty(sum(received))
    all_to_all(output, mine, (received, sent), group, "export_hf")
    return output
