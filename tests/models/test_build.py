"""Building is deterministic, leaves the caller's random state alone, and works through meta."""

from __future__ import annotations

import pytest
import torch

from megafsdp.models import TransformerLayer, build_model, presets, unit_classes


def _equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_a_seed_fixes_the_weights_and_nothing_else() -> None:
    """Equal seeds give equal weights; the caller's random state stays as it was."""
    state = torch.get_rng_state()
    first = build_model(presets["qwen3-toy"], seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert _equal(first, build_model(presets["qwen3-toy"], seed=7))
    assert not _equal(first, build_model(presets["qwen3-toy"], seed=8))


def test_without_a_seed_the_callers_state_is_drawn_from() -> None:
    """torch.manual_seed() before building has the same effect as the argument."""
    torch.manual_seed(7)
    assert _equal(build_model(presets["gpt-toy"]), build_model(presets["gpt-toy"], seed=7))


def test_the_name_of_a_preset_is_no_config() -> None:
    """The message says where the config of that name is."""
    with pytest.raises(TypeError, match=r"got 'gpt-toy'.*megafsdp\.models\.presets"):
        build_model("gpt-toy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "preset", ["qwen3-toy", "llama-toy", "gpt-toy", "qwen3-moe-toy", "qwen3-next-toy"]
)
def test_initialising_a_meta_model_module_by_module_equals_building(preset: str) -> None:
    """reset_parameters() of each module that owns parameters draws the same numbers."""
    with torch.device("meta"):
        model = build_model(presets[preset])
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(7)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.reset_parameters()
    assert _equal(model, build_model(presets[preset], seed=7))


def test_units_are_the_layers() -> None:
    """Every layer is an instance of the unit classes and nothing else is."""
    model = build_model(presets["qwen3-toy"], seed=0)
    units = [m for m in model.modules() if isinstance(m, unit_classes(model.config))]
    assert units == list(model.decoder.layers)
    assert unit_classes(model.config) == (TransformerLayer,)
