"""DTensors whose shards do not follow ``torch.chunk``.

A parameter of a flat buffer is cut where the buffer's shards end, so a rank holds any number of its rows,
possibly none. torch has no placement for that: a plain DTensor would compute wrong global results without
a word. :class:`UnevenDTensor` carries its :class:`~megafsdp.buffer.boxes.UnevenLayout` through everything
torch does to a state dict or an optimizer state, speaks the protocol of ``torch.distributed.checkpoint``,
and refuses operations that torch would compute wrongly.

Elementwise operations run on the local tensors alone and never enter DTensor's dispatch: no sharding
propagation, hence no superlinear first step with many parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megafsdp.buffer.boxes import UnevenLayout
from megafsdp.buffer.collectives import all_gather_equal
from megafsdp.errors import expected

# Result has the source's shape, element by element, whatever the tags say.
_LIKE = frozenset(
    "detach clone alias zeros_like ones_like empty_like full_like rand_like randn_like _to_copy "
    "lift_fresh zero_ fill_ normal_ uniform_ bernoulli_ native_dropout contiguous".split()
)
# Global reductions that DTensor turns into a Partial result, right whatever the cuts.
_REDUCTIONS = frozenset(
    "sum norm linalg_vector_norm _foreach_norm any all equal isfinite isnan isinf "
    "_amp_foreach_non_finite_check_and_unscale_ _is_any_true _is_all_true count_nonzero".split()
)
_NEEDS_DISPATCH_2_11 = torch.__version__ < "2.12"


class UnevenDTensor(DTensor):
    """A DTensor over the last axis of its mesh with arbitrary row ranges as shards.

    Create it with :meth:`from_local_rows`. ``placements`` say ``Shard(0)`` on the last axis and
    ``Replicate`` on the others, which is all that torch can express; the true cuts are in ``layout``.
    """

    _layout: UnevenLayout

    @classmethod
    def from_local_rows(
        cls, local: torch.Tensor, mesh: DeviceMesh, layout: UnevenLayout
    ) -> UnevenDTensor:
        """Wrap this rank's rows; no collective, no copy.

        Args:
            local: Contiguous tensor of shape ``layout.local_shape()``; the result aliases it.
            mesh: Its last axis holds the shards; the tensor is replicated over the others.
            layout: How the global tensor is cut.

        Raises:
            ValueError: ``local`` does not have the layout's local shape.
        """
        if tuple(local.shape) != layout.local_shape():
            raise ValueError(
                expected(
                    f"a local tensor of shape {layout.local_shape()}",
                    f"shape {tuple(local.shape)}",
                    where=f"shard {layout.shard} of a tensor of shape {layout.shape}",
                    mend="Give exactly the rows that the layout assigns to this rank",
                )
            )
        strides = [math.prod(layout.shape[d + 1 :]) for d in range(len(layout.shape))]
        meta = TensorMeta(torch.Size(layout.shape), tuple(strides), local.dtype)
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        return cls._wrap(local, DTensorSpec(mesh, placements, tensor_meta=meta), layout)

    @classmethod
    def _wrap(cls, local: torch.Tensor, spec: DTensorSpec, layout: UnevenLayout) -> UnevenDTensor:
        meta = spec.tensor_meta
        assert meta is not None, "an uneven DTensor has a global shape"
        if meta.dtype != local.dtype:
            meta = TensorMeta(meta.shape, meta.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        result = cls(local, spec, requires_grad=False)
        result._layout = layout
        return result

    @property
    def layout(self) -> UnevenLayout:
        """Return how the global tensor is cut; the same on all ranks but for ``shard``."""
        return self._layout

    @property
    def local(self) -> torch.Tensor:
        """Return this rank's rows as a plain tensor that aliases the shard, outside autograd."""
        return self._local_tensor.detach()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (the protocol's own type)
        """Keep the layout where torch 2.11 dispatches DTensors below ``__torch_dispatch__``."""
        if _NEEDS_DISPATCH_2_11 and not torch.is_grad_enabled():
            name = getattr(func, "__name__", "").strip("_")
            if name == "new_empty" or name in _FUNCTION_NAMES or name.startswith(_FUSED_PREFIXES):
                return _run_on_locals(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _rewrap_like(result, args) if _NEEDS_DISPATCH_2_11 else result

    @classmethod
    def __torch_dispatch__(
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  (the protocol's own type)
        """Run an operation on the local tensors, through DTensor, or refuse it."""
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name == "new_empty":
            return _new_empty(args, kwargs)
        if name in _REDUCTIONS and name not in ("isfinite", "isnan", "isinf"):
            _refuse_empty_identity(name, args)
            plain = tree_map(_as_plain_dtensor, (args, kwargs))
            return func(*plain[0], **plain[1])
        is_elementwise = (
            name in _LIKE or name.startswith(_LIST_PREFIXES) or torch.Tag.pointwise in func.tags
        )
        if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
            is_elementwise = True
        if not is_elementwise:
            _refuse(name, args)
        return _run_on_locals(func, args, kwargs)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor on every rank; collective over the last axis of the mesh.

        Allocates the result and a padded gather buffer. Outside autograd.

        Raises:
            NotImplementedError: The tensor is a part of a tensor-parallel one.
        """
        layout = self._layout
        if layout.box_shape != layout.shape:
            raise NotImplementedError(
                expected(
                    "a tensor that is sharded by data parallelism alone",
                    f"the part {layout.box_shape} of {layout.shape}",
                    where="full_tensor()",
                    mend="Gather the tensor-parallel axis first",
                )
            )
        ranges = [layout.element_range(shard) for shard in range(layout.num_shards)]
        longest = max(stop - start for start, stop in ranges)
        local = self.local.reshape(-1)
        padded = local.new_zeros(longest)
        padded[: local.numel()] = local
        axis_group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
        gathered = all_gather_equal(padded, group=axis_group, label="full_tensor")
        pieces = [gathered[s, : stop - start] for s, (start, stop) in enumerate(ranges)]
        return torch.cat(pieces).view(layout.shape)

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **kwargs: object,
    ) -> DTensor:
        """Return the tensor as it is, or replicated; collective for the latter.

        Raises:
            NotImplementedError: Any other placements.
        """
        wanted = tuple(placements or self.placements)
        if wanted == tuple(self.placements):
            return self
        if not all(p.is_replicate() for p in wanted):
            raise NotImplementedError(
                expected(
                    "Replicate() on every mesh axis",
                    wanted,
                    where="UnevenDTensor.redistribute()",
                    mend="Replicate it, and cut the result with distribute_tensor()",
                )
            )
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    def copy_from_full_(self, full: torch.Tensor) -> None:
        """Copy this rank's rows from a full plain tensor of the global shape; local.

        Raises:
            ValueError: ``full`` has another shape.
        """
        if tuple(full.shape) != self._layout.shape:
            raise ValueError(
                expected(
                    f"a full tensor of shape {self._layout.shape}",
                    f"shape {tuple(full.shape)}",
                    where="UnevenDTensor.copy_from_full_()",
                    mend="Give the whole tensor, not a shard",
                )
            )
        flat = self.local.view(-1)
        with torch.no_grad():
            for box in self._layout.boxes():
                region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                flat[box.start : box.start + box.numel].view(box.sizes).copy_(full[region])

    def __deepcopy__(self, memo: dict[int, object]) -> UnevenDTensor:
        """Copy the local rows; the layout is shared."""
        copy = type(self)._wrap(self.local.clone(), self._spec, self._layout)
        memo[id(self)] = copy
        return copy.requires_grad_(self.requires_grad)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the boxes this rank stores, for ``torch.distributed.checkpoint``."""
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self._layout.boxes()
        ]

    def __create_write_items__(self, fqn: str, obj: object) -> list[WriteItem]:
        """Plan one write a box, for ``torch.distributed.checkpoint``; none for an empty shard."""
        properties = TensorProperties.create_from_tensor(self._local_tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=properties, size=torch.Size(self._layout.shape)
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the view of one box, for ``torch.distributed.checkpoint`` to read or write.

        Raises:
            ValueError: No box of this rank starts at the index's offset.
        """
        for box in self._layout.boxes():
            if index.offset is None or tuple(index.offset) == box.offsets:
                flat = self.local.view(-1)
                return flat[box.start : box.start + box.numel].view(box.sizes)
        raise ValueError(
            expected(
                f"an offset among {[box.offsets for box in self._layout.boxes()]}",
                index.offset,
                where=f"tensor '{index.fqn}', shard {self._layout.shard}",
                mend="Ask for the chunks that __create_chunk_list__() names",
            )
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        """Show the global shape and the own range, without a collective."""
        return (
            f"UnevenDTensor(shape={self._layout.shape}, own={self._layout.element_range()}, "
            f"mesh={tuple(self.device_mesh.shape)}, dtype={self.dtype})"
        )

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """Return the tensor outside autograd; assigning is refused."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            expected(
                "in-place changes of a sharded parameter",
                "an assignment to its .data, which would cut it from its flat buffer",
                where=f"a parameter of shape {self._layout.shape}",
                mend="Use parameter.copy_() under torch.no_grad(), then "
                "megafsdp.mark_main_weights_changed(module)",
            )
        )


_LIST_PREFIXES = ("_foreach_", "_fused_")
_FUSED_PREFIXES = ("foreach", "fused")
_FUNCTION_NAMES = frozenset(
    "add sub mul div sqrt rsqrt addcdiv addcmul lerp neg abs sign maximum minimum copy zero fill "
    "pow exp log clamp iadd isub imul itruediv truediv rsub rmul detach clone zeros_like ones_like "
    "empty_like full_like to float half bfloat16 double cpu cuda contiguous normal uniform".split()
)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded, replicated or plain tensor; collective if it is sharded.

    Right for uneven shards. To be called by all ranks of the tensor's mesh alike.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's plain tensor under a DTensor, or the tensor itself; aliases, no autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def make_replicated(local: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Wrap a tensor that is equal on all ranks as a DTensor with Replicate; aliases, no collective."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def _as_plain_dtensor(value: object) -> object:
    if isinstance(value, UnevenDTensor):
        return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)
    return value


def _first_uneven(tree: object) -> UnevenDTensor:
    return next(leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, UnevenDTensor))


def _run_on_locals(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:  # noqa: ANN401  (an operation's result)
    """Run an elementwise operation on local tensors and wrap what comes out."""
    leaves, structure = tree_flatten((args, kwargs))
    # A list operation pairs its k-th tensors: sources of results are taken by local shape and order.
    sources = [leaf for leaf in leaves if isinstance(leaf, UnevenDTensor)]
    if getattr(func, "__name__", "").strip("_").startswith("new_empty"):
        return _new_empty(args, kwargs)
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    for operands in zip(*lists, strict=False) if lists else [leaves]:
        _check_operands(func, operands)
    locals_ = [_to_local(leaf) for leaf in leaves]
    local_args, local_kwargs = tree_unflatten(locals_, structure)
    result = func(*local_args, **local_kwargs)
    if isinstance(result, (list, tuple)):
        first = lists[0] if lists else sources
        return type(result)(
            _wrap_result(r, s if isinstance(s, UnevenDTensor) else sources[0])
            for r, s in zip(result, first, strict=False)
        )
    for leaf, local in zip(leaves, locals_, strict=True):
        if result is local and isinstance(leaf, DTensor):
            return leaf
    return _wrap_result(result, sources[0])


def _wrap_result(result: object, source: UnevenDTensor) -> object:
    is_like = isinstance(result, torch.Tensor) and result.shape == source._local_tensor.shape
    if not is_like or isinstance(result, DTensor):
        return result
    return UnevenDTensor._wrap(result, source._spec, source._layout)


def _rewrap_like(result: object, args: object) -> object:
    """Give plain DTensors that are like an uneven argument its layout again."""
    source = _first_uneven(args)
    if type(result) is DTensor and result.shape == source.shape:
        return _wrap_result(result._local_tensor, source)
    return result


def _to_local(value: object) -> object:
    return value._local_tensor if isinstance(value, DTensor) else value


def _check_operands(func: Callable[..., Any], operands: Sequence[object]) -> None:
    """Refuse to mix tensors that are cut differently, or a shard with a full tensor."""
    layout = next((o._layout for o in operands if isinstance(o, UnevenDTensor)), None)
    if layout is None:
        return
    for operand in operands:
        if not isinstance(operand, torch.Tensor) or operand.ndim == 0:
            continue
        is_cut_alike = isinstance(operand, UnevenDTensor) and (
            operand._layout is layout or operand._layout == layout
        )
        if not is_cut_alike:
            raise ValueError(
                expected(
                    f"operands cut like the first, of shape {layout.shape}",
                    f"a {type(operand).__name__} of shape {tuple(operand.shape)}",
                    where=f"{func}",
                    mend="Use full_tensor() on both, local shards on both, or copy_from_full_()",
                )
            )


def _new_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnevenDTensor:
    """Answer ``new_empty`` of the own global shape, which staging and deepcopy ask for."""
    source, size = args[0], tuple(args[1])
    if size != tuple(source.shape):
        _refuse("new_empty with another shape", args)
    wanted = {k: v for k, v in kwargs.items() if k in ("dtype", "device") and v is not None}
    local = torch.empty_like(source._local_tensor, **wanted)
    return UnevenDTensor._wrap(local, source._spec, source._layout)


def _refuse_empty_identity(name: str, args: tuple[Any, ...]) -> None:
    """Refuse norms that have no value on an empty shard, on all ranks alike."""
    is_norm = name in ("linalg_vector_norm", "_foreach_norm", "norm")
    if is_norm and len(args) > 1 and args[1] in (math.inf, -math.inf):
        _refuse(f"{name} of order {args[1]}", args)


def _refuse(name: str, args: object) -> NoReturn:
    shape = tuple(_first_uneven(args).shape)
    raise NotImplementedError(
        expected(
            "an elementwise operation, a sum, or a 2-norm",
            f"'{name}'",
            where=f"an unevenly sharded tensor of shape {shape}",
            mend="Call full_tensor() first, or work on .local, this rank's rows",
        )
    )
