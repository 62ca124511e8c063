"""A compute weight that is the main weight in the compute dtype.

This file lets a step write the cast in the pass that changes the main weight, and lets an optimizer
move the main weight to the host and leave a copy on the device. The gather is in
:mod:`~megafsdp.fsdp.params.gathered_weight`.
"""

from __future__ import annotations

import contextlib
import functools

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.device.memory import ByteLedger, Category
from megafsdp.fsdp.params.gather_sources import (
    CastOnGather,
    Encode,
    GatherSource,
    MainWeightSource,
    OuterJoin,
    PersistentSource,
    StepOutput,
    TemporarySource,
    cast_main_weight,
)
from megafsdp.fsdp.params.gathered_weight import GatheredWeight, WeightBuffers, joined
from megafsdp.fsdp.params.host_params import HostWeight
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes


class CastWeight(GatheredWeight):
    """The compute weight of one group as a cast of its main weight.

    Args:
        dtype: The compute dtype.
        main_weight: The group's main weight, a shard or the whole.
        axes: Ranks that divide or replicate the group.
        stays_gathered: Whether the strategy keeps the full buffer between uses.
        device: Where the buffers live.
        ledger: Counts their bytes.
        host_weight: The cast and the copies of a main weight that lives on the host.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        main_weight: DBuffer,
        *,
        axes: DataParallelAxes,
        stays_gathered: bool,
        device: torch.device,
        ledger: ByteLedger,
        host_weight: HostWeight | None = None,
    ) -> None:
        self._main = main_weight
        self._host_weight = host_weight
        is_same = dtype == main_weight.flat.dtype and host_weight is None
        # If this rank has the whole main weight, forward reads that itself: one buffer less.
        is_main = is_same and axes.has_whole
        is_gathered = axes.is_sharded and not is_main
        is_persistent = stays_gathered or not is_gathered
        buffers = WeightBuffers(main_weight, axes, dtype, device=device, ledger=ledger)
        if is_main:
            full = main_weight
        else:
            full = buffers.new_full(
                Category.COMPUTE_WEIGHT if is_persistent else Category.UNSHARDED
            )
        on_copy_stream = (
            contextlib.nullcontext if host_weight is None else host_weight.on_copy_stream
        )
        # A method of this object would be a cycle, which delays freeing a deleted model's memory.
        encode: Encode = functools.partial(cast_main_weight, main_weight)
        if host_weight is not None:
            encode = host_weight.encode
        source: GatherSource
        if is_same:
            source = MainWeightSource(main_weight)
        elif not axes.is_sharded:
            source = PersistentSource(full, encode)
        elif axes.is_divided or host_weight is not None:
            # The gather reads another buffer than its output: a joined shard, or a copy from the
            # host.
            source = TemporarySource(buffers.new_piece, encode)
        else:
            source = CastOnGather(buffers.new_piece, main_weight, is_gathered_once=is_persistent)
        super().__init__(
            full,
            joined(source, buffers, axes, on_copy_stream),
            buffers,
            axes=axes,
            stays_gathered=stays_gathered,
            is_gathered=is_gathered,
            on_copy_stream=on_copy_stream,
        )
        self._before_move: tuple[DBuffer, GatherSource] | None = None

    def assemble(
        self, index: int, shape: torch.Size, name: str, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return tensor ``index`` in full: from the full buffer, or ``rows`` if they are all."""
        # Without .data ``rows`` share their count of writes, so that autograd notices a write to a
        # main weight that it has saved.
        own = rows if self._full is self._main else self._full.tensor(index).data
        tensor = own.view(shape)
        self._readable.append(tensor)
        return tensor

    def mark_stale(self) -> None:
        """Note that the main weight changed: the next unshard refreshes, once."""
        self.is_stale = True
        self._step_output.mark_stale()

    @property
    def _step_output(self) -> StepOutput:
        # A step on the host writes its cast there; all gathers until the next step copy that cast.
        return self._source if self._host_weight is None else self._host_weight

    def start_encoding(self) -> torch.Tensor | None:
        """Return memory for a cast of the main weight, for a step that changes it; local."""
        # A moved main weight is copied by start_copy(), with or without a cast.
        return None if self._before_move is not None else self._step_output.start_encoding()

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` or :meth:`start_copy` as filled."""
        self._step_output.mark_encoded()

    def finish_unshard(self) -> None:
        """Wait for the gather; afterwards the full buffer may be read."""
        # A replicated group has no gather, but its copy from the host may be under way.
        if self._host_weight is not None:
            self._host_weight.wait_for_copy()
        super().finish_unshard()

    def move_main_weight(self, main_weight: DBuffer) -> None:
        """Adopt a main weight on the host; gathers read a copy on the device; local.

        The memory of the old main weight is released unless forward reads it.
        """
        # A gather of pieces under way may read memory that is released here.
        self._source.finish_refresh()
        self._before_move = before, source = self._main, self._source
        self._main = main_weight
        encode = functools.partial(cast_main_weight, main_weight)
        if not self._is_gathered:
            self._source = PersistentSource(self._full, encode)
        else:
            copy = PersistentSource(self._buffers.new_piece(), encode)
            self._source = source.with_pieces(copy) if isinstance(source, OuterJoin) else copy
        if self._full is not before:
            before.storage.release()
        self.mark_stale()

    def return_main_weight(self) -> DBuffer:
        """Undo :meth:`move_main_weight`; local.

        Returns:
            The buffer on the device that becomes the main weight; its content is undefined.
        """
        assert self._before_move is not None, "the main weight is elsewhere"
        # A gather of pieces under way may read the copy, which is freed with its source.
        self._source.finish_refresh()
        self._main, self._source = self._before_move
        self._before_move = None
        self._main.storage.allocate()
        self.mark_stale()
        return self._main

    def start_copy(self) -> torch.Tensor:
        """Return the memory of the copy on the device, 1-D like the main weight; local.

        Call it only after :meth:`move_main_weight`, and :meth:`mark_encoded` once it is written.
        """
        assert self._before_move is not None, "the main weight is elsewhere"
        copy = self._source.start_encoding()
        assert copy is not None, "the copy has memory"
        return copy
