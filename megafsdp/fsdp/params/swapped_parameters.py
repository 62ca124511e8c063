"""Keep parameters of units over their flat buffers where ``torch.utils.swap_tensors`` swaps them.

Programs swap a parameter to change what it contains while it stays the same object, for the
optimizer and for all modules that own it: to give memory to meta tensors, to load, or to compute
with averaged weights for a while. Class, attributes and memory move to the other tensor, and with
them what ties the parameter to its unit. The hook here runs at the end of each swap::

                  before              torch has swapped        settled
    parameter     buffer: 1, tied     memory: 2, not tied      buffer: 2, tied
    other         memory: 2           buffer: 1, tied          memory: 1

So it costs nothing in a step. Parameters that a module replaces by other objects are found in
:mod:`megafsdp.fsdp.runtime.guards`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.uneven import ReplicatedParameter, UnevenDTensor
from megafsdp.buffer.dtensor.unwritten import UNWRITTEN
from megafsdp.errors import expected
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.mesh.torch_private import (
    call_after_swaps,
    exchange_forms,
    local_of,
    set_local,
)

_UNSHARDED_ATTRIBUTE = "_megafsdp_unsharded"


def watch_swaps(parameters: Iterable[ManagedParameter]) -> None:
    """Make swaps of parameters write into their main weights, or raise; local.

    The tensor that is swapped in must be cut like the sharded parameter. Its values become those of
    the main weight; the other tensor gets a copy of the old ones. Gradients, ``requires_grad`` and
    the user's attributes move as torch moves them.
    """
    call_after_swaps(_settle)
    for parameter in parameters:
        # With its id: a copy of the parameter has the attribute too, and may be swapped.
        mark = id(parameter.unsharded), parameter.name
        setattr(parameter.unsharded, _UNSHARDED_ATTRIBUTE, mark)


@torch.no_grad()
def _settle(first: torch.Tensor, second: torch.Tensor) -> None:
    """Settle a swap that torch has made of two tensors; local.

    Raises:
        RuntimeError: One is a parameter of a unit that cannot have the other's content.
    """
    if first is second:
        return
    _refuse_unsharded(first, second)
    # Attributes have moved, so each tensor names the group of the other one.
    groups = group_of(second), group_of(first)
    for tensor, form, group in ((first, second, groups[0]), (second, first, groups[1])):
        if group is not None:
            _check(tensor, form, group)
    if groups[0] is not None:
        _take_back(first, second, groups[0], groups[1])
    elif groups[1] is not None:
        _take_back(second, first, groups[1], None)


def _refuse_unsharded(first: torch.Tensor, second: torch.Tensor) -> None:
    """Raise if one of two swapped tensors was an unsharded parameter: gathers fill its memory."""
    for tensor, other in ((first, second), (second, first)):
        mark = vars(other).get(_UNSHARDED_ATTRIBUTE)
        if mark is not None and mark[0] == id(tensor):
            raise RuntimeError(
                expected(
                    "a swap of sharded parameters",
                    f"one of the full parameter '{mark[1]}', whose memory gathers fill",
                    where="torch.utils.swap_tensors()",
                    hint=cure_of("swap of a full parameter"),
                )
            )


def _check(tensor: torch.Tensor, form: torch.Tensor, group: ParameterGroup) -> None:
    """Check what a parameter of a group was swapped with, and that its main weight may be written.

    Args:
        tensor: The parameter, as torch left it.
        form: The other tensor, which has what the parameter had.
        group: The parameter's group.

    Raises:
        RuntimeError: The two are not alike, or the tensor is no parameter of the model.
    """
    name = next((p.name for p in group.parameters if p.sharded is tensor), None)
    wanted, cure = f"the sharded parameter '{name}'", "swap"
    if name is None:
        wanted, cure = "the model's parameters", "swap of a local parameter"
    if name is None or not (_is_alike(tensor, form) and tensor.is_leaf):
        kind = type(tensor).__name__ if tensor.is_leaf else f"{type(tensor).__name__} with a graph"
        raise RuntimeError(
            expected(
                f"a swap of {wanted} with a leaf that has its class, cuts, dtype and device: "
                f"{_describe(form)}",
                f"a {kind}: {_describe(tensor)}",
                where=f"torch.utils.swap_tensors() of a parameter of unit '{group.label}'",
                hint=cure_of(cure),
            )
        )
    # A step in another thread may still write to the main weight, and would overwrite the values.
    group.wait_for_step()


def _is_alike(tensor: torch.Tensor, form: torch.Tensor) -> bool:
    """Return whether a tensor's rows can be copied into a parameter that has had a form."""
    if not (isinstance(tensor, DTensor) and isinstance(form, DTensor)):
        return False
    # Operations on replicated parameters give plain DTensors.
    is_plain = type(tensor) is DTensor and isinstance(form, ReplicatedParameter)
    if type(tensor) is not type(form) and not is_plain:
        return False
    if isinstance(tensor, UnevenDTensor) and isinstance(form, UnevenDTensor):
        is_cut_alike = tensor.uneven_layout.cuts_as(form.uneven_layout)
    else:
        is_cut_alike = tensor.shape == form.shape
    where = [(t.device_mesh, t.placements, t.dtype, t.device) for t in (tensor, form)]
    return is_cut_alike and where[0] == where[1]


def _describe(tensor: torch.Tensor) -> str:
    cuts = f", {tensor.placements}" if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)}{cuts}, {tensor.dtype} on {tensor.device}"


def _take_back(
    parameter: torch.Tensor,
    other: torch.Tensor,
    group: ParameterGroup,
    other_group: ParameterGroup | None,
) -> None:
    """Give a swapped parameter its rows of the buffer back, with the values swapped in."""
    assert isinstance(parameter, DTensor) and isinstance(other, DTensor), "checked before"
    exchange_forms(parameter, other)
    _exchange_ties(parameter, other)
    rows, given = local_of(parameter), local_of(other)
    # torch's loads swap a parameter with an alias of it, which stays one.
    if rows.data_ptr() != given.data_ptr():
        kept = rows.clone()
        rows.copy_(given)
        if other_group is None:
            # New memory: writing to that of the other tensor would change aliases of it.
            set_local(other, kept)
        else:
            given.copy_(kept)
    for tensor, own_group in ((parameter, group), (other, other_group)):
        if own_group is not None:
            if own_group.dtypes.grad != own_group.dtypes.main:
                # This moves with the gradient: parameters of such groups allow any dtype.
                tensor.grad_dtype = None
            # Ranks without rows count it too: all must gather alike.
            own_group.mark_stale()


def _exchange_ties(first: torch.Tensor, second: torch.Tensor) -> None:
    """Exchange the attributes that tie each of two tensors to its place; local."""
    of_first, of_second = _ties_of(first), _ties_of(second)
    for tensor, old, new in ((first, of_first, of_second), (second, of_second, of_first)):
        for name in old:
            del vars(tensor)[name]
        vars(tensor).update(new)


def _ties_of(tensor: torch.Tensor) -> dict[str, object]:
    prefixes, guard = ("_megafsdp", "_uneven_layout"), "register_hook"
    return {
        name: value
        for name, value in vars(tensor).items()
        # The mark of missing values says something of the values, so it moves with them.
        if name != UNWRITTEN and (name.startswith(prefixes) or name == guard)
    }
