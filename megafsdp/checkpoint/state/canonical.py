"""Canonical state: the tensors of a model and its optimizer, by names free of mesh and wrappers.

The name of a parameter is its FQN in the user's module. Keys are ``model.<fqn>``,
``optimizer.state.<fqn>.<state>``, ``optimizer.param_groups`` and so on; a fused parameter has a key
for each part, and an expert is named by its index in the layer. Tensors stay where they are:
nothing is copied or gathered here, and a sharded tensor is listed as the DTensor it is.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.checkpoint.format.manifest import joining
from megafsdp.checkpoint.format.plain_values import plain
from megafsdp.checkpoint.format.regions import Stored
from megafsdp.checkpoint.state.declared import declare_parts
from megafsdp.checkpoint.state.experts import (
    holders,
    is_named_by_expert,
    name_in_layer,
    name_of_group_member,
    names_elsewhere,
)
from megafsdp.checkpoint.state.fused import StoredForm, part_names, stored_form
from megafsdp.device.torch_private import non_persistent_buffers
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.runtime.root import refuse_parts_of_ranks
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.mesh.annotation import FusedParts, annotation_of
from megafsdp.optimizer.states.quantized import main_weight_of

GROUPS_KEY = "optimizer.param_groups"
EXTRA_STATE = "_extra_state"
# Entries of a group that list its parameters; checkpoints list canonical names instead.
GROUP_MEMBERS = frozenset({"params", "param_names"})
# The entry of a stored group that lists those names.
MEMBER_NAMES = "names"
# The running job decides how its optimizer runs; the checkpoint decides what it computes.
EXECUTION_FLAGS = frozenset({"foreach", "fused", "capturable", "differentiable"})
_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


@runtime_checkable
class HasCanonicalState(Protocol):
    """An optimizer that keeps states or weights in another form than checkpoints."""

    def canonical_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's states in the form of checkpoints; local."""

    def canonical_names(self, parameter: torch.Tensor) -> frozenset[str] | None:
        """Return the names of the states that a parameter may have; None means any; local."""

    def canonical_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's weight in the form of checkpoints, or the parameter; local."""

    def load_canonical(self, parameter: torch.Tensor, weight: torch.Tensor | None = None) -> None:
        """Accept loaded states, which are in ``state``, and a loaded weight; local."""


@runtime_checkable
class HasInnerTensors(Protocol):
    """A tensor without memory of its own, such as weights that torchao has quantized."""

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        """Return the names of its inner tensors, and what else it needs; torch's own protocol."""


@dataclass(frozen=True, slots=True)
class CanonicalState:
    """State by key, sharded as it is.

    Attributes:
        tensors: Plain tensors, DTensors, and parts of them.
        objects: Structures of plain values and small tensors, alike on all ranks that have them.
        fused: Declared parts of fused parameters that are stored whole.
        fused_into: Key of each fused tensor that is stored in parts -> its parts' keys in order
            (``"parts"``), the dim that joins them (``"dim"``), and, if they repeat in memory, how
            often (``"num_groups"``).
        aliases: Further names of tied parameters, and of buffers of a module that has several
            names: key -> key in ``tensors``.
        rank_zero: Keys in ``tensors`` whose values may differ between ranks (buffers): rank 0's are
            stored.
        ranks_of: Keys that not all ranks have -> the ranks that have them.
        elsewhere: Names of parameters that only other ranks have.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    fused: dict[str, FusedParts] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    fused_into: dict[str, dict] = field(default_factory=dict)
    rank_zero: set[str] = field(default_factory=set)
    ranks_of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    elsewhere: set[str] = field(default_factory=set)

    def update(self, other: CanonicalState) -> None:
        """Add the entries of another state, e.g. the optimizer's to the model's."""
        for kind in fields(self):
            getattr(self, kind.name).update(getattr(other, kind.name))

    def note_ranks(self, keys: Iterable[str], form: StoredForm) -> None:
        """Record the ranks of keys that not all ranks have."""
        if form.is_own and form.ranks is not None:
            self.ranks_of.update(dict.fromkeys(keys, form.ranks))


def canonical_name(fqn: str) -> str:
    """Return a module path without the components of ``torch.compile`` and checkpoint wrappers."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPER_PARTS)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the canonical name of each parameter; the first one if it is tied."""
    declare_parts(model)
    return {
        parameter: canonical_name(fqn) for fqn, parameter in _unwrapped(model).named_parameters()
    }


class ExtraState(NamedTuple):
    """A module that defines ``get_extra_state``.

    Attributes:
        key: Its key in a checkpoint; one expert's module is named by the expert's index in the
            layer.
        module: The module.
        ranks: The ranks that have it under this key; None means all.
        elsewhere: Names, without the section, of the same module of other ranks' experts.
    """

    key: str
    module: nn.Module
    ranks: tuple[int, ...] | None
    elsewhere: list[str]


def extra_states(model: nn.Module, *, are_all_names: bool = False) -> Iterator[ExtraState]:
    """Yield the modules that define ``get_extra_state``.

    A module with several names is yielded under the first only, unless ``are_all_names``.
    """
    for fqn, module in _unwrapped(model).named_modules(remove_duplicate=not are_all_names):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            name = ".".join(filter(None, (canonical_name(fqn), EXTRA_STATE)))
            yield _named_by_expert(name, module)


def _named_by_expert(name: str, module: nn.Module) -> ExtraState:
    for fqn, parameter in module.named_parameters():
        experts = annotation_of(parameter).experts
        if experts is None or experts.name_component is None or not is_named_by_expert(experts):
            continue
        # Counted from the end of the parameter's name, which goes deeper.
        component = experts.name_component + canonical_name(fqn).count(".")
        if component < -1:
            at = replace(experts, name_component=component)
            ranks, elsewhere = holders(name, parameter, at), names_elsewhere(name, at)
            return ExtraState(f"model.{name_in_layer(name, at)}", module, ranks, elsewhere)
    return ExtraState(f"model.{name}", module, None, [])


def _add_extra_states(model: nn.Module, state: CanonicalState) -> None:
    values: dict[nn.Module, object] = {}
    for key, module, ranks, elsewhere in extra_states(model, are_all_names=True):
        if module not in values:
            values[module] = plain(key, module.get_extra_state())
        state.objects[key] = values[module]
        state.elsewhere.update(elsewhere)
        if ranks is not None:
            state.ranks_of[key] = ranks


def model_state(model: nn.Module, stored: Container[str] = ()) -> CanonicalState:
    """List a model's parameters, persistent buffers and extra states; local.

    Args:
        model: Any module, sharded or not, outside its forward and backward.
        stored: Keys of a checkpoint that is to be loaded; a fused parameter that is stored whole
            there is listed whole.

    Raises:
        CheckpointError: The model shows compute weights; main weights cannot be restored from them.
    """
    _require_at_rest(_unwrapped(model))
    declare_parts(model)
    state = CanonicalState()
    keys_by_parameter: dict[nn.Parameter, list[str]] = {}
    for fqn, parameter in _unwrapped(model).named_parameters(remove_duplicate=False):
        name = canonical_name(fqn)
        form = stored_form(name, parameter).as_in(stored, "model.")
        if len(keys_by_parameter.get(parameter, form.parts)) < len(form.parts):
            form = form.undivided()
        inner = _inner_tensors(parameter)
        keys = [f"model.{part}" for part in [f"{name}.{i}" for i in inner] or form.parts]
        for key in keys:
            _require_new(key, state)
        state.note_ranks(keys, form)
        state.elsewhere.update(_names_elsewhere(name, parameter))
        if form.fused is not None:
            state.fused_into[f"model.{form.name}"] = joining(
                keys, form.fused.dim, form.fused.num_groups
            )
        if parameter in keys_by_parameter:
            state.aliases.update(zip(keys, keys_by_parameter[parameter], strict=True))
            continue
        keys_by_parameter[parameter] = keys
        # A quantized parameter is stored as its fp32 weight; the codes are derived from it.
        weight = main_weight_of(parameter)
        pieces = list(inner.values()) or form.pieces(parameter if weight is None else weight)
        state.tensors.update(zip(keys, pieces, strict=True))
        if form.grouping is not None:
            state.fused[keys[0]] = form.grouping
    for key, first_key, buffer in persistent_buffers(model):
        _require_new(key, state)
        if first_key != key:
            state.aliases[key] = first_key
            continue
        state.tensors[key] = buffer
        state.rank_zero.add(key)
    _add_extra_states(model, state)
    return state


def _inner_tensors(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors in which a parameter has its values, by name; empty if in itself."""
    if (
        not isinstance(parameter, HasInnerTensors)
        or isinstance(parameter, DTensor)
        or main_weight_of(parameter) is not None
    ):
        return {}
    found = {}
    for name in parameter.__tensor_flatten__()[0]:
        tensor = getattr(parameter, name)
        nested = {f"{name}.{key}": inner for key, inner in _inner_tensors(tensor).items()}
        found.update(nested or {name: tensor})
    return found


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> CanonicalState:
    """List an optimizer's states and parameter groups; local.

    Args:
        optimizer: Any ``torch.optim.Optimizer``.
        names: Canonical names of the model's parameters.

    Raises:
        CheckpointError: The optimizer has a parameter that is not the model's, a state that exists
            per rank, or a state that belongs to no parameter.
    """
    state = CanonicalState()
    _require_states_of_parameters(optimizer)
    for group_names, group in named_groups(optimizer, names):
        for name, parameter in zip(group_names, group["params"], strict=True):
            form = stored_form(name, parameter)
            for state_name, value in states_of(optimizer, parameter).items():
                keys = [state_key(part, state_name) for part in form.parts]
                state.note_ranks(keys, form)
                if isinstance(value, torch.Tensor):
                    _require_global(keys[0], value, parameter)
                    state.tensors.update(zip(keys, form.pieces(value), strict=True))
                    if form.fused is not None and (form.is_split(value) or value.ndim == 0):
                        whole_key = state_key(form.name, state_name)
                        state.fused_into[whole_key] = joining(
                            keys, form.fused.dim, form.fused.num_groups
                        )
                else:
                    state.objects.update(dict.fromkeys(keys, plain(keys[0], value)))
    state.objects[GROUPS_KEY] = [
        {MEMBER_NAMES: member_names}
        | {k: plain(GROUPS_KEY, v) for k, v in group.items() if k not in GROUP_MEMBERS}
        for member_names, group in _groups_of_all_ranks(optimizer, names)
    ]
    return state


def reserved_option(where: str) -> str:
    """Return the error message for a parameter group that has an option of the reserved name."""
    return expected(
        "options of parameter groups by other names",
        f"an option '{MEMBER_NAMES}', which is what checkpoints call the members",
        where=where,
        hint="Rename the option",
    )


def member_names(group: dict, names: dict[nn.Parameter, str]) -> list[str]:
    """Return the names that a group lists on disk; all experts of a layer have one name."""
    members = (name_of_group_member(names[p], annotation_of(p).experts) for p in group["params"])
    return list(dict.fromkeys(members))


def _groups_of_all_ranks(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]
) -> list[tuple[list[str], dict]]:
    found: dict[str, int] = {}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        if MEMBER_NAMES in group:
            raise CheckpointError(reserved_option(f"optimizer.param_groups[{index}]"))
        groups.append((member_names(group, names), group))
        for name in groups[-1][0]:
            if found.setdefault(name, index) != index:
                raise CheckpointError.expected(
                    "all experts of a layer in one parameter group",
                    f"some in group {found[name]} and some in group {index}",
                    where=f"'{name}'",
                    hint="Give the experts of a layer the same hyperparameters",
                )
    return groups


def canonical_weights(
    optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], stored: Container[str] = ()
) -> Iterator[tuple[str, nn.Parameter, Stored]]:
    """Yield key, parameter and stored piece of each weight that the optimizer converts; local."""
    if not isinstance(optimizer, HasCanonicalState):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            weight = optimizer.canonical_weight(parameter)
            if weight is not parameter:
                form = stored_form(names[parameter], parameter).as_in(stored, "model.")
                for part, piece in zip(form.parts, form.pieces(weight), strict=True):
                    yield f"model.{part}", parameter, piece


def states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's states in the form of checkpoints; local."""
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
                raise CheckpointError.expected(
                    "an optimizer over parameters of the model",
                    f"one of shape {tuple(parameter.shape)} that the model does not have",
                    where=f"position {position} of optimizer.param_groups[{index}]",
                    hint="Build the optimizer from model.parameters() after fully_shard()",
                )
    return [([names[p] for p in group["params"]], group) for group in optimizer.param_groups]


def state_key(name: str, state_name: object) -> str:
    """Return the key of one state of one parameter.

    Raises:
        CheckpointError: The state's name is not a non-empty string without dots.
    """
    if not isinstance(state_name, str) or not state_name or "." in state_name:
        raise CheckpointError.expected(
            "optimizer states named by words without a dot",
            repr(state_name),
            where=f"the optimizer state of '{name}'",
            hint="Rename the state in the optimizer",
        )
    return f"optimizer.state.{name}.{state_name}"


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _names_elsewhere(name: str, parameter: torch.Tensor) -> Iterator[str]:
    for other in names_elsewhere(name, annotation_of(parameter).experts):
        yield from {other, *part_names(other, annotation_of(parameter).fused)}


def _require_new(key: str, state: CanonicalState) -> None:
    if key in state.tensors or key in state.aliases:
        raise CheckpointError.expected(
            "a name for each stored tensor",
            "two tensors of this name",
            where=f"'{key}'",
            hint="Rename the parameter, or declare other stored_as templates or experts",
        )


def _require_at_rest(model: nn.Module) -> None:
    refuse_parts_of_ranks(model, "a checkpoint")
    shown = {id(parameter) for parameter in model.parameters()}
    for name, unit in units_below([model]).items():
        if any(id(p.unsharded) in shown for group in unit.groups for p in group.parameters):
            raise CheckpointError.expected(
                "sharded parameters",
                "unsharded ones",
                where=f"unit '{name}'",
                hint="Save and load outside of forward and backward, and after reshard(); after an "
                "exception call reset_iter_state() first",
            )
        for group in unit.groups:
            group.wait_for_step()


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield key, first key and buffer; a module with two names has its buffers under both."""
    first_keys: dict[tuple[nn.Module, int], str] = {}
    for fqn, module in _unwrapped(model).named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in non_persistent_buffers(module):
                key = canonical_name(f"model.{fqn}.{name}" if fqn else f"model.{name}")
                yield key, first_keys.setdefault((module, id(buffer)), key), buffer


def _require_states_of_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse states that belong to no parameter, and so have no name on disk, unless empty."""
    members = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strange = [k for k, states in optimizer.state.items() if k not in members and states != {}]
    if strange:
        got = ", ".join(
            f"a tensor of shape {tuple(k.shape)}" if isinstance(k, torch.Tensor) else repr(k)
            for k in strange[:4]
        )
        raise CheckpointError.expected(
            "states of parameters of the optimizer's groups",
            f"{len(strange)} of something else: {got}",
            where=f"the state of {type(optimizer).__name__}",
            hint="Keep what belongs to no parameter in a parameter group, or in extra=",
        )


def _require_global(key: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    """Refuse a plain tensor as state of a sharded parameter: its global form is unknown."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.ndim > 0:
        raise CheckpointError.expected(
            f"a DTensor like its parameter of shape {tuple(parameter.shape)}, or a scalar",
            f"a plain tensor of shape {tuple(value.shape)}",
            where=f"'{key}'",
            hint="Keep a count as a number or a tensor without dimensions; create a state of the "
            "parameter's elements with torch.zeros_like(parameter)",
        )
