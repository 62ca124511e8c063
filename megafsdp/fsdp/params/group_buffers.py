"""Cut and allocate the flat buffers of one parameter group.

:class:`GroupBuffers` allocates buffers for the group's main weight, gradients and optimizer states;
:class:`LocalRows` finds each parameter's rows in such a buffer. The callers decide what the bytes
mean, and when they are written and freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafsdp.buffer.dbuffer import DBuffer
from megafsdp.buffer.layout import FlatLayout
from megafsdp.device.memory import ByteLedger, Category, outside_inference_mode
from megafsdp.device.torch_private import split_as
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.unit_ledger import HostMemory
from megafsdp.mesh.placement import Residence


@dataclass(frozen=True)
class GroupDtypes:
    """Dtypes of one group: compute weight, main weight, main gradient, and the sum over ranks."""

    compute: torch.dtype
    main: torch.dtype
    grad: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class GroupBuffers:
    """Allocates the flat buffers of one group; the content of their sub-buffers is undefined.

    Attributes:
        layout: Offsets of the parameters, cut as the main weight is.
        gathered_layout: The same buffer, cut as the ranks of the inner axis gather and reduce it.
        axes: Ranks that divide or replicate the group.
        dtypes: Dtypes of the buffers.
        device: Device of the buffers that are not on the host.
        ledger: Counts the bytes on the device.
    """

    layout: FlatLayout
    gathered_layout: FlatLayout
    axes: DataParallelAxes
    dtypes: GroupDtypes
    device: torch.device
    ledger: ByteLedger

    @property
    def residence(self) -> Residence:
        """Return the residence of the main weight, of its gradient and of its states."""
        return Residence.SHARD if self.axes.is_sharded else Residence.REPLICATE

    @property
    def local_numel(self) -> int:
        """Return the number of elements of the main weight on this rank, gaps included."""
        layout = self.layout
        return layout.shard_numel if self.axes.is_sharded else layout.gathered_numel

    def new(self, residence: Residence, dtype: torch.dtype, category: Category) -> DBuffer:
        """Allocate a buffer on the device."""
        return _with_zeros_between(
            DBuffer(
                self.layout,
                residence,
                shard=max(self.axes.shard, 0),
                dtype=dtype,
                device=self.device,
                ledger=self.ledger,
                category=category,
            )
        )

    def new_main_grad(self) -> DBuffer:
        """Allocate a gradient on the device that is cut as the main weight is."""
        return self.new(self.residence, self.dtypes.grad, Category.MAIN_GRAD)

    def new_inner_sum(self) -> DBuffer:
        """Allocate this rank's shard of a sum over the inner axis alone.

        It is longer than the main weight's shard if the outer axis divides the main weight too.
        """
        return _with_zeros_between(
            DBuffer(
                self.gathered_layout,
                Residence.SHARD,
                shard=self.axes.gathered_shard,
                dtype=self.dtypes.grad,
                device=self.device,
                ledger=self.ledger,
                category=Category.MAIN_GRAD,
            )
        )

    def new_beside_main_weight(
        self, dtype: torch.dtype, category: Category, host: HostMemory | None
    ) -> DBuffer:
        """Allocate a buffer next to the main weight, and cut like it.

        Args:
            dtype: Its dtype.
            category: The category that its bytes are counted in.
            host: The host memory with the main weight; None for the device.
        """
        if host is None:
            return self.new(self.residence, dtype, category)
        # Take it from the arena: pinning is slow, and an arena is pinned in one call.
        memory = host.arena.take(self.local_numel, dtype)
        return self._over(memory, category, host.ledger)

    def new_host_grad(self, host: HostMemory) -> DBuffer:
        """Allocate a gradient of parameters that live on the host."""
        memory = host.take_apart(self.local_numel, self.dtypes.grad)
        return self._over(memory, Category.MAIN_GRAD, host.ledger)

    def _over(self, memory: torch.Tensor, category: Category, ledger: ByteLedger) -> DBuffer:
        return _with_zeros_between(
            DBuffer(
                self.layout,
                self.residence,
                # A replicated group has no shard; its whole buffer counts as the first.
                shard=max(self.axes.shard, 0),
                dtype=memory.dtype,
                device=memory.device,
                ledger=ledger,
                category=category,
                memory=memory,
            )
        )


def _with_zeros_between(buffer: DBuffer) -> DBuffer:
    # No collective writes between sub-buffers, but norms and fused steps read all of a shard. Whole
    # buffers of addends are zeroed when gradients are packed.
    is_shard = buffer.residence is Residence.SHARD
    if is_shard and any(sub.gap_numel for sub in buffer.layout.sub_buffers):
        buffer.zero_gaps()
    return buffer


class LocalRows:
    """Finds the rows of each parameter that this rank has in a flat buffer.

    Args:
        rows: The rows of each parameter in one example buffer, in local shapes.
        flat: That buffer, 1-D.
    """

    def __init__(self, rows: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        # split_as() splits a buffer into consecutive tensors, so each gap is one more tensor. It
        # reads only their sizes: they are on the meta device.
        self._shapes: list[torch.Tensor] = []
        self._places: list[int | None] = [None] * len(rows)
        self._empty_shapes = [own.shape for own in rows if not own.numel()]
        starts = [int(own.storage_offset() - flat.storage_offset()) for own in rows]
        end = 0
        for index in sorted(range(len(rows)), key=starts.__getitem__):
            own = rows[index]
            if own.numel():
                self._append((starts[index] - end,))
                end = starts[index] + own.numel()
                self._places[index] = len(self._shapes)
                self._append(own.shape)
        # With many ranks most parameters have no rows here. Their empty tensors need no buffer, so
        # they are made once for each dtype and device.
        self._empty: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def _append(self, shape: Sequence[int]) -> None:
        self._shapes.append(torch.empty((), device="meta").expand(shape))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each parameter in a buffer, in local shapes.

        They alias the buffer, except the empty ones.
        """
        key = flat.dtype, flat.device
        if key not in self._empty:
            with outside_inference_mode():
                self._empty[key] = [flat.new_empty(shape) for shape in self._empty_shapes]
        empty = iter(self._empty[key])
        # One call into C++ for all parameters: this runs for each unit in each backward.
        views = split_as(flat, self._shapes)
        return [next(empty) if place is None else views[place] for place in self._places]
