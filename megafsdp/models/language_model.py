"""The frame round the layers: embedding, decoder, output layer, loss.

``LanguageModel`` is the same for every architecture; what differs comes in as functions that make a
layer and a norm. It knows nothing of data parallelism: parameters outside the layers (embedding,
final norm, output layer) belong to the root's unit, and are read in the forward of their own
modules below it. With tensor parallelism every rank of tp is given the same tokens and returns the
same logits or loss; between the embedding and the output layer it has its part of the sequence.

Shape suffixes: B batch, T sequence, H hidden, R rotary frequencies, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from megafsdp.errors import expected
from megafsdp.models.activation_checkpointing import ActivationCheckpointing
from megafsdp.models.common import TransformerLayer, require_divisor, rotary_table
from megafsdp.models.config import ModelConfig
from megafsdp.models.loss import masked_cross_entropy
from megafsdp.parallel import (
    OutputLayer,
    ParallelModule,
    PositionEmbedding,
    VocabParallelEmbedding,
    gather_vocabulary,
    scale_auxiliary_losses,
)


class LanguageModelEmbedding(ParallelModule):
    """Word embedding, plus a learned position embedding where positions are not rotations.

    Args:
        config: Sizes and initial spread.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size,
            config.hidden_size,
            init_std=config.init_std,
            sequence_parallel=True,
        )
        self.position_embeddings = (
            None
            if config.has_rotary_positions
            else PositionEmbedding(
                config.max_sequence_length,
                config.hidden_size,
                init_std=config.init_std,
                sequence_parallel=True,
            )
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Embed token ids as (B, T, H), or with tp as this rank's part of the sequence."""
        words_BTH = self.word_embeddings(tokens_BT)
        if self.position_embeddings is None:
            return words_BTH
        return words_BTH + self.position_embeddings(tokens_BT.shape[1])


class Decoder(ParallelModule):
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


class LanguageModel(ParallelModule):
    """A decoder-only language model that returns logits, or the loss when it is given labels.

    Modules are made in the order of ``modules()``, so initialising a meta model module by module
    draws the same numbers as building it on a device.

    Args:
        config: The model's description; kept as ``config``.
        make_layer: Makes one transformer layer, given its index.
        make_norm: Makes the final norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        make_layer: Callable[[ModelConfig, int], TransformerLayer],
        make_norm: Callable[[ModelConfig], nn.Module],
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = LanguageModelEmbedding(config)
        self.decoder = Decoder(
            [make_layer(config, index) for index in range(config.num_layers)], make_norm(config)
        )
        tied_weight = self.embedding.word_embeddings.weight if config.tie_embeddings else None
        self.output_layer = OutputLayer(
            config.hidden_size,
            config.vocab_size,
            init_std=config.init_std,
            tied_weight=tied_weight,
            sequence_parallel=True,
        )

    @property
    def activation_checkpointing(self) -> ActivationCheckpointing:
        """What backward recomputes; may be set at any time between a backward and a forward."""
        return self.decoder.activation_checkpointing

    @activation_checkpointing.setter
    def activation_checkpointing(self, choice: ActivationCheckpointing) -> None:
        self.decoder.activation_checkpointing = choice

    def check_degree(self, degree: int) -> None:
        """Raise ValueError unless a tensor-parallel degree divides the vocabulary."""
        require_divisor(degree, self.config.vocab_size, "rows of the vocabulary", "vocab_size")

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
        """Predict, or score a prediction; collective over tp.

        With tp a sequence that the ranks do not divide is padded on the right, which changes
        nothing before the padding.

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
        group = self.tp_group
        num_padded = 0 if group is None else -num_positions % group.size()
        if num_padded:
            tokens_BT = F.pad(tokens_BT, (0, num_padded))
        rotary_TR = None
        if self.config.has_rotary_positions:
            rotary_TR = rotary_table(
                num_positions + num_padded,
                self.config.rotary_dim,
                self.config.rope_theta,
                device=tokens_BT.device,
            )
        logits_BTV = self.output_layer(self.decoder(self.embedding(tokens_BT), rotary_TR))
        if num_padded:
            logits_BTV = logits_BTV[:, :num_positions]
        if labels_BT is None:
            return logits_BTV if group is None else gather_vocabulary(logits_BTV, group)
        # No operator saves them, and no caller sees them.
        loss = masked_cross_entropy(
            logits_BTV, labels_BT, loss_mask_BT, may_overwrite_logits=True, tp_group=group
        )
        # Asked first: routers are looked for in all modules.
        has_auxiliary_loss = self.config.router_balance == "aux_loss"
        return scale_auxiliary_losses(loss, self) if has_auxiliary_loss else loss
