"""The Qwen3-Next block: linear attention in most layers, gated attention in the others.

Every layer has norms that start from zero and a mixture of experts. The released models have three
layers of linear attention for one of attention; here ``config.layer_types`` says which is which.

Source: the released weights' configuration and model in Hugging Face transformers, qwen3_next; Qiu
et al., Gated Attention for Large Language Models (arXiv:2505.06708), section 2.2.
"""

from __future__ import annotations

from torch import nn

from megafsdp.models.common import SelfAttention, TransformerLayer
from megafsdp.models.config import LINEAR_ATTENTION, ModelConfig
from megafsdp.models.gated_delta_net import GatedDeltaNet
from megafsdp.models.language_model import LanguageModel
from megafsdp.models.moe import MoE
from megafsdp.parallel import RMSNorm


def qwen3_next_norm(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps, zero_centered=True, sequence_parallel=True)


def qwen3_next_layer(config: ModelConfig, index: int) -> TransformerLayer:
    """Make the layer of an index."""
    return TransformerLayer(
        qwen3_next_norm(config),
        _attention(config, index),
        pre_mlp_layernorm=qwen3_next_norm(config),
        mlp=MoE(config),
    )


def _attention(config: ModelConfig, index: int) -> nn.Module:
    if config.layer_types and config.layer_types[index] == LINEAR_ATTENTION:
        return GatedDeltaNet(config)
    return SelfAttention(
        config,
        has_bias=False,
        has_head_norms=True,
        has_output_gate=True,
        has_zero_centered_norms=True,
    )


def qwen3_next(config: ModelConfig) -> LanguageModel:
    """Make a Qwen3-Next on torch's default device."""
    return LanguageModel(config, make_layer=qwen3_next_layer, make_norm=qwen3_next_norm)
