"""What a gather of a compute weight reads on this rank: one class for each way to store it.

A :class:`~megafsdp.fsdp.params.compute_weight.ComputeWeight` has one source for the life of its
main weight, and slices in front of it where a unit saves some between forward and backward:

==================  ============================================  ================================
class               used where                                    memory between gathers
==================  ============================================  ================================
MainWeightSource    the recipe casts to the main weight's dtype   none of its own
CastOnGather        the recipe casts to another dtype             none: a cast goes straight into
                                                                  the gathered buffer
PersistentSource    any other recipe; a replicated group; an      the encoded buffers
                    optimizer has moved the main weight
TemporarySource     the policy has the main weight on the host;   none: filled for one gather
                    pieces of an outer axis
OuterJoin           an outer axis divides the main weight too     the joined shard of the inner
                    (HFSDP)                                       axis
SliceSource         ``reshard_after_forward`` is a number         a slice, until backward
==================  ============================================  ================================

When a gather runs, and into which buffer, is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers
from megafsdp.device.torch_private import preserving_versions
from megafsdp.quantize.recipe import BufferSpec, Recipe

Buffers: TypeAlias = dict[str, DBuffer]
# Fills buffers, by their names in the recipe, from the main weight and the combined statistics.
Encode: TypeAlias = Callable[[Mapping[str, DBuffer], torch.Tensor | None], None]


class StepOutput(Protocol):
    """Memory that an optimizer step fills with the cast of the main weight that it changes."""

    def start_encoding(self) -> torch.Tensor | None:
        """Return the memory, 1-D like the main weight, in the compute dtype; None for none."""

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` as filled."""

    def mark_stale(self) -> None:
        """Mark what was encoded as out of date: the main weight has changed."""


class GatherSource:
    """The buffers that this rank contributes to a gather.

    The defaults are those of a source without memory of its own. A replicated group gathers
    nothing: of its source only the refresh is used.
    """

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the input of the gather of each buffer.

        Args:
            specs: The buffers to gather.
            full: The allocated outputs by name. An output that stands in for its own input has
                this rank's part filled.
        """
        raise NotImplementedError

    def release_inputs(self) -> None:
        """Free what was made for a gather that is complete."""

    def refresh(self, statistics: torch.Tensor | None, label: str) -> None:
        """Encode what is persistent; a collective over an outer axis is issued, not awaited.

        Args:
            statistics: Those of all tensors, combined over ranks; None without any.
            label: FQN of the unit, for counters and profilers.
        """

    def finish_refresh(self) -> None:
        """Wait for the collective of :meth:`refresh`."""

    def start_encoding(self) -> torch.Tensor | None:
        """Return memory for the cast of a step; None where it would save nothing."""
        return None

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` as filled."""

    def mark_stale(self) -> None:
        """Mark what was encoded as out of date: the main weight has changed."""


class MainWeightSource(GatherSource):
    """The main weight itself.

    Args:
        main_weight: The main weight.
    """

    def __init__(self, main_weight: DBuffer) -> None:
        self._main = main_weight

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the main weight."""
        return [self._main]


class PersistentSource(GatherSource):
    """Buffers that are encoded once after each change of the main weight.

    Args:
        buffers: The buffers by name; the gathered ones themselves in a replicated group.
        encode: Fills them.
    """

    def __init__(self, buffers: Buffers, encode: Encode) -> None:
        self._buffers, self._encode = buffers, encode
        self._is_encoded = False

    def refresh(self, statistics: torch.Tensor | None, label: str) -> None:
        """Encode the buffers, unless a step has."""
        # The mark of a step stays: its encoding is right until the next mark_stale().
        if not self._is_encoded:
            self._encode(self._buffers, statistics)

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the buffers."""
        return [self._buffers[spec.name] for spec in specs]

    def start_encoding(self) -> torch.Tensor:
        """Return the buffer of a cast."""
        (buffer,) = self._buffers.values()
        return buffer.flat

    def mark_encoded(self) -> None:
        """Mark the buffer of :meth:`start_encoding` as filled."""
        self._is_encoded = True

    def mark_stale(self) -> None:
        """Encode at the next refresh."""
        self._is_encoded = False


class TransientBuffers(GatherSource):
    """Base of sources whose buffers have memory from their filling to the end of one gather.

    Args:
        make: Makes the buffers, at the first use.
    """

    def __init__(self, make: Callable[[], Buffers]) -> None:
        self._make = make
        # Made late: a unit whose steps write no casts never needs them.
        self._buffers: Buffers = {}
        self._is_filled = False

    def allocate(self) -> Buffers:
        """Return the buffers with memory, uninitialised unless they had it."""
        if not self._buffers:
            self._buffers = self._make()
        for buffer in self._buffers.values():
            buffer.storage.allocate()
        return self._buffers

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the filled buffers, to be read by one gather."""
        assert self._is_filled, "a gather reads what was encoded"
        # From here on a true flag says that a step has filled the buffers for the next gather.
        self._is_filled = False
        return [self._buffers[spec.name] for spec in specs]

    def release_inputs(self) -> None:
        """Free the buffers, unless they are filled for the next gather."""
        # A step may have filled them while the gather that read them was not awaited yet.
        if not self._is_filled:
            for buffer in self._buffers.values():
                buffer.storage.release()

    def start_encoding(self) -> torch.Tensor | None:
        """Return the buffer of a cast, with memory."""
        (buffer,) = self.allocate().values()
        return buffer.flat

    def mark_encoded(self) -> None:
        """Mark the buffer of :meth:`start_encoding` as filled."""
        self._is_filled = True

    def mark_stale(self) -> None:
        """Mark the buffers as not filled."""
        self._is_filled = False


class TemporarySource(TransientBuffers):
    """Buffers that are encoded for each gather and freed when it is complete.

    Args:
        make: Makes the buffers, at the first use.
        encode: Fills them.
    """

    def __init__(self, make: Callable[[], Buffers], encode: Encode) -> None:
        super().__init__(make)
        self._encode = encode

    def refresh(self, statistics: torch.Tensor | None, label: str) -> None:
        """Encode the buffers for the next gather, unless a step has."""
        if not self._is_filled:
            self._encode(self.allocate(), statistics)
            self._is_filled = True

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the buffers; a second gather after one refresh encodes them again."""
        # The first gather has freed them: encoding again costs time, keeping them costs memory.
        self.refresh(None, "")
        return super().inputs(specs, full)


class CastOnGather(TransientBuffers):
    """A cast of the main weight straight into this rank's part of the gathered buffer.

    Args:
        make: Makes a buffer for a cast that a step writes.
        recipe: The cast.
        main_weight: The main weight, a shard.
        is_gathered_once: Whether one gather follows each change of the main weight. Where several
            do, each casts, and a cast that a step had written would need memory between them.
    """

    def __init__(
        self,
        make: Callable[[], Buffers],
        recipe: Recipe,
        main_weight: DBuffer,
        *,
        is_gathered_once: bool,
    ) -> None:
        super().__init__(make)
        self._recipe, self._main = recipe, main_weight
        self._is_gathered_once = is_gathered_once

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the cast of a step if there is one, else the outputs with this rank's part."""
        if self._is_filled:
            # Read where it lies: a copy into the outputs would cost what the step has saved.
            return super().inputs(specs, full)
        outputs = [full[spec.name] for spec in specs]
        # The writes count as the gather's, which restores the version of its outputs.
        with torch.no_grad():
            for spec, output in zip(specs, outputs, strict=True):
                parts = output.parts(self._main.shard)
                for main, part in zip(self._main.pieces(), parts, strict=True):
                    self._recipe.encode(main, {spec.name: part}, None)
        return outputs

    def start_encoding(self) -> torch.Tensor | None:
        """Return a buffer for the cast of a step where one gather reads it, else None."""
        return super().start_encoding() if self._is_gathered_once else None


class OuterJoin(GatherSource):
    """Shards of the inner axis, joined over the outer axis after each change of the main weight.

    Args:
        pieces: The source of the gather over the outer axis.
        shards: Its outputs: the pieces of all ranks of the outer axis, joined.
        specs: The buffers, in order.
        group: Ranks of the outer axis.
        on_copy_stream: Returns the context in which collectives read what was copied from the host.
    """

    def __init__(
        self,
        pieces: GatherSource,
        shards: Buffers,
        specs: Sequence[BufferSpec],
        group: dist.ProcessGroup,
        on_copy_stream: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pieces, self._shards, self._specs = pieces, shards, specs
        self._group = group
        self._on_copy_stream = on_copy_stream
        self._joining: Pending | None = None

    def with_pieces(self, pieces: GatherSource) -> OuterJoin:
        """Return a join of other pieces into the same shards."""
        return OuterJoin(pieces, self._shards, self._specs, self._group, self._on_copy_stream)

    def refresh(self, statistics: torch.Tensor | None, label: str) -> None:
        """Encode this rank's pieces and issue the gather of the others'; collective."""
        # Not awaited: pieces of all units travel while the first units compute.
        self._pieces.refresh(statistics, label)
        inputs = self._pieces.inputs(self._specs, self._shards)
        with self._on_copy_stream():
            shards = [self._shards[spec.name] for spec in self._specs]
            self._joining = gather_buffers(shards, inputs, group=self._group, label=label)

    def finish_refresh(self) -> None:
        """Wait for the gather of the pieces and free them."""
        # The shards may be read, and the pieces written, only after it.
        if self._joining is not None:
            self._joining.wait()
            self._joining = None
            self._pieces.release_inputs()

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the shards."""
        return [self._shards[spec.name] for spec in specs]

    def start_encoding(self) -> torch.Tensor | None:
        """Return the memory of this rank's piece."""
        # The gather under way reads that memory.
        self.finish_refresh()
        return self._pieces.start_encoding()

    def mark_encoded(self) -> None:
        """Mark this rank's piece as filled."""
        self._pieces.mark_encoded()

    def mark_stale(self) -> None:
        """Mark this rank's piece as out of date."""
        self._pieces.mark_stale()


class SliceSource(GatherSource):
    """Slices of gathered buffers, saved after forward for a gather over fewer ranks in backward.

    Args:
        group: Ranks that save one slice each, in order: neighbours on the inner axis.

    Attributes:
        group: As given: the ranks of the gather.
        slices: The slices by the buffers' names.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.slices: Buffers = {}

    def inputs(self, specs: Sequence[BufferSpec], full: Mapping[str, DBuffer]) -> list[DBuffer]:
        """Return the slices."""
        return [self.slices[spec.name] for spec in specs]


def encode_main_weight(
    recipe: Recipe,
    main_weight: DBuffer,
    targets: Mapping[str, DBuffer],
    statistics: torch.Tensor | None,
) -> None:
    """Fill buffers from the main weight by a recipe; local.

    Args:
        recipe: The recipe.
        main_weight: The main weight, a shard or the whole.
        targets: All of the recipe's buffers, which lie like the main weight, by name.
        statistics: Those of all tensors, ``(tensors * num_statistics,)`` fp32; None without any.
    """
    with torch.no_grad(), versions_preserved(targets.values()):
        if recipe.is_elementwise:
            # One call on whole buffers: gaps are encoded along, and read by no tensor.
            outputs = {name: buffer.flat for name, buffer in targets.items()}
            recipe.encode(main_weight.flat, outputs, statistics)
            return
        n = recipe.num_statistics
        for i in range(len(main_weight.layout.slots)):
            own = None if statistics is None else statistics[i * n : (i + 1) * n]
            outputs = {name: buffer.tensor(i) for name, buffer in targets.items()}
            recipe.encode(main_weight.tensor(i), outputs, own)


def versions_preserved(buffers: Iterable[DBuffer]) -> AbstractContextManager[None]:
    """Return a context in which autograd does not count writes to the buffers.

    Autograd takes a tensor that it saved in forward for modified if its version has changed. A
    replicated group's buffers are encoded in place between the microbatches of such graphs.
    """
    return preserving_versions(*(b.flat for b in buffers))
