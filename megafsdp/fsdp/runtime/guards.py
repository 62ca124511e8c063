"""What modules and parameters of a unit refuse: conversions, copies, and hooks that never fire.

``.to()``, copies and pickles are refused by the unit's modules through their class, and by the
plain modules below them that hold sharded parameters through attributes of the instance, so that
their classes stay what they are. State dicts are the business of
:mod:`megafsdp.fsdp.runtime.state_dict_guard`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def refuse_changes(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raise if a conversion would change a parameter or buffer below a module; local.

    Raises:
        RuntimeError: ``fn`` changes a dtype or device.
    """
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        result = fn(probe)
        if (result.dtype, result.device) != (probe.dtype, probe.device):
            raise RuntimeError(
                expected(
                    f"'{name}' to stay {probe.dtype} on {probe.device}",
                    f"{result.dtype} on {result.device}",
                    where="a conversion of a module given to fully_shard(), or of a part of one",
                    mend="Convert before fully_shard(), or choose compute dtypes with "
                    "MixedPrecisionPolicy(param_dtype=...)",
                )
            )


def refuse_copy(operation: str) -> NoReturn:
    """Raise the error of copies: they would not be tied to the flat buffers."""
    raise RuntimeError(
        expected(
            "a module that is not sharded",
            "one given to fully_shard(), or a part of one",
            where=operation,
            mend="Copy the module before fully_shard(), or move values with full_state_dict() and "
            "load_full_state_dict()",
        )
    )


def guard_faces(groups: Iterable[ParameterGroup], units: Iterable[nn.Module]) -> list[nn.Module]:
    """Guard the sharded parameters of groups and the plain modules that hold them.

    Args:
        groups: The groups of one unit.
        units: The unit's modules, which guard themselves.

    Returns:
        The plain modules.
    """
    parts: dict[nn.Module, None] = {}
    for parameter in (p for group in groups for p in group.parameters):
        _guard_gradient_hooks(parameter.sharded)
        owners = [reference() for reference, _ in parameter.owners]
        parts.update((owner, None) for owner in owners if owner is not None)
    found = [part for part in parts if part not in set(units)]
    for part in found:
        _guard_part(part)
    return found


def _guard_part(module: nn.Module) -> None:
    """Make a plain module that holds sharded parameters refuse what its unit refuses."""
    # A strong reference would be a cycle, and a deleted model would wait for the collector.
    reference = weakref.ref(module)

    def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        part = reference()
        assert part is not None, "its attribute is called"
        refuse_changes(part, fn)
        return part

    module._apply = apply  # type: ignore[assignment, method-assign]
    module.__deepcopy__ = _refuse_deepcopy  # type: ignore[assignment]
    module.__reduce_ex__ = _refuse_pickle  # type: ignore[assignment, method-assign]


def _refuse_deepcopy(memo: object) -> NoReturn:
    refuse_copy("copy.deepcopy()")


def _refuse_pickle(protocol: object) -> NoReturn:
    refuse_copy("pickle")


def _guard_gradient_hooks(parameter: torch.Tensor) -> None:
    """Make a sharded parameter refuse ``register_hook``: it is in no graph."""
    parameter.register_hook = _refuse_gradient_hook  # type: ignore[assignment, method-assign]


def _refuse_gradient_hook(hook: object) -> NoReturn:
    raise RuntimeError(
        expected(
            "a hook on the reduced gradient",
            "register_hook(), which fires when autograd reaches a parameter",
            where="a sharded parameter, which autograd never reaches",
            mend="Call register_post_accumulate_grad_hook() and read or change .grad in it",
        )
    )
