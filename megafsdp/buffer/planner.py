"""Plan layouts: pack tensors into few sub-buffers with little padding.

Tensors of one row size form a *class*. One sub-buffer for all classes may need shards that are
multiples of the least common multiple of the row sizes, which pads a lot with many ranks; a
sub-buffer for each class pads little but takes more collectives. One-dimensional tensors may be cut
anywhere and fill slack. :func:`plan_layout` states the rule of choice. Planning is deterministic
arithmetic: every rank plans by itself and must arrive at the same layout.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megafsdp.buffer.layout import SHARD_MULTIPLE, FlatLayout, Slot, SubBuffer, TensorSpec
from megafsdp.errors import expected
from megafsdp.mesh.placement import Even, TensorAtomic

_RELATIVE_BOUND = 0.005
_RELATIVE_AIM = 0.001
# In elements: padding up to this costs less than another collective.
_SLACK_NUMEL = 8192
_LEAST_FACTOR = 1.25
# In bytes; plan_layout() takes the coarsest alignment that pads little.
_ALIGNMENTS = (256, 128, 64, 32, 16)
# The most shard lengths that tightened() tries; bounds the time of planning.
_MAX_TRIALS = 1024


def plan_layout(
    specs: Sequence[TensorSpec],
    num_shards: int,
    *,
    itemsize: float = 4,
) -> FlatLayout:
    """Pack tensors into the fewest sub-buffers whose padding is small.

    Candidates are made by merging row classes pair by pair, from one sub-buffer per class down to
    one for all, and their shards are shortened as far as no row is cut. Their padding may be at
    most the largest of 0.1 % of the elements, 8,192 elements, and 1.25 times the least padding of
    all candidates, and never more than :func:`padding_bound`. Of these candidates the one with the
    fewest sub-buffers is taken. Tensors start 256-byte aligned in the gathered buffer. If that pads
    more than 0.1 % and a finer alignment pads less, the coarsest alignment, down to 16 bytes, is
    taken that pads at most 0.1 %, or else the least. Equal input gives an equal layout.

    Tensors of the placement :class:`Even` lie in one sub-buffer each.

    Args:
        specs: The tensors; if there are several shards, each has at least one dimension and one
            element.
        num_shards: Number of equal shards.
        itemsize: Bytes per element of the gathered (compute weight) buffer, for the alignment;
            0.5 for two codes per byte.

    Returns:
        The layout, its slots in the order of ``specs``.

    Raises:
        ValueError: A tensor without dimensions or elements is to be cut, there is no tensor, or
            ``num_shards`` is not positive.
    """
    for spec in specs:
        if num_shards > 1 and (not spec.shape or spec.numel == 0):
            raise ValueError(
                expected(
                    "tensors with at least one dimension and one element",
                    f"shape {spec.shape}",
                    where=f"tensor '{spec.name}'",
                    hint="Keep such a tensor whole on every rank",
                )
            )
    if num_shards < 1 or not specs:
        raise ValueError(
            expected(
                "at least one shard and one tensor",
                f"{num_shards} shards and {len(specs)} tensors",
                where="plan_layout()",
                hint="Leave out parameter groups without tensors",
            )
        )
    if any(isinstance(spec.placement, Even) for spec in specs):
        return _evenly(specs, num_shards)
    return _plan(tuple(specs), num_shards, itemsize)


def _evenly(specs: Sequence[TensorSpec], num_shards: int) -> FlatLayout:
    """Give each tensor a sub-buffer of its own, whose shards are the chunks of ``torch.chunk``."""
    assert all(isinstance(spec.placement, Even) for spec in specs), "all tensors are cut evenly"
    subs, local = [], 0
    for spec in specs:
        shard = -(-spec.shape[0] // num_shards) * spec.granule
        # Chunks have any length: padding after them keeps the start of the next one aligned.
        gap = -shard % SHARD_MULTIPLE
        subs.append(SubBuffer(local * num_shards, local, shard, gap))
        local += shard + gap
    slots = tuple(Slot(spec, k, 0) for k, spec in enumerate(specs))
    return FlatLayout(num_shards, tuple(subs), slots)


# Cached: units of one kind share a layout. Their specs are equal, since names are relative to the
# unit.
@functools.lru_cache(maxsize=64)
def _plan(specs: tuple[TensorSpec, ...], num_shards: int, itemsize: float) -> FlatLayout:
    numel = sum(spec.numel for spec in specs)
    # Align in the gathered buffer, because kernels and matrix products read its views.
    steps = dict.fromkeys(max(int(nbytes / itemsize), 1) for nbytes in _ALIGNMENTS)
    tried: dict[int, list[_Packed]] = {}
    for step in steps:
        tried[step] = _Packer(specs, num_shards, step).candidates()
        least = min(packed.total(num_shards) for packed in tried[step]) - numel
        # Finer alignments could then change neither what is accepted nor which one is taken.
        if max(_SLACK_NUMEL, _LEAST_FACTOR * least) <= _RELATIVE_AIM * numel:
            break
    # Shards are equal and of whole rows, so even the best candidate may pad more than the aim. Then
    # up to 1.25 times its padding is accepted, if that saves collectives.
    totals = [packed.total(num_shards) - numel for found in tried.values() for packed in found]
    accepted = max(_RELATIVE_AIM * numel, _SLACK_NUMEL, _LEAST_FACTOR * min(totals))
    bound = padding_bound(specs, num_shards, itemsize=itemsize)
    # The bound must not exclude every candidate: the one with the least padding always passes.
    accepted = max(min(accepted, bound), min(totals))

    def fewest(found: list[_Packed]) -> list[_Packed]:
        fitting = [packed for packed in found if packed.total(num_shards) - numel <= accepted]
        ordered = sorted(fitting, key=lambda packed: (len(packed.bins), packed.total(num_shards)))
        return ordered[:1]

    chosen = [packed for found in tried.values() for packed in fewest(found)]
    # A finer alignment must not cost another collective.
    chosen = [packed for packed in chosen if len(packed.bins) <= len(chosen[0].bins)]
    least = min(packed.total(num_shards) for packed in chosen)
    aim = max((1 + _RELATIVE_AIM) * numel, least)
    best = next(packed for packed in chosen if packed.total(num_shards) <= aim)
    return best.freeze(specs, num_shards)


def padding_bound(specs: Sequence[TensorSpec], num_shards: int, *, itemsize: float = 4) -> float:
    """Return the padding, in elements, that a planned layout never exceeds.

    It is the larger of 0.5 % of the elements and the cost of equal row-aligned shards: for each row
    class less than ``num_shards * lcm(granule, 32)``, and for each tensor less than one alignment
    step. For tensor-atomic tensors ``num_shards`` times their elements and 32 are added, because
    one shard may contain them all.
    """
    fine = max(int(16 / itemsize), 1)
    numel = sum(spec.numel for spec in specs)
    atomic = [s.numel for s in specs if isinstance(s.placement, TensorAtomic)]
    added = num_shards * (sum(atomic) + SHARD_MULTIPLE) if atomic else 0
    rows = {s.granule for s in specs if not isinstance(s.placement, TensorAtomic)}
    classes = sum(num_shards * math.lcm(granule, SHARD_MULTIPLE) for granule in rows)
    return added + max(
        _RELATIVE_BOUND * numel, classes + sum(math.lcm(s.granule, fine) for s in specs)
    )


class _Bin:
    """A sub-buffer that is being packed: tensors, their offsets, free ranges, shard length."""

    def __init__(self, granules: Sequence[int], num_shards: int, alignment: int) -> None:
        # The next sub-buffer starts after all shards of this one, and must be aligned too.
        self.aligned = alignment // math.gcd(alignment, num_shards)
        self.multiple = math.lcm(SHARD_MULTIPLE, self.aligned, *granules)
        self.num_shards, self.alignment = num_shards, alignment
        self.placed: dict[int, int] = {}
        self.free: list[tuple[int, int]] = []
        self.end = 0
        self.shard = 0

    def append(self, index: int, spec: TensorSpec) -> None:
        """Place a tensor after all others."""
        # Shards are multiples of every granule here, so no row of a tensor is cut if its offset is
        # a multiple of its own granule.
        offset = _round_up(self.end, math.lcm(spec.granule, self.alignment))
        if offset > self.end:
            self.free.append((self.end, offset))
        self.placed[index] = offset
        self.end = offset + spec.numel
        self.shard = self.shard_for(self.end)

    def shard_for(self, end: int) -> int:
        """Return the shard length that is enough for ``end`` elements."""
        return _round_up(-(-end // self.num_shards), self.multiple)

    def fill(self, index: int, spec: TensorSpec) -> bool:
        """Place a tensor that may be cut anywhere into slack; return whether there was enough."""
        # Try the free end last, so that it stays one range, in which long tensors fit.
        ranges = [*self.free, (self.end, self.num_shards * self.shard)]
        for k, (start, stop) in enumerate(ranges):
            offset = _round_up(start, self.alignment)
            if offset + spec.numel > stop:
                continue
            self.placed[index] = offset
            if k == len(ranges) - 1:
                self.free.append((start, offset))
                self.end = offset + spec.numel
            else:
                self.free[k : k + 1] = [(start, offset), (offset + spec.numel, stop)]
            return True
        return False

    def tightened(self, specs: Sequence[TensorSpec]) -> _Bin:
        """Return the sub-buffer with the shortest shards found that cut no row.

        For a tensor over one boundary a row must end there, whatever the length of a shard; only
        the rows of tensors over several boundaries must divide a shard.
        """
        if any(isinstance(specs[i].placement, TensorAtomic) for i in self.placed):
            return self
        # The shards together must have room for all elements. A tensor longer than two shards
        # crosses several boundaries, so its rows must divide a shard.
        least = -(-sum(specs[i].numel for i in self.placed) // self.num_shards)
        long = [specs[i].granule for i in self.placed if specs[i].numel > 2 * self.shard]
        step = math.lcm(SHARD_MULTIPLE, self.aligned, *long)
        order = sorted(self.placed, key=self.placed.__getitem__)
        for shard in range(_round_up(least, step), self.shard, step)[:_MAX_TRIALS]:
            packed = _Bin((1,), self.num_shards, self.alignment)
            packed.shard = shard
            if packed.takes(order, specs):
                return packed
        return self

    def takes(self, order: Sequence[int], specs: Sequence[TensorSpec]) -> bool:
        """Place tensors in shards of this length; return whether they fit without a cut row."""
        # Place matrices first, in their order: vectors may be cut anywhere and fill the slack.
        for i in (i for i in order if specs[i].granule > 1):
            offset = self._first_uncut(specs[i])
            if offset is None:
                return False
            if offset > self.end:
                self.free.append((self.end, offset))
            self.placed[i], self.end = offset, offset + specs[i].numel
        vectors = [i for i in order if specs[i].granule == 1]
        vectors.sort(key=lambda i: (-specs[i].numel, i))
        return all(self.fill(i, specs[i]) for i in vectors)

    def _first_uncut(self, spec: TensorSpec) -> int | None:
        """Return the first aligned offset after all others at which no row of a tensor is cut."""
        granule, shard = spec.granule, self.shard
        offset = _round_up(self.end, self.alignment)
        while offset + spec.numel <= self.num_shards * shard:
            cut = (offset // shard + 1) * shard
            stop = offset + spec.numel
            if stop <= cut or (cut - offset) % granule == 0:
                return offset if stop <= cut + shard or shard % granule == 0 else None
            # Move to the next aligned offset with whole rows before the cut, or to the cut itself.
            # Such an offset exists only if the remainder to the cut is a multiple of
            # gcd(alignment, granule).
            divisor = math.gcd(self.alignment, granule)
            steps, rest = divmod((cut - offset) % granule, divisor)
            if rest:
                offset = _round_up(cut, self.alignment)
                continue
            # Solve by a modular inverse: a search would take thousands of steps for a long row.
            period = granule // divisor
            steps = steps * pow(self.alignment // divisor, -1, period) % period
            offset = min(offset + steps * self.alignment, _round_up(cut, self.alignment))
        return None

    def growth(self, spec: TensorSpec) -> int:
        """Return the number of elements by which appending a tensor grows the sub-buffer."""
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


class _Packer:
    """Packs the tensors of a group, by partitions of their row classes."""

    def __init__(self, specs: Sequence[TensorSpec], num_shards: int, alignment: int) -> None:
        self.specs, self.num_shards, self.alignment = specs, num_shards, alignment
        self.atomic: list[int] = []
        self.fillers: list[int] = []
        self.classes: dict[int, list[int]] = {}
        for i, spec in enumerate(specs):
            if isinstance(spec.placement, TensorAtomic):
                self.atomic.append(i)
            elif spec.granule == 1:
                self.fillers.append(i)
            else:
                self.classes.setdefault(spec.granule, []).append(i)
        # Longest first, while there is slack for them. The index breaks ties, alike on all ranks.
        self.fillers.sort(key=lambda i: (-specs[i].numel, i))

    def candidates(self) -> list[_Packed]:
        """Pack each partition that pairwise merging visits; 1-D tensors fill slack or lie apart."""
        partition: list[tuple[int, ...]] = [(granule,) for granule in sorted(self.classes)]
        found = []
        while True:
            # Vectors in their own sub-buffer may shorten the matrices' shards; vectors in the slack
            # of others save that sub-buffer. Neither is always better.
            found += [self.complete(partition, is_filled=is_filled) for is_filled in (True, False)]
            if len(partition) < 2:
                return found
            partition = _merge_cheapest(partition, lambda granules: self.pack(granules).shard)

    def pack(self, granules: Sequence[int]) -> _Bin:
        """Pack some classes into one sub-buffer, the longest rows first."""
        packed = _Bin(granules, self.num_shards, self.alignment)
        # If row sizes divide one another, this order leaves only gaps for the alignment.
        for granule in sorted(granules, reverse=True):
            for i in self.classes[granule]:
                packed.append(i, self.specs[i])
        return packed

    def complete(self, partition: list[tuple[int, ...]], *, is_filled: bool) -> _Packed:
        """Pack a partition, and add the tensors that are in no class: 1-D and atomic ones."""
        bins = [self.pack(granules) for granules in partition]
        if not is_filled or not bins:
            bins.append(_Bin((1,), self.num_shards, self.alignment))
        targets = bins if is_filled else bins[-1:]
        for i in self.fillers:
            spec = self.specs[i]
            if not any(b.fill(i, spec) for b in targets):
                growths = [b.growth(spec) for b in targets]
                targets[growths.index(min(growths))].append(i, spec)
        if self.atomic:
            bins.append(_pack_atomic(self.specs, self.atomic, self.num_shards, self.alignment))
        return _Packed([b.tightened(self.specs) for b in bins if b.placed])


def _merge_cheapest(
    partition: list[tuple[int, ...]], shard_of: Callable[[tuple[int, ...]], int]
) -> list[tuple[int, ...]]:
    """Merge the two sub-buffers whose union grows the shard least."""
    # Pack every pair anew, which is cheap: a model has few row classes.
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
    """Give whole tensors to shards: the largest first, each to the least loaded shard (LPT)."""
    packed = _Bin((1,), num_shards, alignment)
    loads = [(0, shard) for shard in range(num_shards)]
    owners: dict[int, tuple[int, int]] = {}
    for i in sorted(indices, key=lambda i: (-specs[i].numel, i)):
        load, shard = heapq.heappop(loads)
        owners[i] = (shard, load)
        heapq.heappush(loads, (_round_up(load + specs[i].numel, alignment), shard))
    packed.shard = _round_up(max(load for load, _ in loads), packed.multiple)
    packed.placed = {i: shard * packed.shard + load for i, (shard, load) in owners.items()}
    packed.end = num_shards * packed.shard
    return packed


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
