"""Which parameters ``MixedPrecisionPolicy.keep_fp32`` names.

A name counts within the module that is made a unit. Whoever sees the whole model
(``fully_shard_model``, a blueprint) translates names that count in the model to each unit's own
first. This file matches names; it changes nothing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy


def matching_names(fqn: str, owner: nn.Module, policy: MixedPrecisionPolicy) -> set[str]:
    """Return the names of a policy that a parameter, a module above it, or its class answers to.

    Args:
        fqn: The parameter's name.
        owner: The module that holds it.
        policy: Holds names, or patterns (``fnmatch``) of names.
    """
    if not policy.keep_fp32:
        return set()
    parts = fqn.split(".")
    names = {".".join(parts[:k]) for k in range(1, len(parts) + 1)} | {type(owner).__name__}
    return {
        wanted
        for wanted in policy.keep_fp32
        if wanted in names or any(fnmatch.fnmatchcase(name, wanted) for name in names)
    }


def policies_by_module(
    model: nn.Module, units: Sequence[nn.Module], policy: MixedPrecisionPolicy
) -> dict[nn.Module, MixedPrecisionPolicy]:
    """Return the policies of a model and of units below it, names translated to each one's own.

    A name counts in the model and in each of the units.

    Raises:
        ValueError: A name matches nothing.
    """
    if not policy.keep_fp32:
        return dict.fromkeys([model, *units], policy)
    idle, kept = set(policy.keep_fp32), set()
    for root in (model, *units):
        for fqn, owner, parameter in _parameters_of(root):
            matching = matching_names(fqn, owner, policy)
            idle -= matching
            if matching:
                kept.add(id(parameter))
    if idle:
        first = next((fqn for fqn, _, _ in _parameters_of(model)), "")
        raise ValueError(
            expected(
                f"names of parameters such as '{first}', of modules or their classes, or patterns",
                f"{sorted(idle)} that match none",
                where=f"keep_fp32 for {type(model).__name__}",
                mend="Correct or remove them",
            )
        )
    return {
        root: dataclasses.replace(
            policy,
            keep_fp32=tuple(fqn for fqn, _, p in _parameters_of(root) if id(p) in kept),
        )
        for root in (model, *units)
    }


def _parameters_of(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield name, owner and parameter, tied ones under each of their names."""
    for prefix, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{prefix}.{attribute}" if prefix else attribute, module, parameter
