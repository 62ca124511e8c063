"""Checks for functions with hand-written gradients, which are differentiable only once."""

from __future__ import annotations

import torch

from megafsdp.device.torch_private import is_tracing
from megafsdp.errors import expected


def check_no_second_backward(*, where: str, hint: str) -> None:
    """Raise if backward is to build a graph of gradients, which would silently end here.

    For backwards of functions that are differentiable once. torch's ``once_differentiable`` only
    looks for a graph in the inputs of backward, not in the tensors that it reads.

    Raises:
        NotImplementedError: Backward runs with ``create_graph=True``.
    """
    # Not when tracing: a graph of torch.compile refuses a second differentiation itself, and the
    # grad mode of a trace says nothing.
    if torch.is_grad_enabled() and not is_tracing():
        raise _refusal(where, hint)


def check_has_no_graph(grad: torch.Tensor, *, where: str, hint: str) -> None:
    """Raise if a gradient has a graph, which would end here; for functions that are linear.

    Raises:
        NotImplementedError: It has a graph.
    """
    if grad.requires_grad:
        raise _refusal(where, hint)


def _refusal(where: str, hint: str) -> NotImplementedError:
    return NotImplementedError(
        expected("a backward without create_graph", "one with it", where=where, hint=hint)
    )
