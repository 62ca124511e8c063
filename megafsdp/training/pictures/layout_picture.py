"""A layout as rectangles: shards from top to bottom, elements of a shard from left to right.

A tensor lies in consecutive elements of a sub-buffer, so it covers the end of one shard, some
shards whole and the beginning of another: three rectangles at most, however many ranks there are.
Two shards of 12, A with 12 elements and B with 24 over three of them::

    shard 0 [ A A A B ]        A: shard 0, columns 0 to 3
    shard 1 [ B B B B ]        B: shard 0, column 3; shard 1, columns 0 to 4; shard 2, column 0
    shard 2 [ B . . . ]        padding: shard 2, columns 1 to 4
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megafsdp.buffer.layout import FlatLayout

PADDING = "padding"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Equal columns of consecutive shards.

    Attributes:
        tensor: Name of the tensor, or PADDING.
        shape: Shape of the tensor; empty for padding.
        numel: Elements of the whole tensor; for padding those of the rectangle.
        first_shard: The first shard.
        stop_shard: The shard after the last one.
        start: First element in the local buffer of each.
        stop: The element after the last one.
    """

    tensor: str
    shape: str
    numel: int
    first_shard: int
    stop_shard: int
    start: int
    stop: int

    @property
    def area(self) -> int:
        """Return the elements that it covers."""
        return (self.stop_shard - self.first_shard) * (self.stop - self.start)


def rectangles_of(layout: FlatLayout) -> list[Rectangle]:
    """Return rectangles that cover each element of each shard once, by what it is for."""
    found = []
    for slot in layout.slots:
        shape = " x ".join(map(str, slot.spec.shape))
        length = layout.sub_buffers[slot.sub_buffer].shard_numel
        offset = layout.sub_buffers[slot.sub_buffer].local_offset
        for rows, start, stop in _cut(slot.offset, slot.offset + slot.spec.numel, length):
            place = (rows.start, rows.stop, offset + start, offset + stop)
            found.append(Rectangle(slot.spec.name, shape, slot.spec.numel, *place))
    for first, stop_element in layout.gaps():
        found += _padding(layout, first, stop_element)
    return found


def _padding(layout: FlatLayout, first: int, stop_element: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a gap of the gathered buffer, which may span sub-buffers."""
    for sub in layout.sub_buffers:
        end = sub.gathered_offset + sub.shard_numel * layout.num_shards
        begin, stop = max(first, sub.gathered_offset), min(stop_element, end)
        if begin < stop:
            own = begin - sub.gathered_offset, stop - sub.gathered_offset
            for rows, left, right in _cut(*own, sub.shard_numel):
                numel = (right - left) * len(rows)
                place = (rows.start, rows.stop, sub.local_offset + left, sub.local_offset + right)
                yield Rectangle(PADDING, "", numel, *place)


def _cut(start: int, stop: int, length: int) -> Iterator[tuple[range, int, int]]:
    """Yield the shards that a range covers and the columns in them: an end, whole ones, a start."""
    if start == stop:
        return
    first, last = start // length, (stop - 1) // length
    left, right = start - first * length, stop - last * length
    if first == last:
        yield range(first, first + 1), left, right
        return
    if left:
        yield range(first, first + 1), left, length
        first += 1
    if right < length:
        if first < last:
            yield range(first, last), 0, length
        yield range(last, last + 1), 0, right
    else:
        yield range(first, last + 1), 0, length
