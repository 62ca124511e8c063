"""The formula equals a count of the operations that really run."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megafsdp.models import ModelConfig, build_model, flops_per_token, num_idle_parameters

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


_MIXTURE = ModelConfig(
    architecture="qwen3_moe",
    num_layers=2,
    num_experts=8,
    num_experts_per_token=3,
    moe_ffn_hidden_size=24,
    shared_expert_ffn_hidden_size=40,
)


def test_a_token_costs_its_own_experts_and_the_shared_one() -> None:
    """By hand, beside a dense model: 3 of 8 experts, the shared one, and a score for each."""
    dense = dataclasses.replace(
        _MIXTURE,
        architecture="qwen3",
        ffn_hidden_size=3 * 24 + 40,
        **dict.fromkeys(("num_experts", "num_experts_per_token", "moe_ffn_hidden_size"), 0),
        shared_expert_ffn_hidden_size=0,
    )
    scores = 6 * 2 * 128 * (8 + 1)
    assert flops_per_token(_MIXTURE, 100) == flops_per_token(dense, 100) + scores
    alone = dataclasses.replace(_MIXTURE, shared_expert_ffn_hidden_size=0)
    shared = 6 * 2 * 128 * (3 * 40 + 1)
    assert flops_per_token(_MIXTURE, 100) == flops_per_token(alone, 100) + shared
    assert num_idle_parameters(_MIXTURE) == 2 * (8 - 3) * (2 * 24 * 128 + 128 * 24)
    assert num_idle_parameters(dense) == 0


def test_linear_attention_costs_the_same_at_every_length() -> None:
    """By hand: two of three layers of the gated delta rule, 4 value heads of 2 key heads."""
    attention = dataclasses.replace(
        _MIXTURE, architecture="qwen3_next", num_layers=3, rotary_fraction=0.5
    )
    hybrid = dataclasses.replace(
        attention,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=20,
    )
    in_and_out = 128 * (32 + 32 + 80 + 80 + 4 + 4) + 80 * 128
    convolution = 4 * (32 + 32 + 80)
    # Read, correct and write a state of 16 x 20; key by key and query by key of 16, a triangle of
    # 16 + 20 columns and scores by values of 20, each over 32 of 64 tokens on average.
    rule = 4 * (3 * 16 * 20 + 32 * (16 + 16 + (16 + 20) + 20))
    linear = in_and_out + convolution + rule
    # Query, gate, key and value rows, then back; attention to half of the tokens.
    full = 128 * (2 * 128 + 2 * 64) + 128 * 128 + 2 * 128 * 500
    assert flops_per_token(attention, 1000) - flops_per_token(hybrid, 1000) == 6 * 2 * (
        full - linear
    )
    growth = flops_per_token(hybrid, 2000) - flops_per_token(hybrid, 1000)
    assert growth == 6 * 2 * 128 * 500
    # A sequence shorter than a chunk is one chunk.
    short = flops_per_token(hybrid, 16) - flops_per_token(hybrid, 8)
    assert short == 6 * (2 * 4 * 4 * (16 + 16 + 36 + 20) + 2 * 128 * 4)
