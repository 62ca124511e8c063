"""The frame around the layers: embedding, decoder, output layer, loss.

``LanguageModel`` is the same for every architecture; what differs comes in as functions that make a
layer and a norm. It knows nothing of data parallelism: parameters outside the layers (embedding,
final norm, output layer) belong to the root's unit, and are read in the forward of their own
modules below it. With tensor or context parallelism every rank of tp and cp is given the same
tokens and returns the same logits or loss; between the embedding and the output layer it has its
part of the sequence.

Shape suffixes: B batch, T sequence, H hidden, R rotary frequencies, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from megafsdp.errors import expected
from megafsdp.models.activation_checkpointing import ActivationCheckpointing
from megafsdp.models.common import TransformerLayer, require_divisor, rotary_table
from megafsdp.models.config import ModelConfig
from megafsdp.models.loss import masked_cross_entropy
from megafsdp.parallel import (
    Documents,
    OutputLayer,
    ParallelModule,
    PositionEmbedding,
    RoutedBatch,
    VocabParallelEmbedding,
    gather_vocabulary,
    scale_auxiliary_losses,
)
from megafsdp.parallel.context import own_part, sum_over_cp, whole_logits


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

    def forward(self, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
        """Embed token ids as (B, T, H), or with tp as this rank's part of the sequence."""
        words_BTH = self.word_embeddings(tokens_BT)
        if self.position_embeddings is None:
            return words_BTH
        return words_BTH + self.position_embeddings(tokens_BT.shape[1], documents)


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

    def forward(
        self,
        x_BTH: Tensor,
        rotary_TR: Tensor | None,
        batch: RoutedBatch | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Run the layers and the final norm on (B, T, H)."""
        run_layer = self.activation_checkpointing.run_layer
        for index, layer in enumerate(self.layers):
            x_BTH = run_layer(layer, index, x_BTH, rotary_TR, batch, documents)
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
        document_lengths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Predict, or score a prediction; collective over tp and cp.

        A sequence that these ranks do not divide is padded on the right. That changes nothing
        before the padding, nor the experts' loads, which count only the tokens given.

        Args:
            tokens_BT: Token ids, at most ``max_sequence_length`` of them a row.
            labels_BT: The token that follows each; valid ids at masked places too.
            loss_mask_BT: 1 where a label counts, 0 where not; None counts all.
            document_lengths: For each row the number of tokens of each document, on the host, alike
                on the ranks of tp and cp: ``[[3, 5], [8]]`` for rows of 8. Tokens then see only
                those of their own document, at the positions that they have there. None takes each
                row as one document.

        Returns:
            Logits (B, T, V) without labels; with labels the mean loss over the unmasked tokens, a
            scalar in fp32, in nats. With labels the gradient may overwrite the logits' memory, so a
            hook on the output layer must copy what it keeps.

        Raises:
            ValueError: The rows are longer than the model's longest sequence, or the documents do
                not fill them.
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
        num_padded = -num_positions % self._length_unit()
        documents = self._documents(document_lengths, tokens_BT, num_padded)
        if num_padded:
            tokens_BT = F.pad(tokens_BT, (0, num_padded))
        rotary_TR = self._rotary_table(tokens_BT, documents)
        cp_group = self.cp_group
        if cp_group is not None:
            tokens_BT = own_part(tokens_BT, cp_group, dim=1)
        batch = None
        if self.config.has_experts:
            batch = RoutedBatch(self._padding_of(tokens_BT, num_padded))
        x_BTH = self.embedding(tokens_BT, documents)
        x_BTH = self.decoder(x_BTH, rotary_TR, batch, documents)
        logits_BTV = self.output_layer(x_BTH)
        if labels_BT is None:
            logits_BTV = self._whole(logits_BTV)
        # Sliced only if needed: the backward of a slice fills a gradient of the whole size.
        if num_padded and (labels_BT is None or cp_group is None):
            logits_BTV = logits_BTV[:, :num_positions]
        if labels_BT is None:
            return logits_BTV
        loss = self._score(logits_BTV, labels_BT, loss_mask_BT, num_padded)
        # Checked first, because looking for routers walks all modules.
        has_auxiliary_loss = self.config.router_balance == "aux_loss"
        return scale_auxiliary_losses(loss, self) if has_auxiliary_loss else loss

    def _documents(
        self, lengths: Sequence[Sequence[int]] | None, tokens_BT: Tensor, num_padded: int
    ) -> Documents | None:
        """Return the documents of the rows with their padding; None if no lengths are given."""
        if lengths is None:
            return None
        documents = Documents(lengths)
        where = "the document_lengths given to LanguageModel.forward()"
        documents.check(*tokens_BT.shape, where=where)
        return documents.padded(num_padded) if num_padded else documents

    def _rotary_table(self, tokens_BT: Tensor, documents: Documents | None) -> Tensor | None:
        """Return the rotations of this rank's tokens: (T, R), or with documents (B, T, R).

        Args:
            tokens_BT: All tokens, with padding.
            documents: Documents of the rows.
        """
        if not self.config.has_rotary_positions:
            return None
        rotary_TR = rotary_table(
            tokens_BT.shape[1],
            self.config.rotary_dim,
            self.config.rope_theta,
            device=tokens_BT.device,
        )
        if documents is not None:
            rotary_TR = documents.begin_anew(rotary_TR)
        return rotary_TR if self.cp_group is None else own_part(rotary_TR, self.cp_group, dim=-2)

    def _padding_of(self, tokens_BT: Tensor, num_padded: int) -> Tensor | None:
        """Return which of this rank's tokens, row after row, are padding; None without any.

        Args:
            tokens_BT: Tokens and padding that the ranks of tp have together, with cp this rank's.
            num_padded: Tokens added on the right of the whole sequence.
        """
        if not num_padded:
            return None
        num_rows, num_own = tokens_BT.shape
        num_ranks = 1 if self.cp_group is None else self.cp_group.size()
        positions_T = torch.arange(num_own * num_ranks, device=tokens_BT.device)
        is_padding_T = positions_T >= len(positions_T) - num_padded
        if self.cp_group is not None:
            is_padding_T = own_part(is_padding_T, self.cp_group, dim=0)
        if self.tp_group is not None:
            is_padding_T = is_padding_T.chunk(self.tp_group.size())[self.tp_group.rank()]
        return is_padding_T.repeat(num_rows)

    def _whole(self, logits_BTV: Tensor) -> Tensor:
        """Join the logits of the ranks of tp and cp."""
        if self.tp_group is not None:
            logits_BTV = gather_vocabulary(logits_BTV, self.tp_group)
        return logits_BTV if self.cp_group is None else whole_logits(logits_BTV, self.cp_group)

    def _score(
        self,
        logits_BTV: Tensor,
        labels_BT: Tensor,
        loss_mask_BT: Tensor | None,
        num_padded: int,
    ) -> Tensor:
        """Return the mean loss over all unmasked tokens, those of other ranks of cp too.

        Args:
            logits_BTV: Logits of this rank's tokens and columns.
            labels_BT: Labels of all tokens.
            loss_mask_BT: Mask of all tokens.
            num_padded: Tokens added on the right, which labels and mask lack.
        """
        num_counted, cp_group = None, self.cp_group
        if cp_group is not None:
            if loss_mask_BT is None:
                loss_mask_BT = torch.ones_like(labels_BT, dtype=torch.float32)
            # A policy may have cast the mask to bf16, in which a sum does not count past 256.
            num_counted = loss_mask_BT.sum(dtype=torch.float32)
            labels_BT, loss_mask_BT = (
                own_part(F.pad(x_BT, (0, num_padded)), cp_group, dim=1)
                for x_BT in (labels_BT, loss_mask_BT)
            )
        loss = masked_cross_entropy(
            logits_BTV,
            labels_BT,
            loss_mask_BT,
            num_counted=num_counted,
            # No operator saves the logits, and no caller sees them.
            may_overwrite_logits=True,
            tp_group=self.tp_group,
        )
        return loss if cp_group is None else sum_over_cp(loss, cp_group)

    def _length_unit(self) -> int:
        """Return what the length of a sequence must be a multiple of.

        A rank of cp has two chunks of the same length, and the ranks of tp divide both together.
        """
        tp = 1 if self.tp_group is None else self.tp_group.size()
        return tp if self.cp_group is None else self.cp_group.size() * math.lcm(2, tp)
