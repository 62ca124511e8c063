"""The bytes of all tensors that are made within a block of code and still alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Count storages by their present sizes, after being freed or resized.

    Attributes:
        peak: The most bytes alive after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, and note the storages of its results."""
        given = {id(storage) for storage in _storages((args, kwargs))}
        found = func(*args, **(kwargs or {}))
        for storage in _storages(found):
            # A view of an older storage has allocated nothing.
            if id(storage) not in given:
                self._storages[id(storage)] = weakref.ref(storage)
        self.peak = max(self.peak, self.total())
        return found

    def total(self) -> int:
        """Return the bytes that are there now."""
        self._storages = {k: each for k, each in self._storages.items() if each() is not None}
        alive = [each() for each in self._storages.values()]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def _storages(values: object) -> list[torch.UntypedStorage]:
    leaves = pytree.tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
