"""The gathered buffer of a parameter group's compute weight: its gather and its release.

A compute weight is the form of a group's main weight that forward and backward read, in one full
buffer. It is a cast (:mod:`~megafsdp.fsdp.params.cast_weight`) or the codes of a quantized format
(:mod:`~megafsdp.fsdp.params.quantized_weight`). For this file it is a buffer of which each rank has
a piece.
Under ZeRO-3 the full buffer is gathered for each use and released after it. Under ZeRO-1 and ZeRO-2
it is persistent, and gathered once after each change of the main weight. A replicated group has a
persistent full buffer that is encoded in place; nothing is gathered. With two ranks and a cast from
fp32 to bf16, under ZeRO-3::

    rank 0   main weight [0, 32) fp32 --cast--> full [0, 32)  --gather-->  full [0, 64) bf16
    rank 1   main weight [32, 64) fp32 --cast-> full [32, 64) --gather-->  full [0, 64) bf16

A class of :mod:`~megafsdp.fsdp.params.gather_sources` says what this rank contributes to a gather,
and how it is stored. The schedule decides which units are gathered ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.comm.custom import AllGather
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.device.torch_private import set_versions, version_of
from megafsdp.fsdp.params.gather_sources import GatherSource, OuterJoin, SliceSource
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.policy import Quantization
from megafsdp.mesh.placement import Residence


class WeightBuffers:
    """Factory of the buffers of one group's compute weight, on the device.

    Args:
        main_weight: The group's main weight, a shard or the whole.
        axes: Ranks that divide or replicate the group.
        dtype: Dtype of the buffers.
        numel_per_element: How many elements of the main weight one element of the buffers stands
            for.
        device: Where the buffers live.
        ledger: Counts their bytes.
    """

    def __init__(
        self,
        main_weight: DBuffer,
        axes: DataParallelAxes,
        dtype: torch.dtype,
        *,
        numel_per_element: int = 1,
        device: torch.device,
        ledger: ByteLedger,
    ) -> None:
        self._layout, self._shard = main_weight.layout.packed(numel_per_element), main_weight.shard
        self._axes, self._dtype = axes, dtype
        self._device, self._ledger = device, ledger

    def new_piece(self) -> DBuffer:
        """Make a buffer that is cut like the main weight."""
        return self._new(Residence.SHARD, Category.COMPUTE_WEIGHT, 1, self._shard)

    def new_full(self, category: Category) -> DBuffer:
        """Make the output of a gather over the inner axis."""
        return self._new(Residence.REPLICATE, category, self._axes.num_pieces, 0)

    def new_shard(self) -> DBuffer:
        """Make the input of a gather over the inner axis; longer than a piece under HFSDP."""
        merged, shard = self._axes.num_pieces, self._axes.gathered_shard
        return self._new(Residence.SHARD, Category.COMPUTE_WEIGHT, merged, shard)

    def slice_of(self, full: DBuffer, group: dist.ProcessGroup) -> DBuffer:
        """Return a copy of this rank's slice of a full buffer, the input of a gather over a group.

        Args:
            full: The full buffer.
            group: Ranks that save one slice each, in order: neighbours on the inner axis.
        """
        index, merged = group.rank(), self._axes.group.size() // group.size()
        merged *= self._axes.num_pieces
        saved = self._new(Residence.SHARD, Category.COMPUTE_WEIGHT, merged, index)
        # Slice each sub-buffer: a gather joins the shards of each sub-buffer by itself.
        with torch.no_grad():
            for own, whole in zip(saved.pieces(), full.pieces(), strict=True):
                own.copy_(whole.narrow(0, index * own.numel(), own.numel()))
        return saved

    def _new(self, residence: Residence, category: Category, merged: int, shard: int) -> DBuffer:
        return DBuffer(
            self._layout.merged(merged),
            residence,
            shard=shard,
            dtype=self._dtype,
            device=self._device,
            ledger=self._ledger,
            category=category,
        )


class GatheredWeight:
    """The full buffer of one group's compute weight, and the source that fills it.

    Args:
        full: The full buffer.
        source: What this rank contributes to its gather.
        buffers: Makes the slices that a unit may save between forward and backward.
        axes: Ranks that divide or replicate the group.
        stays_gathered: Whether the strategy keeps the full buffer between uses.
        is_gathered: Whether a gather fills it; if not, its source does.
        on_copy_stream: Returns the context in which collectives read a copy from the host: they run
            on the stream of the copy.

    Attributes:
        is_stale: Whether the main weight has changed since the last refresh.
        is_set: Whether anything but steps, such as a load, has changed it since.
        label: FQN of the unit, for counters and profilers.
        stays_gathered: The argument.
        all_gather_comm: The user's object that gathers over the inner axis; None for the default.
    """

    def __init__(
        self,
        full: DBuffer,
        source: GatherSource,
        buffers: WeightBuffers,
        *,
        axes: DataParallelAxes,
        stays_gathered: bool,
        is_gathered: bool,
        on_copy_stream: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        # Before the first use there is nothing to read.
        self.is_stale = self.is_set = True
        self.label = ""
        self.stays_gathered = stays_gathered
        self.all_gather_comm: AllGather | None = None
        self._full, self._source, self._buffers = full, source, buffers
        self._axes = axes
        self._is_gathered = is_gathered
        self._on_copy_stream = on_copy_stream
        # Whether the full buffer has not been gathered since the last refresh.
        self._is_outdated = True
        # The gather under way, and what it reads.
        self._gather: tuple[Pending, GatherSource, DBuffer] | None = None
        self._slice: SliceSource | None = None
        # Tensors over the full buffer, and their versions while it is not there: autograd then
        # refuses to read them, where it would read freed memory or a gather under way.
        self._readable: list[torch.Tensor] = []
        self._versions: list[int] = []

    def assemble(
        self, index: int, shape: torch.Size, name: str, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return tensor ``index`` in full, as forward reads it; aliases the full buffer.

        Called once for each parameter: the buffer is refilled in place. The result has its own
        count of writes (version), by which autograd notices changes of saved tensors. Views of the
        buffer would share one count: a write to one parameter would count for all, and so would a
        gather, although it brings the same bytes.

        Args:
            index: Index of the tensor in the layout.
            shape: Its shape.
            name: Its name, for messages.
            rows: This rank's rows of it in the main weight, 1-D.
        """
        raise NotImplementedError

    @property
    def quantization(self) -> Quantization | None:
        """Return how the weight is quantized; None for a cast."""
        return None

    @property
    def needs_maxima(self) -> bool:
        """Return whether the next encoding must first agree with other ranks."""
        return False

    @property
    def _is_persistent(self) -> bool:
        # A full buffer that no gather fills is never freed, whatever the strategy.
        return self.stays_gathered or not self._is_gathered

    @property
    def is_unsharded(self) -> bool:
        """Return whether a full buffer that is not persistent has memory."""
        return not self._is_persistent and self._full.storage.is_allocated

    @property
    def gathered_storages(self) -> list[FlatStorage]:
        """Return the storages that gathers fill and releases free; none if it is persistent."""
        return [] if self._is_persistent else [self._full.storage]

    def mark_stale(self) -> None:
        """Note that the main weight changed: the next unshard refreshes, once."""
        self.is_stale = True
        self._source.mark_stale()

    def refresh(self) -> None:
        """Encode persistent buffers from the main weight.

        Local, unless the outer axis divides the main weight: then the gather of the pieces, a
        collective over the outer axis, is issued.
        """
        self.is_stale = self.is_set = False
        # A full buffer that still has memory must be gathered again, too.
        self._is_outdated = True
        # The slice was cut from a gather of the old main weight.
        self._slice = None
        # A gather under way reads the memory that is encoded next.
        self._source.finish_refresh()
        self._source.refresh(self.label)

    def start_encoding(self) -> torch.Tensor | None:
        """Return memory for a cast of the main weight, for a step that changes it; local.

        Returns:
            1-D like the main weight's flat buffer, in the compute dtype. None if casting at the
            gather is as good (the weight needs no cast, or is gathered several times), or if the
            compute weight is not a cast.
        """
        return None

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` as filled.

        Called after the :meth:`mark_stale` of the step that filled it, which drops older casts.
        """

    def start_unshard(self, *, in_backward: bool) -> None:
        """Issue the gather of the full buffer unless it is current; collective."""
        if self._gather is not None:
            if not (self.is_stale or self._is_outdated):
                return
            # The unit was gathered ahead but did not run, and the main weight has changed since.
            # Its pieces may have been joined anew by now.
            self.finish_unshard()
        if self.is_stale:
            self.refresh()
        full, source, group = self._full, self._source, self._axes.group
        if not self._is_gathered or not (self._is_outdated or not full.storage.is_allocated):
            return
        # Do this before the full buffer takes memory: it frees the piece that a join has read.
        self._source.finish_refresh()
        full.storage.allocate()
        if self._slice is not None:
            source, group = self._slice, self._slice.group
            # This is the last use of the slice; the gather keeps its input alive.
            if in_backward:
                self._slice = None
        own = source.input(full)
        with self._on_copy_stream():
            pending = gather_buffers(
                [full], [own], group=group, label=self.label, comm=self.all_gather_comm
            )
        # Only now: if a user's object raised, the buffer must be gathered again.
        self._is_outdated = False
        # This reference keeps the input alive until the gather has read it.
        self._gather = pending, source, own

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the full buffer may be read."""
        if self._gather is None:
            return
        pending, source, _ = self._gather
        pending.wait()
        source.release_input()
        self._gather = None
        if self._versions:
            set_versions(self._readable, self._versions)
            self._versions = []

    def release(self) -> None:
        """Free the full buffer, unless it is persistent."""
        if self.is_unsharded:
            # A gather that nothing read may still write to the memory.
            self.finish_unshard()
            self._full.storage.release()
            self._versions = [version_of(tensor) for tensor in self._readable]
            torch.autograd.graph.increment_version(self._readable)

    def keep_storage(self, keep: bool) -> None:
        """Choose whether :meth:`release` leaves the full buffer's memory to the next gather."""
        for storage in self.gathered_storages:
            storage.keep_memory(keep)

    def release_to_slice(self, group: dist.ProcessGroup) -> None:
        """Free the full buffer except a slice, to gather again over fewer ranks; local.

        Args:
            group: Ranks that save one slice each, in order: neighbours on the inner axis.
        """
        if not self.is_unsharded:
            return
        self.finish_unshard()
        # A second forward before backward gathered the same bytes, so its slice exists already.
        if self._slice is None or self._slice.group is not group:
            self._slice = SliceSource(group, self._buffers.slice_of(self._full, group))
        self.release()

    def forget_slice(self) -> None:
        """Free the slice: no backward will gather from it."""
        self._slice = None


def joined(
    pieces: GatherSource,
    buffers: WeightBuffers,
    axes: DataParallelAxes,
    on_copy_stream: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> GatherSource:
    """Return a source that joins the pieces over the outer axis, if that divides too."""
    # HSDP also has an outer axis, but its ranks have equal shards.
    if axes.outer_group is None or not axes.is_divided:
        return pieces
    return OuterJoin(pieces, buffers.new_shard(), axes.outer_group, on_copy_stream)
