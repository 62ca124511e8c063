"""What a unit checks when torch reads or writes its modules' state dicts.

``state_dict()`` shows sharded parameters, hence is refused while the unit is at work. What is
written into its tensors is written into main weights, and counted there.
``load_state_dict()`` copies into main weights, after which compute weights are stale and the
parameters that the state dict has are initialised; assigning new tensors is refused, since it would
cut parameters from their flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Protocol

from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.op_rules import is_cut_alike, refuse_full_state
from megafsdp.buffer.dtensor.uneven import wrap_like
from megafsdp.errors import expected
from megafsdp.fsdp.params.meta import device_of, mark_initialized
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.plain_tensors import give_memory_to_meta_tensors


class GuardedUnit(Protocol):
    """What the guard must know of a unit."""

    name: str
    groups: list[ParameterGroup]

    @property
    def is_resting(self) -> bool:
        """Tell whether the unit is outside its forward and backward."""

    def mark_stale(self) -> None:
        """Note that main weights changed."""


def guard_state_dicts(module: nn.Module, unit: GuardedUnit) -> None:
    """Register the checks on one module of a unit."""
    module.register_state_dict_pre_hook(partial(_before_state_dict, unit))
    module.register_state_dict_post_hook(_after_state_dict)
    before_load = partial(_before_load_state_dict, unit)
    module._register_load_state_dict_pre_hook(before_load, with_module=True)
    module.register_load_state_dict_post_hook(partial(_after_load_state_dict, unit))


def _before_state_dict(unit: GuardedUnit, *unused: object) -> None:
    if not unit.is_resting:
        raise RuntimeError(
            expected(
                "a unit at rest",
                "one at work",
                where=f"state_dict() of unit '{unit.name}'",
                mend="Call it outside of the unit's forward and backward",
            )
        )
    for group in unit.groups:
        group.wait_for_step()


def _after_state_dict(
    module: nn.Module, state: MutableMapping[str, object], prefix: str, *unused: object
) -> None:
    """Have a unit notice what ``torch.distributed.checkpoint`` writes into a state dict."""
    for name, parameter in module._parameters.items():
        shown = state.get(f"{prefix}{name}")
        if not (isinstance(shown, DTensor) and isinstance(parameter, DTensor)):
            continue
        own = parameter._local_tensor
        is_alias = shown._local_tensor.data_ptr() == own.data_ptr() and shown.dtype == own.dtype
        # A hook of the user may have put a copy there.
        if is_alias and shown is not parameter:
            # Shares the count of writes, which what torch detaches does not.
            state[f"{prefix}{name}"] = wrap_like(parameter, own)


def _before_load_state_dict(
    unit: GuardedUnit,
    module: nn.Module,
    state: Mapping[str, object],
    prefix: str,
    metadata: dict[str, object],
    *unused: object,
) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(
            expected(
                "load_state_dict(assign=False)",
                "assign=True, which would cut parameters from their flat buffer",
                where=f"unit '{unit.name}'",
                mend="Load with assign=False, or call megafsdp.load_full_state_dict() "
                "for full tensors",
            )
        )
    for group in unit.groups:
        group.wait_for_step()
    for name, parameter in module._parameters.items():
        given = state.get(f"{prefix}{name}")
        if given is not None and not is_cut_alike(given, parameter):
            refuse_full_state(f"load_state_dict() of '{prefix}{name}'")
    give_memory_to_meta_tensors(
        module, device_of(unit.groups), is_wanted=lambda name: f"{prefix}{name}" in state
    )
    named = module.named_parameters(remove_duplicate=False)
    mark_initialized(unit.groups, [p for name, p in named if f"{prefix}{name}" in state])


def _after_load_state_dict(unit: GuardedUnit, *unused: object) -> None:
    unit.mark_stale()
