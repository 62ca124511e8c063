"""Compute weights follow main weights: who tells the units that main weights changed.

After any ``torch.optim.Optimizer`` step one process-wide hook marks the groups of its parameters,
with or without a gradient on this rank, so no optimizer needs an adapter. Before the step another
hook refuses optimizers over parameters that ``fully_shard`` has replaced. Edits by hand are told by
:func:`mark_main_weights_changed`. Who still reads main weights is asked before this room's own
loads write to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megafsdp.errors import expected
from megafsdp.fsdp.grouping import is_replaced
from megafsdp.fsdp.params.meta import mark_initialized
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.fsdp.runtime.unit import units_below

_before_loads: list[Callable[[], object]] = []


class MarksMainWeights:
    """Base of optimizers that know our parameters.

    They mark the groups of their parameters themselves, and refuse what
    :func:`fully_shard_optimizer` refuses.
    """


def _mark_stepped(optimizer: Optimizer, *unused: object) -> None:
    """Mark every group that has a parameter in a stepped optimizer, with or without a gradient."""
    if isinstance(optimizer, MarksMainWeights):
        return
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            group = group_of(parameter)
            if group is not None:
                group.mark_stale()


def _refuse_originals(optimizer: Optimizer, *unused: object) -> None:
    if not isinstance(optimizer, MarksMainWeights):
        fully_shard_optimizer(optimizer)


register_optimizer_step_pre_hook(_refuse_originals)
register_optimizer_step_post_hook(_mark_stepped)


def register_before_load(wait: Callable[[], object]) -> None:
    """Have a function called before main weights are loaded other than by ``load_state_dict``.

    Args:
        wait: Returns when main weights may be written.
    """
    _before_loads.append(wait)


def wait_before_load() -> None:
    """Return when nobody reads main weights any more that are about to be loaded; local."""
    for wait in _before_loads:
        wait()


def mark_main_weights_changed(
    module: nn.Module, parameters: Iterable[torch.Tensor] | None = None
) -> None:
    """Tell that main weights below a module were edited in place; called on all ranks alike.

    Optimizer steps, ``load_state_dict`` and checkpoint loads tell by themselves.

    Args:
        module: A module with units below it.
        parameters: Those that have values, if they came on the meta device; None means all.
    """
    given = None if parameters is None else list(parameters)
    for unit in units_below([module]).values():
        unit.mark_stale()
        mark_initialized(unit.groups, given)


def fully_shard_optimizer(optimizer: Optimizer) -> Optimizer:
    """Check that an optimizer holds sharded parameters, and return it unchanged.

    Not needed: any ``torch.optim`` optimizer over ``model.parameters()`` works, and its first step
    makes the same check. It exists for people who come from Megatron-FSDP.

    Raises:
        ValueError: A parameter is the original that ``fully_shard`` has replaced.
    """
    for index, param_group in enumerate(optimizer.param_groups):
        for parameter in param_group["params"]:
            if group_of(parameter) is None and is_replaced(parameter):
                raise ValueError(
                    expected(
                        "sharded parameters",
                        f"an original parameter of shape {tuple(parameter.shape)}",
                        where=f"param group {index} of {type(optimizer).__name__}",
                        hint="Build the optimizer after fully_shard(), and not within "
                        "summon_full_params()",
                    )
                )
    return optimizer
