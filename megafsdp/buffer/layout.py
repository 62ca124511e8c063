"""Where each tensor of a parameter group lies in its flat buffer: pure arithmetic.

A group's tensors are packed into a few *sub-buffers*, each padded to ``num_shards`` equal shards whose
boundaries never cut a row. Two ranks, rows of 3 and of 4 elements in one sub-buffer (chunk 12, here without
the 32-element rule)::

    shard 0 [ A0 A1 A2 A3 | B0 B1 B2 ]        A: (4, 3), 12 elements at offset 0
    shard 1 [ B3 B4 B5 .  .  .  .  . ]        B: (6, 4), 24 elements at offset 12

Tensors of one row size form a *class*. One sub-buffer for all classes needs shards that are multiples of
the least common multiple of the row sizes, which at many ranks pads a lot; a sub-buffer for each class
pads little but takes more collectives. The planner takes the fewest sub-buffers whose padding is small
(:func:`plan_layout` gives the rule). One-dimensional tensors may be cut anywhere and fill slack.

This file moves no data and calls no collective: every rank computes every rank's layout.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megafsdp.errors import expected
from megafsdp.mesh.placement import Flat, Granularity, TensorAtomic

SHARD_MULTIPLE = 32  # Elements; keeps every shard aligned for vector kernels in any dtype.
_RELATIVE_BOUND = 0.005
_RELATIVE_AIM = 0.001
_SLACK_NUMEL = 8192  # Padding that costs less than another collective.
_LEAST_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the planner must know of one tensor.

    Attributes:
        name: FQN, for messages.
        shape: Shape of the tensor; with several shards of at least one dimension and one element.
        placement: Which elements must stay together.
        row_numel: Elements in a row; None means ``prod(shape[1:])``. Stacked experts (E, N, K) give K.
    """

    name: str
    shape: tuple[int, ...]
    placement: Granularity = Flat()
    row_numel: int | None = None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def granule(self) -> int:
        """Return how many consecutive elements a cut must keep together."""
        rows = math.prod(self.shape[1:]) if self.row_numel is None else self.row_numel
        return max(self.placement.granule_numel(self.shape, rows), 1)


@dataclass(frozen=True, slots=True)
class SubBuffer:
    """One equally sharded piece of a group's flat buffer.

    Attributes:
        gathered_offset: First element in the gathered flat buffer.
        local_offset: First element in a rank's local buffer.
        shard_numel: Elements of one shard.
    """

    gathered_offset: int
    local_offset: int
    shard_numel: int


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
        sub_buffers: In order of their offsets.
        slots: One a tensor, in the order the tensors were given.
    """

    num_shards: int
    sub_buffers: tuple[SubBuffer, ...]
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        """Assert the invariants: disjoint, inside, granules never cut, shards multiples of 32."""
        assert all(s.shard_numel % SHARD_MULTIPLE == 0 for s in self.sub_buffers), "ragged shard"
        ends = [0] * len(self.sub_buffers)
        tensors = [slot for slot in self.slots if slot.spec.numel]
        for slot in sorted(tensors, key=lambda s: (s.sub_buffer, s.offset)):
            shard = self.sub_buffers[slot.sub_buffer].shard_numel
            name, start, stop = slot.spec.name, slot.offset, slot.offset + slot.spec.numel
            assert ends[slot.sub_buffer] <= start, f"{name} overlaps its neighbour"
            assert stop <= shard * self.num_shards, f"{name} leaves its sub-buffer"
            ends[slot.sub_buffer] = stop
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
        return sum(s.shard_numel for s in self.sub_buffers)

    @property
    def padding_numel(self) -> int:
        """Return the elements of the gathered flat buffer that belong to no tensor."""
        return self.gathered_numel - sum(slot.spec.numel for slot in self.slots)

    def gathered_offset(self, index: int) -> int:
        """Return where tensor ``index`` starts in the gathered flat buffer."""
        slot = self.slots[index]
        return self.sub_buffers[slot.sub_buffer].gathered_offset + slot.offset

    def owned_range(self, index: int, shard: int) -> tuple[int, int]:
        """Return the element range [start, stop) of tensor ``index`` that ``shard`` holds."""
        slot = self.slots[index]
        numel, length = slot.spec.numel, self.sub_buffers[slot.sub_buffer].shard_numel
        start = min(max(shard * length - slot.offset, 0), numel)
        return start, min(max((shard + 1) * length - slot.offset, start), numel)

    def local_offset(self, index: int, shard: int) -> int:
        """Return where the owned range of tensor ``index`` starts in the local buffer of ``shard``.

        The value is 0 where the shard owns nothing of the tensor.
        """
        start, stop = self.owned_range(index, shard)
        if start == stop:
            return 0
        slot = self.slots[index]
        sub = self.sub_buffers[slot.sub_buffer]
        return sub.local_offset + slot.offset + start - shard * sub.shard_numel

    def gaps(self) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of the gathered flat buffer that belong to no tensor."""
        order = sorted(range(len(self.slots)), key=self.gathered_offset)
        return _complement(
            [(self.gathered_offset(i), self.slots[i].spec.numel) for i in order],
            self.gathered_numel,
        )

    def local_gaps(self, shard: int) -> list[tuple[int, int]]:
        """Return the ranges [start, stop) of the local buffer of ``shard`` that belong to no tensor."""
        owned = []
        for i in range(len(self.slots)):
            start, stop = self.owned_range(i, shard)
            if stop > start:
                owned.append((self.local_offset(i, shard), stop - start))
        return _complement(sorted(owned), self.shard_numel)

    def fingerprint(self) -> str:
        """Return a hash of the whole layout; equal on all ranks that agree."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def describe(self) -> str:
        """Return the layout as a table for people: a line a sub-buffer and a line a tensor."""
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
                    lines.append(
                        f"  {slot.offset:>12} {spec.name} {tuple(spec.shape)} granule {spec.granule}"
                    )
        return "\n".join(lines)


def plan_layout(
    specs: Sequence[TensorSpec], num_shards: int, *, itemsize: int = 4
) -> FlatLayout:
    """Pack tensors into the fewest sub-buffers whose padding is small.

    Candidates are made by merging row classes one pair at a time, from one sub-buffer a class down to one
    for all. Accepted is the candidate with the fewest sub-buffers whose padding is at most the largest of
    0.1 % of the elements, 8,192 elements, and 1.25 times the least of all candidates, and never more than
    :func:`padding_bound`. Tensors start 256-byte aligned in the gathered buffer, or 16-byte
    aligned where no 256-byte candidate is accepted. Deterministic: equal input, equal layout.

    Args:
        specs: The tensors; if there are several shards, each has at least one dimension and one element.
        num_shards: Number of equal shards.
        itemsize: Bytes of an element of the gathered (compute weight) buffer, for the alignment.

    Returns:
        The layout, its slots in the order of ``specs``.

    Raises:
        ValueError: A tensor without dimension or element is to be cut, there is no tensor, or
            ``num_shards`` is not positive.
    """
    for spec in specs:
        if num_shards > 1 and (not spec.shape or spec.numel == 0):
            raise ValueError(
                expected(
                    "tensors with at least one dimension and one element",
                    f"shape {spec.shape}",
                    where=f"tensor '{spec.name}'",
                    mend="Keep such a tensor whole on every rank",
                )
            )
    if num_shards < 1 or not specs:
        raise ValueError(
            expected(
                "at least one shard and one tensor",
                f"{num_shards} shards and {len(specs)} tensors",
                where="plan_layout()",
                mend="Leave out parameter groups without tensors",
            )
        )
    fine, coarse = max(16 // itemsize, 1), max(256 // itemsize, 1)
    candidates = [
        (alignment, packed)
        for alignment in (coarse, fine)
        for packed in _candidates(specs, num_shards, alignment)
    ]
    numel = sum(spec.numel for spec in specs)
    least = min(packed.total(num_shards) for _, packed in candidates) - numel
    accepted = max(_RELATIVE_AIM * numel, _SLACK_NUMEL, _LEAST_FACTOR * least)
    accepted = max(min(accepted, padding_bound(specs, num_shards, itemsize=itemsize)), least)
    _, best = min(
        (c for c in candidates if c[1].total(num_shards) - numel <= accepted),
        key=lambda c: (-c[0], len(c[1].bins), c[1].total(num_shards)),
    )
    return best.freeze(specs, num_shards)


def padding_bound(specs: Sequence[TensorSpec], num_shards: int, *, itemsize: int = 4) -> float:
    """Return the padding, in elements, that a planned layout never exceeds.

    The larger of 0.5 % of the elements and what equal row-aligned shards cost at least: for each row
    class less than ``num_shards * lcm(granule, 32)``, and for each tensor less than one alignment step.
    Tensor-atomic tensors are left out: a shard holds whole ones, and no bound but the largest applies.
    """
    fine = max(16 // itemsize, 1)
    numel = sum(spec.numel for spec in specs)
    atomic = [s for s in specs if isinstance(s.placement, TensorAtomic)]
    if atomic:
        numel += num_shards * sum(s.numel for s in atomic) * 200
    rows = {s.granule for s in specs if not isinstance(s.placement, TensorAtomic)}
    classes = sum(num_shards * math.lcm(granule, SHARD_MULTIPLE) for granule in rows)
    return max(
        _RELATIVE_BOUND * numel, classes + sum(math.lcm(s.granule, fine) for s in specs)
    )


class _Bin:
    """A sub-buffer while it is being packed: tensors, their offsets, free ranges, shard length."""

    def __init__(self, granules: Sequence[int], num_shards: int, alignment: int) -> None:
        self.chunk = math.lcm(SHARD_MULTIPLE, *granules)
        self.num_shards, self.alignment = num_shards, alignment
        self.placed: dict[int, int] = {}
        self.free: list[tuple[int, int]] = []
        self.end = 0
        self.shard = 0

    def append(self, index: int, spec: TensorSpec) -> None:
        """Place a tensor behind all others."""
        offset = _round_up(self.end, math.lcm(spec.granule, self.alignment))
        if offset > self.end:
            self.free.append((self.end, offset))
        self.placed[index] = offset
        self.end = offset + spec.numel
        self.shard = self.shard_for(self.end)

    def shard_for(self, end: int) -> int:
        """Return the shard length that holds ``end`` elements."""
        return _round_up(-(-end // self.num_shards), self.chunk)

    def fill(self, index: int, spec: TensorSpec) -> bool:
        """Place a tensor that may be cut anywhere into slack, if there is enough."""
        ranges = [*self.free, (self.end, self.num_shards * self.shard)]
        for k, (start, stop) in enumerate(ranges):
            offset = _round_up(start, self.alignment)
            if offset + spec.numel > stop:
                continue
            if k == len(ranges) - 1:
                self.append(index, spec)
            else:
                self.placed[index] = offset
                self.free[k : k + 1] = [(start, offset), (offset + spec.numel, stop)]
            return True
        return False

    def growth(self, spec: TensorSpec) -> int:
        """Return by how many elements the sub-buffer grows when a tensor is appended."""
        end = _round_up(self.end, math.lcm(spec.granule, self.alignment)) + spec.numel
        return self.num_shards * (self.shard_for(end) - self.shard)


@dataclass(slots=True)
class _Packed:
    """A candidate: packed bins."""

    bins: list[_Bin]

    def total(self, num_shards: int) -> int:
        """Return the elements of all sub-buffers."""
        return num_shards * sum(b.shard for b in self.bins)

    def freeze(self, specs: Sequence[TensorSpec], num_shards: int) -> FlatLayout:
        """Return the candidate as a layout."""
        subs, where, local = [], {}, 0
        for k, packed in enumerate(self.bins):
            subs.append(SubBuffer(local * num_shards, local, packed.shard))
            local += packed.shard
            where.update({index: (k, offset) for index, offset in packed.placed.items()})
        slots = tuple(Slot(spec, *where[i]) for i, spec in enumerate(specs))
        return FlatLayout(num_shards, tuple(subs), slots)


def _candidates(specs: Sequence[TensorSpec], num_shards: int, alignment: int) -> list[_Packed]:
    """Pack every partition that pairwise merging visits, with 1-D tensors filled in or apart."""
    atomic = [i for i, s in enumerate(specs) if isinstance(s.placement, TensorAtomic)]
    fillers = [i for i, s in enumerate(specs) if s.granule == 1 and i not in atomic]
    classes: dict[int, list[int]] = {}
    for i, spec in enumerate(specs):
        if i not in atomic and spec.granule > 1:
            classes.setdefault(spec.granule, []).append(i)
    fillers.sort(key=lambda i: (-specs[i].numel, i))

    def pack(granules: Sequence[int]) -> _Bin:
        packed = _Bin(granules, num_shards, alignment)
        for granule in sorted(granules, reverse=True):
            for i in classes[granule]:
                packed.append(i, specs[i])
        return packed

    def complete(partition: list[tuple[int, ...]], is_filled: bool) -> _Packed:
        bins = [pack(granules) for granules in partition]
        if not is_filled or not bins:
            bins.append(_Bin((1,), num_shards, alignment))
        for i in fillers:
            targets = bins if is_filled else bins[-1:]
            if not any(b.fill(i, specs[i]) for b in targets):
                min(targets, key=lambda b: b.growth(specs[i])).append(i, specs[i])
        if atomic:
            bins.append(_pack_atomic(specs, atomic, num_shards, alignment))
        return _Packed([b for b in bins if b.placed])

    partition: list[tuple[int, ...]] = [(granule,) for granule in sorted(classes)]
    found = []
    while True:
        found += [complete(partition, is_filled) for is_filled in (True, False)]
        if len(partition) < 2:
            return found
        partition = _merge_cheapest(partition, lambda granules: pack(granules).shard)


def _merge_cheapest(
    partition: list[tuple[int, ...]], shard_of: Callable[[tuple[int, ...]], int]
) -> list[tuple[int, ...]]:
    """Merge the two sub-buffers whose union grows the shard least."""
    alone = [shard_of(granules) for granules in partition]
    pairs = [(a, b) for a in range(len(partition)) for b in range(a + 1, len(partition))]
    a, b = min(
        pairs, key=lambda p: shard_of(partition[p[0]] + partition[p[1]]) - alone[p[0]] - alone[p[1]]
    )
    rest = [granules for k, granules in enumerate(partition) if k not in (a, b)]
    return [*rest, partition[a] + partition[b]]


def _pack_atomic(
    specs: Sequence[TensorSpec], indices: Sequence[int], num_shards: int, alignment: int
) -> _Bin:
    """Give whole tensors to shards, largest first to the least loaded (longest processing time)."""
    packed = _Bin((1,), num_shards, alignment)
    loads = [(0, shard) for shard in range(num_shards)]
    owners: dict[int, tuple[int, int]] = {}
    for i in sorted(indices, key=lambda i: (-specs[i].numel, i)):
        load, shard = heapq.heappop(loads)
        owners[i] = (shard, load)
        heapq.heappush(loads, (_round_up(load + specs[i].numel, alignment), shard))
    packed.shard = _round_up(max(load for load, _ in loads), packed.chunk)
    packed.placed = {i: shard * packed.shard + load for i, (shard, load) in owners.items()}
    packed.end = num_shards * packed.shard
    return packed


def _complement(ranges: list[tuple[int, int]], numel: int) -> list[tuple[int, int]]:
    """Return what (offset, length) ranges, sorted and disjoint, leave free of [0, numel)."""
    free, end = [], 0
    for offset, length in ranges:
        if offset > end:
            free.append((end, offset))
        end = offset + length
    return [*free, (end, numel)] if end < numel else free


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
