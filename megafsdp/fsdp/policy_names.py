"""Match the names in a policy to parameters, in a unit and in a whole model.

``keep_fp32`` and ``keep_unquantized`` name parameters, modules above them, patterns of either, or
classes of modules. A name is relative to the module that becomes a unit; ``fully_shard_model``
first translates names relative to the whole model to each unit's own. Names without effect are
refused. What happens to the named parameters is decided elsewhere.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy

_FIELDS = ("keep_fp32", "keep_unquantized")


def matching_names(fqn: str, owner: nn.Module, wanted: Sequence[str]) -> set[str]:
    """Return the names that match a parameter, a module above it, or its class.

    Args:
        fqn: The parameter's FQN.
        owner: The module that has the parameter as an attribute.
        wanted: Names, or patterns (``fnmatch``) of names.
    """
    # Most policies name nothing, and this runs for each parameter of each unit.
    if not wanted:
        return set()
    parts = fqn.split(".")
    names = {".".join(parts[:k]) for k in range(1, len(parts) + 1)} | {type(owner).__name__}
    return {
        each
        for each in wanted
        if each in names or any(fnmatch.fnmatchcase(name, each) for name in names)
    }


class UnitNames:
    """The names of one field of a policy, as they match the parameters of one unit.

    Args:
        field: ``"keep_fp32"`` or ``"keep_unquantized"``.
        policy: The unit's policy.
    """

    def __init__(self, field: str, policy: MixedPrecisionPolicy) -> None:
        self._field = field
        self._names: tuple[str, ...] = getattr(policy, field)
        self._applied: set[str] = set()
        # A name that matches only parameters of inner units would have no effect.
        self._missed: dict[str, str] = {}

    def apply(self, fqn: str, owner: nn.Module) -> bool:
        """Return whether the unit's own parameter is named."""
        matching = matching_names(fqn, owner, self._names)
        self._applied |= matching
        return bool(matching)

    def miss(self, fqn: str, owner: nn.Module) -> None:
        """Note a parameter of an inner unit whose group does not do what the names ask for."""
        self._missed |= dict.fromkeys(matching_names(fqn, owner, self._names), fqn)

    def check(self) -> None:
        """Raise ValueError if a name matches only parameters of inner units."""
        missed = {name: fqn for name, fqn in self._missed.items() if name not in self._applied}
        if missed:
            wanted, fqn = next(iter(missed.items()))
            raise ValueError(
                expected(
                    "names of the unit's own parameters and modules",
                    f"'{wanted}', which is '{fqn}' of a unit below that has another policy",
                    where=f"{self._field} of fully_shard()",
                    hint="Name it in the inner unit's call as that unit knows it, or use "
                    "fully_shard_model(), where names of the whole model count",
                )
            )


def policies_by_module(
    model: nn.Module, units: Sequence[nn.Module], policy: MixedPrecisionPolicy
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Return the policies of a model and of units below it, with names translated for each.

    A name may be relative to the model or to any of the units. Only the model's outputs are cast: a
    layer without a unit of its own would not cast the outputs of other units back to its dtype.

    Raises:
        ValueError: A name matches nothing.
    """
    policies = dict.fromkeys(units, dataclasses.replace(policy, output_dtype=None))
    policies = {model: policy, **policies}
    for field in _FIELDS:
        wanted: tuple[str, ...] = getattr(policy, field)
        if wanted:
            matched = _matched_ids(model, units, field, wanted)
            for root, own in policies.items():
                names = tuple(fqn for fqn, _, p in parameters_of(root) if id(p) in matched)
                changes: dict[str, Any] = {field: names}
                policies[root] = dataclasses.replace(own, **changes)
    return policies


def _matched_ids(
    model: nn.Module, units: Sequence[nn.Module], field: str, wanted: tuple[str, ...]
) -> set[int]:
    """Return the ids of the parameters that some name matches."""
    # Collect ids: the names of one parameter differ between the model and its units.
    idle, matched = set(wanted), set()
    for root in (model, *units):
        for fqn, owner, parameter in parameters_of(root):
            matching = matching_names(fqn, owner, wanted)
            idle -= matching
            if matching:
                matched.add(id(parameter))
    if idle:
        first = next((fqn for fqn, _, _ in parameters_of(model)), "")
        raise ValueError(
            expected(
                f"names of parameters such as '{first}', of modules or their classes, or patterns",
                f"{sorted(idle)} that match none",
                where=f"{field} for {type(model).__name__}",
                hint="Correct or remove them",
            )
        )
    return matched


def parameters_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield name, owner and parameter; a tied parameter under each of its names."""
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, parameter
