"""Where autograd's graph touches a unit: the edges at which its backward begins and ends.

Outputs carry a hook that begins the unit's backward; inputs pass through an identity whose backward
says that their gradients, hence all of the unit's, are there.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class BackwardUnit(Protocol):
    """What the edges tell a unit."""

    def begin_backward(self, token: ForwardToken) -> None:
        """Start the backward of one forward."""

    def inputs_done(self, token: ForwardToken) -> None:
        """Note that the gradients of one forward's inputs are there."""


class ForwardToken:
    """One forward of a unit, kept alive by the graph it built."""

    __slots__ = ("__weakref__",)


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
        ctx.unit.inputs_done(ctx.token)
        return (None, None, *grads)


class BackwardHook:
    """Start a unit's backward when the gradient of an output is there."""

    __slots__ = ("token", "unit")

    def __init__(self, unit: BackwardUnit, token: ForwardToken | None) -> None:
        self.unit = unit
        self.token = token or ForwardToken()

    def __call__(self, grad: torch.Tensor) -> None:
        """Tell the unit; the gradient is left as it is."""
        self.unit.begin_backward(self.token)
