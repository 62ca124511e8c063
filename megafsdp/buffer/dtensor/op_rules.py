"""Which operations an unevenly sharded DTensor allows, and how they run.

Elementwise operations run on the local tensors alone and never enter DTensor's dispatch: no
sharding propagation, hence no superlinear first step with many parameters. Sums and 2-norms go
through DTensor, whose ``Partial`` results are right whatever the cuts. Everything else would be
wrong without a word, or hang some ranks, and is refused on all ranks alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten, tree_map

from megafsdp.buffer.dtensor.busy_memory import is_any_in_use, wait_for_writer
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.errors import expected

Self = TypeVar("Self", bound="RowShardedDTensor")
D = TypeVar("D", bound=DTensor)

_NEW_EMPTY = "new_empty"
# Their results have the source's shape, element by element, though torch does not tag them
# pointwise.
_LIKE = frozenset(
    {"detach", "clone", "alias", "contiguous", "_to_copy", "lift_fresh", "copy_"}
    | {f"{name}_like" for name in ("zeros", "ones", "empty", "full", "rand", "randn")}
    | {"zero_", "fill_", "normal_", "uniform_", "bernoulli_"}
)
_LIST_PREFIXES = ("_foreach_", "_fused_ada", "_fused_sgd_")
_LISTS_THAT_MIX = frozenset({"_foreach_max", "_foreach_mm", "_foreach_powsum"})
_FUSED_SGD = "_fused_sgd_"
_RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "rand_like", "randn_like"})
_REDUCTIONS = frozenset(
    {"sum", "norm", "linalg_vector_norm", "_foreach_norm", "any", "all", "equal", "count_nonzero"}
    | {"_amp_foreach_non_finite_check_and_unscale_", "_is_any_true", "_is_all_true"}
)
_NORMS = frozenset({"norm", "linalg_vector_norm", "_foreach_norm"})
# What only the function path of torch 2.11 meets: names of methods, not of operators.
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "half", "bfloat16", "double"})
_EXTREMA = frozenset({"max", "min"})
_INDEXING = frozenset({"__getitem__", "__setitem__", "__iter__"})
_METADATA = frozenset(
    {"size", "stride", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "__len__"}
    | {"is_contiguous", "requires_grad_", "retain_grad", "backward", "data_ptr", "type"}
    | {"__get__", "__set__", "__delete__"}
)
# torch 2.11 handles subclasses of DTensor below __torch_dispatch__; there the same rules are
# applied one level higher, to functions by name.
IS_DISPATCH_BYPASSED = tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 12)


def wrapper(cls: type[D], local: torch.Tensor, spec: DTensorSpec) -> D:
    """Make a DTensor of a class over a local tensor, which may lie anywhere in its storage."""
    # A wrapper takes over the offset, and torch's staging an offset for the address of a storage.
    source = local.new_empty(0) if local.storage_offset() else local
    # DTensor's initializer serves export alone, and takes longer than all else that is done here.
    result = cast(D, cls.__new__(cls, source, spec, requires_grad=False))
    result._local_tensor = local
    return result


class RowShardedDTensor(DTensor):
    """A DTensor whose local tensor is any range of its rows; it carries the true cuts."""

    _uneven_layout: UnevenLayout

    @classmethod
    def wrap(cls: type[Self], local: torch.Tensor, spec: DTensorSpec, layout: UnevenLayout) -> Self:
        """Make one over a local tensor, with its dtype; outside autograd, no copy."""
        meta = spec.tensor_meta
        assert meta is not None, "an uneven DTensor has a global shape"
        if meta.dtype != local.dtype:
            meta = TensorMeta(meta.shape, meta.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        result = wrapper(cls, local, spec)
        result._uneven_layout = layout
        return result

    # An override in Python would cost microseconds for each attribute of the tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the local tensors, through DTensor, or refuse it."""
        name = func._schema.name.removeprefix("aten::")
        is_pointwise = torch.Tag.pointwise in func.tags
        if name.endswith("_") and not is_pointwise:
            # Some forms in place lack the tag: abs_.
            is_pointwise = _is_pointwise(name[:-1])
        if name == "view" and len(args) == 2 and isinstance(args[1], torch.dtype):
            is_pointwise = args[1].itemsize == args[0].dtype.itemsize
        return _run_by_rule(func, name, is_pointwise, args, kwargs or {})


# Names of operations that are refused beside those that always are.
_refused: ContextVar[frozenset[str]] = ContextVar("refused", default=frozenset())


@contextlib.contextmanager
def refusing_random_numbers() -> Iterator[None]:
    """Refuse to draw into uneven DTensors: ranks of equal random states would draw equal rows."""
    token = _refused.set(_RANDOM)
    try:
        yield
    finally:
        _refused.reset(token)


def _run_by_rule(
    func: Callable[..., Any],
    name: str,
    is_pointwise: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if name in _refused.get():
        refuse(name, (args, kwargs), "Draw each module's own parameters in its own initializer")
    if name == _NEW_EMPTY:
        return _new_empty(args, kwargs)
    if is_any_in_use():
        for leaf in _leaves_of((*args, *kwargs.values())):
            if isinstance(leaf, RowShardedDTensor):
                wait_for_writer(leaf._local_tensor)
    if name == "equal":
        _check_operands(func, args)
    if name in _REDUCTIONS:
        return _reduce(func, name, *tree_map(_as_plain_dtensor, (args, kwargs)))
    if name == _FUSED_SGD:
        _check_fused_sgd(args)
    is_list = name.startswith(_LIST_PREFIXES) and name not in _LISTS_THAT_MIX
    if not (is_pointwise or is_list or name in _LIKE):
        refuse(name, args)
    return _run_on_locals(func, args, kwargs)


def _reduce(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a reduction through DTensor; its result must hang on no cut."""
    if name in _NORMS and not {math.inf, -math.inf}.isdisjoint(_numbers(args, kwargs)):
        # An empty shard has no largest element: it would raise on some ranks and hang the rest.
        refuse(f"{name} of infinite order", (args, kwargs))
    result = func(*args, **kwargs)
    _count_writes(func, args, kwargs)
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, DTensor) and any(p.is_shard() for p in leaf.placements):
            # One value a row: sharded like the rows, which no plain DTensor can say.
            refuse(f"{name} of each row", (args, kwargs))
    return result


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, float)]


def rule_function(
    cls: type,
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Apply the rules to a function: ``__torch_function__`` where dispatch is bypassed (2.11)."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    bare = name.strip("_")
    is_like = not {name, bare, f"{bare}_"}.isdisjoint(_LIKE | _CONVERSIONS)
    # The second name is that of the operator behind __rdiv__ and __iadd__.
    operators = (bare, bare[1:]) if name.startswith("__") else (bare,)
    is_pointwise = bare not in _EXTREMA and any(map(_is_pointwise, operators))
    is_list = name.startswith(_LIST_PREFIXES)
    with torch._C.DisableTorchFunctionSubclass():
        if name in _REDUCTIONS or is_like or is_pointwise or is_list or name == _NEW_EMPTY:
            is_traced = torch.is_grad_enabled() and name != "detach" and not name.endswith("_like")
            if is_traced and any(s.requires_grad for s in _all_uneven((args, kwargs))):
                # Autograd makes plain DTensors here, whose cuts are not theirs.
                refuse(f"{name} within autograd", (args, kwargs))
            with torch.no_grad():
                return _run_by_rule(func, name, is_pointwise or is_like, args, kwargs)
        if name in _INDEXING or (hasattr(torch.ops.aten, bare) and name not in _METADATA):
            refuse(name, (args, kwargs))
        return func(*args, **kwargs)


@functools.cache
def _is_pointwise(name: str) -> bool:
    packets = [getattr(torch.ops.aten, n, None) for n in (name, f"{name}_")]
    return any(
        torch.Tag.pointwise in getattr(p, o).tags for p in packets if p for o in p.overloads()
    )


if IS_DISPATCH_BYPASSED:
    RowShardedDTensor.__torch_function__ = classmethod(rule_function)  # type: ignore[assignment]


def _run_on_locals(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an elementwise operation on local tensors and wrap what comes out."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and arg]
    if not lists or not _are_cut_alike(lists):
        everything = [_leaves_of((*args, *kwargs.values()))]
        for operands in zip(*lists, strict=False) if lists else everything:
            _check_operands(func, operands)
    local_args = [_local_operands(arg) for arg in args]
    local_kwargs = {name: _local_operands(arg) for name, arg in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    _count_writes(func, local_args, local_kwargs)
    if result is None:
        return None
    leaves = _leaves_of((*args, *kwargs.values()))
    sources = [leaf for leaf in leaves if isinstance(leaf, RowShardedDTensor)]
    if isinstance(result, (list, tuple)):
        firsts = lists[0] if lists else sources
        return type(result)(_wrap_result(r, s) for r, s in zip(result, firsts, strict=False))
    for leaf in sources:
        if result is leaf._local_tensor:
            return leaf
    return _wrap_result(result, sources[0])


def _count_writes(func: Callable[..., Any], args: Sequence[object], kwargs: dict[str, Any]) -> None:
    """Bump the version counters of what was written, which below autograd nobody else does."""
    if not isinstance(func, torch._ops.OpOverload):
        return
    written = _leaves_of(
        [args[place] for place in _places_written(func) if place < len(args)]
        + [value for name, value in kwargs.items() if name in _names_written(func)]
    )
    tensors = [w._local_tensor if isinstance(w, DTensor) else w for w in written]
    counted = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


@functools.cache
def _places_written(func: torch._ops.OpOverload) -> tuple[int, ...]:
    return tuple(
        place
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _names_written(func: torch._ops.OpOverload) -> frozenset[str]:
    return frozenset(func._schema.arguments[place].name for place in _places_written(func))


# Operators nest tensors in flat lists alone: torch's general trees cost ten times as much, which
# shows with hundreds of parameters in one call.
def _leaves_of(args: Iterable[object]) -> list[object]:
    leaves: list[object] = []
    for arg in args:
        if type(arg) in (list, tuple):
            leaves += arg  # type: ignore[arg-type]
        else:
            leaves.append(arg)
    return leaves


def _local_operands(arg: object) -> object:
    if type(arg) is list or type(arg) is tuple:
        return type(arg)([_local_operand(value) for value in arg])
    return _local_operand(arg)


def _local_operand(value: object) -> object:
    """Return what stands for an operand in a local operation."""
    if isinstance(value, RowShardedDTensor):
        return value._local_tensor
    # A scalar such as a norm may still be a sum over ranks to be made.
    return value.full_tensor() if isinstance(value, DTensor) else value


def _wrap_result(result: object, source: object) -> object:
    if not isinstance(result, torch.Tensor) or isinstance(result, DTensor):
        return result
    if not isinstance(source, RowShardedDTensor) or result.shape != source._local_tensor.shape:
        return result
    return type(source).wrap(result, source._spec, source._uneven_layout)


def _as_plain_dtensor(value: object) -> object:
    if isinstance(value, RowShardedDTensor):
        return DTensor(value._local_tensor, value._spec, requires_grad=value.requires_grad)
    return value


def _all_uneven(tree: object) -> list[RowShardedDTensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, RowShardedDTensor)]


def _are_cut_alike(lists: Sequence[Sequence[object]]) -> bool:
    """Tell whether lists pair tensors of the same cuts, or scalars; if not, one must look closer.

    In bulk: with hundreds of parameters in one call a look at each costs as much as the kernel.
    """
    first, *others = ([getattr(o, "_uneven_layout", None) for o in operands] for operands in lists)
    are_scalars = (not any(getattr(o, "ndim", 0) for o in operands) for operands in lists[1:])
    return None not in first and all(
        cuts == first or is_scalar for cuts, is_scalar in zip(others, are_scalars, strict=True)
    )


def _check_operands(func: Callable[..., Any], operands: Sequence[object]) -> None:
    """Refuse to mix tensors that are cut differently, or a shard with a full tensor."""
    sharded = [o for o in operands if isinstance(o, RowShardedDTensor)]
    if not sharded:
        return
    layout = sharded[0]._uneven_layout
    for operand in operands:
        if not isinstance(operand, torch.Tensor) or operand.ndim == 0:
            continue
        is_cut_alike = isinstance(operand, RowShardedDTensor) and (
            operand._uneven_layout is layout or operand._uneven_layout == layout
        )
        if not is_cut_alike:
            raise ValueError(
                expected(
                    f"operands cut like the first, of shape {layout.shape}",
                    f"a {type(operand).__name__} of shape {tuple(operand.shape)}",
                    where=f"{func}",
                    hint="Use full_tensor() on both, local shards on both, or copy_from_full_()",
                )
            )


def _check_fused_sgd(args: tuple[Any, ...]) -> None:
    """Refuse what torch's kernel gets wrong: of narrow types it steps only the tail on a CPU."""
    for weight in args[0]:
        if weight.device.type == "cpu" and weight.dtype.itemsize < 4:
            raise NotImplementedError(
                expected(
                    "torch.float32 or torch.float64 main weights on a CPU",
                    weight.dtype,
                    where=f"torch.optim.SGD(fused=True), a tensor of shape {tuple(weight.shape)}",
                    hint="Give SGD fused=False: torch's fused kernel does not step these weights",
                )
            )


def _new_empty(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowShardedDTensor:
    """Answer ``new_empty`` of the own global shape, which staging and deepcopy ask for."""
    source = args[0]
    sizes = kwargs.get("size", args[1:])
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        (sizes,) = sizes
    if tuple(sizes) != tuple(source.shape):
        refuse("new_empty with another shape", args)
    wanted = {k: v for k, v in kwargs.items() if k in ("dtype", "device") and v is not None}
    local = torch.empty_like(source._local_tensor, **wanted)
    return type(source).wrap(local, source._spec, source._uneven_layout)


def refuse(name: str, args: object, hint: str = "") -> NoReturn:
    """Raise the error of an operation that would be wrong, naming it and the tensor's shape."""
    shape = next(tuple(t.shape) for t in tree_flatten(args)[0] if isinstance(t, DTensor))
    raise NotImplementedError(
        expected(
            "an elementwise operation, a sum, or a 2-norm",
            f"'{name}'",
            where=f"an unevenly sharded tensor of shape {shape}",
            hint=hint or "Call full_tensor() first, or work on .local, this rank's rows",
        )
    )


def is_cut_alike(value: object, tensor: object) -> bool:
    """Tell whether a value may be copied into an uneven DTensor row by row, or it is another."""
    if not isinstance(tensor, RowShardedDTensor):
        return True
    return isinstance(value, RowShardedDTensor) and value._uneven_layout == tensor._uneven_layout


def refuse_full_state(where: str) -> NoReturn:
    """Raise the error of a loaded tensor that is whole, or that torch has cut by itself."""
    raise NotImplementedError(
        expected(
            "a tensor cut like the parameter",
            "a full one, or one that torch has cut",
            where=where,
            hint="Load a model by megafsdp.load_full_state_dict(); write full optimizer states by "
            "torch_save_to_dcp(), and load them by torch.distributed.checkpoint.load() into what "
            "get_optimizer_state_dict() returns",
        )
    )
