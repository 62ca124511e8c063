"""What rehearsed units hold: a stand-in for a group's weights, and the meter that counts for all.

It repeats which buffers main and compute weights have, and when they come and go; when a weight is
gathered and released is the business of :mod:`megafsdp.fsdp.estimate.rehearsal`.
"""

from __future__ import annotations

from collections import Counter

import torch

from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.estimate.blueprint import PlannedGroup, ShardDegrees
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD

NEIGHBOURS = "neighbours"  # Some ranks of the inner axis, among which a unit is kept divided.


class Meter:
    """Bytes alive, and the collectives of the running step.

    Attributes:
        degrees: The ranks.
        all_axes: Name of all axes together.
        ledger: Bytes alive.
        calls: Collectives by (mesh axis, kind).
        nbytes: Their bytes, on the full-size side.
    """

    def __init__(self, degrees: ShardDegrees) -> None:
        self.degrees = degrees
        self.all_axes = DP_SHARD if degrees.dp_outer == 1 else f"{DP_OUTER} x {DP_SHARD}"
        self.ledger = ByteLedger()
        self.start()

    def start(self) -> None:
        """Begin a step."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self.ledger.reset_peak()

    def count(self, axis: str, kind: str, nbytes: int) -> None:
        """Count a collective."""
        self.calls[axis, kind] += 1
        self.nbytes[axis, kind] += nbytes


class RehearsedWeight:
    """Stands in for the main and compute weights of a group.

    Args:
        group: The group.
        meter: Counts.

    Attributes:
        is_kept: Whether the full buffer is kept between uses.
        is_stale: Whether the main weight has changed since it was gathered.
        is_allocated: Whether the full buffer is there.
    """

    def __init__(self, group: PlannedGroup, meter: Meter) -> None:
        layout, dtypes, degrees = group.layout, group.dtypes, meter.degrees
        self._meter = meter
        self._is_sharded = group.is_sharded
        self.is_kept = group.strategy.has_persistent_compute_weight
        self._full_nbytes = layout.gathered_numel * dtypes.compute.itemsize
        is_cast = dtypes.compute != dtypes.main
        # Cut over both axes, the inner shard is kept and gathered over the outer axis.
        self._is_kept_shard = group.is_sharded and degrees.is_outer_sharded
        self._inner_nbytes = self._full_nbytes // degrees.dp_shard
        piece_nbytes = layout.shard_numel * dtypes.compute.itemsize
        has_copy = group.is_offloaded and group.is_sharded
        cast_nbytes = piece_nbytes if is_cast and not has_copy else 0
        # A cast that no step has written goes straight into the full buffer.
        self._encoded_nbytes = 0 if self._is_kept_shard else cast_nbytes
        self._outer_source_nbytes = cast_nbytes if self._is_kept_shard else 0
        # Where a cast is read once a step, a step may write it along with the main weight.
        is_read_once = group.is_sharded and (self.is_kept or self._is_kept_shard)
        self._main_dtype = dtypes.main if cast_nbytes and is_read_once else None
        self._is_in_flight = self._is_joining = self._is_encoded = False
        self._slice_nbytes = 0
        self.is_stale = True
        self.is_allocated = self.is_kept
        if has_copy:
            # What is gathered from, in place of the main weight.
            meter.ledger.debit(Category.COMPUTE_WEIGHT, piece_nbytes)
        elif not (group.is_offloaded and is_cast):
            meter.ledger.debit(Category.MAIN_WEIGHT, layout.shard_numel * dtypes.main.itemsize)
        if self._is_kept_shard:
            meter.ledger.debit(Category.COMPUTE_WEIGHT, self._inner_nbytes)
        if self.is_kept and (group.is_sharded or is_cast):
            meter.ledger.debit(Category.COMPUTE_WEIGHT, self._full_nbytes)

    def note_step(self, *, casts_from: torch.dtype | None) -> None:
        """Note that the main weight has changed.

        Args:
            casts_from: Dtype of the main weights that the optimizer casts as it steps.
        """
        self.is_stale = True
        if casts_from is not None and casts_from == self._main_dtype and not self._is_encoded:
            self._is_encoded = True
            nbytes = self._encoded_nbytes + self._outer_source_nbytes
            self._meter.ledger.debit(Category.COMPUTE_WEIGHT, nbytes)

    def join(self) -> None:
        """Note the gather of a stale shard over the outer axis, if that divides it."""
        if self._is_kept_shard and self.is_stale:
            self.is_stale, self._is_joining = False, True
            if not self._is_encoded:
                self._meter.ledger.debit(Category.COMPUTE_WEIGHT, self._outer_source_nbytes)
            self._is_encoded = False
            self._meter.count(DP_OUTER, "all_gather", self._inner_nbytes)

    def start_unshard(self, *, in_backward: bool) -> None:
        """Note the gather of a buffer that is not current, and allocate it."""
        if self._is_in_flight or not self._is_sharded:
            return
        was_stale, self.is_stale = self.is_stale, False
        if self.is_allocated and not was_stale:
            return
        ledger = self._meter.ledger
        if self._is_joining:
            ledger.credit(Category.COMPUTE_WEIGHT, self._outer_source_nbytes)
            self._is_joining = False
        if not self.is_allocated:
            ledger.debit(Category.UNSHARDED, self._full_nbytes)
        self.is_allocated = self._is_in_flight = True
        axis = NEIGHBOURS if self._slice_nbytes else DP_SHARD
        self._read_nbytes = self._slice_nbytes
        if not self._slice_nbytes:
            self._read_nbytes = self._encoded_nbytes if self._is_encoded else 0
            self._is_encoded = False
        elif in_backward:
            self._slice_nbytes = 0
        else:
            self._read_nbytes = 0
        self._meter.count(axis, "all_gather", self._full_nbytes)

    def finish_unshard(self) -> None:
        """Free what the gather read."""
        if self._is_in_flight:
            self._meter.ledger.credit(Category.COMPUTE_WEIGHT, self._read_nbytes)
            self._is_in_flight = False

    def release(self) -> None:
        """Free the full buffer, unless it is kept."""
        if self.is_allocated and not self.is_kept:
            self.finish_unshard()
            self._meter.ledger.credit(Category.UNSHARDED, self._full_nbytes)
            self.is_allocated = False

    def release_to_slices(self, num_ranks: int) -> None:
        """Free the full buffer but for this rank's slice among neighbours."""
        if self.is_allocated and not self.is_kept:
            self._slice_nbytes = self._full_nbytes // num_ranks
            self._meter.ledger.debit(Category.COMPUTE_WEIGHT, self._slice_nbytes)
            self.release()
