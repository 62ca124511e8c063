"""Named model sizes: toys for two cores, and the true shapes of public models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION, ModelConfig

# One layer of attention after three of linear attention.
_HYBRID = (LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,)


def _qwen3(
    num_layers: int, hidden_size: int, *, num_attention_heads: int, ffn_hidden_size: int, tied: bool
) -> ModelConfig:
    """Describe a released dense Qwen3; other values are common to all sizes."""
    return ModelConfig(
        architecture="qwen3",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=151_936,
        max_sequence_length=40_960,
        rope_theta=1_000_000.0,
        tie_embeddings=tied,
    )


def _qwen3_moe(
    num_layers: int,
    hidden_size: int,
    *,
    num_attention_heads: int,
    num_query_groups: int,
    num_experts: int,
    moe_ffn_hidden_size: int,
) -> ModelConfig:
    """Describe a released mixture of Qwen3; other values are common to all sizes."""
    return ModelConfig(
        architecture="qwen3_moe",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        head_dim=128,
        vocab_size=151_936,
        max_sequence_length=40_960,
        rope_theta=1_000_000.0,
        tie_embeddings=False,
        num_experts=num_experts,
        num_experts_per_token=8,
        moe_ffn_hidden_size=moe_ffn_hidden_size,
    )


def _llama(
    num_layers: int,
    hidden_size: int,
    *,
    num_attention_heads: int,
    num_query_groups: int,
    ffn_hidden_size: int,
    generation: int,
) -> ModelConfig:
    """Describe a released Llama of the second or the third generation."""
    is_third = generation == 3
    return ModelConfig(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        head_dim=hidden_size // num_attention_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=128_256 if is_third else 32_000,
        max_sequence_length=8192 if is_third else 4096,
        rope_theta=500_000.0 if is_third else 10_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
    )


presets: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "qwen3-toy": ModelConfig(),
        "llama-toy": ModelConfig(architecture="llama", tie_embeddings=False),
        "qwen3-moe-toy": ModelConfig(
            architecture="qwen3_moe",
            num_experts=16,
            num_experts_per_token=4,
            moe_ffn_hidden_size=64,
        ),
        "gpt-toy": ModelConfig(
            architecture="gpt", num_query_groups=4, ffn_hidden_size=512, norm_eps=1e-5
        ),
        "qwen3-next-toy": ModelConfig(
            architecture="qwen3_next",
            hidden_size=96,
            num_experts=8,
            num_experts_per_token=2,
            moe_ffn_hidden_size=72,
            shared_expert_ffn_hidden_size=72,
            layer_types=_HYBRID,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            rotary_fraction=0.25,
        ),
        "gpt2-small": ModelConfig(
            architecture="gpt",
            num_layers=12,
            hidden_size=768,
            num_attention_heads=12,
            num_query_groups=12,
            head_dim=64,
            ffn_hidden_size=3072,
            vocab_size=50_257,
            max_sequence_length=1024,
            norm_eps=1e-5,
        ),
        "qwen3-0.6b": _qwen3(28, 1024, num_attention_heads=16, ffn_hidden_size=3072, tied=True),
        "qwen3-1.7b": _qwen3(28, 2048, num_attention_heads=16, ffn_hidden_size=6144, tied=True),
        "qwen3-4b": _qwen3(36, 2560, num_attention_heads=32, ffn_hidden_size=9728, tied=True),
        "qwen3-8b": _qwen3(36, 4096, num_attention_heads=32, ffn_hidden_size=12_288, tied=False),
        "qwen3-14b": _qwen3(40, 5120, num_attention_heads=40, ffn_hidden_size=17_408, tied=False),
        "qwen3-32b": _qwen3(64, 5120, num_attention_heads=64, ffn_hidden_size=25_600, tied=False),
        "qwen3-30b-a3b": _qwen3_moe(
            48,
            2048,
            num_attention_heads=32,
            num_query_groups=4,
            num_experts=128,
            moe_ffn_hidden_size=768,
        ),
        "qwen3-235b-a22b": _qwen3_moe(
            94,
            4096,
            num_attention_heads=64,
            num_query_groups=4,
            num_experts=128,
            moe_ffn_hidden_size=1536,
        ),
        "qwen3-coder-480b-a35b": replace(
            _qwen3_moe(
                62,
                6144,
                num_attention_heads=96,
                num_query_groups=8,
                num_experts=160,
                moe_ffn_hidden_size=2560,
            ),
            max_sequence_length=262_144,
            rope_theta=10_000_000.0,
        ),
        # A Llama 2 with fewer layers and the first Llama's context.
        "tinyllama-1.1b": replace(
            _llama(
                22,
                2048,
                num_attention_heads=32,
                num_query_groups=4,
                ffn_hidden_size=5632,
                generation=2,
            ),
            max_sequence_length=2048,
        ),
        "llama-2-7b": _llama(
            32,
            4096,
            num_attention_heads=32,
            num_query_groups=32,
            ffn_hidden_size=11_008,
            generation=2,
        ),
        "llama-2-13b": _llama(
            40,
            5120,
            num_attention_heads=40,
            num_query_groups=40,
            ffn_hidden_size=13_824,
            generation=2,
        ),
        "llama-2-70b": _llama(
            80,
            8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28_672,
            generation=2,
        ),
        "llama-3-8b": _llama(
            32,
            4096,
            num_attention_heads=32,
            num_query_groups=8,
            ffn_hidden_size=14_336,
            generation=3,
        ),
        "llama-3-70b": _llama(
            80,
            8192,
            num_attention_heads=64,
            num_query_groups=8,
            ffn_hidden_size=28_672,
            generation=3,
        ),
        "qwen3-next-80b-a3b": ModelConfig(
            architecture="qwen3_next",
            num_layers=48,
            hidden_size=2048,
            num_attention_heads=16,
            num_query_groups=2,
            head_dim=256,
            ffn_hidden_size=5120,
            vocab_size=151_936,
            max_sequence_length=262_144,
            rope_theta=10_000_000.0,
            tie_embeddings=False,
            num_experts=512,
            num_experts_per_token=10,
            moe_ffn_hidden_size=512,
            shared_expert_ffn_hidden_size=512,
            layer_types=_HYBRID * 12,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            rotary_fraction=0.25,
        ),
    }
)
