"""Hooks beside the type checks of the package ``spmd_types``, which follow each operation.

What a hook does with buffers has no types, so checks pause within it. Tensors that it returns in
place of those that came have their types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from megafsdp.fsdp.runtime.autograd_hooks import tensors_of
from megafsdp.mesh.spmd_types import imported_package

R = TypeVar("R")
# Where the package keeps a tensor's types.
_ATTRIBUTES = ("_local_type", "_partition_spec")


def keeps_types(
    tree_of: Callable[..., object],
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a method of hooks run without type checks, and keep the types of tensors.

    Args:
        tree_of: Returns, of the arguments after the module, the tree that the method returns with
            other tensors in it.
    """

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(method)
        def run(self: object, module: object, *values: object) -> R:
            # Types are checked only where the package was imported.
            package = imported_package()
            if package is None or not package.is_type_checking():
                return method(self, module, *values)
            with package.no_typecheck():
                result = method(self, module, *values)
            for old, new in zip(tensors_of(tree_of(*values)), tensors_of(result), strict=True):
                for name in _ATTRIBUTES:
                    if old is not new and hasattr(old, name):
                        setattr(new, name, getattr(old, name))
            return result

        return run

    return decorate
