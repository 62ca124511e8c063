"""Presets have the sizes that their names promise."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megafsdp.models import (
    ModelConfig,
    build_model,
    config_from_hugging_face,
    config_to_hugging_face,
    presets,
)

# Totals as published or as transformers counts them, tied weights once.
PUBLISHED = {
    "gpt2-small": 124_439_808,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-next-80b-a3b": 79_674_391_296,
}


def test_every_preset_that_is_no_toy_is_a_public_model() -> None:
    """Each has a count below."""
    assert set(PUBLISHED) == {name for name in presets if not name.endswith("-toy")}


@pytest.mark.parametrize(("preset", "numel"), PUBLISHED.items())
def test_public_models_have_their_published_number_of_parameters(preset: str, numel: int) -> None:
    """On the meta device; tied weights are counted once."""
    with torch.device("meta"):
        model = build_model(presets[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("preset", PUBLISHED)
def test_transformers_builds_the_same_model(preset: str) -> None:
    """From the fields of an export: as many elements with two layers, and the same config back."""
    config = presets[preset]
    types = config.layer_types[2:4]
    small = replace(config, num_layers=2, layer_types=types)
    fields = config_to_hugging_face(small)
    theirs = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        ours, built = build_model(small), AutoModelForCausalLM.from_config(theirs)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, built)]
    assert counts[0] == counts[1]
    read = config_from_hugging_face(theirs.to_dict())
    unread = {"ffn_hidden_size"} if config.has_experts else set()
    for name in {f.name for f in dataclass_fields(ModelConfig)} - unread:
        assert getattr(read, name) == getattr(small, name), name


@pytest.mark.parametrize("preset", ["qwen3-toy", "llama-toy", "gpt-toy", "qwen3-next-toy"])
def test_toys_are_about_a_million_parameters(preset: str) -> None:
    """Small enough to train on two cores while one waits."""
    model = build_model(presets[preset])
    assert 700_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000


def test_presets_cannot_be_changed() -> None:
    """A run cannot alter the sizes that another one sees."""
    with pytest.raises(TypeError):
        presets["qwen3-toy"] = presets["gpt-toy"]  # type: ignore[index]
