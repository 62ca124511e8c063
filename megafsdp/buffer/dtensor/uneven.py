"""DTensors whose shards do not follow ``torch.chunk``.

A parameter of a flat buffer is cut where the buffer's shards end, so a rank has any number of its
rows, possibly none. torch has no placement for that: a plain DTensor would silently compute wrong
global results. :class:`UnevenDTensor` keeps its
:class:`~megafsdp.buffer.dtensor.uneven_layout.UnevenLayout` through all that torch does to a state
dict or an optimizer state, and implements the protocol of ``torch.distributed.checkpoint``.

The functions below it take any tensor: uneven or plain DTensors and local ones. op_rules.py decides
which operations are allowed, buffer/planner.py which rows a rank has. The class is a DTensor, so
the file reads private names of torch.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from megafsdp.buffer.comm.collectives import all_gather_equal
from megafsdp.buffer.dtensor.busy_memory import wait_for_writer
from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.function_rules import rule_function
from megafsdp.buffer.dtensor.op_rules import (
    IS_DISPATCH_BYPASSED,
    ReplicatedDTensor,
    RowShardedDTensor,
    as_plain_dtensor,
    check_may_draw,
    refuse,
)
from megafsdp.buffer.dtensor.random_values import (
    DrawsAsOneProcess,
    copy_initial_dtype,
    draw_rows,
    initial_dtype,
    write_rows,
)
from megafsdp.buffer.dtensor.safetensors_writes import check_writer
from megafsdp.buffer.dtensor.traced import plain_spec, spec_of_rows
from megafsdp.buffer.dtensor.uneven_layout import Region, UnevenLayout, whole
from megafsdp.buffer.dtensor.unwritten import is_shown_as_meta, mark_written
from megafsdp.device.autograd import check_has_no_graph
from megafsdp.device.torch_private import untraced_hook
from megafsdp.errors import expected
from megafsdp.mesh.dtensor import cut_dim, group_of_axes, main_weight_placements, shard_axes
from megafsdp.mesh.torch_private import (
    DTensorSpec,
    TensorMeta,
    make_dtensor,
)


def _outside_autograd(parameter: DTensor) -> torch.Tensor:
    alias = parameter.detach()
    if isinstance(parameter, ReplicatedParameter):
        # So that a draw into .data is a draw into the parameter.
        alias.__class__ = type(parameter)  # type: ignore[assignment]
    copy_initial_dtype(parameter, alias)
    return alias


def _refuse_other_memory(parameter: DTensor, value: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        expected(
            "in-place changes of a sharded parameter",
            "an assignment to its .data, which would cut it from its flat buffer",
            where=f"a parameter of shape {tuple(parameter.shape)}",
            hint=cure_of("assignment to .data"),
        )
    )


# torch's own setter would point the parameter at memory that no gather reads.
FIXED_DATA = property(_outside_autograd, _refuse_other_memory)
# Parameters that came on the meta device have memory, but no values until the user writes some.
SHOWN_AS_META = property(is_shown_as_meta)


class ReplicatedParameter(DrawsAsOneProcess, ReplicatedDTensor):  # type: ignore[metaclass]
    """A replicated parameter over a flat buffer; its operations give plain DTensors."""

    data = FIXED_DATA  # type: ignore[assignment]
    is_meta = SHOWN_AS_META  # type: ignore[assignment]

    def copy_from_full_(self, full: torch.Tensor) -> None:
        """Copy a plain tensor of the same shape, which must be equal on all ranks; local.

        Raises:
            ValueError: ``full`` has another shape.
        """
        _check_whole(self, full)
        with torch.no_grad():
            write_rows(self, full)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        """Copy the tensor and the gradient, out of the flat buffer."""
        return _deep_copy(self, wrap_like(self, self._local_tensor.clone()), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values, without the ties of the parameter to its unit."""
        return nn.Parameter, (wrap_like(self, self._local_tensor), self.requires_grad)


def _deep_copy(tensor: DTensor, rows: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    """Turn copied rows of a tensor into a copy of the tensor, for ``copy.deepcopy()``."""
    copied = nn.Parameter(rows) if isinstance(tensor, nn.Parameter) else rows
    memo[id(tensor)] = copied
    copied.requires_grad_(tensor.requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    return copied


def _check_whole(tensor: DTensor, full: torch.Tensor) -> None:
    if full.shape != tensor.shape:
        raise ValueError(
            expected(
                f"a full tensor of shape {tuple(tensor.shape)}",
                f"shape {tuple(full.shape)}",
                where=f"{type(tensor).__name__}.copy_from_full_()",
                hint="Give the whole tensor, not a shard",
            )
        )


class UnevenDTensor(RowShardedDTensor):
    """A DTensor with arbitrary ranges of its rows, or of the rows of a part of it, as shards.

    Create it with :meth:`from_local_rows`. Its mesh has data axes, then model axes. The last data
    axis, or all of them, or none divide rows; the last model axis may cut the tensor into parts.
    ``placements`` are only labels, the nearest that torch can express; the true cuts are in
    ``uneven_layout``. If two data axes divide rows, shards are counted along the first axis first:
    rank (o, s) of a mesh (M, N) has shard ``s * M + o``.
    """

    @classmethod
    def from_local_rows(
        cls,
        local: torch.Tensor,
        mesh: DeviceMesh,
        layout: UnevenLayout,
        *,
        num_shard_axes: int = 1,
    ) -> UnevenDTensor:
        """Wrap this rank's rows; no collective, no copy.

        Args:
            local: Contiguous tensor of shape ``layout.local_shape()``; the result aliases it.
            mesh: Data axes, then the layout's model axes.
            layout: How the global tensor is cut.
            num_shard_axes: Data axes that divide rows, counted from the last; the tensor is
                replicated over the others.

        Raises:
            ValueError: ``local`` does not have the layout's local shape.
        """
        if tuple(local.shape) != layout.local_shape():
            raise ValueError(
                expected(
                    f"a local tensor of shape {layout.local_shape()}",
                    f"shape {tuple(local.shape)}",
                    where=f"shard {layout.shard} of a tensor of shape {layout.shape}",
                    hint="Give exactly the rows that the layout assigns to this rank",
                )
            )
        strides = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]
        meta = TensorMeta(torch.Size(layout.shape), tuple(strides), local.dtype)
        num_model_axes = layout.num_model_axes
        placements = main_weight_placements(
            mesh.ndim - num_model_axes, num_shard_axes, layout.part, num_model_axes
        )
        return cls.wrap(local, DTensorSpec(mesh, placements, tensor_meta=meta), layout)

    @property
    def uneven_layout(self) -> UnevenLayout:
        """Return how the global tensor is cut; only ``shard`` differs between ranks of a part."""
        return self._uneven_layout

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's rows as a plain tensor that aliases the shard, outside autograd."""
        wait_for_writer(self._local_tensor)
        return self._local_tensor.detach()

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Return the ranks that divide the rows of this rank's part among them.

        Raises:
            AssertionError: No data axis divides them: every rank of the data axes has all rows.
        """
        assert self._shard_axes, "a group of ranks divides the rows"
        return group_of_axes(self.device_mesh, self._shard_axes)

    @property
    def copy_group(self) -> dist.ProcessGroup:
        """Return the ranks that together have the whole tensor, and other tensors of its model.

        They include every rank of a model axis; if these have equal elements, :attr:`is_counted`
        says which rank counts.
        """
        mesh, num_model_axes = self.device_mesh, self._uneven_layout.num_model_axes
        model_axes = range(mesh.ndim - num_model_axes, mesh.ndim)
        return group_of_axes(mesh, [*self._shard_axes, *model_axes])

    @property
    def is_counted(self) -> bool:
        """Return whether this rank's elements count in sums over :attr:`copy_group`."""
        mesh = self.device_mesh
        model_axes = range(mesh.ndim - self._uneven_layout.num_model_axes, mesh.ndim)
        # Among ranks with the same elements, the first counts.
        return all(
            mesh.get_local_rank(axis) == 0
            for axis in model_axes
            if cut_dim(self.placements[axis]) is None
        )

    @property
    def _shard_axes(self) -> list[int]:
        """Return the data axes that divide rows."""
        return shard_axes(self.placements, self._uneven_layout.num_model_axes)

    def shards_by_rank(self) -> list[int]:
        """Return the shards of all ranks of :attr:`shard_group`; without it, this rank's alone."""
        if not self._shard_axes:
            return [0]
        # Ranks of the flat group are numbered along the last axis first, shards along the first.
        num_inner = self.device_mesh.size(self._shard_axes[-1])
        num_shards = self._uneven_layout.num_shards
        num_outer = num_shards // num_inner
        return [s * num_outer + o for o in range(num_outer) for s in range(num_inner)]

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's rows, differentiably; their gradient is cut like the tensor.

        Raises:
            NotImplementedError: Under torch 2.11 a gradient of uneven rows would lose its cuts.
        """
        is_watched = self.requires_grad and torch.is_grad_enabled()
        if IS_DISPATCH_BYPASSED and is_watched and not self._uneven_layout.is_even:
            refuse("to_local within autograd", [self], hint=cure_of("within autograd"))
        wait_for_writer(self._local_tensor)
        return _LocalRows.apply(self)

    @untraced_hook
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor on every rank; collective over the ranks that divide it.

        Gathers over the data axes first, then over a model axis that cuts the tensor. Allocates the
        result, a part before that, and padded gather buffers. Differentiable, except with torch
        2.11; in backward the gradient of the whole must be equal on all ranks.
        """
        is_watched = self.requires_grad and torch.is_grad_enabled() and not IS_DISPATCH_BYPASSED
        return _Whole.apply(self) if is_watched else self._gathered()

    def _gathered(self) -> torch.Tensor:
        layout, part = self._uneven_layout, self._uneven_layout.part
        # Move an offloaded tensor to the device: NCCL cannot gather from the host.
        rows = self.local.reshape(-1).to(self.device_mesh.device_type)
        if self._shard_axes:
            ranges = [layout.element_range(shard) for shard in range(layout.num_shards)]
            numels = [ranges[s][1] - ranges[s][0] for s in self.shards_by_rank()]
            gathered = _gather_unequal(rows, numels, self.shard_group)
            by_shard = dict(zip(self.shards_by_rank(), gathered, strict=True))
            rows = torch.cat([by_shard[shard] for shard in range(layout.num_shards)])
        if part.is_whole:
            return rows.view(layout.shape)
        parts = [part.of_rank(rank) for rank in range(part.num_ranks)]
        model_axis = self.device_mesh.get_group(self.device_mesh.ndim - 1)
        gathered = _gather_unequal(rows, [each.local_numel for each in parts], model_axis)
        shapes = [each.local_shape for each in parts]
        return part.join([rows.view(shape) for rows, shape in zip(gathered, shapes, strict=True)])

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: object,
    ) -> DTensor:
        """Return the tensor as it is, or replicated; replicating is collective.

        Raises:
            NotImplementedError: Other placements are wanted.
        """
        wanted = tuple(placements or self.placements)
        if wanted == tuple(self.placements):
            return self
        if self._uneven_layout.is_even:
            # torch knows the rows from the placements, so it can move them.
            return as_plain_dtensor(self).redistribute(device_mesh, placements, **kwargs)
        if not all(p.is_replicate() for p in wanted):
            raise NotImplementedError(
                expected(
                    "Replicate() on every mesh axis",
                    wanted,
                    where="UnevenDTensor.redistribute()",
                    hint="Replicate it, and cut the result with distribute_tensor()",
                )
            )
        # The gather makes the tensor equal on all ranks; run_check would be a second exchange.
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    def like(self, local: torch.Tensor) -> UnevenDTensor:
        """Wrap as many other local elements as this tensor has, with the same mesh and layout."""
        shape = self._local_tensor.shape
        rows = local if local.shape == shape else local.view(shape)
        return type(self).wrap(rows, self._spec, self._uneven_layout)

    def copy_from_full_(self, full: torch.Tensor) -> None:
        """Copy this rank's rows from a full plain tensor of the global shape; local.

        Raises:
            ValueError: ``full`` has another shape.
        """
        _check_whole(self, full)
        # Copy regions: a tensor-parallel part is no contiguous flat range of the whole.
        everything = whole(self._uneven_layout.shape)
        with torch.no_grad():
            for region, view in self._region_views():
                view.copy_(full[region.slices_in(everything)])
        # Count the write on ranks without rows too: all ranks must enter the collective that
        # refreshes a stale compute weight.
        torch.autograd.graph.increment_version(self._local_tensor)
        mark_written(self)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        """Copy the local rows and the gradient; the layout is shared."""
        return _deep_copy(self, self.like(self.local.clone()), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the tensor if this rank has all of its rows.

        Copies to processes of ``multiprocessing`` may have any rows. Of an evenly cut tensor, as of
        torch's, a file has this rank's rows and the mesh: it is a plain DTensor.

        Raises:
            RuntimeError: The rank has fewer rows: a file would pass them off as the whole.
        """
        if self._uneven_layout.is_even:
            # A copy, or the file would have the whole flat buffer.
            plain = make_dtensor(DTensor, self.local.clone(), plain_spec(self._spec, self.dtype))
            if not isinstance(self, nn.Parameter):
                return plain.__reduce_ex__(protocol)
            return nn.Parameter, (plain, self.requires_grad)
        start, stop = self._uneven_layout.element_range()
        if stop - start < math.prod(self.shape):
            raise RuntimeError(
                expected(
                    "a tensor of which this rank has all rows",
                    f"elements {start} to {stop} of one of shape {tuple(self.shape)}",
                    where="pickle or torch.save() of a sharded parameter, gradient or state",
                    hint=cure_of("pickle"),
                )
            )
        return _reduce(self)

    def __setstate__(self, state: Any) -> None:
        """Take over what a pickle has; the spec gets the layout again."""
        # Attributes, or a pair of these and of what DTensor keeps in slots.
        for attributes in state if isinstance(state, tuple) else (state,):
            for name, value in (attributes or {}).items():
                setattr(self, name, value)
        self._spec = spec_of_rows(self._spec, self.dtype, self._uneven_layout)

    def __copy__(self) -> UnevenDTensor:
        """Copy the tensor by reference: the rows are the same memory."""
        return self.like(self._local_tensor)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the regions this rank reads, for ``torch.distributed.checkpoint`` to load."""
        # A load writes only on ranks with rows. Other ranks must count it too: all ranks must enter
        # the collective that refreshes a stale compute weight.
        torch.autograd.graph.increment_version(self._local_tensor)
        return self._chunks()

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
            for region in self._uneven_layout.regions()
        ]

    def _region_views(self) -> Iterator[tuple[Region, torch.Tensor]]:
        """Yield this rank's regions, each with the view of its elements."""
        flat, start = self.local.view(-1), 0
        for region in self._uneven_layout.regions():
            yield region, flat.narrow(0, start, region.numel).view(region.sizes)
            start += region.numel

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Plan a write for each region, for ``torch.distributed.checkpoint`` to save.

        Raises:
            NotImplementedError: The writer is torch's for safetensors, and would lose regions.
        """
        check_writer(fqn, self._uneven_layout)
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=torch.Size(self._uneven_layout.shape)
                ),
            )
            for chunk in self._chunks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the view of one region, for ``torch.distributed.checkpoint`` to read or write.

        Raises:
            ValueError: No region of this rank starts at the index's offset.
        """
        for region, view in self._region_views():
            if index.offset is None or tuple(index.offset) == region.offsets:
                return view
        raise ValueError(
            expected(
                f"an offset among {[region.offsets for region in self._uneven_layout.regions()]}",
                index.offset,
                where=f"tensor '{index.fqn}', shard {self._uneven_layout.shard}",
                hint="Ask for the chunks that __create_chunk_list__() names",
            )
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Show the global shape and this rank's range, without a collective."""
        layout = self._uneven_layout
        return (
            f"UnevenDTensor(shape={layout.shape}, own={layout.element_range()}, "
            f"mesh={tuple(self.device_mesh.shape)}, dtype={self.dtype})"
        )

    data = FIXED_DATA  # type: ignore[assignment]
    is_meta = SHOWN_AS_META  # type: ignore[assignment]
    if IS_DISPATCH_BYPASSED:
        __torch_function__: Any = classmethod(rule_function)


def _gather_unequal(
    local: torch.Tensor, numels: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return every rank's flat elements; all ranks know their numbers; collective."""
    # A part may have no rows, if a dimension is smaller than its model axis.
    if not any(numels):
        return [local] * len(numels)
    # Pad to the longest: equal pieces take one gather and no exchange of sizes.
    padded = local.new_zeros(max(numels))
    padded[: local.numel()] = local
    # Gather bytes: gloo gathers neither int16 nor FP8.
    received = all_gather_equal(padded.view(torch.uint8), group=group, label="full_tensor")
    pieces = zip(received, numels, strict=True)
    return [piece.view(local.dtype)[:numel] for piece, numel in pieces]


def _reduce(tensor: UnevenDTensor) -> Any:
    if isinstance(tensor, nn.Parameter):
        # Without the attributes that tie it to its unit.
        return nn.Parameter, (tensor.like(tensor._local_tensor), tensor.requires_grad)
    # Files have torch's own spec: what torch.load() lets in by default, and what older files have.
    described = make_dtensor(
        UnevenDTensor, tensor._local_tensor, plain_spec(tensor._spec, tensor.dtype)
    )
    described._uneven_layout = tensor.uneven_layout
    return super(UnevenDTensor, described).__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# A copy to another process of this job, as in torch's background saves, is no file.
ForkingPickler.register(UnevenDTensor, _reduce)


def fill_truncated(
    tensor: torch.Tensor,
    fill: Callable[[torch.Tensor], torch.Tensor],
    generator: torch.Generator | None,
) -> bool:
    """Fill a sharded or replicated tensor with its rows of a whole tensor that ``fill`` fills.

    ``fill`` draws from ``generator``, or the default one.

    Returns:
        False for any other tensor, which is left as it is.
    """
    if isinstance(tensor, UnevenDTensor):
        check_may_draw("normal_", [tensor])
    elif not isinstance(tensor, ReplicatedParameter):
        return False
    layout = tensor.uneven_layout if isinstance(tensor, UnevenDTensor) else None
    with torch.no_grad():
        rows = draw_rows(tensor, layout, fill, initial_dtype(tensor), generator)
        write_rows(tensor, rows)
    return True


_ALONE = "Add losses of parameters in a backward of their own"


class _LocalRows(torch.autograd.Function):
    """Return the rows of an uneven DTensor; wrap their gradient with its layout in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        """Return a view of the local tensor."""
        ctx.spec, ctx.layout = tensor._spec, tensor.uneven_layout
        # Return a view: autograd attaches this node to the result, but the stored local tensor must
        # stay outside autograd.
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> UnevenDTensor:
        """Wrap the gradient of the rows.

        Raises:
            NotImplementedError: The gradient has a graph, which would end here without a word.
        """
        check_has_no_graph(grads[0], where="to_local() of a sharded parameter", hint=_ALONE)
        return UnevenDTensor.wrap(grads[0].contiguous(), ctx.spec, ctx.layout)


class _Whole(torch.autograd.Function):
    """Return an uneven DTensor's whole tensor; cut its gradient the same way in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: UnevenDTensor) -> torch.Tensor:
        """Gather the whole."""
        ctx.spec, ctx.layout, ctx.device = tensor._spec, tensor.uneven_layout, tensor.local.device
        return tensor._gathered()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> UnevenDTensor:
        """Wrap this rank's rows of the gradient.

        Raises:
            NotImplementedError: The gradient has a graph, which would end here without a word.
        """
        check_has_no_graph(grads[0], where="full_tensor() of a sharded parameter", hint=_ALONE)
        rows = ctx.layout.rows_of(grads[0]).to(ctx.device)
        return UnevenDTensor.wrap(rows, ctx.spec, ctx.layout)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded, replicated or plain tensor; collective if it is sharded.

    All ranks of the tensor's mesh must call it. It works for uneven shards too.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor under a DTensor, or the tensor itself; aliases, no autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def local_object(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's local tensor object, whose version counts writes, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrap_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap other local elements, of any dtype, like a tensor: cut the same, or plain; aliases."""
    if isinstance(tensor, UnevenDTensor):
        return tensor.like(local)
    if not isinstance(tensor, DTensor):
        return local
    return make_dtensor(DTensor, local, plain_spec(tensor._spec, local.dtype))
