"""Set ``requires_grad`` of unsharded parameters: in forward as the user has set it.

A parameter may be frozen in one forward and trained in another one of the same backward, for
example if adapters are switched off in between. Autograd reads the flag only when a gradient
arrives, and drops the gradient if the parameter is frozen by then. So a gradient on its way
unfreezes its parameter. In backward, parameters are frozen as they were in each forward, so that
activations are recomputed into the same graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from megafsdp.device.torch_private import untraced_hook
from megafsdp.fsdp.params.parameter_group import ParameterGroup


def trainable_of(groups: Sequence[ParameterGroup]) -> list[bool]:
    """Return for each unsharded parameter of the groups whether it requires a gradient."""
    return [p.unsharded.requires_grad for group in groups for p in group.parameters]


def follow_user(groups: Sequence[ParameterGroup]) -> None:
    """Set ``requires_grad`` of the unsharded parameters to that of the sharded ones."""
    set_trainable(groups, [p.sharded.requires_grad for g in groups for p in g.parameters])


def set_trainable(groups: Sequence[ParameterGroup], trainable: list[bool]) -> None:
    """Set ``requires_grad`` of the unsharded parameters to values from :func:`trainable_of`."""
    if trainable == trainable_of(groups):
        return
    parameters = [p for group in groups for p in group.parameters]
    for p, is_trainable in zip(parameters, trainable, strict=True):
        if p.unsharded.requires_grad and not is_trainable and not p.unfreezes:
            p.unfreezes = True
            p.unsharded.register_hook(_unfreezing(p.unsharded))
        p.unsharded.requires_grad_(is_trainable)


def _unfreezing(parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a hook for the gradient of a parameter that was trained in the graph's forward."""
    # A strong reference would be a cycle, which delays the freeing of a deleted model.
    reference = weakref.ref(parameter)

    @untraced_hook
    def unfreeze(grad: torch.Tensor) -> None:
        own = reference()
        if own is not None:
            # If the user has frozen the parameter by now, its gradient is dropped when the unit's
            # backward ends.
            own.requires_grad_(True)

    return unfreeze
