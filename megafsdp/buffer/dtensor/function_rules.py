"""Torch 2.11: the rules of op_rules.py, applied to functions instead of operators.

That version handles subclasses of DTensor below ``__torch_dispatch__``, where plain DTensors would
come out. So the rules apply one level higher, to functions and methods by name and outside
autograd. Later versions do not use this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.factories import FACTORIES
from megafsdp.buffer.dtensor.op_rules import (
    ALIASES,
    LIKE,
    LIST_PREFIXES,
    REDUCTIONS,
    UNSCALE,
    RowShardedDTensor,
    is_pointwise_name,
    refuse,
    run_by_rule,
    run_operator,
    uneven_leaves,
)
from megafsdp.buffer.dtensor.operands import map_operands
from megafsdp.buffer.dtensor.random_values import DRAWS
from megafsdp.buffer.dtensor.statistics import STATISTICS, SpreadDTensor
from megafsdp.device.torch_private import (
    OpOverload,
    untraced_hook,
    without_dynamo,
    without_torch_function,
    wrapper_like,
)

# Names of functions and methods.
_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "half", "bfloat16", "double"})
_EXTREMA = frozenset({"max", "min"})
_INDEXING = frozenset({"__getitem__", "__setitem__", "__iter__"})
_METADATA = frozenset(
    {"size", "stride", "dim", "numel", "ndimension", "is_floating_point", "is_complex", "__len__"}
    | {"is_contiguous", "is_inference", "requires_grad_", "retain_grad", "backward", "grad"}
    | {"element_size", "get_device", "type", "data_ptr", "__get__", "__set__", "__delete__"}
)


class _StandIn(torch.Tensor):
    """Replaces an uneven DTensor in a call, so that its operators come to the rules (2.11)."""

    _original: RowShardedDTensor

    @classmethod
    @untraced_hook
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the replaced DTensors."""
        return run_operator(func, *map_operands(_original_of, args, kwargs or {}))


def _stand_in_for(value: object) -> object:
    if not isinstance(value, RowShardedDTensor):
        return value
    result = wrapper_like(_StandIn, value)
    result._original = value
    return result


def _original_of(value: object) -> object:
    return value._original if isinstance(value, _StandIn) else value


@without_dynamo
def rule_function(
    cls: type,
    func: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Apply the rules to a function: ``__torch_function__`` where dispatch is bypassed (2.11)."""
    # torch then asks the SpreadDTensor, which has no value before full_tensor().
    if SpreadDTensor in types:
        return NotImplemented
    kwargs = kwargs or {}
    name = getattr(func, "__name__", "")
    bare = name.strip("_")
    is_like = not {name, bare, f"{bare}_"}.isdisjoint(LIKE | ALIASES | _CONVERSIONS | DRAWS)
    if name == "__getitem__" and type(args[1]) is int:
        name, args, is_like = "select", (args[0], 0, args[1]), True
    # The second name is that of the operator behind __rdiv__ and __iadd__.
    operators = (bare, bare[1:]) if name.startswith("__") else (bare,)
    is_pointwise = bare not in _EXTREMA and any(map(is_pointwise_name, operators))
    is_list = name.startswith(LIST_PREFIXES)
    # Functions of torch.nn.init, and loads that swap parameters, come here as a whole; their
    # operators then come one by one.
    if name == "module_load" or getattr(func, "__module__", "") == nn.init.__name__:
        return _run_on_stand_ins(func, args, kwargs)
    is_statistic = name in STATISTICS
    leaves = uneven_leaves(args, kwargs)
    # Of these plain DTensors are right, and torch takes them for such.
    are_even = all(leaf._uneven_layout.is_even for leaf in leaves)
    with without_torch_function():
        is_reduction = is_statistic or name in REDUCTIONS or name == UNSCALE
        if is_reduction or is_like or is_pointwise or is_list or name in FACTORIES:
            is_traced = name not in {"detach", "equal", *FACTORIES} and not name.endswith("_like")
            is_traced &= torch.is_grad_enabled()
            if is_traced and any(leaf.requires_grad for leaf in leaves):
                if are_even:
                    return func(*args, **kwargs)
                # Autograd makes plain DTensors here, which torch would cut in its own way.
                cure = cure_of("within autograd" if is_statistic else name, of_parameter=True)
                refuse(f"{name} within autograd", args, kwargs, hint=cure)
            if is_statistic:
                return _run_on_stand_ins(func, args, kwargs)
            with torch.no_grad():
                return run_by_rule(func, name, is_pointwise or is_like, args, kwargs)
        is_operation = name in _INDEXING or hasattr(torch.ops.aten, bare)
        if is_operation and name not in _METADATA and not are_even:
            refuse(name, args, kwargs)
        return func(*args, **kwargs)


def _run_on_stand_ins(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a function so that its operators come to the rules one by one, as in later torch."""
    with without_torch_function(), torch.no_grad():
        args, kwargs = map_operands(_stand_in_for, args, kwargs)
        return _original_of(func(*args, **kwargs))
