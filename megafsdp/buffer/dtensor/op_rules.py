"""Operations that an unevenly sharded DTensor allows, and how they run.

Elementwise operations run on the local tensors alone and never enter DTensor's dispatch: without
sharding propagation the first step is not superlinear in the number of parameters. statistics.py
computes sums, means, extremes, norms and deviations, to be combined over ranks later. Any other
operation would silently give wrong values, or leave some ranks waiting; it is refused on all ranks
alike. If all operands are cut evenly, as torch cuts, it is torch's.

The file has the base class that applies these rules. The class that users see, and its protocol for
checkpoints, are in uneven.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.buffer.dtensor.busy_memory import is_any_in_use, wait_for_writer
from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.factories import FACTORIES, new_tensor
from megafsdp.buffer.dtensor.operands import (
    check_fused_sgd,
    count_writes,
    leaves_of,
    map_operands,
    places_written,
)
from megafsdp.buffer.dtensor.random_values import (
    DRAWS,
    DRAWS_IN_PLACE,
    draw_rows,
    initial_dtype,
    write_rows,
)
from megafsdp.buffer.dtensor.statistics import STATISTICS, arguments_of, reduce_rows
from megafsdp.buffer.dtensor.traced import TracedAsItself, layout_of, plain_spec, spec_of_rows
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.device.torch_private import IS_DISPATCH_BYPASSED as IS_DISPATCH_BYPASSED
from megafsdp.device.torch_private import (
    OpOverload,
    no_torch_function,
    schema_of,
    untraced_hook,
)
from megafsdp.errors import expected
from megafsdp.mesh.dtensor import main_weight_placements, shard_axes, whole_of
from megafsdp.mesh.torch_private import DTensorSpec, TensorMeta, local_of, make_dtensor, spec_of

Self = TypeVar("Self", bound="RowShardedDTensor")

# Operators that act elementwise and keep the source's shape, although torch does not tag them
# pointwise.
LIKE = frozenset(
    {"clone", "contiguous", "_to_copy", "lift_fresh", "copy_", "zero_", "fill_"}
    | {f"{name}_like" for name in ("zeros", "ones", "empty", "full")}
)
# The optimizers' operators on lists step each tensor by itself, but torch tags none of them.
LIST_PREFIXES = ("_foreach_", "_fused_ada", "_fused_sgd_")
_LISTS_THAT_MIX = frozenset({"_foreach_max", "_foreach_mm", "_foreach_powsum"})
# Reductions that torch combines over ranks at once.
REDUCTIONS = frozenset({"equal", "_is_any_true", "_is_all_true"})
UNSCALE = "_amp_foreach_non_finite_check_and_unscale_"
ALIASES = frozenset({"detach", "alias"})


class RowShardedDTensor(TracedAsItself):
    """A DTensor whose local tensor is any range of its rows, given by its layout."""

    _uneven_layout: UnevenLayout

    @classmethod
    def wrap(cls: type[Self], local: torch.Tensor, spec: DTensorSpec, layout: UnevenLayout) -> Self:
        """Wrap a local tensor, keeping its dtype; outside autograd, no copy."""
        return _wrap_rows(cls, local, spec, layout)

    # An override in Python would cost microseconds for each attribute of the tensor.
    __torch_function__ = no_torch_function()  # type: ignore[assignment]

    @classmethod
    @untraced_hook
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the local tensors, through DTensor, or refuse it."""
        return run_operator(func, args, kwargs or {})

    @classmethod
    def __tensor_unflatten__(cls: type[Self], *parts: Any) -> Self:  # type: ignore[override]
        """Make a tensor of other rows with the same cuts."""
        plain = DTensor.__tensor_unflatten__(*parts)
        # A graph would have DTensor's own operations, which take the placements for the cuts.
        if IS_DISPATCH_BYPASSED:
            refuse("torch.compile", [plain], hint="Compile no function of parameters, or use 2.12")
        return _wrap_rows(cls, local_of(plain), spec_of(plain), layout_of(parts[1]))


def _wrap_rows(
    cls: type[Self], local: torch.Tensor, spec: DTensorSpec, layout: UnevenLayout
) -> Self:
    result = make_dtensor(cls, local, spec_of_rows(spec, local.dtype, layout))
    result._uneven_layout = layout
    return result


class YieldingClass(type(DTensor)):  # type: ignore[misc]
    """Metaclass of DTensors that leave operations to unevenly sharded operands, if there are any.

    torch asks an operation's first operand, but operands of a subclass before it: so unevenly
    sharded DTensors claim to be a subclass. A ``__torch_dispatch__`` that declines would take
    every other operation off torch's fast path. 2.12 to 2.15.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether torch asks operands of ``subclass`` before those of this class."""
        return issubclass(subclass, RowShardedDTensor) or type.__subclasscheck__(cls, subclass)


class ReplicatedDTensor(TracedAsItself, metaclass=YieldingClass):
    """A DTensor of which every rank of the data axes has all rows."""


def run_operator(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation below autograd, or refuse it."""
    name = schema_of(func).name.removeprefix("aten::")
    is_pointwise = torch.Tag.pointwise in func.tags
    if name.endswith("_") and not is_pointwise:
        # torch does not tag some in-place forms, such as abs_.
        is_pointwise = is_pointwise_name(name[:-1])
    # A view in a dtype of the same size keeps rows and cuts; FP8 codes are viewed as bytes.
    if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
        is_pointwise = args[1].itemsize == args[0].dtype.itemsize
    return run_by_rule(func, name, is_pointwise, args, kwargs)


# A context variable, because other threads, such as one that loads a checkpoint, may draw.
_refused = contextvars.ContextVar("refused", default=frozenset[str]())


@contextlib.contextmanager
def refusing_random_numbers() -> Iterator[None]:
    """Refuse draws into uneven DTensors: ranks with equal random states would draw equal rows."""
    token = _refused.set(DRAWS)
    try:
        yield
    finally:
        _refused.reset(token)


def check_may_draw(name: str, args: Sequence[object]) -> None:
    """Raise for a draw within :func:`refusing_random_numbers`."""
    if name in _refused.get():
        refuse(name, args, hint=cure_of("a draw beside an initialiser"))


def run_by_rule(
    func: Callable[..., Any],
    name: str,
    is_pointwise: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an operation by the rule for its name, or refuse it."""
    check_may_draw(name, args)
    if name in FACTORIES:
        return new_tensor(func, args, kwargs)
    # Operations that only write wait too: otherwise the other thread's writes would come later.
    if is_any_in_use():
        for leaf in uneven_leaves(args, kwargs):
            wait_for_writer(local_of(leaf))
    if name in _RULES:
        return _RULES[name](func, name, args, kwargs)
    if name == "_fused_sgd_":
        check_fused_sgd(args)
    # All ranks decide alike: the decision depends on names and layouts, never on local tensors.
    is_list = name.startswith(LIST_PREFIXES) and name not in _LISTS_THAT_MIX
    if not (is_pointwise or is_list or name in LIKE):
        return run_as_torch(func, name, args, kwargs)
    return _run_on_locals(func, args, kwargs)


def run_as_torch(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation of tensors that are all cut evenly through DTensor, or refuse it."""
    leaves = uneven_leaves(args, kwargs)
    # All ranks decide alike: layouts are the same everywhere but for the shard.
    if not all(leaf._uneven_layout.is_even for leaf in leaves):
        refuse(name, args, kwargs)
    return _through_dtensor(func, name, args, kwargs)


def _alias(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RowShardedDTensor:
    """Return another DTensor over the same local tensor, which counts writes to either."""
    # An alias of the local tensor, made below autograd, would have its own count.
    (source,) = args
    return type(source).wrap(local_of(source), spec_of(source), source._uneven_layout)


def _through_dtensor(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation through DTensor, which combines values over ranks at once."""
    args, kwargs = map_operands(as_plain_dtensor, args, kwargs)
    result = func(*args, **kwargs)
    count_writes(func, args, kwargs)
    return result


def _equal(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Compare two tensors as if both were whole; collective if their shapes are equal."""
    first, second = args
    if first.shape != second.shape:
        return False
    cuts = [isinstance(a, RowShardedDTensor) and (a.device_mesh, a._uneven_layout) for a in args]
    # DTensor compares the shards, which means nothing if the cuts differ.
    if cuts[0] == cuts[1]:
        return bool(_through_dtensor(func, name, args, kwargs))
    with torch.no_grad():
        return torch.equal(*(a.full_tensor() if isinstance(a, DTensor) else a for a in args))


def _unscale(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Unscale gradients, and combine ``found_inf`` over all ranks that have rows of any of them.

    torch combines it only over the ranks of the first gradient, but others may be cut otherwise.
    """
    grads, found_inf, inverse_scale = args
    local = [local_of(grad) if isinstance(grad, DTensor) else grad for grad in grads]
    func(local, found_inf, inverse_scale, **kwargs)
    count_writes(func, (local, found_inf, inverse_scale), kwargs)
    cuts = {(g.device_mesh, g.placements): None for g in grads if isinstance(g, DTensor)}
    groups = [
        mesh.get_group(axis)
        for mesh, placements in cuts
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    ]
    for group in dict.fromkeys(groups):
        all_reduce(found_inf, op="max", group=group, label=name)


def _statistic(
    func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor | list[DTensor]:
    """Compute a statistic of this rank's rows of a tensor, or of each in a list; local."""
    bound = arguments_of(func, args, kwargs)
    if isinstance(args[0], RowShardedDTensor):
        return _statistic_of(func, name, args[0], bound)
    norm = torch.ops.aten.linalg_vector_norm.default
    # Compute one by one: a list may also have replicated tensors.
    return [
        _statistic_of(norm, name, tensor, bound)
        if isinstance(tensor, RowShardedDTensor)
        else norm(tensor, **bound)
        for tensor in args[0]
    ]


def _statistic_of(
    func: OpOverload, name: str, tensor: RowShardedDTensor, bound: dict[str, Any]
) -> DTensor:
    found = reduce_rows(func, name, tensor, tensor._uneven_layout, bound)
    if found is None:
        # One value per row would be cut like the rows, which a plain DTensor cannot express.
        name = name if bound.get("dim") is None else f"{name} of each row"
        found = run_as_torch(func, name, (tensor,), bound)
    return found


def _draw(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RowShardedDTensor:
    """Draw this rank's rows of a draw of the whole, into the tensor or into one like it."""
    target, *others = args
    if any(isinstance(o, torch.Tensor) for o in (*others, *kwargs.values())):
        # No rank has all elements of another sharded tensor.
        refuse(f"{name} with a tensor of parameters", args, kwargs)
    is_into = name in DRAWS_IN_PLACE
    dtype = initial_dtype(target) if is_into else target.dtype
    rows = draw_rows(
        target,
        target._uneven_layout,
        lambda full: func(full, *others, **kwargs),
        dtype,
        kwargs.get("generator"),
    )
    if not is_into:
        return type(target).wrap(rows, spec_of(target), target._uneven_layout)
    write_rows(target, rows)
    return target


def _select_row(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> RowShardedDTensor:
    """Return row ``index``, which one rank has, as an alias; embeddings pad by such a row."""
    tensor, dim, index = args
    layout: UnevenLayout = tensor._uneven_layout
    is_watched = tensor.requires_grad and torch.is_grad_enabled()
    # If a model axis cuts rows, only one of its ranks has this one: no placement expresses that.
    are_rows_cut = layout.part.dim == 0 and not layout.part.is_whole
    if dim % len(layout.shape) or is_watched or are_rows_cut:
        return run_as_torch(func, name, args, kwargs)
    place, of_row = layout.row(index)
    start, stop = of_row.element_range()
    rows = local_of(tensor).view(-1).narrow(0, place, stop - start).view(of_row.local_shape())
    strides = tuple(math.prod(of_row.shape[d + 1 :]) for d in range(len(of_row.shape)))
    meta = TensorMeta(torch.Size(of_row.shape), strides, rows.dtype)
    num_model_axes, mesh = layout.num_model_axes, tensor.device_mesh
    num_shard_axes = len(shard_axes(tensor.placements, num_model_axes))
    placements = main_weight_placements(
        mesh.ndim - num_model_axes, num_shard_axes, of_row.part, num_model_axes
    )
    return type(tensor).wrap(rows, DTensorSpec(mesh, placements, tensor_meta=meta), of_row)


# Operators with their own rule: neither run on the local tensors as they are, nor refused.
_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(STATISTICS, _statistic),
    **dict.fromkeys(DRAWS, _draw),
    **dict.fromkeys(REDUCTIONS, _through_dtensor),
    "equal": _equal,
    **dict.fromkeys(ALIASES, _alias),
    UNSCALE: _unscale,
    "select": _select_row,
}


@functools.cache
def is_pointwise_name(name: str) -> bool:
    """Return whether torch tags an operator, or its in-place form, as pointwise."""
    packets = [getattr(torch.ops.aten, n, None) for n in (name, f"{name}_")]
    return any(
        torch.Tag.pointwise in getattr(p, o).tags for p in packets if p for o in p.overloads()
    )


def _run_on_locals(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on local tensors and wrap the results."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    args = _cut_whole_operands(func, args, kwargs)
    if not lists or not _are_cut_alike(lists):
        everything = [leaves_of((*args, *kwargs.values()))]
        for operands in zip(*lists, strict=False) if lists else everything:
            if not _are_operands_alike(func, operands):
                return run_as_torch(func, str(func), args, kwargs)
    local_args, local_kwargs = map_operands(_local_operand, args, kwargs)
    result = func(*local_args, **local_kwargs)
    count_writes(func, args, kwargs)
    if result is None:
        return None
    sources = uneven_leaves(args, kwargs)
    if isinstance(result, (list, tuple)):
        firsts = lists[0] if lists else sources
        return type(result)(_wrap_result(r, s) for r, s in zip(result, firsts, strict=False))
    # An in-place operation returns its operand, which must stay the object that the caller has.
    for leaf in sources:
        if result is local_of(leaf):
            if IS_DISPATCH_BYPASSED:
                # With 2.11 no layer of torch above this one counts the write.
                torch.autograd.graph.increment_version(leaf)
            return leaf
    return _wrap_result(result, sources[0])


def uneven_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RowShardedDTensor]:
    """Return the operands that are cut by a layout."""
    leaves = leaves_of((*args, *kwargs.values()))
    return [leaf for leaf in leaves if isinstance(leaf, RowShardedDTensor)]


def _cut_whole_operands(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments, replacing those that every rank has whole by this rank's rows.

    Autograd expands the gradient of a statistic to a replicated DTensor of the whole shape. The
    source of a copy may also be cut by torch: ``copy_()`` is then collective over its mesh.
    """
    if not any(type(arg) is DTensor and arg.ndim for arg in args):
        return args
    # Not if an operand is written: the write would go to a copy.
    if not isinstance(args[0], RowShardedDTensor) and (
        not isinstance(func, OpOverload) or places_written(func)
    ):
        return args
    like = uneven_leaves(args, kwargs)[0]
    layout = like._uneven_layout
    is_copy = getattr(func, "__name__", "").split(".")[0] == "copy_"

    def cut(arg: object) -> object:
        if type(arg) is not DTensor or tuple(arg.shape) != layout.shape:
            return arg
        is_whole = all(p.is_replicate() for p in arg.placements)
        if is_even_chunk(arg, like) or not (is_whole or is_copy):
            return arg
        return type(like).wrap(layout.rows_of(whole_of(arg)), spec_of(like), layout)

    return tuple(map(cut, args))


def _local_operand(value: object) -> object:
    """Return the local form of an operand for a local operation."""
    if not isinstance(value, DTensor):
        return value
    # Lists may also have replicated DTensors, and DTensors that torch has cut.
    if value.ndim or not any(placement.is_partial() for placement in value.placements):
        return local_of(value)
    # A scalar such as a norm may be Partial: full_tensor() makes its reduction over ranks. Detach
    # it first: torch 2.12 detaches one that requires gradients by an operator that it refuses.
    settled = cast(DTensor, value.detach()) if value.requires_grad else value
    return settled.full_tensor()


def _wrap_result(result: object, source: object) -> object:
    if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
        return result
    if not isinstance(source, DTensor) or result.shape != local_of(source).shape:
        return result
    if isinstance(source, RowShardedDTensor):
        return type(source).wrap(result, spec_of(source), source._uneven_layout)
    return make_dtensor(DTensor, result, plain_spec(spec_of(source), result.dtype))


def as_plain_dtensor(value: Any) -> Any:
    """Return a plain DTensor over the same rows, outside autograd; another value as it is."""
    if isinstance(value, RowShardedDTensor):
        spec = plain_spec(spec_of(value), value.dtype)
        return DTensor(local_of(value), spec, requires_grad=value.requires_grad)
    return value


def _are_cut_alike(lists: Sequence[Sequence[object]]) -> bool:
    """Return whether lists pair tensors of the same cuts, or scalars; False if unsure.

    A check in bulk: with hundreds of parameters, a check of each costs as much as the kernel.
    """
    first, *others = ([getattr(o, "_uneven_layout", None) for o in operands] for operands in lists)
    are_scalars = (not any(getattr(o, "ndim", 0) for o in operands) for operands in lists[1:])
    return None not in first and all(
        cuts == first or is_scalar for cuts, is_scalar in zip(others, are_scalars, strict=True)
    )


def _is_movable(tensor: torch.Tensor) -> bool:
    """Return whether torch knows the rows of a DTensor, so that it can redistribute it."""
    if isinstance(tensor, RowShardedDTensor):
        return tensor._uneven_layout.is_even
    return isinstance(tensor, DTensor)


def is_even_chunk(operand: object, like: RowShardedDTensor) -> bool:
    """Return whether torch has cut an operand as an evenly cut tensor is."""
    # Of equal shape: rows of a tensor that is broadcast would meet other rows.
    return (
        like._uneven_layout.is_even
        and isinstance(operand, DTensor)
        and not isinstance(operand, RowShardedDTensor)
        and operand.shape == like.shape
        and operand.device_mesh == like.device_mesh
        and operand.placements == like.placements
    )


def _are_operands_alike(func: Callable[..., Any], operands: Sequence[object]) -> bool:
    """Return whether operands have the same rows; False for DTensors that torch can move.

    Raises:
        ValueError: Tensors that are cut differently are mixed, or a shard with a full tensor.
    """
    sharded = [o for o in operands if isinstance(o, RowShardedDTensor)]
    if not sharded:
        return True
    # Tensors of equal local shape may be different rows: a kernel would pair them silently.
    layout = sharded[0]._uneven_layout
    for operand in operands:
        if not isinstance(operand, torch.Tensor) or operand.ndim == 0:
            continue
        is_cut_alike = isinstance(operand, RowShardedDTensor) and (
            operand._uneven_layout is layout or operand._uneven_layout == layout
        )
        is_cut_alike = is_cut_alike or is_even_chunk(operand, sharded[0])
        if not is_cut_alike and _is_movable(operand) and all(map(_is_movable, sharded)):
            return False
        if not is_cut_alike:
            # With a graph it is an activation that meets a weight: optimizers make no graph.
            is_forward = torch.is_grad_enabled() and isinstance(sharded[0], nn.Parameter)
            cuts = ", cut in another way" if isinstance(operand, DTensor) else ""
            raise ValueError(
                expected(
                    f"operands cut like the first, of shape {layout.shape}",
                    f"a {type(operand).__name__} of shape {tuple(operand.shape)}{cuts}",
                    where=f"{func}",
                    hint=cure_of("operands of a forward" if is_forward else "operands"),
                )
            )
    return True


def refuse(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, hint: str = ""
) -> NoReturn:
    """Raise the error for an operation that would be wrong, naming it and the tensor's shape."""
    leaves = leaves_of((*args, *(kwargs or {}).values()))
    shape = next((tuple(t.shape) for t in leaves if isinstance(t, DTensor)), "unknown")
    is_of_parameter = any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    raise NotImplementedError(
        expected(
            "an elementwise operation, or a statistic of all rows",
            f"'{name}'",
            where=f"an unevenly sharded tensor of shape {shape}",
            hint=hint or cure_of(name, of_parameter=is_of_parameter),
        )
    )


def is_cut_alike(value: object, tensor: object) -> bool:
    """Return whether a value can be copied row by row into a tensor; True for a plain tensor."""
    if not isinstance(tensor, RowShardedDTensor):
        return True
    return isinstance(value, RowShardedDTensor) and value._uneven_layout == tensor._uneven_layout


def refuse_full_state(where: str) -> NoReturn:
    """Raise the error for a loaded tensor that is full, or that torch has cut in its own way."""
    raise NotImplementedError(
        expected(
            "a tensor cut like the parameter",
            "a full one, or one that torch has cut",
            where=where,
            hint=cure_of("load of a full tensor"),
        )
    )
