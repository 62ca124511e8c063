"""The compute weight of a parameter group: its buffers, their gather and their release.

A :class:`ComputeWeight` turns the group's main weight into what forward and backward read. Its
recipe names the buffers; for each there is a full one, gathered between uses, and a shard to gather
from:

* the main weight itself where the recipe casts to the main dtype,
* a temporary, filled at each gather, where it casts to another one,
* a kept one, encoded once after each change of the main weight, for every other recipe.

Under ZeRO-1 and ZeRO-2 the full buffers are kept and gathered once after each change of the main
weight. A replicated group keeps them too and encodes them in place; nothing is gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megafsdp.buffer.collectives import Pending
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.recipe import BufferSpec, CastRecipe, Recipe


class ComputeWeight:
    """Buffers of one group's compute weight.

    Args:
        recipe: What the buffers are.
        main_weight: The group's main weight, a shard or the whole.
        group: Ranks to gather over; None for a replicated group.
        is_kept: True to keep the full buffers between uses.
        device: Where the buffers live.
        ledger: Counts their bytes.
    """

    def __init__(
        self,
        recipe: Recipe,
        main_weight: DBuffer,
        *,
        group: dist.ProcessGroup | None,
        is_kept: bool,
        device: torch.device,
        ledger: ByteLedger,
    ) -> None:
        self.recipe = recipe
        self.is_stale = True
        self._main = main_weight
        self._group = group
        self._is_kept = is_kept or group is None
        self._device, self._ledger = device, ledger
        self._is_cast = isinstance(recipe, CastRecipe)
        is_same = self._is_cast and recipe.specs[0].dtype == main_weight.flat.dtype
        self._is_main_itself = is_same and group is None
        self._layouts = {s.name: main_weight.layout.with_block(s.block) for s in recipe.specs}
        self._shards: dict[str, DBuffer] = {}
        if is_same:
            self._shards = {recipe.specs[0].name: main_weight}
        elif group is not None and not self._is_cast:
            self._shards = {s.name: self._new_shard(s) for s in recipe.specs}
        category = Category.COMPUTE_WEIGHT if self._is_kept else Category.UNSHARDED
        self._full = {
            s.name: main_weight if self._is_main_itself else self._new_full(s, category)
            for s in recipe.specs
        }
        self._pending: Pending | None = None
        self._in_flight: list[tuple[DBuffer, int]] = []
        self._sources: dict[str, DBuffer] = {}

    def _new_shard(self, spec: BufferSpec) -> DBuffer:
        return self._new_buffer(spec, Residence.SHARD, Category.COMPUTE_WEIGHT)

    def _new_full(self, spec: BufferSpec, category: Category) -> DBuffer:
        return self._new_buffer(spec, Residence.REPLICATE, category)

    def _new_buffer(self, spec: BufferSpec, residence: Residence, category: Category) -> DBuffer:
        return DBuffer(
            self._layouts[spec.name],
            residence,
            shard=self._main.shard,
            dtype=spec.dtype,
            device=self._device,
            ledger=self._ledger,
            category=category,
        )

    def assemble(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return tensor ``index`` in full, as the recipe reads it; aliases the full buffers."""
        return self.recipe.assemble(shape, {n: b.tensor(index) for n, b in self._full.items()})

    @property
    def is_unsharded(self) -> bool:
        """Tell whether a full buffer that is not kept anyway is allocated."""
        return not self._is_kept and any(b.storage.is_allocated for b in self._full.values())

    @property
    def needs_statistics(self) -> bool:
        """Tell whether the next encoding must first agree with other ranks."""
        return self.is_stale and self.recipe.num_statistics > 0

    def statistics(self) -> torch.Tensor:
        """Return this rank's statistics of all tensors, ``(tensors * num_statistics,)`` fp32."""
        indices = range(len(self._main.layout.slots))
        return torch.cat([self.recipe.statistics(self._main.tensor(i)) for i in indices])

    def refresh(self, statistics: torch.Tensor | None = None) -> None:
        """Encode kept buffers from the main weight; local.

        Args:
            statistics: What :meth:`statistics` returned, combined over ranks.
        """
        self.is_stale = False
        targets = self._shards if self._group is not None else self._full
        if self._is_main_itself or not targets or self._main in targets.values():
            return
        with torch.no_grad(), _versions_kept(list(targets.values())):
            if self.recipe.is_elementwise:
                outputs = {name: buffer.flat for name, buffer in targets.items()}
                self.recipe.encode(self._main.flat, outputs, statistics)
                return
            n = self.recipe.num_statistics
            for i in range(len(self._main.layout.slots)):
                own = None if statistics is None else statistics[i * n : (i + 1) * n]
                outputs = {name: buffer.tensor(i) for name, buffer in targets.items()}
                self.recipe.encode(self._main.tensor(i), outputs, own)

    def start_unshard(self, *, in_backward: bool, label: str) -> None:
        """Issue the gather of the buffers that are needed and not current; collective."""
        if self._pending is not None:
            return
        was_stale = self.is_stale
        if was_stale:
            self.refresh()
        if self._group is None:
            return
        needed = [
            s
            for s in self.recipe.specs
            if s.is_needed(in_backward=in_backward)
            and (was_stale or not self._full[s.name].storage.is_allocated)
        ]
        if not needed:
            return
        self._sources = {s.name: self._shards.get(s.name) or self._cast(s) for s in needed}
        targets = [self._full[s.name] for s in needed]
        for full in targets:
            full.storage.allocate()
        self._in_flight = [(full, full.flat._version) for full in targets]
        with torch.no_grad():
            self._pending = gather_buffers(
                targets, list(self._sources.values()), group=self._group, label=label
            )

    def _cast(self, spec: BufferSpec) -> DBuffer:
        source = self._new_shard(spec)
        with torch.no_grad():
            self.recipe.encode(self._main.flat, {spec.name: source.flat}, None)
        return source

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the full buffers may be read."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._sources = {}
        # An asynchronous gather bumps the version counter when it completes, and tensors that
        # autograd saved in forward would be taken for modified; their bytes are the same.
        for full, version in self._in_flight:
            torch._C._autograd._unsafe_set_version_counter((full.flat,), (version,))
        self._in_flight = []

    def release(self) -> None:
        """Free the full buffers, unless they are kept."""
        if self.is_unsharded:
            self.finish_unshard()
            for full in self._full.values():
                full.storage.release()


def _versions_kept(buffers: list[DBuffer]) -> torch.autograd._unsafe_preserve_version_counter:
    return torch.autograd._unsafe_preserve_version_counter(tuple(b.flat for b in buffers))
