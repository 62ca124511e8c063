"""Layouts of uneven DTensors: a shard's range of elements, and the regions that cover it.

An :class:`UnevenLayout` describes an uneven DTensor without its elements: a part of the global
tensor (all of it, or the part of a rank of a model axis), and the place of that part in an equally
sharded sub-buffer. From it every rank computes every rank's range, so checkpoints and full tensors
need no exchange of metadata. All of this is local arithmetic. The elements of a :class:`Region` on
disk are a chunk of checkpoint/format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from megafsdp.mesh.model_part import ModelPart


class Region(NamedTuple):
    """Part of a tensor: where it starts and how far it reaches along each dimension.

    Attributes:
        offsets: First index along each dimension; empty for a 0-d tensor.
        sizes: Extent along each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements inside."""
        return math.prod(self.sizes)

    def intersect(self, other: Region) -> Region | None:
        """Return the part common to both regions, or None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Region(starts, sizes) if all(size > 0 for size in sizes) else None

    def moved(self, origin: Region, target: Region) -> Region:
        """Return this region moved as ``origin`` is moved to ``target``."""
        places = zip(self.offsets, origin.offsets, target.offsets, strict=True)
        return Region(tuple(own - old + new for own, old, new in places), self.sizes)

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Return the index that selects this region in a tensor with the elements of ``outer``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole tensor."""
    return Region((0,) * len(shape), shape)


def regions_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Region]:
    """Cover the flat range [start, stop) of a row-major tensor by disjoint regions, in order.

    The elements of each region follow those of the previous region in the range. There are at most
    ``2 * len(shape) - 1`` regions; none for an empty range. Example: [3, 9) of a (4, 4) tensor is
    the end of row 0, the whole of row 1 and the start of row 2.
    """
    if stop <= start:
        return []
    if not shape:
        return [Region((), ())]
    if len(shape) == 1:
        return [Region((start,), (stop - start,))]
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if not head and not tail:
        return [Region((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))]
    # The code below takes a partial first row to its end, which here would be beyond ``stop``.
    if first == last:
        return _within_row(shape, first, head, tail)
    regions = []
    if head:
        regions += _within_row(shape, first, head, row_numel)
        first += 1
    # Whole rows make one region, so a shard of whole rows is one chunk on disk.
    if last > first:
        regions.append(Region((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return regions + _within_row(shape, last, 0, tail)


def _within_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> list[Region]:
    return [
        Region((row, *inner.offsets), (1, *inner.sizes))
        for inner in regions_of_range(shape[1:], start, stop)
    ]


def _with_range(region: Region, dim: int, first: int, length: int) -> Region:
    """Return a region with another range of one dim."""
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim], sizes[dim] = first, length
    return Region(tuple(offsets), tuple(sizes))


def _in_whole(region: Region, part: ModelPart) -> list[Region]:
    """Return the regions of the whole tensor that make up a region of a part, in its order."""
    dim = part.dim
    assert dim is not None, "a part that is not whole is cut along a dimension"
    leading = next((i for i in range(dim) if region.sizes[i] > 1), None)
    if leading is not None and len(part.pieces) > 1:
        # In a stack whose matrices are cut into pieces, those of one matrix come before the next.
        first, count = region.offsets[leading], region.sizes[leading]
        ones = (_with_range(region, leading, i, 1) for i in range(first, first + count))
        return [moved for one in ones for moved in _in_whole(one, part)]
    start, stop = region.offsets[dim], region.offsets[dim] + region.sizes[dim]
    found, base = [], 0
    for first, length in part.pieces:
        low, high = max(start, base), min(stop, base + length)
        if low < high:
            found.append(_with_range(region, dim, first + low - base, high - low))
        base += length
    return found


class Sliceable(Protocol):
    """A tensor, or what reads one from a file by its slices."""

    def __getitem__(self, slices: tuple[slice, ...], /) -> torch.Tensor:
        """Return a part of the tensor."""


@dataclass(frozen=True, slots=True)
class UnevenLayout:
    """How one tensor is spread over the shards of a sub-buffer.

    A model axis, if there is one, has cut the tensor first: the sub-buffer has this rank's part.

    Attributes:
        part: The part of the global tensor that the ranks of the sub-buffer have together.
        row_numel: Elements in a row of the part; no row is cut.
        buffer_offset: First element of the part within the sub-buffer.
        shard_numel: Elements of one shard of the sub-buffer.
        num_shards: Number of shards.
        shard: This rank's shard.
        num_model_axes: Number of axes after the data axes of the DTensor's mesh. The last one cuts
            the tensor into parts, or none does; over the others it is replicated.
        is_even: Whether its DTensor's placements say which rows each rank has.
    """

    part: ModelPart
    row_numel: int
    buffer_offset: int
    shard_numel: int
    num_shards: int
    shard: int
    num_model_axes: int = 0
    is_even: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the global tensor."""
        return self.part.shape

    @property
    def numel(self) -> int:
        """Return the number of elements of the part."""
        return self.part.local_numel

    def element_range(self, shard: int | None = None) -> tuple[int, int]:
        """Return a shard's range [start, stop) of the part (default: this rank's shard)."""
        index, numel = self.shard if shard is None else shard, self.numel
        # Clamp on both sides: a shard before or after the part gets an empty range.
        start = min(max(index * self.shard_numel - self.buffer_offset, 0), numel)
        return start, min(max((index + 1) * self.shard_numel - self.buffer_offset, start), numel)

    def cuts_as(self, other: UnevenLayout) -> bool:
        """Return whether each shard has the same elements of its tensor as another layout's."""
        if self == other:
            return True
        # Tensors of one shape at other places of their sub-buffers may be cut alike, or not at all.
        is_comparable = self.part == other.part and self.num_shards == other.num_shards
        shards = range(self.num_shards)
        return is_comparable and all(
            self.element_range(s) == other.element_range(s) for s in shards
        )

    def local_shape(self, shard: int | None = None) -> tuple[int, ...]:
        """Return the shape of a shard's local tensor, made of rows of the part."""
        start, stop = self.element_range(shard)
        trailing = self.part.local_shape[1:]
        # A stack (E, N, K) has rows of K elements: a cut between them may divide an (N, K) matrix.
        if math.prod(trailing) != self.row_numel:
            trailing = (self.row_numel,)
        # The rows of a part without columns have no elements.
        return ((stop - start) // max(self.row_numel, 1), *trailing)

    def regions(self, shard: int | None = None) -> list[Region]:
        """Return the regions of the *global* tensor in a shard; none for an empty shard.

        Their elements follow each other in the local tensor.
        """
        regions = regions_of_range(self.part.local_shape, *self.element_range(shard))
        # A fast path: saves ask for the regions of every tensor while training waits.
        if self.part.is_whole:
            return regions
        return [moved for region in regions for moved in _in_whole(region, self.part)]

    def max_num_regions(self) -> int:
        """Return how many regions a shard has at most."""
        # A range of whole rows is one region, unless a model axis has cut fused tensors.
        if self.part.is_whole and self.row_numel == math.prod(self.shape[1:]):
            return 1
        return max(len(self.regions(shard)) for shard in range(self.num_shards))

    def rows_of(self, full: Sliceable) -> torch.Tensor:
        """Return a copy of this rank's rows of a whole tensor, in their local shape.

        Args:
            full: A tensor, or what reads one from a file; then no rows are in torch's default
                dtype.
        """
        everything = whole(self.shape)
        # Take regions: a tensor-parallel part is no contiguous flat range of the whole.
        pieces = [full[region.slices_in(everything)].reshape(-1) for region in self.regions()]
        nothing = full.new_empty(0) if isinstance(full, torch.Tensor) else torch.empty(0)
        return (torch.cat(pieces) if pieces else nothing).view(self.local_shape())

    def rows_of_part(self, part: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of its model part, in their local shape; a view if it can be."""
        start, stop = self.element_range()
        return part.reshape(-1)[start:stop].view(self.local_shape())

    def row(self, index: int) -> tuple[int, UnevenLayout]:
        """Return where row ``index`` starts in the local tensor, and its layout over the shards.

        A matrix's row lies in one shard; on ranks with other shards the place is 0. A model axis
        must not cut the rows.

        Raises:
            IndexError: There is no such row.
        """
        row = index + self.shape[0] if index < 0 else index
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"Index {index} is out of range for {self.shape[0]} rows.")
        part, dim = self.part, self.part.dim
        assert part.is_whole or dim != 0, "a model axis does not cut the rows"
        numel = math.prod(part.local_shape[1:])
        layout = replace(
            self,
            part=replace(
                part,
                shape=part.shape[1:],
                dim=dim - 1 if dim else None,
                fused_sizes=part.fused_sizes if dim else (),
            ),
            row_numel=math.prod(part.local_shape[2:]),
            buffer_offset=self.buffer_offset + row * numel,
            is_even=False,
        )
        start, stop = layout.element_range()
        return (row * numel + start - self.element_range()[0] if stop > start else 0), layout
