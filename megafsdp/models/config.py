"""The one description of a model's shape, from which everything else follows.

``ModelConfig`` holds plain values only, so that a configuration file or a command line can spell
it. It checks itself once, at construction; the modules trust it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from megafsdp.errors import ConfigError, expected

Architecture = Literal["gpt", "qwen3", "llama", "qwen3_moe", "qwen3_next"]
RouterBalance = Literal["none", "aux_loss", "bias"]

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

_ARCHITECTURES = get_args(Architecture)
_MIXTURES = ("qwen3_moe", "qwen3_next")
_LAYER_TYPES = (LINEAR_ATTENTION, FULL_ATTENTION)
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
_LINEAR_COUNTS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel",
)
_EXPERT_COUNTS = ("num_experts", "num_experts_per_token", "moe_ffn_hidden_size")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Describe one decoder-only language model; the defaults are the byte-level toy Qwen3.

    Attributes:
        architecture: Which block: ``gpt`` (learned positions, LayerNorm, GELU, biases), ``qwen3``
            (rotary positions, RMSNorm, SwiGLU, normed queries and keys), ``llama`` (as qwen3,
            queries and keys not normed), ``qwen3_moe`` (as qwen3, a mixture of experts for the
            MLP) or ``qwen3_next`` (as qwen3_moe, with linear attention in some layers, gated
            attention in the others, and norms that start from zero).
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads; divides ``num_attention_heads``.
        head_dim: Width of one head; heads together need not be as wide as ``hidden_size``.
        ffn_hidden_size: Inner width of the MLP; of each of gate and up if it is gated. Mixtures
            do not read it.
        vocab_size: Rows of the embedding, padding included.
        max_sequence_length: Longest sequence that the model takes.
        rope_theta: Base of the rotary frequencies; ``gpt`` does not read it.
        norm_eps: Added to the variance under each norm's root.
        tie_embeddings: True if the output layer's weight is the word embedding's.
        init_std: Standard deviation of the initial weights.
        num_experts: Routed experts of a layer; 0 in models without.
        num_experts_per_token: Experts that each token goes to.
        moe_ffn_hidden_size: Inner width of one expert.
        shared_expert_ffn_hidden_size: Inner width of the expert that all tokens go to; 0 for none.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
        router_balance: What balances the experts' loads: ``none``, ``aux_loss`` (a loss added to
            the model's) or ``bias`` (added to the scores that experts are chosen by, and moved at
            each step).
        router_aux_loss_coefficient: Factor of that loss.
        router_bias_update_rate: How far a step moves the bias.
        layer_types: ``linear_attention`` or ``full_attention`` for each layer; empty for attention
            in all.
        linear_num_key_heads: Query and key heads of linear attention.
        linear_num_value_heads: Value heads of linear attention, a multiple of its key heads.
        linear_key_head_dim: Width of one query or key head of linear attention.
        linear_value_head_dim: Width of one value head of linear attention.
        linear_conv_kernel: Tokens that its convolution sees, the current one included.
        rotary_fraction: Part of each head of attention, from its start, that positions rotate.
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
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    shared_expert_ffn_hidden_size: int = 0
    norm_topk_prob: bool = True
    router_balance: RouterBalance = "none"
    router_aux_loss_coefficient: float = 0.001
    router_bias_update_rate: float = 0.001
    layer_types: tuple[str, ...] = ()
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel: int = 4
    rotary_fraction: float = 1.0

    def __post_init__(self) -> None:
        """Check every value and the relations between them.

        Raises:
            ConfigError: A value is out of its range, heads do not divide into groups, or a field
                is set that the architecture does not have.
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
        self._check_experts()
        self._check_layer_types()

    def _check_experts(self) -> None:
        if not self.has_experts:
            for name in (*_EXPERT_COUNTS, "shared_expert_ffn_hidden_size"):
                if getattr(self, name):
                    raise _out_of_range(
                        name, f"0 in the architecture {self.architecture}", getattr(self, name)
                    )
            return
        in_range = {name: getattr(self, name) >= 1 for name in _EXPERT_COUNTS}
        for name in (
            "shared_expert_ffn_hidden_size",
            "router_aux_loss_coefficient",
            "router_bias_update_rate",
        ):
            in_range[name] = getattr(self, name) >= 0
        for name, is_in_range in in_range.items():
            if not is_in_range:
                least = "of at least 1" if name in _EXPERT_COUNTS else "of at least 0"
                raise _out_of_range(name, f"a number {least}", getattr(self, name))
        if self.num_experts_per_token > self.num_experts:
            raise _out_of_range(
                "num_experts_per_token",
                f"at most the {self.num_experts} experts of a layer",
                self.num_experts_per_token,
            )
        if self.router_balance not in get_args(RouterBalance):
            raise _out_of_range(
                "router_balance",
                f"one of {', '.join(get_args(RouterBalance))}",
                repr(self.router_balance),
            )

    def _check_layer_types(self) -> None:
        is_hybrid = self.architecture == "qwen3_next"
        if not is_hybrid and self.rotary_fraction != 1:
            raise _out_of_range(
                "rotary_fraction",
                f"1 in the architecture {self.architecture}",
                self.rotary_fraction,
            )
        if is_hybrid and not (
            0 < self.rotary_fraction <= 1 and self.head_dim * self.rotary_fraction % 2 == 0
        ):
            raise _out_of_range(
                "rotary_fraction",
                "a fraction that rotates an even number of elements of a head",
                self.rotary_fraction,
            )
        if self.layer_types and not is_hybrid:
            raise _out_of_range(
                "layer_types", f"none in the architecture {self.architecture}", self.layer_types
            )
        unknown = sorted(set(self.layer_types) - set(_LAYER_TYPES))
        if unknown or (self.layer_types and len(self.layer_types) != self.num_layers):
            raise _out_of_range(
                "layer_types",
                f"one of {', '.join(_LAYER_TYPES)} for each of the {self.num_layers} layers",
                self.layer_types,
            )
        if not self.has_linear_attention:
            return
        for name in _LINEAR_COUNTS:
            if getattr(self, name) < 1:
                raise _out_of_range(name, "an integer of at least 1", getattr(self, name))
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise _out_of_range(
                "linear_num_value_heads",
                f"a multiple of the {self.linear_num_key_heads} key heads",
                self.linear_num_value_heads,
            )

    @property
    def has_experts(self) -> bool:
        """Return whether the MLP of each layer is a mixture of experts."""
        return self.architecture in _MIXTURES

    @property
    def has_linear_attention(self) -> bool:
        """Return whether some layers attend by the gated delta rule."""
        return LINEAR_ATTENTION in self.layer_types

    @property
    def has_rotary_positions(self) -> bool:
        """Return whether positions are rotations of queries and keys, not a learned table."""
        return self.architecture != "gpt"

    @property
    def rotary_dim(self) -> int:
        """Return how many elements of each head positions rotate."""
        return int(self.head_dim * self.rotary_fraction)

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
