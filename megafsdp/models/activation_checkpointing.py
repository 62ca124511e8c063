"""Activation checkpointing: which layers run again in backward, and what of them is kept.

A layer's forward is called through torch.utils.checkpoint; no module is wrapped, so parameters and
state dicts keep their names. The file does not move activations to the host, and it knows nothing
of sharding: it calls the layer as a module, so whatever hooks gather its parameters run in the
recomputation too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from megafsdp.errors import ConfigError, expected

CheckpointingMode = Literal["none", "full", "selective"]

_MODES = ("none", "full", "selective")

# The outputs of products of activations and weights, and of fused attention. Batched products are
# not kept: without a fused kernel, attention's scores are one, and quadratic in the sequence.
_KEPT_BY_SELECTIVE = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._efficient_attention_forward.default,
)
_selective_contexts = functools.partial(
    create_selective_checkpoint_contexts, list(_KEPT_BY_SELECTIVE)
)


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Choose what backward recomputes; set it as ``LanguageModel.activation_checkpointing``.

    Results are bitwise those without it: the layer runs again on the same input, and from the same
    random state.

    Attributes:
        mode: ``none`` keeps all activations. ``full`` keeps a layer's input and runs the layer
            again. ``selective`` keeps the outputs of matrix products and attention too, and
            recomputes the cheap rest: norms, activation functions, rotations. In layers that
            inductor compiles it keeps attention only.
        every: Layers 0, ``every``, 2 * ``every`` and so on are checkpointed, the others not.
        use_reentrant: torch's older implementation, for ``full`` only: it records no graph in
            forward, and gives no gradients unless the layer's input requires one.
    """

    mode: CheckpointingMode = "none"
    every: int = 1
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        """Check every value and the relations between them.

        Raises:
            ConfigError: The mode is unknown, ``every`` is below 1, or ``use_reentrant`` is set for
                ``selective``.
        """
        if self.mode not in _MODES:
            raise _bad("mode", f"one of {', '.join(_MODES)}", repr(self.mode), "Name one of these")
        if self.every < 1:
            raise _bad("every", "a whole number of at least 1", self.every, "Use 1 for every layer")
        if self.use_reentrant and self.mode == "selective":
            raise _bad(
                "use_reentrant",
                "use_reentrant false with mode selective",
                self.use_reentrant,
                "Leave it false, or use mode full",
            )

    def run_layer(self, layer: nn.Module, index: int, x_BTH: Tensor, *others: object) -> Tensor:
        """Run one layer of a stack, checkpointed if the choice says so and a graph is recorded.

        Args:
            layer: Called with the hidden states and what follows them; again in backward.
            index: Its place in the stack, from 0.
            x_BTH: Hidden states.
            *others: Further arguments of the layer, such as the rotary table.

        Returns:
            The layer's output.
        """
        is_chosen = self.mode != "none" and index % self.every == 0
        if not is_chosen or not torch.is_grad_enabled():
            return layer(x_BTH, *others)
        if self.mode == "selective":
            return checkpoint(
                layer, x_BTH, *others, use_reentrant=False, context_fn=_selective_contexts
            )
        return checkpoint(layer, x_BTH, *others, use_reentrant=self.use_reentrant)


def _bad(name: str, what: str, got: object, hint: str) -> ConfigError:
    return ConfigError(expected(what, got, where=f"activation_checkpointing.{name}", hint=hint))
