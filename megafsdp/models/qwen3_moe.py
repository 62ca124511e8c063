"""Qwen3's mixture of experts: the dense block with experts in the place of its MLP.

Source: Qwen3 Technical Report (arXiv:2505.09388), section 2.
"""

from __future__ import annotations

from megafsdp.models.common import SelfAttention, TransformerLayer
from megafsdp.models.config import ModelConfig
from megafsdp.models.language_model import LanguageModel
from megafsdp.models.moe import MoE
from megafsdp.models.qwen3 import qwen3_norm


def qwen3_moe_layer(config: ModelConfig, index: int) -> TransformerLayer:
    """Make one layer."""
    del index  # All layers are of one kind.
    return TransformerLayer(
        qwen3_norm(config),
        SelfAttention(config, has_bias=False, has_head_norms=True),
        pre_mlp_layernorm=qwen3_norm(config),
        mlp=MoE(config),
    )


def qwen3_moe(config: ModelConfig) -> LanguageModel:
    """Make a Qwen3 mixture on torch's default device."""
    return LanguageModel(config, make_layer=qwen3_moe_layer, make_norm=qwen3_norm)
