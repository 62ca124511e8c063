"""The formula equals a count of the operations that really run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megafsdp.models import ModelConfig, build_model, flops_per_token

_CONFIGS = [
    ModelConfig(num_layers=2),
    ModelConfig(num_layers=2, tie_embeddings=False, architecture="llama", head_dim=64),
    ModelConfig(num_layers=2, architecture="gpt", num_query_groups=4),
]


@pytest.mark.parametrize("config", _CONFIGS, ids=lambda config: config.architecture)
def test_formula_equals_the_counted_operations(config: ModelConfig) -> None:
    """Every matrix product of forward and backward, counted one by one.

    The plain attention kernel computes the masked half of the square as well, so it is the count
    without credit for the mask; fused kernels would recompute the scores in backward.
    """
    model = build_model(config, seed=0)
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    wanted = flops_per_token(config, 16, credit_causal_mask=False) * tokens.numel()
    assert counter.get_total_flops() == wanted


def test_the_causal_mask_halves_attention_only() -> None:
    """The credit is 6 operations a query element and a position, for half of the positions."""
    config = _CONFIGS[0]
    full = flops_per_token(config, 1000, credit_causal_mask=False)
    credit = full - flops_per_token(config, 1000)
    assert credit == 6 * config.num_layers * config.query_size * 1000


def test_a_large_model_costs_six_operations_a_parameter() -> None:
    """For Llama-3-8B at short context: 6 N without the embedding, the usual estimate."""
    config = ModelConfig(
        architecture="llama",
        num_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_query_groups=8,
        head_dim=128,
        ffn_hidden_size=14_336,
        vocab_size=128_256,
        tie_embeddings=False,
    )
    matrices_numel = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    tied = dataclasses.replace(config, tie_embeddings=True)
    assert flops_per_token(config, 0) == 6 * matrices_numel
    assert flops_per_token(tied, 0) == 6 * matrices_numel
