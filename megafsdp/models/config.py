"""The one description of a model's shape, from which everything else follows.

``ModelConfig`` holds plain values only, so that a configuration file or a command line can spell
it. It checks itself once, at construction; the modules trust it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megafsdp.errors import ConfigError, expected

Architecture = Literal["gpt", "qwen3", "llama"]

_ARCHITECTURES = ("gpt", "qwen3", "llama")
_COUNTS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "max_sequence_length",
)
_POSITIVE_NUMBERS = ("rope_theta", "norm_eps", "init_std")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Describe one decoder-only language model; the defaults are the byte-level toy Qwen3.

    Attributes:
        architecture: Which block: ``gpt`` (learned positions, LayerNorm, GELU, biases), ``qwen3``
            (rotary positions, RMSNorm, SwiGLU, normed queries and keys) or ``llama`` (as qwen3,
            queries and keys not normed).
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads; divides ``num_attention_heads``.
        head_dim: Width of one head; heads together need not be as wide as ``hidden_size``.
        ffn_hidden_size: Inner width of the MLP; of each of gate and up where it is gated.
        vocab_size: Rows of the embedding, padding included.
        max_sequence_length: Longest sequence that the model takes.
        rope_theta: Base of the rotary frequencies; ``gpt`` does not read it.
        norm_eps: Added to the variance under each norm's root.
        tie_embeddings: True if the output layer's weight is the word embedding's.
        init_std: Standard deviation of the initial weights.
    """

    architecture: Architecture = "qwen3"
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 4
    num_query_groups: int = 2
    head_dim: int = 32
    ffn_hidden_size: int = 384
    vocab_size: int = 320
    max_sequence_length: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    init_std: float = 0.02

    def __post_init__(self) -> None:
        """Check every value and the relations between them.

        Raises:
            ConfigError: A value is out of its range, or heads do not divide into groups.
        """
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                expected(
                    f"an architecture among {', '.join(_ARCHITECTURES)}",
                    repr(self.architecture),
                    where="ModelConfig.architecture",
                    hint="Name one of these",
                )
            )
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise _out_of_range(name, "an integer of at least 1", getattr(self, name))
        for name in _POSITIVE_NUMBERS:
            if not getattr(self, name) > 0:
                raise _out_of_range(name, "a number above 0", getattr(self, name))
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                expected(
                    "num_query_groups that divides num_attention_heads",
                    f"{self.num_query_groups} groups for {self.num_attention_heads} heads",
                    where="ModelConfig.num_query_groups",
                    hint="Give each group the same number of query heads",
                )
            )
        if self.has_rotary_positions and self.head_dim % 2:
            raise _out_of_range("head_dim", "an even number, for rotary pairs", self.head_dim)

    @property
    def has_rotary_positions(self) -> bool:
        """Return whether positions are rotations of queries and keys, not a learned table."""
        return self.architecture != "gpt"

    @property
    def has_gated_mlp(self) -> bool:
        """Return whether the MLP is SwiGLU, whose first matrix holds gate and up."""
        return self.architecture != "gpt"

    @property
    def query_size(self) -> int:
        """Return the width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Return the width of all key heads together, which is that of all value heads."""
        return self.num_query_groups * self.head_dim


def _out_of_range(name: str, what: str, got: object) -> ConfigError:
    return ConfigError(
        expected(what, got, where=f"ModelConfig.{name}", hint=f"Set {name} within this range")
    )
