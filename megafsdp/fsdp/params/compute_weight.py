"""The compute weight of a parameter group: its full buffers, their gather and their release.

A :class:`ComputeWeight` is what forward and backward read of a group's main weight. Its recipe
names the buffers, each of which has a full form. Under ZeRO-3 the full buffers are gathered for
each use and released after it. Under ZeRO-1 and ZeRO-2 they are persistent, and gathered once after
each change of the main weight. A replicated group has persistent full buffers that are encoded in
place; nothing is gathered. With two ranks and a cast from fp32 to bf16, under ZeRO-3::

    rank 0   main weight [0, 32) fp32 --cast--> full [0, 32)  --gather-->  full [0, 64) bf16
    rank 1   main weight [32, 64) fp32 --cast-> full [32, 64) --gather-->  full [0, 64) bf16

What this rank contributes to a gather, and how it is stored, is a
:mod:`~megafsdp.fsdp.params.gather_sources` class; which units are gathered ahead is decided by the
schedule.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.device.torch_private import set_version, version_of
from megafsdp.fsdp.params.gather_sources import (
    Buffers,
    CastOnGather,
    Encode,
    GatherSource,
    MainWeightSource,
    OuterJoin,
    PersistentSource,
    SliceSource,
    StepOutput,
    TemporarySource,
    encode_main_weight,
)
from megafsdp.fsdp.params.host_params import HostWeight
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.mesh.placement import Residence
from megafsdp.quantize.recipe import BufferSpec, CastRecipe, Recipe


class WeightBuffers:
    """Factory of the buffers of one group's compute weight, on the device.

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

    def new_pieces(self, specs: Iterable[BufferSpec]) -> Buffers:
        """Make buffers that lie like the main weight."""
        category = Category.COMPUTE_WEIGHT
        return {s.name: self._new(s, Residence.SHARD, category, 1, self._shard) for s in specs}

    def new_shards(self, specs: Iterable[BufferSpec]) -> Buffers:
        """Make the inputs of a gather over the inner axis; longer than pieces under HFSDP."""
        merged, shard = self._axes.num_pieces, self._axes.gathered_shard
        category = Category.COMPUTE_WEIGHT
        return {s.name: self._new(s, Residence.SHARD, category, merged, shard) for s in specs}

    def new_full(self, specs: Iterable[BufferSpec], category: Category) -> Buffers:
        """Make the outputs of a gather over the inner axis."""
        merged = self._axes.num_pieces
        return {s.name: self._new(s, Residence.REPLICATE, category, merged, 0) for s in specs}

    def slice_of(self, full: DBuffer, spec: BufferSpec, group: dist.ProcessGroup) -> DBuffer:
        """Return a copy of this rank's slice of a full buffer, the input of a gather over a group.

        Args:
            full: The full buffer.
            spec: Its description in the recipe.
            group: Ranks that save one slice each, in order: neighbours on the inner axis.
        """
        index, merged = group.rank(), self._axes.group.size() // group.size()
        merged *= self._axes.num_pieces
        saved = self._new(spec, Residence.SHARD, Category.COMPUTE_WEIGHT, merged, index)
        # A slice for each sub-buffer: a gather joins the shards of each by itself.
        with torch.no_grad():
            for own, whole in zip(saved.pieces(), full.pieces(), strict=True):
                own.copy_(whole.narrow(0, index * own.numel(), own.numel()))
        return saved

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
        recipe: Names, dtypes and encoding of the buffers.
        main_weight: The group's main weight, a shard or the whole.
        axes: Ranks that divide or replicate the group.
        is_persistent: Whether the full buffers stay between uses.
        device: Where the buffers live.
        ledger: Counts their bytes.
        host_weight: The cast and the copies of a main weight that lives on the host; the recipe is
            a cast.

    Attributes:
        recipe: As given.
        is_stale: Whether the main weight has changed since the last refresh.
        label: FQN of the unit, for counters and profilers.
    """

    def __init__(
        self,
        recipe: Recipe,
        main_weight: DBuffer,
        *,
        axes: DataParallelAxes,
        is_persistent: bool,
        device: torch.device,
        ledger: ByteLedger,
        host_weight: HostWeight | None = None,
    ) -> None:
        self.recipe = recipe
        self.is_stale = True
        self.label = ""
        self._main = main_weight
        self._axes = axes
        is_same = self.can_be_copied and recipe.specs[0].dtype == main_weight.flat.dtype
        is_same = is_same and host_weight is None
        # Forward may read what the optimizer writes where that is the whole: one buffer less.
        is_main = is_same and (axes.is_alone or not axes.is_sharded)
        self._is_gathered = axes.is_sharded and not is_main
        self._is_persistent = is_persistent or not self._is_gathered
        self._buffers = WeightBuffers(main_weight, axes, device=device, ledger=ledger)
        self._host_weight = host_weight
        # What is read in place has no storage that gathers fill and releases free.
        if is_main:
            self._full = {recipe.specs[0].name: main_weight}
        else:
            category = Category.COMPUTE_WEIGHT if self._is_persistent else Category.UNSHARDED
            self._full = self._buffers.new_full(recipe.specs, category)
        self._source = self._new_source(is_same=is_same)
        # Names of full buffers that were not gathered since the last refresh.
        self._outdated: set[str] = set()
        self._gathers: list[tuple[Pending, GatherSource, list[DBuffer]]] = []
        self._versions: list[tuple[DBuffer, int]] = []
        self._slices: SliceSource | None = None
        self._before_move: tuple[DBuffer, GatherSource] | None = None

    @property
    def _on_copy_stream(self) -> Callable[[], AbstractContextManager[None]]:
        """Return the context in which collectives read what was copied from the host."""
        host_weight = self._host_weight
        return contextlib.nullcontext if host_weight is None else host_weight.on_copy_stream

    def _new_source(self, *, is_same: bool) -> GatherSource:
        """Return the source for how the main weight is divided, where it lies, and its recipe."""
        axes, main, specs = self._axes, self._main, self.recipe.specs
        encode: Encode = functools.partial(encode_main_weight, self.recipe, main)
        if self._host_weight is not None:
            encode = self._host_weight.encode
        if not self._is_gathered:
            return MainWeightSource(main) if is_same else PersistentSource(self._full, encode)
        # Not methods of this object: a cycle would delay the release of a deleted model's memory.
        make = functools.partial(self._buffers.new_pieces, specs)
        source: GatherSource
        if is_same:
            source = MainWeightSource(main)
        elif axes.is_divided or self._host_weight is not None:
            source = TemporarySource(make, encode)
        elif self.can_be_copied:
            source = CastOnGather(make, self.recipe, main, is_gathered_once=self._is_persistent)
        else:
            source = PersistentSource(make(), encode)
        if axes.outer_group is None or not axes.is_divided:
            return source
        shards = self._buffers.new_shards(specs)
        return OuterJoin(source, shards, specs, axes.outer_group, self._on_copy_stream)

    def assemble(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return tensor ``index`` in full, as the recipe reads it; aliases the full buffers."""
        return self.recipe.assemble(shape, {n: b.tensor(index) for n, b in self._full.items()})

    @property
    def is_unsharded(self) -> bool:
        """Return whether a full buffer that is not persistent has memory."""
        if self._is_persistent:
            return False
        return any(buffer.storage.is_allocated for buffer in self._full.values())

    @property
    def gathered_storages(self) -> list[FlatStorage]:
        """Return the storages that gathers fill and releases free; none of a persistent weight."""
        return [] if self._is_persistent else [full.storage for full in self._full.values()]

    @property
    def needs_statistics(self) -> bool:
        """Return whether the next encoding must first agree with other ranks."""
        return self.is_stale and self.recipe.num_statistics > 0

    def statistics(self) -> torch.Tensor:
        """Return this rank's statistics of all tensors, ``(tensors * num_statistics,)`` fp32."""
        indices = range(len(self._main.layout.slots))
        return torch.cat([self.recipe.statistics(self._main.tensor(i)) for i in indices])

    def mark_stale(self) -> None:
        """Note that the main weight changed: the next unshard refreshes, once."""
        self.is_stale = True
        self._step_output.mark_stale()

    def refresh(self, statistics: torch.Tensor | None = None) -> None:
        """Encode persistent buffers from the main weight.

        Local, unless the outer axis divides the main weight: then the gather of the pieces is
        issued, a collective over the outer axis.

        Args:
            statistics: The result of :meth:`statistics`, combined over ranks.
        """
        self.is_stale = False
        # Full buffers with memory are gathered again, too.
        self._outdated = {s.name for s in self.recipe.specs}
        # They were cut from a gather of the old main weight.
        self._slices = None
        # The gather under way reads the memory that is encoded next.
        self._source.finish_refresh()
        self._source.refresh(statistics, self.label)

    @property
    def _step_output(self) -> StepOutput:
        return self._source if self._host_weight is None else self._host_weight

    def start_encoding(self) -> torch.Tensor | None:
        """Return memory for a cast of the main weight, for a step that changes it; local.

        Returns:
            1-D like the main weight's flat buffer, in the compute dtype. None where casting at the
            gather is as good: the weight needs no cast, or it is gathered several times.
        """
        # A moved main weight is copied by start_copy(), with or without a cast.
        if not self.can_be_copied or self._before_move is not None:
            return None
        return self._step_output.start_encoding()

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` or :meth:`start_copy` as filled.

        Called after :meth:`mark_stale` for the step that filled it, which drops older casts.
        """
        self._step_output.mark_encoded()

    @property
    def can_be_copied(self) -> bool:
        """Return whether a copy of the main weight in one dtype is all that is read of it."""
        return isinstance(self.recipe, CastRecipe)

    def move_main_weight(self, main_weight: DBuffer) -> None:
        """Adopt a main weight on the host; gathers read a copy on the device; local.

        The memory of the main weight before is released unless forward reads it.
        """
        assert self.can_be_copied, "the recipe copies the main weight"
        # The gather of pieces under way may read memory that is released here.
        self._source.finish_refresh()
        self._before_move = before, source = self._main, self._source
        self._main = main_weight
        encode = functools.partial(encode_main_weight, self.recipe, main_weight)
        if not self._is_gathered:
            self._source = PersistentSource(self._full, encode)
        else:
            copy = PersistentSource(self._buffers.new_pieces(self.recipe.specs), encode)
            self._source = source.with_pieces(copy) if isinstance(source, OuterJoin) else copy
        if all(buffer is not before for buffer in self._full.values()):
            before.storage.release()
        self.mark_stale()

    def return_main_weight(self) -> DBuffer:
        """Undo :meth:`move_main_weight`; local.

        Returns:
            The buffer on the device that takes the main weight, its content undefined.
        """
        assert self._before_move is not None, "the main weight is elsewhere"
        self._source.finish_refresh()
        self._main, self._source = self._before_move
        self._before_move = None
        self._main.storage.allocate()
        self.mark_stale()
        return self._main

    def start_copy(self) -> torch.Tensor:
        """Return the memory of the copy on the device, 1-D like the main weight; local.

        Only after :meth:`move_main_weight`; what is written counts after :meth:`mark_encoded`.
        """
        assert self._before_move is not None, "the main weight is elsewhere"
        copy = self._source.start_encoding()
        assert copy is not None, "the copy has memory"
        return copy

    def start_unshard(self, *, in_backward: bool) -> None:
        """Issue the gather of the buffers that are needed and not current; collective."""
        if self._gathers:
            if not self.is_stale:
                return
            # It was gathered ahead, did not run, and the main weight has changed since.
            self.finish_unshard()
        if self.is_stale:
            self.refresh()
        if not self._is_gathered:
            return
        needed = [
            s
            for s in self.recipe.specs
            if s.is_needed(in_backward=in_backward)
            and (s.name in self._outdated or not self._full[s.name].storage.is_allocated)
        ]
        if not needed:
            return
        # Before the full buffers take memory: this frees pieces.
        self._source.finish_refresh()
        self._outdated.difference_update(s.name for s in needed)
        for spec in needed:
            full = self._full[spec.name]
            full.storage.allocate()
            self._versions.append((full, version_of(full.flat)))
        if self._slices is not None:
            saved = self._slices.slices
            self._issue(self._slices, self._slices.group, [s for s in needed if s.name in saved])
            needed = [s for s in needed if s.name not in saved]
            # Their last use; the gather keeps those that it reads alive.
            if in_backward:
                self._slices = None
        self._issue(self._source, self._axes.group, needed)

    def _issue(
        self, source: GatherSource, group: dist.ProcessGroup, specs: Sequence[BufferSpec]
    ) -> None:
        if not specs:
            return
        inputs = source.inputs(specs, self._full)
        with self._on_copy_stream():
            outputs = [self._full[s.name] for s in specs]
            pending = gather_buffers(outputs, inputs, group=group, label=self.label)
        # This reference keeps the inputs alive until the gather has read them.
        self._gathers.append((pending, source, inputs))

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the full buffers may be read."""
        # A replicated group has no gather, but its copy from the host may be under way.
        if self._host_weight is not None:
            self._host_weight.wait_for_copy()
        if not self._gathers:
            return
        for pending, _, _ in self._gathers:
            pending.wait()
        for _, source, _ in self._gathers:
            source.release_inputs()
        self._gathers = []
        # An asynchronous gather bumps the version counter when it completes, and tensors that
        # autograd saved in forward would be taken for modified; their bytes are the same.
        for full, version in self._versions:
            set_version(full.flat, version)
        self._versions = []

    def release(self) -> None:
        """Free the full buffers, unless they are persistent."""
        if self.is_unsharded:
            # A gather that nothing read may still write to the memory.
            self.finish_unshard()
            for full in self._full.values():
                full.storage.release()

    def release_to_slices(self, group: dist.ProcessGroup) -> None:
        """Free the full buffers except a slice, to gather again over fewer ranks; local.

        Args:
            group: Ranks that save one slice each, in order: neighbours on the inner axis.
        """
        if not self.is_unsharded:
            return
        self.finish_unshard()
        if self._slices is None or self._slices.group is not group:
            self._slices = SliceSource(group)
        saved = self._slices.slices
        for spec in self.recipe.specs:
            full = self._full[spec.name]
            # A second forward before backward gathers the same bytes: its slice is there.
            if full.storage.is_allocated and spec.name not in saved:
                saved[spec.name] = self._buffers.slice_of(full, spec, group)
        self.release()

    def forget_slices(self) -> None:
        """Free the slices: no backward will gather from them."""
        self._slices = None
