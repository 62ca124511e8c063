"""Gather one whole tensor at a time from its shards to the rank that writes it.

Elements go only to the writer, by one all-to-all whose other lengths are 0, so the ranks that do
not write need no memory beside their shards. If a model axis cuts the tensor, each part is first
gathered to one rank, and the parts go from these ranks to the writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.agreement import rank_and_world_size
from megafsdp.buffer.comm.collectives import all_to_all
from megafsdp.buffer.dtensor.uneven import UnevenDTensor, full_tensor, local_tensor
from megafsdp.mesh.dtensor import shard_axes
from megafsdp.mesh.model_part import ModelPart


def nbytes_to_gather(
    writer: int, tensor: torch.Tensor, dtype: torch.dtype, *, is_rank_zeros: bool
) -> int:
    """Return the most bytes that :func:`gather_to` allocates on this rank at one time.

    It takes the same arguments.
    """
    local = local_tensor(tensor)
    cast_nbytes = 0 if local.dtype == dtype else local.numel() * dtype.itemsize
    rank = rank_and_world_size()[0]
    whole_nbytes = tensor.numel() * dtype.itemsize
    if not isinstance(tensor, DTensor):
        is_received = is_rank_zeros and rank == writer != 0
        return cast_nbytes + (whole_nbytes if is_received else 0)
    if not isinstance(tensor, UnevenDTensor):
        return tensor.nbytes + (whole_nbytes if rank == writer and cast_nbytes else 0)
    receiver = _receiver_of_part(writer, tensor)
    if receiver is None:
        return 0
    if rank != receiver:
        return cast_nbytes
    layout = tensor.uneven_layout
    part_nbytes, shards = layout.numel * dtype.itemsize, tensor.shards_by_rank()
    # A thread of the process group may keep the sent piece a little longer than the gather.
    nbytes = part_nbytes + cast_nbytes + (0 if shards == sorted(shards) else part_nbytes)
    if layout.part.is_whole or rank != writer:
        return nbytes
    # Then the writer receives the parts of all ranks of the model axis and joins them.
    return nbytes + (1 if _are_in_order(layout.part) else 2) * whole_nbytes


@torch.no_grad()
def gather_to(
    writer: int, tensor: torch.Tensor, *, dtype: torch.dtype, is_rank_zeros: bool
) -> torch.Tensor | None:
    """Return the whole of a tensor on one rank; collective over all ranks.

    It allocates what :func:`nbytes_to_gather` says.

    Args:
        writer: The rank that receives it.
        tensor: A sharded, replicated or plain tensor, alike on all ranks.
        dtype: Dtype of the result; elements are cast before they are sent.
        is_rank_zeros: A plain tensor may differ between ranks, and rank 0's is wanted.

    Returns:
        On the writer, the contiguous tensor, which may share memory with ``tensor``; None
        elsewhere.
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


def _receiver_of_part(writer: int, tensor: UnevenDTensor) -> int | None:
    """Return the rank that receives this rank's shard; None if other ranks send the same one.

    It is the writer, or the rank in the writer's place among the ranks with the same model part.
    """
    ranks = tensor.device_mesh.mesh
    place = (ranks == writer).nonzero().tolist()
    own = tensor.device_mesh.get_coordinate()
    if not place or own is None:
        return None
    part, num_model_axes = tensor.uneven_layout.part, tensor.uneven_layout.num_model_axes
    travels = set(shard_axes(tensor.placements, num_model_axes))
    target = list(place[0])
    if not part.is_whole:
        target[-1] = own[-1]
    # Along other axes ranks have equal copies: the writer's is taken.
    if any(
        t != o for axis, (t, o) in enumerate(zip(target, own, strict=True)) if axis not in travels
    ):
        return None
    return int(ranks[tuple(target)])


def _gather_uneven(writer: int, tensor: UnevenDTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather over the data axes, then over the model axis that cuts the tensor, if one does."""
    receiver = _receiver_of_part(writer, tensor)
    if receiver is None:
        return None
    rows = _gather_part(receiver, tensor, dtype)
    part, mesh = tensor.uneven_layout.part, tensor.device_mesh
    if rows is None or part.is_whole:
        return rows
    model_axis = mesh.get_group(mesh.ndim - 1)
    parts = [part.of_rank(rank) for rank in range(part.num_ranks)]
    index = dist.get_process_group_ranks(model_axis).index(writer)
    received = _receive(index, rows.view(-1), [p.local_numel for p in parts], model_axis)
    # Free memory for the join.
    del rows
    if model_axis.rank() != index:
        return None
    if _are_in_order(part):
        return received.view(part.shape)
    pieces = received.split([p.local_numel for p in parts])
    return part.join([piece.view(p.local_shape) for piece, p in zip(pieces, parts, strict=True)])


def _are_in_order(part: ModelPart) -> bool:
    """Return whether the concatenated parts of all ranks are the whole tensor."""
    return part.dim == 0 and len(part.fused_sizes) == 1


def _gather_part(receiver: int, tensor: UnevenDTensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Gather all rows of this rank's model part to one of the ranks that shard it."""
    layout, own = tensor.uneven_layout, tensor.local.reshape(-1).to(dtype)
    if not shard_axes(tensor.placements, layout.num_model_axes):
        return own.view(layout.part.local_shape)
    group, shards = tensor.shard_group, tensor.shards_by_rank()
    counts = [stop - start for start, stop in map(layout.element_range, shards)]
    index = dist.get_process_group_ranks(group).index(receiver)
    received = _receive(index, own, counts, group)
    if group.rank() != index:
        return None
    if shards == sorted(shards):
        return received.view(layout.part.local_shape)
    # In a group over two mesh axes, the order of the shards is not the order of the ranks.
    rows = received.new_empty(layout.numel)
    for shard, piece in zip(shards, received.split(counts), strict=True):
        start, stop = layout.element_range(shard)
        rows[start:stop] = piece
    # Freed at once, as a thread of the process group may keep the tensor a little longer.
    received.untyped_storage().resize_(0)
    return rows.view(layout.part.local_shape)


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
