"""Checks of loaded state dicts: from torch, or from this package on a mesh of the same size.

States are checked against the parameters of this rank; the optimizer decides how to keep them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.op_rules import is_cut_alike, refuse_full_state
from megafsdp.buffer.dtensor.recut import recut_state
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.errors import expected

# Options of torch's optimizers that change the arithmetic.
FOREIGN_OPTIONS = ("amsgrad", "maximize")


def packed_parameters(
    packed: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[object, torch.Tensor]]:
    """Yield each parameter of an optimizer with its number in a state dict."""
    # Not strict: torch checks the lengths, with a message of its own.
    for group, own in zip(packed["param_groups"], param_groups, strict=False):
        yield from zip(group["params"], own["params"], strict=False)


def with_own_cuts(
    packed: dict[str, Any], param_groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a state dict whose states are cut as the parameters are, not as torch cuts.

    Collective if a state is cut by torch, as by ``distribute_tensor()``.
    """
    states = dict(packed["state"])
    for index, parameter in packed_parameters(packed, param_groups):
        if index in states:
            states[index] = recut_state(states[index], parameter)
    return packed | {"state": states}


def check_loaded_states(
    packed: Mapping[str, Any],
    param_groups: Sequence[Mapping[str, Any]],
    names_of: Callable[[torch.Tensor], Collection[str] | None],
) -> None:
    """Check that the states of a state dict have the shape of this rank's rows; local.

    Args:
        packed: The state dict.
        param_groups: Parameter groups of the optimizer that loads it.
        names_of: Returns the names of the states that it can use for a parameter; None means any.

    Raises:
        NotImplementedError: A state has another shape, or torch has sharded it.
        ValueError: A plain state does not have the shape of this rank's rows; or the state dict has
            an option or a state that is not supported here.
    """
    for group in packed["param_groups"]:
        for name in FOREIGN_OPTIONS:
            if group.get(name, False):
                raise ValueError(
                    expected(
                        f"states of an optimizer without {name}",
                        f"{name}={group[name]}",
                        where="a parameter group of a loaded state dict",
                        hint="Load it into an optimizer of torch",
                    )
                )
    for index, parameter in packed_parameters(packed, param_groups):
        known_names = names_of(parameter)
        for name, value in packed["state"].get(index, {}).items():
            if known_names is not None and name not in known_names:
                raise ValueError(
                    expected(
                        f"states among {', '.join(sorted(known_names))}",
                        f"a state '{name}'",
                        where=f"parameter {index} of a loaded state dict",
                        hint="Load it into an optimizer of the kind that made it, or rename states",
                    )
                )
            # A count of steps is 0-dim and the same on all ranks.
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                _check_state(parameter, f"state '{name}' of parameter {index}", value)


def _check_state(parameter: torch.Tensor, where: str, value: torch.Tensor) -> None:
    # Local lengths may agree by chance although the sharding differs.
    if isinstance(value, DTensor) and not is_cut_alike(value, parameter):
        refuse_full_state(where)
    own = local_tensor(parameter)
    if local_tensor(value).shape not in (own.shape, (own.numel(),)):
        raise ValueError(
            expected(
                f"this rank's rows, of shape {(*own.shape,)}, or flat, or a DTensor",
                f"a tensor of shape {tuple(value.shape)}",
                where=where,
                hint="Load full states by torch_save_to_dcp() and torch.distributed.checkpoint",
            )
        )


def fill_options(param_groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> None:
    """Add the default of each option that loaded parameter groups lack."""
    for group in param_groups:
        for name, value in defaults.items():
            # torch adds this option to the defaults of any optimizer that loads.
            if name != "differentiable":
                group.setdefault(name, value)
