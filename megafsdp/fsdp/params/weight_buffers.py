"""How long the buffers of a compute weight are, and which part of it each holds on this rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.recipe import BufferSpec


class WeightBuffers:
    """Makes the buffers of one group's compute weight, on the device.

    Args:
        main_weight: The group's main weight, a shard or the whole.
        axes: Ranks that divide or replicate the group.
        device: Where the buffers live.
        ledger: Counts their bytes.
    """

    def __init__(
        self,
        main_weight: DBuffer,
        axes: DataParallelAxes,
        *,
        device: torch.device,
        ledger: ByteLedger,
    ) -> None:
        self._layout, self._shard = main_weight.layout, main_weight.shard
        self._axes = axes
        self._device, self._ledger = device, ledger

    def new_piece(self, spec: BufferSpec) -> DBuffer:
        """Make a buffer that lies like the main weight."""
        return self._new(spec, Residence.SHARD, Category.COMPUTE_WEIGHT, 1, self._shard)

    def new_shard(self, spec: BufferSpec) -> DBuffer:
        """Make what this rank of the inner axis gathers from."""
        merged, shard = self._axes.num_pieces, self._axes.gathered_shard
        return self._new(spec, Residence.SHARD, Category.COMPUTE_WEIGHT, merged, shard)

    def new_full(self, spec: BufferSpec, category: Category) -> DBuffer:
        """Make what a gather fills."""
        return self._new(spec, Residence.REPLICATE, category, self._axes.num_pieces, 0)

    def slice_of(self, full: DBuffer, spec: BufferSpec, group: dist.ProcessGroup) -> DBuffer:
        """Return this rank's slice of a full buffer, to gather from over a group; a copy.

        Args:
            full: The buffer.
            spec: What it holds.
            group: Ranks that keep one slice each, in order: neighbours on the inner axis.
        """
        index, merged = group.rank(), self._axes.group.size() // group.size()
        merged *= self._axes.num_pieces
        kept = self._new(spec, Residence.SHARD, Category.COMPUTE_WEIGHT, merged, index)
        with torch.no_grad():
            for own, whole in zip(kept.pieces(), full.pieces(), strict=True):
                own.copy_(whole.narrow(0, index * own.numel(), own.numel()))
        return kept

    def _new(
        self, spec: BufferSpec, residence: Residence, category: Category, merged: int, shard: int
    ) -> DBuffer:
        return DBuffer(
            self._layout.with_block(spec.block).merged(merged),
            residence,
            shard=shard,
            dtype=spec.dtype,
            device=self._device,
            ledger=self._ledger,
            category=category,
        )
