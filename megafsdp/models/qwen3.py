"""The dense Qwen3 block: RMSNorm, grouped queries, normed heads, rotary positions, SwiGLU.

No map has a bias. Llama's block is the same without the norms of queries and keys, so it stands
here too.

Source: Qwen3 Technical Report (arXiv:2505.09388), section 2; Llama 3 (arXiv:2407.21783), section
3.2.
"""

from __future__ import annotations

from megafsdp.models.common import MLP, SelfAttention, TransformerLayer
from megafsdp.models.config import ModelConfig
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import RMSNorm


def qwen3_norm(config: ModelConfig) -> RMSNorm:
    """Make a norm of the residual stream."""
    return RMSNorm(config.hidden_size, config.norm_eps, sequence_parallel=True)


def qwen3_layer(config: ModelConfig, index: int) -> TransformerLayer:
    """Make one Qwen3 layer; all are alike."""
    del index
    return _layer(config, has_head_norms=True)


def llama_layer(config: ModelConfig, index: int) -> TransformerLayer:
    """Make one Llama layer; all are alike."""
    del index
    return _layer(config, has_head_norms=False)


def _layer(config: ModelConfig, *, has_head_norms: bool) -> TransformerLayer:
    return TransformerLayer(
        qwen3_norm(config),
        SelfAttention(config, has_bias=False, has_head_norms=has_head_norms),
        pre_mlp_layernorm=qwen3_norm(config),
        mlp=MLP(config, has_bias=False),
    )


def qwen3(config: ModelConfig) -> LanguageModel:
    """Make a dense Qwen3 on torch's default device."""
    return LanguageModel(config, make_layer=qwen3_layer, make_norm=qwen3_norm)


def llama(config: ModelConfig) -> LanguageModel:
    """Make a Llama on torch's default device."""
    return LanguageModel(config, make_layer=llama_layer, make_norm=qwen3_norm)
