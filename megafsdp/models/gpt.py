"""GPT-2's block: LayerNorm, biases everywhere, GELU in its tanh form, learned positions.

Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
"""

from __future__ import annotations

from megafsdp.models.common import MLP, SelfAttention, TransformerLayer
from megafsdp.models.config import ModelConfig
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import LayerNorm


def gpt_norm(config: ModelConfig) -> LayerNorm:
    """Make a norm of the residual stream."""
    return LayerNorm(config.hidden_size, config.norm_eps, sequence_parallel=True)


def gpt_layer(config: ModelConfig, index: int) -> TransformerLayer:
    """Make one GPT layer; all are alike."""
    del index
    return TransformerLayer(
        gpt_norm(config),
        SelfAttention(config, has_bias=True, has_head_norms=False),
        pre_mlp_layernorm=gpt_norm(config),
        mlp=MLP(config, has_bias=True),
    )


def gpt(config: ModelConfig) -> LanguageModel:
    """Make a GPT-2 style model on torch's default device."""
    return LanguageModel(config, make_layer=gpt_layer, make_norm=gpt_norm)
