"""A distributed flat buffer: storage, views of its tensors, and gathers.

A :class:`DBuffer` is a :class:`~megafsdp.buffer.layout.FlatLayout` with memory. A *shard* buffer
has this rank's piece of every sub-buffer; *replicate* and *partial* buffers have all of it. For two
ranks and one sub-buffer of shards of 32::

    rank 0  SHARD [0, 32)       REPLICATE [0, 64)
    rank 1  SHARD [32, 64)      REPLICATE [0, 64)

The file does not decide when a buffer is filled or released, nor what its elements mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import Pending, all_gather
from megafsdp.buffer.comm.custom import AllGather, all_gather_by
from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.mesh.placement import Residence


class DBuffer:
    """One flat buffer of a parameter group on this rank.

    Args:
        layout: Offsets of the tensors.
        residence: Which part of the group the rank has.
        shard: Index of this rank's shard.
        dtype: Element type.
        device: The device of the memory.
        ledger: Counts the bytes.
        category: The category that they are counted in.
        memory: Memory of the right length and dtype to use; None allocates it.

    The storage is allocated on construction; its content is undefined.
    """

    __slots__ = (
        "__weakref__",
        "_full_views",
        "_gaps",
        "_pieces",
        "layout",
        "residence",
        "shard",
        "storage",
    )

    def __init__(
        self,
        layout: FlatLayout,
        residence: Residence,
        *,
        shard: int,
        dtype: torch.dtype,
        device: torch.device,
        ledger: ByteLedger,
        category: Category,
        memory: torch.Tensor | None = None,
    ) -> None:
        numel = layout.shard_numel if residence is Residence.SHARD else layout.gathered_numel
        self.layout = layout
        self.residence = residence
        self.shard = shard
        self.storage = FlatStorage(
            numel, dtype, device=device, ledger=ledger, category=category, memory=memory
        )
        # Views are made once: every forward reads them, and a narrow() costs microseconds. They
        # stay valid over release() and allocate(), which resize the same storage object.
        self._full_views: list[torch.Tensor] | None = None
        self._gaps: list[torch.Tensor] | None = None
        self._pieces: list[torch.Tensor] | None = None

    @property
    def flat(self) -> torch.Tensor:
        """Return the whole storage as one 1-D tensor."""
        return self.storage.tensor

    def exchange(self, other: DBuffer) -> None:
        """Swap the memory of two buffers of the same layout; views stay on the memory they had."""
        assert self.flat.shape == other.flat.shape, "the buffers are alike"
        # The storage objects are swapped, so views that callers hold stay on their memory. The
        # caller then points its parameters and states at their new rows.
        self.storage, other.storage = other.storage, self.storage
        for buffer in (self, other):
            buffer._full_views = buffer._gaps = buffer._pieces = None

    def tensor(self, index: int) -> torch.Tensor:
        """Return the 1-D view of this rank's part of tensor ``index``; empty if it has none."""
        if self.residence is Residence.SHARD:
            start, stop = self.layout.owned_range(index, self.shard)
            return self.flat.narrow(0, self.layout.local_offset(index, self.shard), stop - start)
        spec = self.layout.slots[index].spec
        return self.flat.narrow(0, self.layout.gathered_offset(index), spec.numel)

    def full_views(self) -> list[torch.Tensor]:
        """Return all tensors of a whole buffer in their own shapes."""
        assert self.residence is not Residence.SHARD, "a shard has no full views"
        if self._full_views is None:
            slots = self.layout.slots
            self._full_views = [self.tensor(i).view(s.spec.shape) for i, s in enumerate(slots)]
        return self._full_views

    def pieces(self) -> list[torch.Tensor]:
        """Return the 1-D view of each sub-buffer."""
        if self._pieces is None:
            # In a shard buffer the sub-buffers are adjacent, without other ranks' shards between.
            layout, is_shard = self.layout, self.residence is Residence.SHARD
            factor = 1 if is_shard else layout.num_shards
            self._pieces = [
                self.flat.narrow(
                    0, s.local_offset if is_shard else s.gathered_offset, factor * s.shard_numel
                )
                for s in layout.sub_buffers
            ]
        return self._pieces

    def parts(self, shard: int) -> list[torch.Tensor]:
        """Return, for each sub-buffer of this whole buffer, the 1-D view of one shard."""
        assert self.residence is not Residence.SHARD, "a shard has no parts"
        numels = [s.shard_numel for s in self.layout.sub_buffers]
        pairs = zip(self.pieces(), numels, strict=True)
        return [piece.narrow(0, shard * numel, numel) for piece, numel in pairs]

    @property
    def gaps(self) -> list[torch.Tensor]:
        """Return views of the elements that belong to no tensor."""
        if self._gaps is None:
            is_shard = self.residence is Residence.SHARD
            gaps = self.layout.local_gaps(self.shard) if is_shard else self.layout.gaps()
            self._gaps = [self.flat.narrow(0, start, stop - start) for start, stop in gaps]
        return self._gaps

    def zero_gaps(self) -> None:
        """Zero the elements that belong to no tensor."""
        # Fresh memory may contain NaN, and fused steps and sums over ranks read gaps as well.
        for gap in self.gaps:
            gap.zero_()


def gather_buffers(
    full: Sequence[DBuffer],
    shards: Sequence[DBuffer],
    *,
    group: dist.ProcessGroup,
    label: str,
    comm: AllGather | None = None,
) -> Pending:
    """Fill buffers from every rank's shards, in one call; collective.

    ``full`` are whole buffers and ``shards`` their shards. Or ``full`` are shards of an inner axis
    and ``shards`` the pieces into which an outer axis divides them. A buffer in both lists is whole
    and already contains this rank's part. ``comm`` is the user's object that gathers over
    several ranks, if there is one.
    """
    pairs = list(zip(full, shards, strict=True))
    inputs: list[torch.Tensor] = []
    for whole, own in pairs:
        # An in-place gather reads this rank's part of the output; the backend leaves it unchanged.
        assert own is whole or own.residence is Residence.SHARD, "a gather joins shards"
        inputs += own.parts(group.rank()) if own is whole else own.pieces()
    outputs = [piece for whole, _ in pairs for piece in whole.pieces()]
    if comm is None or group.size() == 1:
        return all_gather(outputs, inputs, group=group, label=label)
    return all_gather_by(comm, outputs, inputs, group=group, label=label)
