"""Which part of a tensor a rank holds: an element range, and the boxes that cover it.

An :class:`UnevenLayout` is the tensor-free description that an uneven DTensor carries: a box of the
global tensor (all of it, or a tensor-parallel part), and how that box lies in an equally sharded
sub-buffer. From it every rank knows every rank's range, so checkpoints and full tensors need no
exchange of metadata. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """An axis-aligned part of a tensor.

    Attributes:
        offsets: First index in each dimension.
        sizes: Extent in each dimension, all positive.
        start: Position of the box's first element within the element range it came from.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cover the flat range [start, stop) of a row-major tensor by disjoint boxes, in order.

    At most ``2 * len(shape) - 1`` boxes; none for an empty range. Example: [3, 9) of a (4, 4)
    tensor is the end of row 0, the whole of row 1 and the start of row 2.
    """
    if stop <= start:
        return []
    if not shape:
        return [Box((), (), 0)]
    if len(shape) == 1:
        return [Box((start,), (stop - start,), 0)]
    row_numel = math.prod(shape[1:])
    first, head = divmod(start, row_numel)
    last, tail = divmod(stop, row_numel)
    if first == last:
        return _within_row(shape, first, head, tail, 0)
    boxes = []
    if head:
        boxes += _within_row(shape, first, head, row_numel, 0)
        first += 1
    if last > first:
        offsets, sizes = (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
        boxes.append(Box(offsets, sizes, first * row_numel - start))
    return boxes + _within_row(shape, last, 0, tail, last * row_numel - start)


def _within_row(shape: tuple[int, ...], row: int, start: int, stop: int, base: int) -> list[Box]:
    return [
        Box((row, *box.offsets), (1, *box.sizes), base + box.start)
        for box in boxes_of_range(shape[1:], start, stop)
    ]


@dataclass(frozen=True, slots=True)
class UnevenLayout:
    """How one tensor is spread over the shards of a sub-buffer.

    Attributes:
        shape: Shape of the global tensor.
        box_offsets: Where the part that is sharded starts in the global tensor.
        box_shape: Shape of that part; equal to ``shape`` without tensor parallelism.
        row_numel: Elements in a row; no row is cut.
        buffer_offset: First element of the part within the sub-buffer.
        shard_numel: Elements of one shard of the sub-buffer.
        num_shards: Number of shards.
        shard: The shard this rank holds.
    """

    shape: tuple[int, ...]
    box_offsets: tuple[int, ...]
    box_shape: tuple[int, ...]
    row_numel: int
    buffer_offset: int
    shard_numel: int
    num_shards: int
    shard: int

    @property
    def numel(self) -> int:
        """Return the elements of the sharded part."""
        return math.prod(self.box_shape)

    def element_range(self, shard: int | None = None) -> tuple[int, int]:
        """Return the range [start, stop) of the sharded part that a shard holds (default: own)."""
        index = self.shard if shard is None else shard
        start = min(max(index * self.shard_numel - self.buffer_offset, 0), self.numel)
        return start, min(
            max((index + 1) * self.shard_numel - self.buffer_offset, start), self.numel
        )

    def local_shape(self, shard: int | None = None) -> tuple[int, ...]:
        """Return the shape of a shard's local tensor: its rows, as the global tensor has them."""
        start, stop = self.element_range(shard)
        trailing = self.box_shape[1:]
        if math.prod(trailing) != self.row_numel:
            trailing = (self.row_numel,)
        return ((stop - start) // self.row_numel, *trailing)

    def boxes(self, shard: int | None = None) -> list[Box]:
        """Return the boxes of the *global* tensor that a shard holds; none for an empty shard."""
        return [
            Box(
                tuple(o + b for o, b in zip(box.offsets, self.box_offsets, strict=True)),
                box.sizes,
                box.start,
            )
            for box in boxes_of_range(self.box_shape, *self.element_range(shard))
        ]
