"""The inputs of a compute weight's gather on this rank: one class for each way to store them.

A :class:`~megafsdp.fsdp.params.gathered_weight.GatheredWeight` has one source for the life of its
main weight; slices that a unit saves between forward and backward take precedence:

==================  ============================================  ================================
class               used where                                    memory between gathers
==================  ============================================  ================================
MainWeightSource    the compute dtype is the main weight's        none of its own
CastOnGather        the compute dtype is another one              none: a cast goes straight into
                                                                  the gathered buffer
PersistentSource    a quantized weight; a replicated group; an    the codes, or the cast
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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending
from megafsdp.buffer.dbuffer import DBuffer, gather_buffers

# Fills a buffer, which is cut like the main weight, from the main weight.
Encode: TypeAlias = Callable[[DBuffer], None]


class StepOutput(Protocol):
    """Memory in which an optimizer step writes the cast of the main weight that it changes."""

    def start_encoding(self) -> torch.Tensor | None:
        """Return the memory, 1-D like the main weight, in the compute dtype; None for none."""

    def mark_encoded(self) -> None:
        """Mark the memory of :meth:`start_encoding` as filled."""

    def mark_stale(self) -> None:
        """Mark what was encoded as out of date: the main weight has changed."""


class GatherSource:
    """The buffer that this rank contributes to a gather.

    The defaults are those of a source without memory of its own. A replicated group gathers
    nothing: it uses only the refresh of its source.
    """

    def input(self, full: DBuffer) -> DBuffer:
        """Return the input of a gather.

        Args:
            full: The allocated output. If it is also the input, this rank's part of it is filled
                here.
        """
        raise NotImplementedError

    def release_input(self) -> None:
        """Free the input of a gather that is complete."""

    def refresh(self, label: str) -> None:
        """Encode persistent buffers; a collective over an outer axis is issued, not awaited.

        Args:
            label: FQN of the unit, for counters and profilers.
        """

    def finish_refresh(self) -> None:
        """Wait for the collective of :meth:`refresh`."""

    def start_encoding(self) -> torch.Tensor | None:
        """Return memory in which a step writes the cast; None if that would save nothing."""
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

    def input(self, full: DBuffer) -> DBuffer:
        """Return the main weight."""
        return self._main


class PersistentSource(GatherSource):
    """A buffer that is encoded once after each change of the main weight.

    Args:
        buffer: The buffer; in a replicated group the full buffer itself.
        encode: Fills it.
    """

    def __init__(self, buffer: DBuffer, encode: Encode) -> None:
        self._buffer, self._encode = buffer, encode
        self._is_encoded = False

    def refresh(self, label: str) -> None:
        """Encode the buffer, unless a step has done so."""
        # The flag that a step set stays: its encoding is right until the next mark_stale().
        if not self._is_encoded:
            self._encode(self._buffer)

    def input(self, full: DBuffer) -> DBuffer:
        """Return the buffer."""
        return self._buffer

    def start_encoding(self) -> torch.Tensor:
        """Return the memory of the buffer."""
        return self._buffer.flat

    def mark_encoded(self) -> None:
        """Mark the buffer as filled."""
        self._is_encoded = True

    def mark_stale(self) -> None:
        """Encode at the next refresh."""
        self._is_encoded = False


class TransientBuffer(GatherSource):
    """Base of sources whose buffer has memory from its filling to the end of one gather.

    Args:
        make: Makes the buffer, at the first use.
    """

    def __init__(self, make: Callable[[], DBuffer]) -> None:
        self._make = make
        # Made at the first use: a unit whose steps write no casts may never need it.
        self._buffer: DBuffer | None = None
        self._is_filled = False

    def allocate(self) -> DBuffer:
        """Return the buffer with memory, uninitialised unless it had some."""
        if self._buffer is None:
            self._buffer = self._make()
        self._buffer.storage.allocate()
        return self._buffer

    def input(self, full: DBuffer) -> DBuffer:
        """Return the filled buffer, to be read by one gather."""
        assert self._is_filled and self._buffer is not None, "a gather reads what was encoded"
        # If the flag is true again later, a step has filled the buffer for the next gather.
        self._is_filled = False
        return self._buffer

    def release_input(self) -> None:
        """Free the buffer, unless it is filled for the next gather."""
        # A step may have filled it before the gather that read it was awaited.
        if self._buffer is not None and not self._is_filled:
            self._buffer.storage.release()

    def start_encoding(self) -> torch.Tensor | None:
        """Return the buffer for a step's cast, with memory."""
        return self.allocate().flat

    def mark_encoded(self) -> None:
        """Mark the buffer of :meth:`start_encoding` as filled."""
        self._is_filled = True

    def mark_stale(self) -> None:
        """Mark the buffer as not filled."""
        self._is_filled = False


class TemporarySource(TransientBuffer):
    """A buffer that is encoded for each gather and freed when it is complete.

    Args:
        make: Makes the buffer, at the first use.
        encode: Fills it.
    """

    def __init__(self, make: Callable[[], DBuffer], encode: Encode) -> None:
        super().__init__(make)
        self._encode = encode

    def refresh(self, label: str) -> None:
        """Encode the buffer for the next gather, unless a step has done so."""
        if not self._is_filled:
            self._encode(self.allocate())
            self._is_filled = True

    def input(self, full: DBuffer) -> DBuffer:
        """Return the buffer; a second gather after one refresh encodes it again."""
        # The first gather freed it. Encoding again costs time; keeping it would cost memory.
        self.refresh("")
        return super().input(full)


class CastOnGather(TransientBuffer):
    """A cast of the main weight straight into this rank's part of the gathered buffer.

    Args:
        make: Makes a buffer for a cast that a step writes.
        main_weight: The main weight, a shard.
        is_gathered_once: Whether one gather follows each change of the main weight. If several
            follow, each of them casts: a cast written by the step would need memory between them.
    """

    def __init__(
        self, make: Callable[[], DBuffer], main_weight: DBuffer, *, is_gathered_once: bool
    ) -> None:
        super().__init__(make)
        self._main = main_weight
        self._is_gathered_once = is_gathered_once

    def input(self, full: DBuffer) -> DBuffer:
        """Return the cast that a step wrote if there is one, else cast into the output."""
        if self._is_filled:
            # Gather from there: a copy into the output would cost what the step has saved.
            return super().input(full)
        copy_pieces(self._main.pieces(), full.parts(self._main.shard))
        return full

    def start_encoding(self) -> torch.Tensor | None:
        """Return a buffer for a step's cast if one gather reads it, else None."""
        return super().start_encoding() if self._is_gathered_once else None


class OuterJoin(GatherSource):
    """Shards of the inner axis, joined over the outer axis after each change of the main weight.

    Args:
        pieces: The source of the gather over the outer axis.
        shard: The output of that gather: the pieces of all ranks of the outer axis, joined.
        group: Ranks of the outer axis.
        on_copy_stream: Returns the context for collectives that read a copy from the host.
    """

    def __init__(
        self,
        pieces: GatherSource,
        shard: DBuffer,
        group: dist.ProcessGroup,
        on_copy_stream: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._pieces, self._shard, self._group = pieces, shard, group
        self._on_copy_stream = on_copy_stream
        self._joining: Pending | None = None

    def with_pieces(self, pieces: GatherSource) -> OuterJoin:
        """Return a join of other pieces into the same shard."""
        return OuterJoin(pieces, self._shard, self._group, self._on_copy_stream)

    def refresh(self, label: str) -> None:
        """Encode this rank's piece and issue the gather of all pieces; collective."""
        # Do not wait: pieces of all units travel while the first units compute.
        self._pieces.refresh(label)
        piece = self._pieces.input(self._shard)
        with self._on_copy_stream():
            self._joining = gather_buffers([self._shard], [piece], group=self._group, label=label)

    def finish_refresh(self) -> None:
        """Wait for the gather of the pieces and free this rank's piece."""
        # Only after this may the shard be read and the piece be written.
        if self._joining is not None:
            self._joining.wait()
            self._joining = None
            self._pieces.release_input()

    def input(self, full: DBuffer) -> DBuffer:
        """Return the shard."""
        return self._shard

    def start_encoding(self) -> torch.Tensor | None:
        """Return the memory of this rank's piece."""
        # A gather under way reads that memory.
        self.finish_refresh()
        return self._pieces.start_encoding()

    def mark_encoded(self) -> None:
        """Mark this rank's piece as filled."""
        self._pieces.mark_encoded()

    def mark_stale(self) -> None:
        """Mark this rank's piece as out of date."""
        self._pieces.mark_stale()


class SliceSource(GatherSource):
    """A slice of a gathered buffer, saved after forward for a gather over fewer ranks in backward.

    Args:
        group: Ranks that save one slice each, in order: neighbours on the inner axis.
        saved: This rank's slice.

    Attributes:
        group: The argument.
    """

    def __init__(self, group: dist.ProcessGroup, saved: DBuffer) -> None:
        self.group = group
        self._saved = saved

    def input(self, full: DBuffer) -> DBuffer:
        """Return the slice."""
        return self._saved


def cast_main_weight(main_weight: DBuffer, target: DBuffer) -> None:
    """Cast the main weight into a buffer that is cut like it; local."""
    # One copy of the whole buffer. Gaps are cast too, but no tensor reads them.
    copy_pieces([main_weight.flat], [target.flat])


@torch.no_grad()
def copy_pieces(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Copy 1-D tensors, each with a cast to its target's dtype."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
