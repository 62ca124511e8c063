"""Where autograd's graph touches a unit: the edges at which its backward begins and ends.

Outputs carry a hook that begins the unit's backward; inputs pass through an identity whose backward
says that their gradients, hence all of the unit's, are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class BackwardUnit(Protocol):
    """What the edges tell a unit."""

    def begin_backward(self, token: ForwardToken) -> None:
        """Start the backward of one forward."""

    def inputs_done(self, token: ForwardToken) -> None:
        """Note that the gradients of one forward's inputs are there."""


class ForwardToken:
    """One forward of a unit, kept alive by the graph it built.

    Args:
        inputs: The inputs that need a gradient, before they pass through the identity.
        pass_number: Which forward of the root it is a part of; units without it count one each.
    """

    __slots__ = ("__weakref__", "outer_ids", "pass_number")

    def __init__(self, inputs: Sequence[torch.Tensor] = (), pass_number: int = 0) -> None:
        self.pass_number = pass_number
        self.outer_ids = frozenset(id(t if t._base is None else t._base) for t in inputs)


class EndOfBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward says that all their gradients are there."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        unit: BackwardUnit,
        token: ForwardToken,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs."""
        ctx.unit, ctx.token = unit, token
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,
        *grads: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Tell the unit and return the gradients."""
        if torch.is_grad_enabled():
            # A backward through this one enters the unit by the gradients of its inputs.
            hook = BackwardHook(ctx.unit, ctx.token)
            for grad in grads:
                if grad is not None:
                    hook.watch(grad)
        ctx.unit.inputs_done(ctx.token)
        return (None, None, *grads)


class BackwardHook:
    """Start a unit's backward when the gradient of an output is there."""

    __slots__ = ("token", "unit")

    def __init__(self, unit: BackwardUnit, token: ForwardToken | None) -> None:
        self.unit = unit
        self.token = token or ForwardToken()

    def watch(self, output: torch.Tensor) -> None:
        """Call this when the gradient of an output is there.

        An output that is a view also has its base watched: an edit of a view in place gives the
        view a new node in the graph, and a hook on the old one never fires.
        """
        if not output.requires_grad:
            return
        output.register_hook(self)
        base = output._base
        # The base of an input that is passed on belongs to the graph outside.
        if base is not None and base.requires_grad and id(base) not in self.token.outer_ids:
            base.register_hook(self)

    def __call__(self, grad: torch.Tensor) -> None:
        """Tell the unit; the gradient is left as it is."""
        self.unit.begin_backward(self.token)
