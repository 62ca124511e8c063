"""Layouts: the places of a parameter group's tensors in its flat buffer; pure arithmetic.

A group's tensors are packed into a few *sub-buffers*, each padded to ``num_shards`` equal shards
whose boundaries never cut a row. Two ranks, rows of 3 and of 4 elements in one sub-buffer
(shards are multiples of 12, here without the 32-element rule)::

    shard 0 [ A0 A1 A2 A3 | B0 B1 B2 ]        A: (4, 3), 12 elements at offset 0
    shard 1 [ B3 B4 B5 .  .  .  .  . ]        B: (6, 4), 24 elements at offset 12

This file defines layouts and answers questions about them; :mod:`megafsdp.buffer.planner` makes
them. It moves no data and calls no collective: every rank computes every rank's layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megafsdp.errors import expected
from megafsdp.mesh.placement import Flat, Granularity

# In elements; aligns every shard for vector kernels in any dtype.
SHARD_MULTIPLE = 32
_ROWS = Flat()


def row_numel_of(shape: Sequence[int]) -> int:
    """Return the elements in a row of a parameter: the least that a cut keeps together.

    For a stack of matrices (E, N, K) it is a row of one matrix, as if the shape were (E * N, K).
    With whole matrices as rows, more ranks than matrices would pad more than the stack itself.
    """
    return shape[-1] if len(shape) == 3 else math.prod(shape[1:])


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The planner's description of one tensor.

    Attributes:
        name: FQN, for messages.
        shape: Shape of the tensor; with several shards, at least one dimension and one element.
        placement: Which elements must stay together.
        row_numel: Elements in a row; None means ``prod(shape[1:])``. For a parameter use
            :func:`row_numel_of`.
    """

    name: str
    shape: tuple[int, ...]
    placement: Granularity = _ROWS
    row_numel: int | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def granule(self) -> int:
        """Return how many consecutive elements a cut must keep together."""
        rows = math.prod(self.shape[1:]) if self.row_numel is None else self.row_numel
        # At least 1: a tensor without elements has rows of 0, and callers divide by the granule.
        return max(self.placement.granule_numel(self.shape, rows), 1)


@dataclass(frozen=True, slots=True)
class SubBuffer:
    """One equally sharded piece of a group's flat buffer.

    Attributes:
        gathered_offset: First element in the gathered flat buffer.
        local_offset: First element in a rank's local buffer.
        shard_numel: Elements of one shard.
        gap_numel: Elements of padding after it in a local buffer, which align the next sub-buffer.
            The gathered buffer has as many times more as there are shards.
    """

    gathered_offset: int
    local_offset: int
    shard_numel: int
    gap_numel: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor.

    Attributes:
        spec: The tensor.
        sub_buffer: Index of its sub-buffer.
        offset: First element within the sub-buffer.
    """

    spec: TensorSpec
    sub_buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The layout of one parameter group over ``num_shards`` shards; validated on construction.

    Attributes:
        num_shards: Number of equal shards of each sub-buffer.
        sub_buffers: The sub-buffers, in order of their offsets.
        slots: One slot per tensor, in the order in which the tensors were given.
    """

    num_shards: int
    sub_buffers: tuple[SubBuffer, ...]
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        """Assert the invariants: disjoint, inside, granules never cut."""
        # A wrong layout would silently mix the rows of tensors on some ranks. So every layout is
        # checked, including those made by merged() and packed().
        ends = [0] * len(self.sub_buffers)
        tensors = [slot for slot in self.slots if slot.spec.numel]
        for slot in sorted(tensors, key=lambda s: (s.sub_buffer, s.offset)):
            shard = self.sub_buffers[slot.sub_buffer].shard_numel
            name, start, stop = slot.spec.name, slot.offset, slot.offset + slot.spec.numel
            assert ends[slot.sub_buffer] <= start, f"{name} overlaps its neighbour"
            assert stop <= shard * self.num_shards, f"{name} leaves its sub-buffer"
            ends[slot.sub_buffer] = stop
            # If a tensor crosses a boundary, a row must end there. If it crosses several, the shard
            # length must also be a multiple of the row.
            first_cut = (start // shard + 1) * shard
            if first_cut < stop:
                granule = slot.spec.granule
                assert (first_cut - start) % granule == 0, f"{name} is cut inside a row"
                assert first_cut + shard >= stop or shard % granule == 0, f"{name} is cut"

    @property
    def gathered_numel(self) -> int:
        """Return the elements of the gathered flat buffer, padding included."""
        return self.num_shards * self.shard_numel

    @property
    def shard_numel(self) -> int:
        """Return the elements of one rank's local buffer, padding included."""
        return sum(s.shard_numel + s.gap_numel for s in self.sub_buffers)

    @property
    def padding_numel(self) -> int:
        """Return the elements of the gathered flat buffer that belong to no tensor."""
        return self.gathered_numel - sum(slot.spec.numel for slot in self.slots)

    def gathered_offset(self, index: int) -> int:
        """Return the offset of tensor ``index`` in the gathered flat buffer."""
        slot = self.slots[index]
        return self.sub_buffers[slot.sub_buffer].gathered_offset + slot.offset

    def owned_range(self, index: int, shard: int) -> tuple[int, int]:
        """Return the element range [start, stop) of tensor ``index`` that lies in ``shard``."""
        slot = self.slots[index]
        # Clamp on both sides: a shard before or after the tensor gets an empty range.
        numel, length = slot.spec.numel, self.sub_buffers[slot.sub_buffer].shard_numel
        start = min(max(shard * length - slot.offset, 0), numel)
        return start, min(max((shard + 1) * length - slot.offset, start), numel)

    def local_offset(self, index: int, shard: int) -> int:
        """Return the offset in ``shard``'s local buffer of its range of tensor ``index``.

        The value is 0 if the shard owns nothing of the tensor.
        """
        start, stop = self.owned_range(index, shard)
        # An empty range may start beyond the local buffer, where no view can be made.
        if start == stop:
            return 0
        slot = self.slots[index]
        sub = self.sub_buffers[slot.sub_buffer]
        return sub.local_offset + slot.offset + start - shard * sub.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of the gathered flat buffer that belong to no tensor."""
        # Slots are in the order of the parameters, not of their offsets.
        order = sorted(range(len(self.slots)), key=self.gathered_offset)
        return _complement(
            [(self.gathered_offset(i), self.slots[i].spec.numel) for i in order],
            self.gathered_numel,
        )

    def local_gaps(self, shard: int) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of ``shard``'s local buffer that belong to no tensor."""
        owned = []
        for i in range(len(self.slots)):
            start, stop = self.owned_range(i, shard)
            if stop > start:
                owned.append((self.local_offset(i, shard), stop - start))
        return _complement(sorted(owned), self.shard_numel)

    def merged(self, factor: int) -> FlatLayout:
        """Return the layout in which every ``factor`` consecutive shards become one.

        The gathered buffer is the same; only the shards are larger.

        Raises:
            ValueError: ``factor`` does not divide the number of shards.
        """
        if factor == 1:
            return self
        if self.num_shards % factor:
            raise ValueError(
                expected(
                    f"a divisor of {self.num_shards} shards",
                    factor,
                    where="FlatLayout.merged()",
                    hint="Merge as many shards as one mesh axis has ranks",
                )
            )
        # Offsets in the gathered buffer stay, so a gather over a second axis can follow the first.
        sub_buffers = tuple(
            SubBuffer(
                s.gathered_offset,
                s.local_offset * factor,
                s.shard_numel * factor,
                s.gap_numel * factor,
            )
            for s in self.sub_buffers
        )
        return FlatLayout(self.num_shards // factor, sub_buffers, self.slots)

    def packed(self, factor: int) -> FlatLayout:
        """Return the layout of a buffer with one element for every ``factor`` elements of this.

        Cuts stay between the same rows. Row lengths must be multiples of the factor.
        """
        if factor == 1:
            return self
        slots = []
        for slot in self.slots:
            spec = slot.spec
            assert spec.granule % factor == 0, f"{spec.name} has rows of whole elements"
            assert slot.offset % factor == 0, f"{spec.name} starts with a whole element"
            # The granules become the rows.
            shape = (spec.numel // spec.granule, spec.granule // factor)
            slots.append(Slot(TensorSpec(spec.name, shape), slot.sub_buffer, slot.offset // factor))
        # Shards are multiples of SHARD_MULTIPLE, hence of the factor.
        sub_buffers = tuple(
            SubBuffer(
                s.gathered_offset // factor,
                s.local_offset // factor,
                s.shard_numel // factor,
                s.gap_numel // factor,
            )
            for s in self.sub_buffers
        )
        return FlatLayout(self.num_shards, sub_buffers, tuple(slots))

    def fingerprint(self) -> str:
        """Return a digest of the whole layout; equal on all ranks that agree."""
        # Digest the repr(), which is equal on all machines: hash() of strings is not.
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self) -> str:
        """Return the layout as a readable table, one line per sub-buffer and per tensor."""
        percent = 100 * self.padding_numel / max(self.gathered_numel - self.padding_numel, 1)
        lines = [
            f"{len(self.slots)} tensors, {self.num_shards} shards of {self.shard_numel} elements, "
            f"padding {self.padding_numel} ({percent:.2f} %)"
        ]
        for k, sub in enumerate(self.sub_buffers):
            lines.append(f"sub-buffer {k} at {sub.gathered_offset}: shard {sub.shard_numel}")
            for slot in self.slots:
                if slot.sub_buffer == k:
                    spec = slot.spec
                    shape = tuple(spec.shape)
                    lines.append(f"  {slot.offset:>12} {spec.name} {shape} granule {spec.granule}")
        return "\n".join(lines)


def _complement(ranges: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Return the ranges of [0, numel) outside sorted, disjoint (offset, length) ranges."""
    free, end = [], 0
    for offset, length in ranges:
        if offset > end:
            free.append((end, offset))
        end = max(end, offset + length)
    return [*free, (end, numel)] if end < numel else free
