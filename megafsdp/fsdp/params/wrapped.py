"""Parameters of tensor subclasses that wrap one plain tensor, such as torchao's for FP8 training.

Such a class holds the weight in its own dtype and computes with it in a way of its own, for example
in products of FP8. Buffers, optimizers and checkpoints have the plain tensor; forward and backward
see a wrapper around the gathered one, as in a single process::

    main weight    plain, fp32      rows of the wrapped tensor
    gathered       plain, bf16
    unsharded      the subclass     around the gathered tensor

The subclass's ``fsdp_pre_all_gather``, by which torch's FSDP2 lets it gather something else, is not
called. Which parameters :func:`~megafsdp.fully_shard` refuses is decided in
:mod:`megafsdp.fsdp.grouping`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from megafsdp.buffer.dtensor.uneven import local_object


def is_wrapped(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, or this rank's part of it, wraps one plain tensor; local."""
    local = local_object(parameter)
    return unwrapped(local) is not local


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that a tensor wraps; any other tensor as given; local.

    Args:
        tensor: Any tensor; of a DTensor give the local tensor.
    """
    cls = type(tensor)
    # Only a class for FSDP2 is known to mean that rows of what it wraps are rows of the weight.
    if not (hasattr(cls, "fsdp_pre_all_gather") and hasattr(cls, "__tensor_flatten__")):
        return tensor
    (name, *others), _ = cast(Any, tensor).__tensor_flatten__()
    inner = getattr(tensor, name)
    is_plain = not others and type(inner) in (torch.Tensor, nn.Parameter)
    is_same = (inner.shape, inner.dtype) == (tensor.shape, tensor.dtype)
    return inner.detach() if is_plain and is_same else tensor


def rewrapped(original: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor in a wrapper like the original's, if that has one; aliases; local.

    Args:
        original: Any tensor; of a DTensor give the local tensor.
        full: A plain tensor of the same shape, of any dtype.
    """
    if unwrapped(original) is original:
        return full
    cls: Any = type(original)
    (name,), context = cast(Any, original).__tensor_flatten__()
    # It has no memory of its own, so it is made once: each gather fills what it wraps.
    return cast(
        torch.Tensor, cls.__tensor_unflatten__({name: full}, context, full.shape, full.stride())
    )
