"""Tensors that have memory but no values yet: those that came on the meta device.

The mark lies on the tensor, beside its count of writes: the first write ends it, whoever makes it.
"""

from __future__ import annotations

import torch

from megafsdp.device.torch_private import version_of

_ATTRIBUTE = "_megafsdp_unwritten"


def mark_unwritten(tensor: torch.Tensor, *, is_meta: bool = False) -> None:
    """Note that a tensor has no values from here to its next write; local.

    Args:
        tensor: Any tensor; a write to another tensor over its memory need not count.
        is_meta: Whether ``to_empty()`` is still to come, until which users see a meta tensor.
    """
    setattr(tensor, _ATTRIBUTE, (version_of(tensor), is_meta))


def mark_written(tensor: torch.Tensor) -> None:
    """Note that a tensor has values, though no write to it was counted; local."""
    vars(tensor).pop(_ATTRIBUTE, None)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was marked and not written since."""
    mark = getattr(tensor, _ATTRIBUTE, None)
    return mark is not None and bool(mark[0] == version_of(tensor))


def is_shown_as_meta(tensor: torch.Tensor) -> bool:
    """Return what a sharded parameter's ``is_meta`` says: no values, and no ``to_empty()`` yet."""
    # Of the tensor's own class it would be this function.
    if torch.Tensor.is_meta.__get__(tensor):  # type: ignore[attr-defined]
        return True
    return is_unwritten(tensor) and bool(getattr(tensor, _ATTRIBUTE)[1])
