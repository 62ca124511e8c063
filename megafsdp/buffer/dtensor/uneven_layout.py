"""Layouts of uneven DTensors: a shard's range of elements, and the regions that cover it.

An :class:`UnevenLayout` describes an uneven DTensor without its elements: a region of the global
tensor (all of it, or a tensor-parallel part), and how that region lies in an equally sharded
sub-buffer. Every rank computes every rank's range from it, so checkpoints and full tensors
need no exchange of metadata. Pure arithmetic; what a :class:`Region` has on disk is a chunk of
checkpoint/format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple


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
        """Return where this region is once ``origin`` lies at the place of ``target``."""
        places = zip(self.offsets, origin.offsets, target.offsets, strict=True)
        return Region(tuple(own - old + new for own, old, new in places), self.sizes)

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Return the index that selects this region in a tensor whose elements are ``outer``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, base, size in zip(self.offsets, outer.offsets, self.sizes, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of a whole tensor."""
    return Region((0,) * len(shape), shape)


def regions_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Region]:
    """Cover the flat range [start, stop) of a row-major tensor by disjoint regions, in order.

    The elements of each region follow those of the one before in the range. At most
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
    # The code below takes a partial first row to its end, which would be beyond ``stop`` here.
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


@dataclass(frozen=True, slots=True)
class UnevenLayout:
    """How one tensor is spread over the shards of a sub-buffer.

    Attributes:
        shape: Shape of the global tensor.
        region_offsets: Where the part that is sharded starts in the global tensor.
        region_shape: Shape of that part; equal to ``shape`` without tensor parallelism.
        row_numel: Elements in a row; no row is cut.
        buffer_offset: First element of the part within the sub-buffer.
        shard_numel: Elements of one shard of the sub-buffer.
        num_shards: Number of shards.
        shard: This rank's shard.
    """

    shape: tuple[int, ...]
    region_offsets: tuple[int, ...]
    region_shape: tuple[int, ...]
    row_numel: int
    buffer_offset: int
    shard_numel: int
    num_shards: int
    shard: int

    @property
    def numel(self) -> int:
        """Return the elements of the sharded part."""
        return math.prod(self.region_shape)

    def element_range(self, shard: int | None = None) -> tuple[int, int]:
        """Return a shard's range [start, stop) of the sharded part (default: the own shard's)."""
        index = self.shard if shard is None else shard
        # Clamped from both sides: a shard before or behind the part gets an empty range.
        start = min(max(index * self.shard_numel - self.buffer_offset, 0), self.numel)
        return start, min(
            max((index + 1) * self.shard_numel - self.buffer_offset, start), self.numel
        )

    def local_shape(self, shard: int | None = None) -> tuple[int, ...]:
        """Return the shape of a shard's local tensor: its rows, as the global tensor has them."""
        start, stop = self.element_range(shard)
        trailing = self.region_shape[1:]
        # A stack (E, N, K) has rows of K elements: a cut between them may divide an (N, K) matrix.
        if math.prod(trailing) != self.row_numel:
            trailing = (self.row_numel,)
        return ((stop - start) // self.row_numel, *trailing)

    def regions(self, shard: int | None = None) -> list[Region]:
        """Return the regions of the *global* tensor that are a shard's; none for an empty shard.

        Their elements follow one another in the local tensor.
        """
        regions = regions_of_range(self.region_shape, *self.element_range(shard))
        # Saves ask for the regions of every tensor while training waits.
        if self.region_shape == self.shape:
            return regions
        origin, part = whole(self.region_shape), Region(self.region_offsets, self.region_shape)
        return [region.moved(origin, part) for region in regions]

    def row(self, index: int) -> tuple[int, UnevenLayout]:
        """Return where row ``index`` starts in the local tensor, and how it lies over the shards.

        One shard has all of a matrix's row; the place is 0 on the others, which have none of it.

        Raises:
            IndexError: There is no such row.
        """
        row = index + self.shape[0] if index < 0 else index
        if not 0 <= row < self.shape[0]:
            raise IndexError(f"Index {index} is out of range for {self.shape[0]} rows.")
        numel = math.prod(self.shape[1:])
        layout = replace(
            self,
            shape=self.shape[1:],
            region_offsets=self.region_offsets[1:],
            region_shape=self.region_shape[1:],
            row_numel=math.prod(self.shape[2:]),
            buffer_offset=self.buffer_offset + row * numel,
        )
        start, stop = layout.element_range()
        return (row * numel + start - self.element_range()[0] if stop > start else 0), layout
