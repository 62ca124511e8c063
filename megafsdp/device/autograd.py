"""Checks of functions whose gradients are written by hand and are differentiable once."""

from __future__ import annotations

import torch

from megafsdp.device.torch_private import is_tracing
from megafsdp.errors import expected


def check_no_second_backward(*, where: str, hint: str) -> None:
    """Raise where gradients are to have a graph, which would end here without a word.

    For backwards of functions that are differentiable once. torch's ``once_differentiable`` looks
    for a graph in what enters backward, not in what it reads.

    Raises:
        NotImplementedError: Backward runs with ``create_graph=True``.
    """
    # A graph of torch.compile refuses a second differentiation itself, and traces with either mode.
    if torch.is_grad_enabled() and not is_tracing():
        raise _refusal(where, hint)


def check_has_no_graph(grad: torch.Tensor, *, where: str, hint: str) -> None:
    """Raise if a gradient has a graph, which would end here; for functions that are linear.

    Raises:
        NotImplementedError: It has one.
    """
    if grad.requires_grad:
        raise _refusal(where, hint)


def _refusal(where: str, hint: str) -> NotImplementedError:
    return NotImplementedError(
        expected("a backward without create_graph", "one with it", where=where, hint=hint)
    )
