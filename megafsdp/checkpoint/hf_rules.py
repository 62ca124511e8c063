"""Rules between Hugging Face's tensor layouts and ours, each knowing both directions.

A rule rearranges elements and never computes with them, so a round trip is exact. Names and tables
stand in ``hf_mapping``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafsdp.errors import CheckpointError, expected


@dataclass(frozen=True, slots=True)
class WeightGeometry:
    """What the mapping must know of a model, beside the tensors.

    Attributes:
        num_layers: Number of transformer layers.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads.
        head_dim: Rows of one head.
        vocab_size: Rows of the embedding at Hugging Face.
        padded_vocab_size: Rows of our embedding, ``vocab_size`` or more.
        is_tied: True if the output layer's weight is the embedding's.
    """

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    is_tied: bool

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ValueError: Heads do not divide into groups, or the padding is negative.
        """
        is_divisible = self.num_attention_heads % self.num_query_groups == 0
        if not is_divisible or self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                expected(
                    "heads that divide into groups and padded_vocab_size >= vocab_size",
                    self,
                    where="WeightGeometry",
                    mend="Take the sizes from the config of the model that the weights belong to",
                )
            )

    @property
    def group_rows(self) -> tuple[int, int, int]:
        """Return the rows of query, key and value in one group of a fused qkv."""
        heads_per_group = self.num_attention_heads // self.num_query_groups
        return (heads_per_group * self.head_dim, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class Rule:
    """How some Hugging Face tensors become one of ours, and how it becomes them again.

    Attributes:
        join: From theirs, in the order of the row's names, to ours.
        split: From ours to theirs, contiguous.
    """

    join: Callable[[Sequence[Tensor], WeightGeometry], Tensor]
    split: Callable[[Tensor, WeightGeometry], list[Tensor]]


def _same_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    return theirs[0]


def _same_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    return [ours]


def _transposed_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    return theirs[0].T.contiguous()


def _transposed_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    return [ours.T.contiguous()]


def _stacked_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    return torch.cat(tuple(theirs))


def _halves_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    return [half.contiguous() for half in ours.chunk(2)]


def _padded_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    _expect_rows(theirs[0], geometry.vocab_size, "the vocabulary at Hugging Face")
    return F.pad(theirs[0], (0, 0, 0, geometry.padded_vocab_size - geometry.vocab_size))


def _padded_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    _expect_rows(ours, geometry.padded_vocab_size, "our vocabulary")
    return [ours[: geometry.vocab_size].contiguous()]


def _qkv_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    """Interleave query, key and value by query group: (rows, ...) each, to (all rows, ...)."""
    parts = []
    for tensor, rows in zip(theirs, geometry.group_rows, strict=True):
        _expect_rows(tensor, geometry.num_query_groups * rows, "query, key or value")
        parts.append(tensor.reshape(geometry.num_query_groups, rows, *tensor.shape[1:]))
    return torch.cat(parts, dim=1).flatten(0, 1)


def _qkv_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    rows = sum(geometry.group_rows)
    _expect_rows(ours, geometry.num_query_groups * rows, "fused query, key and value")
    groups = ours.reshape(geometry.num_query_groups, rows, *ours.shape[1:])
    return [part.flatten(0, 1).contiguous() for part in groups.split(geometry.group_rows, dim=1)]


def _blocks_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    return _qkv_join(theirs[0].chunk(3), geometry)


def _blocks_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    return [torch.cat(_qkv_split(ours, geometry))]


def _conv1d_blocks_join(theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
    return _blocks_join([theirs[0].T], geometry)


def _conv1d_blocks_split(ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
    return [_blocks_split(ours, geometry)[0].T.contiguous()]


SAME = Rule(_same_join, _same_split)
# GPT-2's Conv1D keeps its weight as (in, out).
TRANSPOSED = Rule(_transposed_join, _transposed_split)
PADDED_VOCABULARY = Rule(_padded_join, _padded_split)
GATE_UP = Rule(_stacked_join, _halves_split)
GROUPED_QKV = Rule(_qkv_join, _qkv_split)
# One tensor of three blocks [all q; all k; all v].
BLOCKS_QKV = Rule(_blocks_join, _blocks_split)
CONV1D_BLOCKS_QKV = Rule(_conv1d_blocks_join, _conv1d_blocks_split)


def _expect_rows(tensor: Tensor, rows: int, what: str) -> None:
    if tensor.shape[0] != rows:
        raise CheckpointError(
            expected(
                f"{rows} rows for {what}",
                f"shape {tuple(tensor.shape)}",
                where="a tensor to be mapped between Hugging Face's layout and ours",
                mend="Take the sizes from the config of the model that the weights belong to",
            )
        )
