"""Canonical state: what a model and its optimizer hold, under names free of mesh and wrappers.

The name of a parameter is its FQN in the user's module. Keys are ``model.<fqn>``,
``optimizer.state.<fqn>.<state>``, ``optimizer.param_groups`` and so on. Tensors stay where they
are: nothing is copied or gathered here, and a sharded tensor is listed as the DTensor it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.unit import units_below
from megafsdp.mesh.annotation import FusedParts, annotation_of

EXTRA_STATE = "_extra_state"
# How an optimizer runs is the running job's choice; what it computes is the checkpoint's.
EXECUTION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@runtime_checkable
class HasCanonicalState(Protocol):
    """An optimizer that keeps states or weights in another form than checkpoints hold them."""

    def canonical_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states in the form of checkpoints; local."""

    def canonical_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's weight in the form of checkpoints, or the parameter; local."""

    def load_canonical(self, parameter: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Take over loaded states, which are in ``state``, and a loaded weight; local."""


@dataclass(frozen=True, slots=True)
class CanonicalState:
    """State by key, as it is spread over the ranks.

    Attributes:
        tensors: Plain tensors and DTensors.
        objects: Structures of plain values and small tensors, alike on all ranks.
        fused: Declared parts of fused parameters.
        aliases: Further names of tied parameters: key -> key in ``tensors``.
        rank_zero: Keys in ``tensors`` whose values may differ between ranks (buffers): rank 0's are
            stored.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    fused: dict[str, FusedParts] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    rank_zero: set[str] = field(default_factory=set)


def canonical_name(fqn: str) -> str:
    """Return a module path without what ``torch.compile`` and checkpoint wrappers add to it."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the canonical name of each parameter; a tied one has its first name."""
    return {
        parameter: canonical_name(fqn) for fqn, parameter in _unwrapped(model).named_parameters()
    }


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the key and module of each module that defines ``get_extra_state``."""
    for fqn, module in _unwrapped(model).named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield ".".join(filter(None, ("model", canonical_name(fqn), EXTRA_STATE))), module


def model_state(model: nn.Module) -> CanonicalState:
    """List a model's parameters, persistent buffers and extra states; local.

    Args:
        model: Any module, sharded or not, outside of its forward and backward.

    Raises:
        CheckpointError: It shows compute weights, of which main weights could not be restored.
    """
    _require_at_rest(_unwrapped(model))
    state = CanonicalState()
    key_by_parameter: dict[nn.Parameter, str] = {}
    for fqn, parameter in _unwrapped(model).named_parameters(remove_duplicate=False):
        key = f"model.{canonical_name(fqn)}"
        if parameter in key_by_parameter:
            state.aliases[key] = key_by_parameter[parameter]
            continue
        key_by_parameter[parameter] = key
        state.tensors[key] = parameter
        if (parts := annotation_of(parameter).fused) is not None:
            state.fused[key] = parts
    for key, buffer in _persistent_buffers(model):
        state.tensors[key] = buffer
        state.rank_zero.add(key)
    for key, module in modules_with_extra_state(model):
        state.objects[key] = plain(key, module.get_extra_state())
    return state


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> CanonicalState:
    """List an optimizer's states and parameter groups; local.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        names: Canonical names of the model's parameters.

    Raises:
        CheckpointError: It holds a parameter that is not the model's, or a state that exists per
            rank.
    """
    state = CanonicalState()
    for group_names, group in named_groups(optimizer, names):
        for name, parameter in zip(group_names, group["params"], strict=True):
            for state_name, value in _states_of(optimizer, parameter).items():
                key = state_key(name, state_name)
                if isinstance(value, torch.Tensor):
                    _require_global(key, value, parameter)
                    state.tensors[key] = value
                else:
                    state.objects[key] = plain(key, value)
    state.objects["optimizer.param_groups"] = [
        {"names": group_names}
        | {k: plain("optimizer.param_groups", v) for k, v in group.items() if k != "params"}
        for group_names, group in named_groups(optimizer, names)
    ]
    return state


def canonical_weights(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    """Yield key, parameter and stored form of each weight that is not stored as it is; local."""
    if not isinstance(optimizer, HasCanonicalState):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = optimizer.canonical_weight(parameter)
            if weight is not parameter:
                yield f"model.{names[parameter]}", parameter, weight


def _states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    if isinstance(optimizer, HasCanonicalState):
        return optimizer.canonical_state(parameter)
    return optimizer.state.get(parameter, {})


def named_groups(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> list[tuple[list[str], dict]]:
    """Return each parameter group with the canonical names of its parameters.

    Raises:
        CheckpointError: A parameter of the optimizer is not one of the model's.
    """
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise CheckpointError(
                    expected(
                        "an optimizer over parameters of the model",
                        f"one of shape {tuple(parameter.shape)} that the model does not have",
                        where=f"position {position} of optimizer.param_groups[{index}]",
                        mend="Build the optimizer from model.parameters() after fully_shard()",
                    )
                )
    return [([names[p] for p in group["params"]], group) for group in optimizer.param_groups]


def state_key(name: str, state_name: object) -> str:
    """Return the key of one state of one parameter.

    Raises:
        CheckpointError: The state's name is no plain word.
    """
    if not isinstance(state_name, str) or not state_name or "." in state_name:
        raise CheckpointError(
            expected(
                "optimizer states named by words without a dot",
                repr(state_name),
                where=f"the optimizer state of '{name}'",
                mend="Rename the state in the optimizer",
            )
        )
    return f"optimizer.state.{name}.{state_name}"


def plain(where: str, value: object) -> object:
    """Copy a structure of plain values so that it loads with ``weights_only=True``.

    Tensors are detached and brought to the CPU, numpy scalars become Python's, named tuples plain
    ones.

    Args:
        where: Key of the value, for the message.
        value: Numbers, strings, bytes, None, dtypes, devices, plain tensors; lists, tuples and
            dicts of them.

    Raises:
        CheckpointError: There is something else inside, or a DTensor, of which a rank has only a
            part.
    """
    if isinstance(value, DTensor):
        problem = f"a DTensor of shape {tuple(value.shape)}"
    elif isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    elif isinstance(value, np.generic):
        return value.item()
    elif type(value) in _PLAIN_TYPES:
        return value
    elif isinstance(value, dict) and type(value) in (dict, OrderedDict, Counter):
        items = {plain(where, k): plain(f"{where}.{k}", v) for k, v in value.items()}
        return type(value)(items)
    elif isinstance(value, list | tuple):
        copies = [plain(f"{where}.{i}", v) for i, v in enumerate(value)]
        return copies if isinstance(value, list) else tuple(copies)
    else:
        problem = f"a {type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        expected(
            "plain values (numbers, strings, plain tensors, lists, tuples, dicts)",
            problem,
            where=f"'{where}'",
            mend="Store its plain content instead; a sharded tensor as its full_tensor()",
        )
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _require_at_rest(model: nn.Module) -> None:
    shown = {id(parameter) for parameter in model.parameters()}
    for name, unit in units_below([model]).items():
        if any(id(p.unsharded) in shown for group in unit.groups for p in group.parameters):
            raise CheckpointError(
                expected(
                    "sharded parameters",
                    "unsharded ones",
                    where=f"unit '{name}'",
                    mend="Save and load outside of forward and backward, and after reshard()",
                )
            )


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for fqn, module in _unwrapped(model).named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield canonical_name(f"model.{fqn}.{name}" if fqn else f"model.{name}"), buffer


def _require_global(key: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse a rank's own plain tensor beside a sharded parameter: its global form is unknown."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0:
        raise CheckpointError(
            expected(
                "a DTensor like its sharded parameter, or a scalar, as optimizer state",
                f"a plain tensor of shape {tuple(value.shape)}",
                where=f"'{key}'",
                mend="Create the state with torch.zeros_like(parameter)",
            )
        )
