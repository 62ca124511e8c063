"""Tensors that have memory but no values yet: those that came on the meta device.

The mark is an attribute of the tensor with its count of writes: any first write ends it.
"""

from __future__ import annotations

import torch

from megafsdp.device.torch_private import version_of

# The name of the mark.
UNWRITTEN = "_megafsdp_unwritten"


def mark_unwritten(tensor: torch.Tensor, *, is_meta: bool = False) -> None:
    """Note that a tensor has no values until its next write; local.

    Args:
        tensor: Any tensor; a write to another tensor over its memory may not count.
        is_meta: Whether users see a meta tensor until ``to_empty()`` or a write.
    """
    setattr(tensor, UNWRITTEN, (version_of(tensor), is_meta))


def mark_written(tensor: torch.Tensor) -> None:
    """Note that a tensor has values although no write to it was counted; local."""
    vars(tensor).pop(UNWRITTEN, None)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was marked and not written since."""
    mark = getattr(tensor, UNWRITTEN, None)
    return mark is not None and bool(mark[0] == version_of(tensor))


def is_shown_as_meta(tensor: torch.Tensor) -> bool:
    """Return what a sharded parameter's ``is_meta`` says: no values, and no ``to_empty()`` yet."""
    # Ask torch.Tensor: is_meta of the tensor's own class would call this function again.
    if torch.Tensor.is_meta.__get__(tensor):  # type: ignore[attr-defined]
        return True
    return is_unwritten(tensor) and bool(getattr(tensor, UNWRITTEN)[1])
