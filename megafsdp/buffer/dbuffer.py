"""A distributed flat buffer: storage, views of its tensors, and the moves between its residences.

A :class:`DBuffer` joins a :class:`~megafsdp.buffer.layout.FlatLayout` with memory. As a *shard* it
holds this rank's piece of every sub-buffer, as *replicate* or *partial* the whole. For two ranks
and one sub-buffer of shards of 32::

    rank 0  SHARD [0, 32)       REPLICATE [0, 64)
    rank 1  SHARD [32, 64)      REPLICATE [0, 64)

The file knows nothing of modules, schedules and dtypes' meanings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megafsdp.buffer.collectives import Pending, all_gather, reduce_scatter
from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import ByteLedger, Category, FlatStorage
from megafsdp.mesh.placement import Residence


class DBuffer:
    """One flat buffer of a parameter group on this rank.

    Args:
        layout: Offsets of the tensors.
        residence: What the rank holds.
        shard: Index of this rank's shard.
        dtype: Element type.
        device: Where the memory lies.
        ledger: Counts the bytes.
        category: What they are counted as.

    The storage is allocated on construction; its content is undefined.
    """

    __slots__ = ("__weakref__", "layout", "residence", "shard", "storage")

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
    ) -> None:
        numel = layout.shard_numel if residence is Residence.SHARD else layout.gathered_numel
        self.layout = layout
        self.residence = residence
        self.shard = shard
        self.storage = FlatStorage(numel, dtype, device=device, ledger=ledger, category=category)

    @property
    def flat(self) -> torch.Tensor:
        """Return the whole storage as one 1-D tensor."""
        return self.storage.tensor

    def tensor(self, index: int) -> torch.Tensor:
        """Return the 1-D view of what this rank holds of tensor ``index``; empty if nothing."""
        if self.residence is Residence.SHARD:
            start, stop = self.layout.owned_range(index, self.shard)
            return self.flat.narrow(0, self.layout.local_offset(index, self.shard), stop - start)
        spec = self.layout.slots[index].spec
        return self.flat.narrow(0, self.layout.gathered_offset(index), spec.numel)

    def full_view(self, index: int) -> torch.Tensor:
        """Return tensor ``index`` in its own shape; the buffer must hold the whole."""
        assert self.residence is not Residence.SHARD, "a shard has no full views"
        return self.tensor(index).view(self.layout.slots[index].spec.shape)

    def pieces(self) -> list[torch.Tensor]:
        """Return the 1-D view of each sub-buffer."""
        layout = self.layout
        if self.residence is Residence.SHARD:
            return [self.flat.narrow(0, s.local_offset, s.shard_numel) for s in layout.sub_buffers]
        return [
            self.flat.narrow(0, s.gathered_offset, s.shard_numel * layout.num_shards)
            for s in layout.sub_buffers
        ]

    def zero_gaps(self) -> None:
        """Zero the elements that belong to no tensor."""
        is_shard = self.residence is Residence.SHARD
        gaps = self.layout.local_gaps(self.shard) if is_shard else self.layout.gaps()
        for start, stop in gaps:
            self.flat.narrow(0, start, stop - start).zero_()

    def reduce_scatter_from(
        self,
        partial: DBuffer,
        *,
        group: dist.ProcessGroup,
        scale: float,
        accumulate: bool,
        reduce_dtype: torch.dtype,
        label: str,
    ) -> Pending:
        """Fill or add to this shard from the sum of every rank's partial buffer; collective."""
        assert self.residence is Residence.SHARD and partial.residence is Residence.PARTIAL
        return reduce_scatter(
            self.pieces(),
            partial.pieces(),
            group=group,
            scale=scale,
            accumulate=accumulate,
            reduce_dtype=reduce_dtype,
            label=label,
        )


def gather_buffers(
    full: Sequence[DBuffer], shards: Sequence[DBuffer], *, group: dist.ProcessGroup, label: str
) -> Pending:
    """Fill whole buffers from every rank's shards of them, in one launch; collective."""
    pairs = list(zip(full, shards, strict=True))
    assert all(f.residence is Residence.REPLICATE for f, _ in pairs), "a gather fills whole buffers"
    outputs = [piece for f, _ in pairs for piece in f.pieces()]
    inputs = [piece for _, s in pairs for piece in s.pieces()]
    return all_gather(outputs, inputs, group=group, label=label)
