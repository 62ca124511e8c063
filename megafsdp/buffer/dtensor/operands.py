"""Find the operands of an operator, change them one by one, and count writes to them.

Operators of torch that would update only some elements are refused here; op_rules.py decides which
operators are allowed on uneven shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.device.torch_private import OpOverload, schema_of
from megafsdp.errors import expected
from megafsdp.mesh.torch_private import local_of


# Operators nest tensors only in flat lists. torch's pytree would cost ten times as much, which
# matters with hundreds of parameters in one call.
def leaves_of(args: Iterable[object]) -> list[object]:
    """Return the operands of an operator, including those in lists."""
    leaves: list[object] = []
    for arg in args:
        if type(arg) in (list, tuple):
            leaves += arg  # type: ignore[arg-type]
        else:
            leaves.append(arg)
    return leaves


def map_operands(
    change: Callable[[object], object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an operator with each operand changed."""

    def changed(arg: object) -> object:
        if type(arg) is list or type(arg) is tuple:
            return type(arg)([change(value) for value in arg])
        return change(arg)

    return tuple(map(changed, args)), {name: changed(arg) for name, arg in kwargs.items()}


@functools.cache
def places_written(func: OpOverload) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes to."""
    return tuple(
        place
        for place, argument in enumerate(schema_of(func).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.cache
def _names_written(func: OpOverload) -> frozenset[str]:
    return frozenset(schema_of(func).arguments[place].name for place in places_written(func))


def count_writes(func: Callable[..., Any], args: Sequence[object], kwargs: dict[str, Any]) -> None:
    """Bump the version counters of the operands that were written.

    torch does so in its autograd layer, which lies above the dispatch in which this runs.
    """
    if not isinstance(func, OpOverload):
        # A function (2.11) counts its own writes, except in these two families.
        name = getattr(func, "__name__", "")
        if not name.startswith(("_fused_", "_amp_")):
            return
        func = getattr(torch.ops.aten, name).default
    written = leaves_of(
        [args[place] for place in places_written(func) if place < len(args)]
        + [value for name, value in kwargs.items() if name in _names_written(func)]
    )
    # Of lists torch counts no write at all; an alias shares the wrapper's count, not the local one.
    tensors = [t for w in written for t in ((w, local_of(w)) if isinstance(w, DTensor) else (w,))]
    counted = [t for t in tensors if isinstance(t, torch.Tensor) and not t.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def check_fused_sgd(args: tuple[Any, ...]) -> None:
    """Refuse narrow dtypes on a CPU: torch's kernel would step only the tail of a tensor."""
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
