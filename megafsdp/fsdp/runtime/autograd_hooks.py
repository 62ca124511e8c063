"""The autograd hooks on a unit's outputs and inputs, at which its backward begins and ends.

Outputs carry a hook that begins the unit's backward. Inputs pass through an identity whose backward
runs when their gradients, hence all of the unit's gradients, are complete. Both call the schedule,
and neither changes a gradient. Hooks on parameters could not do this: autograd calls none for a
parameter that is frozen, detached or unused.

Tensors are searched in what a forward takes and returns: lists, tuples, named tuples, dicts and
dataclasses are walked; anything else is left as it is. If no tensor is found in a unit's output,
the first gradient of its parameters shows that a backward runs, and the unit stays gathered until
the end of that backward. An output that is one of the unit's parameters, or a view of one, is
replaced by a copy.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from megafsdp.device.torch_private import base_of, is_backward_running, untraced_hook
from megafsdp.fsdp.runtime.forward_passes import ForwardToken
from megafsdp.fsdp.runtime.schedule import FSDPContext, ScheduledUnit
from megafsdp.mesh.torch_private import arrived, is_arriving


class EndOfBackward(torch.autograd.Function):
    """Identity on a unit's inputs, whose backward runs when all their gradients are complete."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        unit: ScheduledUnit,
        token: ForwardToken,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the inputs, those waited for that torch's tensor parallelism gathers."""
        ctx.unit, ctx.token = unit, token
        # Otherwise autograd allocates zeros for an input whose gradient is None.
        ctx.set_materialize_grads(False)
        return tuple(arrived(each) for each in inputs)

    @staticmethod
    @untraced_hook
    def backward(  # type: ignore[override]
        ctx: Any,
        *grads: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Call the schedule, and return the gradients as they are."""
        if torch.is_grad_enabled():
            # A double backward enters the unit through these gradients of its inputs: like outputs,
            # they begin its backward.
            hook = BackwardHook(ctx.unit, ctx.token)
            for grad in grads:
                if grad is not None:
                    hook.watch(grad)
        _schedule_of(ctx.unit).inputs_done(ctx.unit, ctx.token)
        return (None, None, *grads)


class _Arrival(torch.autograd.Function):
    """Identity that waits for an input."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return arrived(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class BackwardHook:
    """Hook that begins a unit's backward when the gradient of an output arrives."""

    __slots__ = ("token", "unit")

    def __init__(self, unit: ScheduledUnit, token: ForwardToken | None) -> None:
        self.unit = unit
        self.token = token or ForwardToken()

    def watch(self, output: torch.Tensor) -> None:
        """Register this hook on an output.

        The base of an output that is a view is watched too: an in-place edit of a view gives it a
        new node in the graph, and a hook on the old node never fires.
        """
        # A leaf, such as an ignored parameter, has no graph, and would keep the hook for ever.
        if not output.requires_grad or output.is_leaf:
            return
        # The graph, not the tensor, owns the hook: it fires even if the user drops the output.
        output.register_hook(self)
        base = base_of(output)
        # If an input is passed on as an output, its base belongs to the graph outside of the unit.
        if base is not None and base.requires_grad and id(base) not in self.token.outer_ids:
            base.register_hook(self)

    @untraced_hook
    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Call the schedule, and leave the values of the gradient as they are."""
        _schedule_of(self.unit).begin_backward(self.unit, self.token)
        # Autograd has none if nothing but an anchor read the output.
        if grad is None or not (torch.is_grad_enabled() and grad.requires_grad):
            return None
        # A double backward leaves the unit by the gradient of this gradient, and a third backward
        # enters by it. Watch an alias: a leaf of the user's would keep the hook for ever.
        alias = grad.view_as(grad)
        alias.register_hook(self._watch_second)
        return alias

    @untraced_hook
    def _watch_second(self, grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            self.watch(grad)


def _schedule_of(unit: ScheduledUnit) -> FSDPContext:
    # Read it at each call: an outer root may have adopted the unit since the forward.
    assert unit.context is not None, "a forward has built the graph"
    return unit.context


def map_tensors(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return ``tree`` with every tensor replaced; unchanged containers stay the same objects."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (list, tuple)):
        items = [map_tensors(item, function) for item in tree]
        if isinstance(tree, PackedSequence):
            items[1] = tree.batch_sizes  # On the host, wherever the data is.
        # Keep the object if nothing changed: a user may compare or share containers.
        if all(new is old for new, old in zip(items, tree, strict=True)):
            return tree
        if isinstance(tree, list) and type(tree) is not list:
            copied = copy.copy(tree)  # Keeps the attributes of a subclass.
            copied[:] = items
            return copied
        # A named tuple may have its own constructor.
        return tree._make(items) if hasattr(tree, "_make") else type(tree)(items)
    if isinstance(tree, dict):
        return _map_dict(tree, function)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _map_dataclass(tree, function)
    return tree


def _map_dict(
    tree: dict[Any, Any], function: Callable[[torch.Tensor], torch.Tensor]
) -> dict[Any, Any]:
    changed = {k: map_tensors(v, function) for k, v in tree.items()}
    if all(changed[k] is tree[k] for k in tree):
        return tree
    # A subclass's copy() may return a plain dict; copy.copy() keeps class and attributes.
    own = tree.copy()
    if type(own) is not type(tree):
        own = copy.copy(tree)
    # Set items one by one: a ModelOutput of transformers refuses update().
    for key, value in changed.items():
        own[key] = value
    return own


def _map_dataclass(tree: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    names = [f.name for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
    fields = {name: getattr(tree, name) for name in names}
    mapped = {name: map_tensors(value, function) for name, value in fields.items()}
    changed = {name: value for name, value in mapped.items() if value is not fields[name]}
    if not changed:
        return tree
    # replace() would run __post_init__ again, and drop attributes that are no fields.
    copied = copy.copy(tree)
    for name in list(getattr(copied, "__dict__", ())):
        if isinstance(getattr(type(tree), name, None), functools.cached_property):
            del copied.__dict__[name]  # Computed from the old tensors.
    for name, value in changed.items():
        object.__setattr__(copied, name, value)  # The dataclass may be frozen.
    return copied


def tensors_of(tree: object) -> list[torch.Tensor]:
    """Return the tensors of a tree in the order in which :func:`map_tensors` visits them."""
    found: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return found


def anchored(unit: ScheduledUnit, output: object) -> list[torch.Tensor]:
    """Return the tensors of a unit's output, and let them take part in the backward if chosen."""
    outputs, context = tensors_of(output), unit.context
    # A recomputed output replaces none: the graph of its first forward has the anchor.
    if context is not None and not is_backward_running():
        if context.is_root(unit):
            context.anchors.attach(outputs)
        elif unit.options.reduces_unused and not context.is_without_root(unit):
            context.anchors.add(outputs)
    return outputs


def all_arrived(tree: Any) -> Any:
    """Return ``tree`` with tensors waited for that torch's tensor parallelism still gathers.

    torch's compiled graphs (2.13) wait by themselves, and lose the gradient of such an input.
    """
    return map_tensors(tree, lambda t: _Arrival.apply(t) if is_arriving(t) else t)


def on_device(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with tensors moved to ``device``; nothing is moved to the host."""
    if device.type == "cpu":
        return tree
    return map_tensors(tree, lambda t: t.to(device))


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """Return ``tree`` with floating-point tensors cast to ``dtype``; None leaves it as it is."""
    if dtype is None:
        return tree
    return map_tensors(tree, lambda t: t.to(dtype) if t.is_floating_point() else t)
