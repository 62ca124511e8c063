"""The compute weight of a parameter group: its buffers, their gather and their release.

A :class:`ComputeWeight` turns the group's main weight into what forward and backward read. Its
recipe names the buffers; for each there is a full one, gathered between uses, and a shard to gather
from:

* the main weight itself where the recipe casts to the main dtype,
* this rank's own part of the full buffer, filled at each gather, where it casts to another one,
* a kept one, encoded once after each change of the main weight, for every other recipe,
* a kept one too where an outer axis divides the main weight (HFSDP): encoded in pieces, which are
  joined over the outer axis once after each change,
* a kept one too, the *device copy*, where an optimizer has moved the main weight to the host;
  whoever changes the main weight may write the copy as well,
* a temporary, copied from the host at each gather, where the main weight lives there
  (:mod:`megafsdp.fsdp.params.host_params`), whatever its dtype.

Under ZeRO-1 and ZeRO-2 the full buffers are kept and gathered once after each change of the main
weight. A replicated group keeps them too and encodes them in place; nothing is gathered.


How long the buffers of a compute weight are, and which part of it each holds on this rank.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.device.torch_private import preserving_versions, set_version, version_of
from megafsdp.fsdp.params.host_params import HostWeight
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.recipe import BufferSpec, CastRecipe, Recipe


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


class ComputeWeight:
    """Buffers of one group's compute weight.

    Args:
        recipe: What the buffers are.
        main_weight: The group's main weight, a shard or the whole.
        axes: Ranks that divide or replicate the group.
        is_kept: True to keep the full buffers between uses.
        device: Where the buffers live.
        ledger: Counts their bytes.
        host_weight: The main weight as it is read if it lives on the host; the recipe is a cast.
    """

    def __init__(
        self,
        recipe: Recipe,
        main_weight: DBuffer,
        *,
        axes: DataParallelAxes,
        is_kept: bool,
        device: torch.device,
        ledger: ByteLedger,
        host_weight: HostWeight | None = None,
    ) -> None:
        self.recipe = recipe
        self.is_stale = True
        self.label = ""
        self._main = main_weight
        self._axes = axes
        self._is_kept = is_kept or not axes.is_sharded
        self._buffers = WeightBuffers(main_weight, axes, device=device, ledger=ledger)
        self._is_cast = isinstance(recipe, CastRecipe)
        self._host_weight = host_weight
        is_same = self._is_cast and recipe.specs[0].dtype == main_weight.flat.dtype
        self._is_same = is_same = is_same and host_weight is None
        self._is_main_itself = is_same and not axes.is_sharded
        self._shards: dict[str, DBuffer] = {}
        if is_same and axes.is_sharded and not axes.is_divided:
            self._shards = {recipe.specs[0].name: main_weight}
        elif axes.is_divided or (axes.is_sharded and not self._is_cast):
            self._shards = {s.name: self._buffers.new_shard(s) for s in recipe.specs}
        category = Category.COMPUTE_WEIGHT if self._is_kept else Category.UNSHARDED
        self._full = {
            s.name: main_weight if self._is_main_itself else self._buffers.new_full(s, category)
            for s in recipe.specs
        }
        self._outdated: set[str] = set()
        self._encoding: DBuffer | None = None
        self._is_encoded = False
        self._device_copy: DBuffer | None = None
        self._sources: list[DBuffer] = []
        self._pieces: dict[str, DBuffer] = {}
        self._joining: Pending | None = None
        self._pending: list[Pending] = []
        self._in_flight: list[tuple[DBuffer, int]] = []
        self._slice_group: dist.ProcessGroup | None = None
        self._slices: dict[str, DBuffer] = {}

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
        """Encode kept buffers from the main weight.

        Local, but where the outer axis divides the main weight: there the join of the pieces is
        issued, a collective over the outer axis.

        Args:
            statistics: What :meth:`statistics` returned, combined over ranks.
        """
        self.is_stale = False
        # Full buffers that are kept hold what was gathered before.
        self._outdated = {s.name for s in self.recipe.specs}
        self._slices = {}
        self._finish_join()
        if self._axes.is_divided:
            self._join(statistics)
            return
        targets = self._shards if self._axes.is_sharded else self._full
        is_encoded = self._is_encoded and (
            self._device_copy is not None or not self._axes.is_sharded
        )
        is_done = is_encoded or self._is_main_itself or self._main in targets.values()
        if targets and not is_done:
            self._encode(targets, statistics)

    def mark_stale(self) -> None:
        """Note that the main weight changed: the next unshard refreshes, once."""
        self.is_stale = True
        self._is_encoded = False
        if self._host_weight is not None:
            self._host_weight.mark_stale()

    def start_encoding(self) -> torch.Tensor | None:
        """Return where a cast of the main weight may be written while it is changed; local.

        Returns:
            1-D like the main weight's flat buffer, in the compute dtype; None where casting when
            the weight is gathered is as good: it needs no cast, or it is gathered several times.
        """
        if self._host_weight is not None:
            return self._host_weight.start_encoding()
        (spec, *others) = self.recipe.specs
        if not self._is_cast or others or spec.dtype == self._main.flat.dtype:
            return None
        if not self._axes.is_sharded:
            return self._full[spec.name].flat
        if not (self._is_kept or self._axes.is_divided):
            return None
        self._finish_join()
        if self._encoding is None:
            self._encoding = self._buffers.new_piece(spec)
        self._encoding.storage.allocate()
        return self._encoding.flat

    @property
    def can_be_copied(self) -> bool:
        """Tell whether a copy of the main weight in one dtype is all that is read of it."""
        return self._is_cast

    def move_main_weight(self, main_weight: DBuffer) -> None:
        """Take over a main weight elsewhere, and keep on the device what gathers read; local.

        The memory of the main weight before is released unless forward reads it.
        """
        assert self.can_be_copied, "the recipe copies the main weight"
        (spec,) = self.recipe.specs
        before, self._main = self._main, main_weight
        self._before_move = before, self._shards, self._is_main_itself
        is_read, self._is_main_itself = self._is_main_itself, False
        self._device_copy = self._full[spec.name]
        if self._axes.is_sharded:
            self._device_copy = self._buffers.new_piece(spec)
            if not self._axes.is_divided:
                self._shards = {spec.name: self._device_copy}
        if not is_read:
            before.storage.release()
        self.mark_stale()

    def return_main_weight(self) -> DBuffer:
        """Undo :meth:`move_main_weight`; local.

        Returns:
            The buffer on the device that takes the main weight, its content undefined.
        """
        self._finish_join()
        self._main, self._shards, self._is_main_itself = self._before_move
        self._main.storage.allocate()
        self._device_copy = None
        self.mark_stale()
        return self._main

    def start_copy(self) -> torch.Tensor:
        """Return where the main weight is copied to, 1-D like it, on the device; local.

        Only after :meth:`move_main_weight`; what is written counts after :meth:`mark_encoded`.
        """
        assert self._device_copy is not None, "the main weight is elsewhere"
        self._finish_join()
        return self._device_copy.flat

    def mark_encoded(self) -> None:
        """Note that what was returned to write to holds the cast of the main weight."""
        if self._host_weight is not None:
            self._host_weight.mark_encoded()
        else:
            self._is_encoded = True

    def _take_encoding(self) -> DBuffer | None:
        """Return the cast that was written beside the main weight, once, if it was."""
        if not self._is_encoded:
            return None
        self._is_encoded = False
        return self._encoding

    def _release_encoding(self) -> None:
        """Free what was gathered from, unless a step has written it again."""
        if self._encoding is not None and not self._is_encoded:
            self._encoding.storage.release()

    def _encode(self, targets: dict[str, DBuffer], statistics: torch.Tensor | None) -> None:
        with torch.no_grad(), _versions_kept(list(targets.values())):
            if self._host_weight is not None:
                (target,) = targets.values()
                self._host_weight.copy_to(target.flat)
                return
            if self.recipe.is_elementwise:
                outputs = {name: buffer.flat for name, buffer in targets.items()}
                self.recipe.encode(self._main.flat, outputs, statistics)
                return
            n = self.recipe.num_statistics
            for i in range(len(self._main.layout.slots)):
                own = None if statistics is None else statistics[i * n : (i + 1) * n]
                outputs = {name: buffer.tensor(i) for name, buffer in targets.items()}
                self.recipe.encode(self._main.tensor(i), outputs, own)

    def _join(self, statistics: torch.Tensor | None) -> None:
        """Encode this rank's piece and gather the others' into the shard."""
        specs = self.recipe.specs
        if self._device_copy is not None:
            pieces = {specs[0].name: self._device_copy}
            if not self._is_encoded:
                self._encode(pieces, statistics)
        elif self._is_same:
            pieces = {specs[0].name: self._main}
        elif (encoded := self._take_encoding()) is not None:
            pieces = {specs[0].name: encoded}
        else:
            if not self._pieces:
                self._pieces = {s.name: self._buffers.new_piece(s) for s in specs}
            pieces = self._pieces
            for piece in pieces.values():
                piece.storage.allocate()
            self._encode(pieces, statistics)
        assert self._axes.outer_group is not None, "a divided group has an outer axis"
        with self._behind_copies():
            self._joining = gather_buffers(
                [self._shards[name] for name in pieces],
                list(pieces.values()),
                group=self._axes.outer_group,
                label=self.label,
            )

    def _behind_copies(self) -> AbstractContextManager[None]:
        """Return a context for what reads what was copied from the host."""
        host_weight = self._host_weight
        return contextlib.nullcontext() if host_weight is None else host_weight.on_copy_stream()

    def _finish_join(self) -> None:
        if self._joining is not None:
            self._joining.wait()
            self._joining = None
            for piece in self._pieces.values():
                piece.storage.release()
            self._release_encoding()

    def start_unshard(self, *, in_backward: bool) -> None:
        """Issue the gather of the buffers that are needed and not current; collective."""
        if self._pending:
            if not self.is_stale:
                return
            # It was gathered ahead, did not run, and the main weight has changed since.
            self.finish_unshard()
        if self.is_stale:
            self.refresh()
        if not self._axes.is_sharded:
            return
        needed = [
            s
            for s in self.recipe.specs
            if s.is_needed(in_backward=in_backward)
            and (s.name in self._outdated or not self._full[s.name].storage.is_allocated)
        ]
        if not needed:
            return
        self._finish_join()
        self._outdated.difference_update(s.name for s in needed)
        for spec in needed:
            self._full[spec.name].storage.allocate()
        self._in_flight = [(b, version_of(b.flat)) for b in (self._full[s.name] for s in needed)]
        sliced = {s.name: self._slices[s.name] for s in needed if s.name in self._slices}
        whole = {s.name: self._gather_input(s) for s in needed if s.name not in sliced}
        for sources, group in ((sliced, self._slice_group), (whole, self._axes.group)):
            if sources:
                assert group is not None, "slices have a group"
                self._issue(sources, group)
        if in_backward:
            self._slices = {}

    def _issue(self, sources: dict[str, DBuffer], group: dist.ProcessGroup) -> None:
        targets = [self._full[name] for name in sources]
        with torch.no_grad(), self._behind_copies():
            pending = gather_buffers(targets, list(sources.values()), group=group, label=self.label)
        # The sources live as long as the gather reads them.
        self._sources += sources.values()
        self._pending.append(pending)

    def _gather_input(self, spec: BufferSpec) -> DBuffer:
        """Return what to gather a buffer from: what is kept, or itself with its own part filled."""
        if spec.name in self._shards:
            return self._shards[spec.name]
        encoded = self._take_encoding()
        if encoded is not None:
            return encoded
        if self._host_weight is None:
            self._encode_own_part(spec)
            return self._full[spec.name]
        return self._host_weight.copied(lambda: self._buffers.new_shard(spec))

    def _encode_own_part(self, spec: BufferSpec) -> None:
        """Cast the main weight to where the gathered one will hold it."""
        full = self._full[spec.name]
        parts = full.parts(self._main.shard)
        with torch.no_grad():  # Its version is kept with the gather's.
            for main, part in zip(self._main.pieces(), parts, strict=True):
                self.recipe.encode(main, {spec.name: part}, None)

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the full buffers may be read."""
        if self._host_weight is not None:
            self._host_weight.wait_for_copy()
        if not self._pending:
            return
        for pending in self._pending:
            pending.wait()
        self._pending = []
        self._sources = []
        if self._host_weight is not None:
            self._host_weight.release_copy()
        if not self._axes.is_divided:
            self._release_encoding()
        # An asynchronous gather bumps the version counter when it completes, and tensors that
        # autograd saved in forward would be taken for modified; their bytes are the same.
        for full, version in self._in_flight:
            set_version(full.flat, version)
        self._in_flight = []

    def release(self) -> None:
        """Free the full buffers, unless they are kept."""
        if self.is_unsharded:
            self.finish_unshard()
            for full in self._full.values():
                full.storage.release()

    def release_to_slices(self, group: dist.ProcessGroup) -> None:
        """Free the full buffers but for a slice, to gather again from over fewer ranks; local.

        Args:
            group: Ranks that keep one slice each, in order: neighbours on the inner axis.
        """
        if not self.is_unsharded:
            return
        self.finish_unshard()
        self._slice_group = group
        for spec in self.recipe.specs:
            full = self._full[spec.name]
            if full.storage.is_allocated and spec.name not in self._slices:
                self._slices[spec.name] = self._buffers.slice_of(full, spec, group)
        self.release()

    def forget_slices(self) -> None:
        """Free slices: no backward will gather from them."""
        self._slices = {}


def _versions_kept(buffers: list[DBuffer]) -> AbstractContextManager[None]:
    return preserving_versions(*(b.flat for b in buffers))
