"""Where autograd's graph touches a unit: the edges at which its backward begins and ends.

Outputs carry a hook that begins the unit's backward; inputs pass through an identity whose backward
says that their gradients, hence all of the unit's, are there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

_numbers = itertools.count()


class BackwardUnit(Protocol):
    """What the edges tell a unit."""

    def begin_backward(self, token: ForwardToken) -> None:
        """Start the backward of one forward."""

    def inputs_done(self, token: ForwardToken) -> None:
        """Note that the gradients of one forward's inputs are there."""


class ForwardPass:
    """One forward of the root with all units in it, or of a unit without the root."""

    __slots__ = ("__weakref__",)


class ForwardToken:
    """One forward of a unit, kept alive by the graph it built.

    Args:
        inputs: The inputs that need a gradient, before they pass through the identity.
        forward_pass: Which forward of the root it is a part of; None for one of its own.
    """

    __slots__ = ("__weakref__", "forward_pass", "number", "outer_ids")

    def __init__(
        self, inputs: Sequence[torch.Tensor] = (), forward_pass: ForwardPass | None = None
    ) -> None:
        self.forward_pass = forward_pass or ForwardPass()
        self.number = next(_numbers)
        self.outer_ids = frozenset(id(t if t._base is None else t._base) for t in inputs)


class Outstanding:
    """Forwards of a unit whose backward may come.

    They are counted as long as anything is left of the pass that they are a part of, whether or not
    their own graph is: that may differ between ranks, which would end the unit's backward apart. A
    pass of which nothing is left on a rank has no backward there, and leaves nothing here.
    """

    def __init__(self) -> None:
        self._by_pass: weakref.WeakKeyDictionary[ForwardPass, set[int]]
        self._by_pass = weakref.WeakKeyDictionary()

    def add(self, token: ForwardToken) -> None:
        """Count a forward, once."""
        self._by_pass.setdefault(token.forward_pass, set()).add(token.number)

    def discard(self, token: ForwardToken) -> None:
        """Forget a forward, if it is counted."""
        self._by_pass.get(token.forward_pass, set()).discard(token.number)

    def clear(self) -> None:
        """Forget all forwards."""
        self._by_pass.clear()

    def has_any_of(self, passes: Collection[ForwardPass]) -> bool:
        """Tell whether a forward is counted that is a part of one of these passes."""
        return any(self._by_pass.get(each) for each in passes)


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
