"""Where autograd's graph touches a unit: the edges at which its backward begins and ends.

Outputs carry a hook that begins the unit's backward; inputs pass through an identity whose backward
says that their gradients, hence all of the unit's, are there.


Tensors inside the arguments and results of a forward.

Lists, tuples, named tuples, dicts and dataclasses are walked; anything else is left as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import torch

from megafsdp.device.torch_private import base_of

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
        self.outer_ids = frozenset(id(t if base_of(t) is None else base_of(t)) for t in inputs)


class PendingForwards:
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
        base = base_of(output)
        # The base of an input that is passed on belongs to the graph outside.
        if base is not None and base.requires_grad and id(base) not in self.token.outer_ids:
            base.register_hook(self)

    def __call__(self, grad: torch.Tensor) -> None:
        """Tell the unit; the gradient is left as it is."""
        self.unit.begin_backward(self.token)


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``tree`` with every tensor replaced; unchanged containers are kept as objects."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, function) for item in tree]
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, list) and type(tree) is not list:
            copied = copy.copy(tree)  # With the attributes of a subclass.
            copied[:] = items
            return copied
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, dict):
        changed = {k: map_tensors(v, function) for k, v in tree.items()}
        if all(changed[k] is tree[k] for k in tree):
            return tree
        own = tree.copy()
        if type(own) is not type(tree):
            own = copy.copy(tree)
        own.update(changed)
        return own
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree) if f.init}
        mapped = {name: map_tensors(value, function) for name, value in fields.items()}
        if all(mapped[name] is fields[name] for name in fields):
            return tree
        return dataclasses.replace(tree, **mapped)
    return tree


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors of a tree in the order in which :func:`map_tensors` visits them."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return found


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with floating-point tensors cast to ``dtype``; None leaves it as it is."""
    if dtype is None:
        return tree
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)
