"""ModelConfig checks itself and can be read from a command line."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from pydantic import TypeAdapter

from megafsdp.errors import ConfigError
from megafsdp.models import ModelConfig

_MIXTURE = {
    "architecture": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 16,
}
_HYBRID = _MIXTURE | {
    "architecture": "qwen3_next",
    "layer_types": ("linear_attention",) * 3 + ("full_attention",),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "bert"}, "architecture among gpt, qwen3, llama"),
        ({"num_layers": 0}, "ModelConfig.num_layers"),
        ({"vocab_size": -1}, "ModelConfig.vocab_size"),
        ({"num_query_groups": 3}, "3 groups for 4 heads"),
        ({"head_dim": 7}, "ModelConfig.head_dim"),
        ({"norm_eps": 0.0}, "ModelConfig.norm_eps"),
        ({"init_std": float("nan")}, "ModelConfig.init_std"),
        ({"num_experts": 4}, "Expected 0 in the architecture qwen3, got 4"),
        ({"layer_types": ("full_attention",) * 4}, "ModelConfig.layer_types"),
        ({"rotary_fraction": 0.5}, "Expected 1 in the architecture qwen3, got 0.5"),
        ({"architecture": "qwen3_moe"}, "ModelConfig.num_experts"),
        (_MIXTURE | {"num_experts_per_token": 5}, "at most the 4 experts"),
        (_MIXTURE | {"router_balance": "luck"}, "one of none, aux_loss, bias"),
        (_MIXTURE | {"router_bias_update_rate": -1.0}, "ModelConfig.router_bias_update_rate"),
        (_MIXTURE | {"shared_expert_ffn_hidden_size": -8}, "shared_expert_ffn_hidden_size"),
        (_HYBRID | {"layer_types": ("linear_attention",)}, "each of the 4 layers"),
        (_HYBRID | {"layer_types": ("sliding_attention",) * 4}, "linear_attention, full_attention"),
        (_HYBRID | {"linear_num_value_heads": 3}, "a multiple of the 2 key heads"),
        (_HYBRID | {"linear_key_head_dim": 0}, "ModelConfig.linear_key_head_dim"),
        *(
            (_HYBRID | {"rotary_fraction": f}, "an even number of elements")
            for f in (0.3, 0.0, 2.0)
        ),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    """The message names the field, so that it can be found in a configuration file."""
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(ModelConfig(), **changes)


def test_a_token_may_go_to_all_experts() -> None:
    """Then the router only weighs them."""
    config = dataclasses.replace(ModelConfig(), **_MIXTURE | {"num_experts_per_token": 4})
    assert config.num_experts_per_token == config.num_experts


def test_odd_heads_are_allowed_where_positions_are_learned() -> None:
    """Only rotary positions pair the elements of a head."""
    assert ModelConfig(architecture="gpt", head_dim=7).head_dim == 7


def test_a_command_line_can_spell_every_field() -> None:
    """Every field is a plain value, which comes back from text by its type."""
    wanted = ModelConfig(architecture="llama", num_layers=3, rope_theta=5e5, tie_embeddings=False)
    hybrid = dataclasses.replace(ModelConfig(), **_HYBRID)
    for config in (wanted, hybrid):
        text = json.dumps(dataclasses.asdict(config))
        assert TypeAdapter(ModelConfig).validate_json(text, strict=True) == config


def test_a_config_is_a_value() -> None:
    """Equal configs are interchangeable, also after pickling."""
    assert pickle.loads(pickle.dumps(ModelConfig())) == ModelConfig()
    assert hash(ModelConfig()) == hash(ModelConfig())
