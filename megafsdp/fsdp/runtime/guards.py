"""Make a unit's modules and parameters refuse wrong uses, and note writes to main weights.

They refuse conversions and copies, replaced or added parameters, gradient hooks that would never
fire, ``torch.func`` and ``DistributedDataParallel``, and state dicts at the wrong time. They note
when a state dict or a load writes into main weights: compute weights are then stale, and the
parameters are initialised.

A unit's own modules have :class:`~megafsdp.fsdp.fsdp_module.FSDPModule` in their class, which calls
the functions here. Plain modules below them keep their class: each one with sharded parameters gets
its own methods, and the state dict hooks that torch offers.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import partial
from typing import NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.op_rules import is_cut_alike, refuse_full_state
from megafsdp.buffer.dtensor.recut import recut
from megafsdp.buffer.dtensor.uneven import ReplicatedParameter, UnevenDTensor, wrap_like
from megafsdp.device.torch_private import func_transforms, is_forward_mode
from megafsdp.errors import expected
from megafsdp.fsdp.params.managed_parameter import ManagedParameter
from megafsdp.fsdp.params.meta import (
    device_of,
    give_memory_as,
    give_memory_to_meta_tensors,
    mark_initialized,
    quote,
)
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of
from megafsdp.fsdp.params.swapped_parameters import watch_swaps
from megafsdp.mesh.torch_private import local_of

_IGNORED_ATTRIBUTE = "_megafsdp_ignored"
# Transforms that need no hooks where no graph is built.
_WITHOUT_GRADIENTS = {"func.vmap", "autograd.forward_ad"}


def refuse_changes(
    module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
) -> None:
    """Raise if a conversion would change a parameter or buffer below a module; local.

    ``to_empty()`` gives memory to tensors on the meta device, and leaves other values as they are.

    Raises:
        RuntimeError: ``fn`` changes a dtype or device.
    """
    named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
    gives_memory = any(tensor.is_meta for _, tensor in named) and _gives_memory(fn)
    for name, tensor in named:
        if gives_memory and tensor.device.type == "meta":
            continue
        # fn may copy its argument, so give it an empty tensor: the result has dtype and device.
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        result = fn(probe)
        if (result.dtype, result.device) != (probe.dtype, probe.device):
            raise RuntimeError(
                expected(
                    f"'{name}' to stay {probe.dtype} on {probe.device}",
                    f"{result.dtype} on {result.device}",
                    where="a conversion of a module given to fully_shard(), or of a part of one",
                    hint="Convert before fully_shard(), or choose compute dtypes with "
                    "MixedPrecisionPolicy(param_dtype=...)",
                )
            )
    if gives_memory:
        give_memory_as(module, fn, recurse=recurse)


def _gives_memory(fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return whether a conversion is that of ``to_empty()``; others refuse meta tensors."""
    try:
        return not fn(torch.empty(0, device="meta")).is_meta
    except RuntimeError:
        return False


def refuse_copy(operation: str) -> NoReturn:
    """Raise the error for copies: they would not be tied to the flat buffers."""
    raise RuntimeError(
        expected(
            "a module that is not sharded",
            "one given to fully_shard(), or a part of one",
            where=operation,
            hint="Copy the module before fully_shard(), or move values with full_state_dict() and "
            "load_full_state_dict()",
        )
    )


def guard_parameters(
    groups: Iterable[ParameterGroup], units: Iterable[nn.Module]
) -> list[nn.Module]:
    """Make sharded parameters, and the plain modules that own them, refuse wrong uses.

    Args:
        groups: The groups of one unit.
        units: The unit's modules, whose class refuses already.

    Returns:
        The plain modules.
    """
    _watch_data_parallel()
    watch_swaps(p for group in groups for p in group.parameters)
    # A dict keeps the order, which all ranks share.
    parts: dict[nn.Module, None] = {}
    for parameter in (p for group in groups for p in group.parameters):
        _guard_gradient_hooks(parameter.sharded)
        owners = [reference() for reference, _ in parameter.owners]
        parts.update((owner, None) for owner in owners if owner is not None)
    found = [part for part in parts if part not in set(units)]
    for part in found:
        _guard_part(part)
    return found


@functools.cache
def _watch_data_parallel() -> None:
    """Make ``DistributedDataParallel`` refuse parameters of units; once per process."""
    register_module_module_registration_hook(_refuse_data_parallel)


def _guard_part(module: nn.Module) -> None:
    """Make a plain module with sharded parameters refuse what its unit refuses."""
    # A strong reference would be a cycle, which delays freeing a deleted model.
    reference = weakref.ref(module)

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        part = reference()
        assert part is not None, "its attribute is called"
        refuse_changes(part, fn, recurse)
        return part

    # Set them on the instance: modules outside of units share the class, and torch has no hooks for
    # these three methods. A copy would share the unit's hooks, and .to() replaces sharded
    # parameters even if it changes nothing.
    module._apply = apply  # type: ignore[assignment, method-assign]
    module.__deepcopy__ = _refuse_deepcopy  # type: ignore[assignment]
    module.__reduce_ex__ = _refuse_pickle  # type: ignore[assignment, method-assign]


def _refuse_deepcopy(memo: object) -> NoReturn:
    refuse_copy("copy.deepcopy()")


def _refuse_pickle(protocol: object) -> NoReturn:
    refuse_copy("pickle")


def _guard_gradient_hooks(parameter: torch.Tensor) -> None:
    """Make a sharded parameter refuse ``register_hook``: it is in no graph."""
    # Set it on the instance: other tensors of its class may be in a graph.
    parameter.register_hook = _refuse_gradient_hook  # type: ignore[assignment, method-assign]


def _refuse_gradient_hook(hook: object) -> NoReturn:
    raise RuntimeError(
        expected(
            "a hook on the reduced gradient",
            "register_hook(), which fires when autograd reaches a parameter",
            where="a sharded parameter, which autograd never reaches",
            hint=cure_of("register_hook"),
        )
    )


def _refuse_data_parallel(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    # DDP's constructor registers the module before its first collective.
    if not isinstance(wrapper, DistributedDataParallel) or module is None:
        return
    ignored = wrapper.parameters_to_ignore
    # All names of a tied parameter must be ignored: DDP's reducer finds it by any of them.
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        if fqn not in ignored and group_of(parameter) is not None:
            raise ValueError(
                expected(
                    "parameters that no unit owns",
                    f"'{fqn}', which fully_shard() has sharded",
                    where=f"DistributedDataParallel of {type(module).__name__}",
                    hint=cure_of("DistributedDataParallel"),
                )
            )


def refuse_gradient(name: str, unit_name: str, grad: torch.Tensor) -> NoReturn:
    """Raise in a backward that reaches a parameter that ``fully_shard`` has replaced; local.

    No unit would reduce the gradient, and no optimizer would step with it.
    """
    raise RuntimeError(
        expected(
            f"the gradient of the sharded parameter '{name}'",
            "one of the parameter that it has replaced",
            where=f"a backward of unit {unit_name}",
            hint="Read parameters as attributes of their modules: a list or variable from before "
            "fully_shard() has the old ones, with their old values",
        )
    )


def refuse_replaced(groups: Iterable[ParameterGroup]) -> None:
    """Raise if a parameter of a group was replaced in its module; local.

    It costs one comparison for each place of a parameter.

    Raises:
        RuntimeError: A parameter was replaced, or is missing.
    """
    for group in groups:
        found = group.places.find_replaced()
        if found is not None:
            _refuse_replaced(group, *found)


def _refuse_replaced(
    group: ParameterGroup, parameter: ManagedParameter, module: nn.Module, attribute: str
) -> NoReturn:
    # Not by getattr(): a parametrization would compute with sharded parameters.
    other = module._parameters.get(attribute, vars(module).get(attribute))
    change, got = "assignment", "none" if other is None else f"another {type(other).__name__}"
    if is_parametrized(module, attribute):
        change, got = "parametrization", "a parametrization of it"
    if isinstance(other, torch.Tensor):
        got += f" of shape {tuple(other.shape)} and {other.dtype}"
        owner = group_of(other)
        if owner is not None:
            names = [p.name for p in owner.parameters if p.sharded is other]
            got = f"'{names[0]}' of unit '{owner.label}', which was tied to it later"
            change = "tie"
    raise RuntimeError(
        expected(
            f"the sharded parameter '{parameter.name}' of shape {tuple(parameter.shape)}",
            f"{got}, in its place",
            where=f"'{attribute}' of {type(module).__name__}, in unit '{group.label}'",
            hint=cure_of(change),
        )
    )


class Registrations:
    """Counts the modules and parameters that are registered in modules of the process."""

    def __init__(self) -> None:
        self.count = 0
        register_module_module_registration_hook(self._add)
        register_module_parameter_registration_hook(self._add)

    def _add(self, module: nn.Module, name: str, value: nn.Module | nn.Parameter | None) -> None:
        self.count += 1


@functools.cache
def registrations() -> Registrations:
    """Return the process's count of registrations: while it is unchanged, so are all models.

    Walking all modules at each forward would cost more than the hooks of the units.
    """
    return Registrations()


def note_ignored(modules: Iterable[nn.Module]) -> None:
    """Note the places of parameters that a unit ignores, for :func:`refuse_added`; local."""
    # Note places, not parameters: a load or to_empty() may put another parameter there.
    for module in (m for root in modules for m in root.modules()):
        named = module._parameters.items()
        names = [name for name, p in named if p is not None and group_of(p) is None]
        if names:
            setattr(module, _IGNORED_ATTRIBUTE, names)


def is_ignored_at(module: nn.Module, name: str) -> bool:
    """Return whether a unit around a module ignores the parameter that stands at this place."""
    return name in vars(module).get(_IGNORED_ATTRIBUTE, ())


def refuse_added(
    modules: Iterable[nn.Module], groups: Iterable[ParameterGroup], *, where: str
) -> None:
    """Raise if modules have a trainable parameter that was registered after ``fully_shard``; local.

    Args:
        modules: The modules of the root, at rest.
        groups: The groups of all units below them.
        where: The call that would compute with the parameter, for the message.

    Raises:
        RuntimeError: They have such a parameter, whose gradients no unit would reduce.
    """
    owned = {id(p) for g in groups for r in g.parameters for p in (r.sharded, r.unsharded)}
    added = [
        f"{prefix}.{name}".lstrip(".")
        for root in modules
        for prefix, module in root.named_modules()
        for name, p in module._parameters.items()
        if p is not None and p.requires_grad and id(p) not in owned
        if not is_ignored_at(module, name)
    ]
    if added:
        raise RuntimeError(
            expected(
                "trainable parameters of units",
                f"{quote(added)}, registered after fully_shard()",
                where=where,
                hint="Register them, or call get_peft_model(), before fully_shard(), which leaves "
                "alone what ignored_params names; or give their modules fully_shard() calls of "
                "their own. No unit reduces their gradients. What needs none may be a buffer",
            )
        )


def refuse_transforms(unit_name: str) -> None:
    """Raise if ``torch.func`` or forward-mode AD transforms the forward of a unit; local.

    Raises:
        NotImplementedError: It does, by any transform but ``vmap`` or dual tensors without
            gradients.
    """
    names = [f"func.{name}" for name in func_transforms()]
    if not names and is_forward_mode():
        names = ["autograd.forward_ad"]
    if names and (torch.is_grad_enabled() or not _WITHOUT_GRADIENTS.issuperset(names)):
        raise NotImplementedError(
            expected(
                "a forward that backward() or torch.autograd.grad() follows",
                f"one within torch.{names[-1]}",
                where=f"unit '{unit_name}'",
                hint="Use torch.autograd.grad(), or torch.autograd.functional for Jacobians: "
                "units begin and end their backward by hooks, which torch.func does not call",
            )
        )


class GuardedUnit(Protocol):
    """The part of a unit that the checks of state dicts read."""

    name: str
    groups: list[ParameterGroup]
    is_pinned: bool

    @property
    def is_resting(self) -> bool:
        """Return whether the unit is outside its forward and backward."""

    def show_sharded(self) -> None:
        """Put the sharded parameters into the modules, unless the unit is pinned."""

    def mark_stale(self) -> None:
        """Note that main weights changed."""


def guard_state_dicts(module: nn.Module, unit: GuardedUnit) -> None:
    """Register the checks on one module of a unit, for the unit's life."""
    module.register_state_dict_pre_hook(partial(_before_state_dict, unit))
    module.register_state_dict_post_hook(_after_state_dict)
    before_load = partial(_before_load_state_dict, unit)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(partial(_after_load_state_dict, unit))


def _before_state_dict(unit: GuardedUnit, *unused: object) -> None:
    _show_main_weights(unit, "state_dict()", is_read=True)


def _show_main_weights(unit: GuardedUnit, where: str, *, is_read: bool) -> None:
    """Show the sharded parameters, since only their values are state; local.

    Raises:
        RuntimeError: The unit is at work, or is pinned with full compute weights shown.
    """
    where, groups = f"{where} of unit '{unit.name}'", unit.groups
    if not unit.is_resting:
        raise RuntimeError(
            expected(
                "a unit at rest",
                "one at work",
                where=where,
                hint="Call it outside of the unit's forward and backward; after an exception in "
                "one, call reset_iter_state() of the outermost unit first",
            )
        )
    # Full parameters may be read if they are the main weights, gathered without a cast.
    is_cast = any(g.quantization is not None or g.dtypes.compute != g.dtypes.main for g in groups)
    if unit.is_pinned and (is_cast or not is_read):
        refuse_summoned(where)
    # After unshard() the state is that of the sharded parameters, as in torch.
    if any(group.places.have_unsharded for group in groups):
        unit.show_sharded()
    # A step in another thread may still write to main weights, and would overwrite a load.
    for group in groups:
        group.wait_for_step()


def refuse_summoned(where: str) -> NoReturn:
    """Raise the error for state that is read or written within ``summon_full_params``."""
    raise RuntimeError(
        expected(
            "sharded parameters, which have the main weights",
            "full compute weights",
            where=where,
            hint="Save and load outside of summon_full_params()",
        )
    )


def _after_state_dict(
    module: nn.Module, state: MutableMapping[str, object], prefix: str, *unused: object
) -> None:
    """Make writes of ``torch.distributed.checkpoint`` to a state dict count as writes to ours."""
    for name, parameter in module._parameters.items():
        shown = state.get(f"{prefix}{name}")
        if not (isinstance(shown, DTensor) and isinstance(parameter, ReplicatedParameter)):
            continue
        own = local_of(parameter)
        # A user's hook may have put a copy there: writes to a copy are not writes to ours.
        is_alias = local_of(shown).data_ptr() == own.data_ptr() and shown.dtype == own.dtype
        if is_alias and shown is not parameter:
            # torch's detached tensor has its own count of writes; this one shares ours.
            state[f"{prefix}{name}"] = wrap_like(parameter, own)


def _before_load_state_dict(
    unit: GuardedUnit,
    module: nn.Module,
    state: MutableMapping[str, object],
    prefix: str,
    metadata: dict[str, object],
    *unused: object,
) -> None:
    # Values are copied, so that parameters stay views of their flat buffer.
    metadata["assign_to_params_buffers"] = False
    _show_main_weights(unit, "load_state_dict()", is_read=False)
    _drop_own_meta_tensors(module, state, prefix)
    for name, parameter in module._parameters.items():
        given = state.get(f"{prefix}{name}")
        if given is None or parameter is None:
            continue
        if is_cut_alike(given, parameter) and not _is_on_another_mesh(given, parameter):
            continue
        if not isinstance(given, DTensor) or given.shape != parameter.shape:
            refuse_full_state(f"load_state_dict() of '{prefix}{name}'")
        # This tensor is cut as by distribute_tensor() or FSDP2. All ranks load it, so all gather.
        state[f"{prefix}{name}"] = recut(given, parameter)
    # torch copies into the tensors after this hook: on the meta device values would be lost.
    give_memory_to_meta_tensors(
        module, device_of(unit.groups), is_wanted=lambda name: f"{prefix}{name}" in state
    )
    named = module.named_parameters(remove_duplicate=False)
    mark_initialized(unit.groups, [p for name, p in named if f"{prefix}{name}" in state])


def _drop_own_meta_tensors(
    module: nn.Module, state: MutableMapping[str, object], prefix: str
) -> None:
    """Remove the module's own meta tensors: torch's setters add them for missing names."""
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for name, own in named:
        if own.is_meta and state.get(f"{prefix}{name}") is own:
            del state[f"{prefix}{name}"]


def _is_on_another_mesh(given: object, parameter: torch.Tensor) -> bool:
    """Return whether torch cuts both DTensors and refuses to copy between their meshes."""
    if isinstance(parameter, UnevenDTensor) or not isinstance(parameter, DTensor):
        return False
    return isinstance(given, DTensor) and given.device_mesh != parameter.device_mesh


def _after_load_state_dict(unit: GuardedUnit, *unused: object) -> None:
    unit.mark_stale()
