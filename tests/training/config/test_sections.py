"""The configuration tree and what follows from its values."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import megafsdp
from megafsdp.models import ActivationCheckpointing, ModelConfig, presets
from megafsdp.training.config.parse import parse_config
from megafsdp.training.config.sections import ActivationCheckpointingSection, ModelSection
from tests.training.runs import HYBRID, MODEL, tiny


def test_only_training_imports_the_library_of_the_configuration() -> None:
    """A loop of one's own needs the parts below, and not pydantic."""
    package = Path(megafsdp.__file__).parent
    importers = {
        path.relative_to(package).parts[0]
        for path in package.rglob("*.py")
        if re.search(r"^\s*(import|from) pydantic", path.read_text(), re.MULTILINE)
    }
    assert importers == {"training"}


def test_model_section_has_every_field_of_the_model() -> None:
    """Whatever a model can be, a configuration can say."""
    names = {f.name for f in fields(ModelSection)} - {"preset", "from_hf"}
    assert names == {f.name for f in fields(ModelConfig)}


def test_checkpointing_section_has_every_field_of_the_choice() -> None:
    """Each value reaches the field of its name, and the defaults are the same."""
    names = {f.name for f in fields(ActivationCheckpointingSection)}
    assert names == {f.name for f in fields(ActivationCheckpointing)}
    assert ActivationCheckpointingSection().resolve() == ActivationCheckpointing()
    section = ActivationCheckpointingSection(mode="full", every=3, use_reentrant=True)
    chosen = section.resolve()
    assert (chosen.mode, chosen.every, chosen.use_reentrant) == ("full", 3, True)


def test_overrides_stand_over_the_preset() -> None:
    """Null keeps the preset's value; anything else replaces it, false included."""
    model = ModelSection(preset="qwen3-0.6b", num_layers=3, tie_embeddings=False).resolve()
    assert model.num_layers == 3
    assert not model.tie_embeddings
    assert model.hidden_size == presets["qwen3-0.6b"].hidden_size


def test_a_list_of_layer_types_makes_a_hybrid(tmp_path: Path) -> None:
    """As YAML and the command line have it; a configuration keeps the list as it was given."""
    config = tiny(tmp_path, model=HYBRID)
    model = config.model.resolve()
    assert model.layer_types == ("linear_attention", "full_attention")
    assert config.to_dict()["model"]["layer_types"] == HYBRID["layer_types"]
    words = [f"--model.{name}={value}" for name, value in (MODEL | HYBRID).items()]
    assert parse_config(words).model.resolve() == model


def test_length_is_whole_global_batches(tmp_path: Path) -> None:
    """Samples beyond the last whole batch are not trained."""
    config = tiny(tmp_path, train={"steps": None, "samples": 47})
    assert (config.num_steps, config.num_samples) == (3, 36)


def test_micro_batch_is_a_ranks_share_unless_given(tmp_path: Path) -> None:
    """Null takes the whole share of a rank."""
    assert tiny(tmp_path).micro_batch_size(3) == 4
    assert tiny(tmp_path, train={"micro_batch_size": 2}).micro_batch_size(3) == 2
