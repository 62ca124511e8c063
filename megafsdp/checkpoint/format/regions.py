"""Regions: boxes of elements of a global tensor, held by ranks and stored as chunks on disk.

Every tensor of a checkpoint is described by regions, whatever its placement: an uneven DTensor
publishes the rows it owns, a replicated one the whole tensor, an empty shard nothing. Where a
stored tensor is only a part of a tensor in memory, or the other way round, :class:`TensorPart`
shifts the regions. :class:`ReplicaBalance` chooses which replica writes a region, and
:func:`odd_cells` finds the cells that regions leave out or cover twice.

All of it is local arithmetic. state/fused.py and state/experts.py decide which parts a parameter
has; the caller decides what a gap or an overlap means.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.errors import CheckpointError
from megafsdp.mesh.torch_private import local_of, root_of


def odd_cells(shape: tuple[int, ...], regions: Sequence[Region]) -> list[tuple[Region, int]]:
    """List the cells that regions do not cover exactly once, with how often they cover them.

    Example: regions [0:2] and [1:3] of a tensor of 4 elements have the cells [0:1], [1:2], [2:3]
    and [3:4]; ``[1:2]`` is covered twice and ``[3:4]`` never.

    Args:
        shape: Shape of the tensor.
        regions: Its regions; the part of a region that lies outside the tensor is a cell too.
    """
    bounds = [
        sorted(
            {0, extent}
            | {region.offsets[dim] for region in regions}
            | {region.offsets[dim] + region.sizes[dim] for region in regions}
        )
        for dim, extent in enumerate(shape)
    ]
    index = [{bound: i for i, bound in enumerate(of_dim)} for of_dim in bounds]
    counts = np.zeros([len(of_dim) - 1 for of_dim in bounds], dtype=np.int32)
    for region in regions:
        cells = tuple(
            slice(of_dim[start], of_dim[start + size])
            for of_dim, start, size in zip(index, region.offsets, region.sizes, strict=True)
        )
        counts[cells] += 1
    wanted = np.zeros_like(counts)
    wanted[tuple(slice(of_dim[0], of_dim[n]) for of_dim, n in zip(index, shape, strict=True))] = 1
    odd = []
    # argwhere(), unlike nonzero(), supports 0-d arrays: the index of the one cell is empty.
    for cell in np.argwhere(counts != wanted):
        starts = tuple(of_dim[i] for of_dim, i in zip(bounds, cell, strict=True))
        ends = tuple(of_dim[i + 1] for of_dim, i in zip(bounds, cell, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        odd.append((Region(starts, sizes), int(counts[tuple(cell)])))
    return odd


def is_filled(region: Region, pieces: Sequence[Region]) -> bool:
    """Return whether pieces inside a region cover each of its elements exactly once."""
    if len(pieces) == 1:
        return pieces[0] == region
    origin = whole(region.sizes)
    return not odd_cells(region.sizes, [piece.moved(region, origin) for piece in pieces])


def with_extent(shape: tuple[int, ...], dim: int, extent: int) -> tuple[int, ...]:
    """Return a shape with another extent along one dimension."""
    return (*shape[:dim], extent, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True, eq=False)
class TensorPart:
    """A stored tensor that consists of regions of a tensor in memory, sharded or not; no copy.

    Example: the lower half of a (10, 6) tensor, stored as a (5, 6) tensor, is the one pair (rows 5
    to 9, rows 0 to 4). A rank that has rows 4 to 6 in memory has rows 0 and 1 of the stored tensor;
    a rank that has rows 0 to 3 has none.

    Attributes:
        tensor: The tensor in memory.
        shape: Shape of the stored tensor.
        regions: Pairs of regions of equal sizes: one of ``tensor``, and the region of the stored
            tensor with the same elements. The regions of the stored tensor do not overlap.
        ranks: If ``tensor`` is plain: the global ranks that have the same values; None means all.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    regions: tuple[tuple[Region, Region], ...]
    ranks: tuple[int, ...] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the elements."""
        return self.tensor.dtype

    @property
    def is_meta(self) -> bool:
        """Return whether the tensor in memory has no memory yet."""
        return self.tensor.is_meta


Stored: TypeAlias = torch.Tensor | TensorPart
"""A tensor as checkpoints store it: a tensor in memory, or a part of one."""


def underlying(stored: Stored) -> torch.Tensor:
    """Return the tensor in memory behind a stored tensor."""
    return stored.tensor if isinstance(stored, TensorPart) else stored


def local_regions(key: str, stored: Stored) -> list[Region]:
    """List the regions of a stored tensor that this rank has; never an empty region.

    Args:
        key: Name in the checkpoint, for the message.
        stored: A plain tensor, a DTensor, anything with DCP's ``__create_chunk_list__``, or a part.

    Raises:
        CheckpointError: A tensor is sparse or quantized, or the regions do not describe the local
            tensor. torch's own DTensor assumes equal chunks; for uneven rows that would lose data
            silently.
    """
    if not isinstance(stored, TensorPart):
        return _regions_of_tensor(key, stored)
    own = _regions_of_tensor(key, stored.tensor)
    return [
        common.moved(inner, outer)
        for inner, outer in stored.regions
        for region in own
        if (common := region.intersect(inner)) is not None
    ]


def local_view(stored: Stored, region: Region) -> torch.Tensor:
    """Return the plain tensor behind one of :func:`local_regions`; it shares memory.

    It is contiguous if the region is whole along all dims but the first.
    """
    if not isinstance(stored, TensorPart):
        return _view_of_tensor(stored, region)
    for inner, outer in stored.regions:
        if region.intersect(outer) != region:
            continue
        place = region.moved(outer, inner)
        for own in _regions_of_tensor("", stored.tensor):
            if own.intersect(place) == place:
                return _view_of_tensor(stored.tensor, own)[place.slices_in(own)]
    raise AssertionError(f"{region} is none of this rank's regions")


def _regions_of_tensor(key: str, tensor: torch.Tensor) -> list[Region]:
    if not isinstance(tensor, DTensor):
        _require_dense(key, tensor)
        return [whole(tuple(tensor.shape))] if tensor.numel() else []
    if tensor.device_mesh.get_coordinate() is None:
        return []
    local, is_partial = local_of(tensor), any(p.is_partial() for p in tensor.placements)
    # Of partial sums torch lists none, by an error without their name.
    listed = [] if is_partial else tensor.__create_chunk_list__()
    chunks = [Region(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in listed]
    regions = [region for region in chunks if region.numel]
    if local.numel() != sum(region.numel for region in regions):
        raise CheckpointError.expected(
            "a DTensor whose local elements are those of its chunks",
            f"local shape {tuple(local.shape)}, {tensor.placements}, chunks {regions}",
            where=f"'{key}'",
            hint="Shard with megafsdp.fully_shard, or reduce the tensor before saving it",
        )
    return regions


def _require_dense(key: str, tensor: torch.Tensor) -> None:
    if tensor.layout is torch.strided and not tensor.is_quantized:
        return
    kind = "quantized" if tensor.is_quantized else tensor.layout
    raise CheckpointError.expected(
        "a dense tensor",
        f"a tensor of {tensor.dtype}, {kind}",
        where=f"'{key}'",
        hint="Keep its dense parts in buffers, such as indices and values, or register it with "
        "persistent=False",
    )


def _view_of_tensor(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.__get_tensor_shard__(MetadataIndex("", torch.Size(region.offsets))).detach()


class ReplicaBalance:
    """Choose which of several equal replicas writes a region; all of them choose the same.

    Replicas see the same regions in the same order, so a running count of bytes for each set of
    replicas spreads the work with no communication: the rank with the fewest bytes so far writes
    the next region.

    Args:
        rank: This rank.
        world_size: Number of ranks; all of them have every plain tensor.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world = tuple(range(world_size))
        self._loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self._ranks_by_axes: dict[tuple[DeviceMesh, tuple[int, ...]], tuple[int, ...]] = {}
        self._is_first: dict[DeviceMesh, bool] = {}

    def is_mine(self, stored: Stored, region: Region) -> bool:
        """Return whether this rank writes a region that it has."""
        tensor = underlying(stored)
        declared = stored.ranks if isinstance(stored, TensorPart) else None
        replicas = self._replicas(tensor, declared)
        loads = self._loads.setdefault(replicas, [(0, rank) for rank in replicas])
        nbytes, rank = loads[0]
        # A 0-d tensor costs a record like any other, hence at least a few bytes.
        heapq.heapreplace(loads, (nbytes + max(64, region.numel * tensor.element_size()), rank))
        return rank == self._rank

    def _replicas(self, tensor: torch.Tensor, declared: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the ranks that have the same region of a tensor as this rank, in order."""
        if not isinstance(tensor, DTensor):
            return self._world if declared is None else declared
        mesh = tensor.device_mesh
        axes = tuple(i for i, p in enumerate(tensor.placements) if isinstance(p, Replicate))
        found = self._ranks_by_axes.get((mesh, axes))
        if found is None:
            coordinate = mesh.get_coordinate()
            assert coordinate is not None, "local_regions is empty outside the mesh"
            index = tuple(slice(None) if i in axes else c for i, c in enumerate(coordinate))
            found = tuple(mesh.mesh[index].reshape(-1).tolist())
            self._ranks_by_axes[mesh, axes] = found
        return found

    def is_first(self, stored: Stored) -> bool:
        """Return whether the ranks of this mesh, not of an equal mesh beside it, write a tensor.

        A norm that ``parallelize_module`` leaves plain is, on each rank of tp, a DTensor on a mesh
        of the data axis alone. There are as many such meshes, slices of one root, as ranks of tp;
        the first one writes.
        """
        tensor = underlying(stored)
        if not isinstance(tensor, DTensor) or _is_partial(stored):
            return True
        mesh = tensor.device_mesh
        if (found := self._is_first.get(mesh)) is None:
            found = self._is_first[mesh] = _is_first_slice(mesh)
        return found


def _is_partial(stored: Stored) -> bool:
    """Return whether other meshes have other parts of a stored tensor, such as other experts."""
    if not isinstance(stored, TensorPart):
        return False
    return sum(outer.numel for _, outer in stored.regions) < whole(stored.shape).numel


def _is_first_slice(mesh: DeviceMesh) -> bool:
    root = root_of(mesh)
    coordinate = root.get_coordinate()
    if coordinate is None or root.size() == mesh.size():
        return True
    # Matched by ranks: an axis flattened from several has a name that the root does not know.
    places = torch.isin(root.mesh, mesh.mesh).nonzero()
    beside = (places == places[0]).all(dim=0)
    return not any(torch.tensor(coordinate, device="cpu")[beside])
