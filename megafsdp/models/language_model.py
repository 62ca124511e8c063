"""The frame round the layers: embedding, decoder, output layer, loss.

``LanguageModel`` is the same for every architecture; what differs comes in as functions that make a
layer and a norm. It knows nothing of sharding: parameters outside the layers (embedding, final
norm, output layer) belong to the root's unit, and are read in the forward of their own
modules below it.

Shape suffixes: B batch, T sequence, H hidden, R rotary frequencies, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from megafsdp.errors import expected
from megafsdp.mesh.annotation import annotate
from megafsdp.models.activation_checkpointing import ActivationCheckpointing
from megafsdp.models.common import AnnotatedModule, Embedding, TransformerLayer, rotary_table
from megafsdp.models.config import ModelConfig
from megafsdp.models.loss import masked_cross_entropy


class LanguageModelEmbedding(nn.Module):
    """Word embedding, plus a learned position embedding where positions are not rotations.

    Args:
        config: Sizes and initial spread.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = Embedding(
            config.vocab_size, config.hidden_size, init_std=config.init_std, tp_dim=0
        )
        self.position_embeddings = (
            None
            if config.has_rotary_positions
            else Embedding(
                config.max_sequence_length,
                config.hidden_size,
                init_std=config.init_std,
                tp_dim=None,
            )
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embed token ids as (B, T, H)."""
        words_BTH = self.word_embeddings(tokens_BT)
        if self.position_embeddings is None:
            return words_BTH
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return words_BTH + self.position_embeddings(positions_T)


class Decoder(nn.Module):
    """The stack of layers and the norm after the last.

    Args:
        layers: The layers, first to last.
        final_layernorm: Norm of the last layer's output.
    """

    def __init__(self, layers: Sequence[TransformerLayer], final_layernorm: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.final_layernorm = final_layernorm
        self.activation_checkpointing = ActivationCheckpointing()

    def forward(self, x_BTH: Tensor, rotary_TR: Tensor | None) -> Tensor:
        """Run the layers and the final norm on (B, T, H)."""
        for index, layer in enumerate(self.layers):
            x_BTH = self.activation_checkpointing.run_layer(layer, index, x_BTH, rotary_TR)
        return self.final_layernorm(x_BTH)


class OutputLayer(AnnotatedModule):
    """The map from hidden states to logits, with its own weight or the word embedding's.

    Args:
        config: Sizes and initial spread.
        tied_weight: The word embedding's Parameter to share; None makes one of its own.
    """

    def __init__(self, config: ModelConfig, *, tied_weight: nn.Parameter | None) -> None:
        super().__init__()
        self.init_std = config.init_std
        self.is_tied = tied_weight is not None
        self.weight = (
            nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
            if tied_weight is None
            else tied_weight
        )
        self.reset_parameters()
        self.annotate_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution, unless it is the embedding's to draw."""
        if not self.is_tied:
            nn.init.normal_(self.weight, std=self.init_std)

    def annotate_parameters(self) -> None:
        """Declare that tensor parallelism cuts the vocabulary."""
        annotate(self.weight, tp_dim=0)

    def forward(self, x_BTH: Tensor) -> Tensor:
        """Map (B, T, H) to logits (B, T, V) of the weight's dtype; a policy may keep it in fp32."""
        return F.linear(x_BTH.to(self.weight.dtype), self.weight)


class LanguageModel(nn.Module):
    """A decoder-only language model that returns logits, or the loss when it is given labels.

    Modules are made in the order of ``modules()``, so initialising a meta model module by module
    draws the same numbers as building it on a device.

    Args:
        config: The model's description; kept as ``config``.
        make_layer: Makes one transformer layer.
        make_norm: Makes the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        make_layer: Callable[[ModelConfig], TransformerLayer],
        make_norm: Callable[[ModelConfig], nn.Module],
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = LanguageModelEmbedding(config)
        self.decoder = Decoder(
            [make_layer(config) for _ in range(config.num_layers)], make_norm(config)
        )
        tied_weight = self.embedding.word_embeddings.weight if config.tie_embeddings else None
        self.output_layer = OutputLayer(config, tied_weight=tied_weight)

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """What backward recomputes; may be set at any time between a backward and a forward."""
        return self.decoder.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, choice: ActivationCheckpointing) -> None:
        self.decoder.activation_checkpointing = choice

    def tie_weights(self) -> None:
        """Share the word embedding's Parameter with the output layer, if the config says so.

        Only conversions of a part of the model, such as ``model.embedding.to_empty(...)``, need
        this call; those of the whole model keep the tie.
        """
        if self.config.tie_embeddings:
            self.output_layer.weight = self.embedding.word_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty() makes a new Parameter per module, also where two modules share one.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    def forward(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor | None = None,
        loss_mask_BT: Tensor | None = None,
    ) -> Tensor:
        """Predict, or score a prediction.

        Args:
            tokens_BT: Token ids, at most ``max_sequence_length`` of them a row.
            labels_BT: The token that follows each; valid ids at masked places too.
            loss_mask_BT: 1 where a label counts, 0 where not; None counts all.

        Returns:
            Logits (B, T, V) without labels; with labels the mean loss over the unmasked tokens, a
            scalar in fp32, in nats. Then the logits' memory may take their gradient, so a hook on
            the output layer copies what it keeps.

        Raises:
            ValueError: The rows are longer than the model's longest sequence.
        """
        num_positions = tokens_BT.shape[1]
        if num_positions > self.config.max_sequence_length:
            raise ValueError(
                expected(
                    f"at most {self.config.max_sequence_length} tokens in a row",
                    num_positions,
                    where="the tokens given to LanguageModel.forward()",
                    hint="Cut the sequence, or raise max_sequence_length in the model's config",
                )
            )
        rotary_TR = None
        if self.config.has_rotary_positions:
            rotary_TR = rotary_table(
                num_positions,
                self.config.head_dim,
                self.config.rope_theta,
                device=tokens_BT.device,
            )
        x_BTH = self.decoder(self.embedding(tokens_BT), rotary_TR)
        logits_BTV = self.output_layer(x_BTH)
        if labels_BT is None:
            return logits_BTV
        # No operator saves them, and no caller sees them.
        return masked_cross_entropy(logits_BTV, labels_BT, loss_mask_BT, may_overwrite_logits=True)
