"""Which parameters have values, and what is refused while some have none.

A parameter that came on the meta device has none until it is initialised or loaded. This file keeps
that fact; giving values is the business of :mod:`megafsdp.fsdp.materialize` and of the loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.params.parameter_group import ParameterGroup, group_of

_MAX_NAMES = 20


def mark_initialized(
    groups: Iterable[ParameterGroup], parameters: Iterable[torch.Tensor] | None = None
) -> None:
    """Note that sharded parameters of groups have values: those given, or all; local."""
    given = None if parameters is None else {id(parameter) for parameter in parameters}
    for group in groups:
        for record in group.parameters:
            if given is None or id(record.sharded) in given:
                record.is_initialized = True


def device_of(groups: Sequence[ParameterGroup]) -> torch.device:
    """Return the device of groups of one model; torch's default device if there are none."""
    return groups[0].device if groups else torch.get_default_device()


def uninitialized_names(module: nn.Module) -> list[str]:
    """Return the FQNs of what has no values below a module at rest; local."""
    parameters = list(module.named_parameters())
    groups = {group for _, p in parameters if (group := group_of(p)) is not None}
    fresh = {id(p.sharded) for group in groups for p in group.parameters if not p.is_initialized}
    names = [name for name, p in parameters if id(p) in fresh or p.is_meta]
    return names + [name for name, buffer in module.named_buffers() if buffer.is_meta]


def require_initialized(modules: Iterable[nn.Module], *, where: str) -> None:
    """Refuse parameters and buffers without values; local, alike on ranks of the same history.

    Args:
        modules: What has to have values, at rest.
        where: What needs them.

    Raises:
        RuntimeError: Something has none.
    """
    missing = [name for module in modules for name in uninitialized_names(module)]
    if missing:
        raise RuntimeError(
            expected(
                "initialised parameters and buffers",
                f"{quote(missing)} without values, as they came on the meta device",
                where=where,
                mend="Call megafsdp.materialize(model) first, or load a checkpoint, or call "
                "megafsdp.load_full_state_dict()",
            )
        )


def quote(names: Sequence[str]) -> str:
    """Return names for a message, at most twenty of them."""
    more = f", and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"'{name}'" for name in names[:_MAX_NAMES]) + more
