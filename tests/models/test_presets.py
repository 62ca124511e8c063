"""Presets have the sizes that their names promise."""

from __future__ import annotations

import pytest
import torch

from megafsdp.models import build_model, presets


@pytest.mark.parametrize(
    ("preset", "numel"),
    [
        ("gpt2-small", 124_439_808),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("llama-3-8b", 8_030_261_248),
        ("qwen3-next-80b-a3b", 79_674_391_296),
    ],
)
def test_public_models_have_their_published_number_of_parameters(preset: str, numel: int) -> None:
    """Totals as published, tied weights counted once."""
    with torch.device("meta"):
        model = build_model(presets[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == numel


@pytest.mark.parametrize("preset", ["qwen3-toy", "llama-toy", "gpt-toy", "qwen3-next-toy"])
def test_toys_are_about_a_million_parameters(preset: str) -> None:
    """Small enough to train on two cores while one waits."""
    model = build_model(presets[preset])
    assert 700_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_100_000


def test_presets_cannot_be_changed() -> None:
    """A run cannot alter the sizes that another one sees."""
    with pytest.raises(TypeError):
        presets["qwen3-toy"] = presets["gpt-toy"]  # type: ignore[index]
