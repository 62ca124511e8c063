"""Anchors: outputs of units that take part in the backward although nothing may read them.

A rank that does not use a unit's output, as a text-only batch does with images, would skip the
unit's backward, and with it collectives that other ranks issue. An anchor is an empty tensor in the
graph behind such an output. The root's outputs then depend on all anchors, so that autograd visits
every anchored unit, in the same order on all ranks. The gradients that it takes there are
undefined, not zeros: autograd's formulas skip them, and nothing is computed for an unused output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megafsdp.device.torch_private import preserving_versions


class _Anchor(torch.autograd.Function):
    """An empty tensor that depends on tensors, and keeps none of them alive."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        ctx.num_outputs = len(outputs)
        return torch.empty(0, device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, grad: object) -> tuple[None, ...]:  # type: ignore[override]
        return (None,) * ctx.num_outputs


class _Anchored(torch.autograd.Function):
    """A tensor as it is, which depends on anchors from here on."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, output: torch.Tensor, *anchors: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.num_anchors = len(anchors)
        # If it were a view of itself, the user could not change it in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        return (grad, *(None,) * ctx.num_anchors)


class Anchors:
    """The anchors that one forward of a root has made so far."""

    def __init__(self) -> None:
        self._anchors: list[torch.Tensor] = []

    def add(self, outputs: Sequence[torch.Tensor]) -> None:
        """Anchor the outputs of a unit; local."""
        outputs = _with_graph(outputs)
        if outputs:
            self._anchors.append(_Anchor.apply(*outputs))

    def attach(self, outputs: Sequence[torch.Tensor]) -> None:
        """Make each output of the root depend on all anchors, in place; local."""
        anchors = self._anchors
        self.clear()
        for output in _with_graph(outputs) if anchors else ():
            # Its values stay: what was saved of it for backward is as valid as before.
            with preserving_versions(output):
                _Anchored.apply(output, *anchors)

    def clear(self) -> None:
        """Drop the anchors of a forward that did not reach its end."""
        self._anchors = []


def _with_graph(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # A leaf, such as an ignored parameter, has no unit's backward behind it.
    return [each for each in tensors if each.requires_grad and not each.is_leaf]
