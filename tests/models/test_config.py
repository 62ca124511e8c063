"""ModelConfig checks itself and can be read from a command line."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
from pydantic import TypeAdapter

from megafsdp.errors import ConfigError
from megafsdp.models import ModelConfig


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
    ],
)
def test_a_value_out_of_range_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    """The message names the field, so that it can be found in a configuration file."""
    with pytest.raises(ConfigError, match=named):
        dataclasses.replace(ModelConfig(), **changes)


def test_odd_heads_are_allowed_where_positions_are_learned() -> None:
    """Only rotary positions pair the elements of a head."""
    assert ModelConfig(architecture="gpt", head_dim=7).head_dim == 7


def test_a_command_line_can_spell_every_field() -> None:
    """Every field is a plain value, which comes back from text by its type."""
    wanted = ModelConfig(architecture="llama", num_layers=3, rope_theta=5e5, tie_embeddings=False)
    text = json.dumps(dataclasses.asdict(wanted))
    assert TypeAdapter(ModelConfig).validate_json(text, strict=True) == wanted


def test_a_config_is_a_value() -> None:
    """Equal configs are interchangeable, also after pickling."""
    assert pickle.loads(pickle.dumps(ModelConfig())) == ModelConfig()
    assert hash(ModelConfig()) == hash(ModelConfig())
