"""Tensors inside the arguments and results of a forward.

Lists, tuples, named tuples, dicts and dataclasses are walked; anything else is left as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


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
