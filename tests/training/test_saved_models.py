"""Runs that go on with a model that transformers has saved."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from megafsdp.data import IndexedDatasetWriter
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.models import ModelConfig
from megafsdp.training import Config, config_from_dict, parse_config, train
from megafsdp.training.config.model_section import ModelSection
from megafsdp.training.datasets import build_datasets
from megafsdp.training.dry_run.dry_run import dry_run
from megafsdp.training.generate import GenerateOptions, generate
from tests.checkpoint.huggingface.hf_models import VOCABULARY, their_config, their_model
from tests.ranks import Ranks
from tests.training.runs import rows

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")
LENGTH = 8


def _saved(folder: Path, family: str) -> Path:
    """Save a model of transformers with a tokenizer of as many words as it has."""
    their_model(family).save_pretrained(folder)
    words = {"</s>": 0, "?": 1, **{f"w{i}": i for i in range(2, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return folder


def _config(folder: Path, saved: Path, **sections: dict[str, Any]) -> Config:
    with IndexedDatasetWriter(folder / "train", "<u2") as writer:
        writer.add_document(torch.arange(4000).mul(7).remainder(VOCABULARY).numpy())
    values: dict[str, dict[str, Any]] = {
        "run": {"directory": str(folder / "run"), "device": "cpu"},
        "model": {"from_hf": str(saved)},
        "data": {"train": [str(folder / "train")], "sequence_length": LENGTH},
        "schedule": {"kind": "constant"},
        "train": {"steps": 2, "global_batch_size": 4},
        "logging": {"interval_steps": 1},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    return config_from_dict(values)


def _loss_of_transformers(config: Config, family: str) -> float:
    """Return the loss on the first four samples of a run, whose model has rows of padding."""
    samples = build_datasets(config, vocab_size=64).train
    batch = torch.stack([torch.from_numpy(samples[number]) for number in range(4)])
    with torch.no_grad():
        logits = their_model(family)(batch[:, :-1]).logits
    # Weights of padding are 0, and so are its logits.
    padded = torch.nn.functional.pad(logits, (0, config.model.resolve().vocab_size - VOCABULARY))
    return torch.nn.functional.cross_entropy(padded.flatten(0, 1), batch[:, 1:].flatten()).item()


@pytest.mark.parametrize(
    ("family", "parallel", "vocab_size"),
    [
        ("qwen3", {}, None),
        ("llama", {"strategy": "optim"}, 64),
        ("qwen3_moe", {"ep": 2}, 64),
    ],
)
def test_a_run_begins_with_the_saved_weights(
    ranks: Ranks, tmp_path: Path, family: str, parallel: dict[str, Any], vocab_size: int | None
) -> None:
    """The first loss is that of transformers on the same tokens, and the next is lower.

    Divided as any other run, with rows of padding too.
    """
    saved = _saved(tmp_path / "saved", family)
    model = {"from_hf": str(saved), "vocab_size": vocab_size}
    # The same four samples in every step.
    config = _config(
        tmp_path, saved, parallel=parallel, model=model, optimizer={"lr": 1e-2}, train={"steps": 3}
    )
    ranks(2).run(train, config)
    first, second, third = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    # Two implementations in fp32 of losses of 4.
    assert first == pytest.approx(_loss_of_transformers(config, family), abs=2e-5)
    assert third != second != first
    assert third < first


def test_a_run_needs_the_folder_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It resumes from its own checkpoint and configuration, and so does text; all the same bits."""
    saved = _saved(tmp_path / "saved", "qwen3")
    train(_config(tmp_path, saved, train={"steps": 4}))
    assert "run: saved with 47,632 parameters" in capsys.readouterr().out
    whole = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    shutil.rmtree(tmp_path / "run")
    train(_config(tmp_path, saved, data={"num_samples": 16}))
    text = generate(GenerateOptions(run=str(tmp_path / "run"), prompt="w2 w9", tokens=5))
    assert text.startswith("w2 w9 ")
    tokenizer = saved / "tokenizer.json"
    kept = tokenizer.rename(tmp_path / "kept.json")
    shutil.rmtree(saved)
    words = ["--config", str(tmp_path / "run" / "config.yaml"), "--train.steps", "4"]
    train(parse_config([*words, "--data.tokenizer", str(kept)]))
    assert [row["loss"] for row in rows(tmp_path) if "loss" in row] == whole
    generated = GenerateOptions(run=str(tmp_path / "run"), prompt="w2", tokenizer=str(kept))
    assert generate(generated).startswith("w2 ")


def test_tokenizer_is_that_of_the_folder_unless_another_is_named(tmp_path: Path) -> None:
    """Bytes are for runs of presets, and null for runs without."""
    saved = tmp_path / "saved"
    assert _config(tmp_path, saved).tokenizer == str(saved / "tokenizer.json")
    assert _config(tmp_path, saved, data={"tokenizer": "byte"}).tokenizer == "byte"
    assert _config(tmp_path, saved, data={"tokenizer": None}).tokenizer is None
    assert Config().tokenizer == "byte"


def test_a_dry_run_needs_the_configuration_alone(tmp_path: Path) -> None:
    """No weights are read; the report is called by the folder's name."""
    saved = _saved(tmp_path / "saved", "qwen3_moe")
    for path in saved.glob("*.safetensors"):
        path.unlink()
    report = dry_run(_config(tmp_path, saved), 4)
    assert report.num_parameters == sum(p.numel() for p in their_model("qwen3_moe").parameters())
    assert "saved: " in report.describe()
    assert json.loads(report.to_json())["model"] == "saved"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "gpt2 or llama or qwen3 or qwen3_moe or qwen3_next, got bert"),
        ({"hidden_act": "gelu"}, "'silu', got gelu. In field 'hidden_act'"),
        ({"attention_bias": True}, "False, got True. In field 'attention_bias'"),
        ({"hidden_size": None}, "an integer, got None. In field 'hidden_size'"),
        ("{", "a folder with the config.json of a model, got JSONDecodeError"),
        ("[1]", "a folder with the config.json of a model, got TypeError"),
        (None, r"got FileNotFoundError.*model\.from_hf.*save_pretrained"),
    ],
)
def test_a_model_that_we_do_not_have_is_refused(
    tmp_path: Path, change: dict[str, object] | str | None, message: str
) -> None:
    """Before anything is built, with the field, what is known, and the folder."""
    saved = tmp_path / "saved"
    saved.mkdir()
    if isinstance(change, dict):
        change = json.dumps(their_config("qwen3").to_dict() | change)
    if change is not None:
        (saved / "config.json").write_text(change)
    with pytest.raises(ConfigError, match=rf"{message}.*") as caught:
        train(_config(tmp_path, saved))
    assert f"{saved}" in str(caught.value)
    assert "model.from_hf" in str(caught.value)


def test_a_preset_and_a_folder_contradict_each_other(tmp_path: Path) -> None:
    """Which of the two is meant is not guessed."""
    config = _config(tmp_path, tmp_path, model={"preset": "qwen3-8b"})
    with pytest.raises(ConfigError, match="either a preset or from_hf, got both, 'qwen3-8b' and"):
        train(config)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    """A value that is given in place of the folder's makes another model."""
    saved = _saved(tmp_path / "saved", "qwen3")
    config = _config(tmp_path, saved, model={"ffn_hidden_size": 96})
    with pytest.raises(CheckpointError, match=r"tensors of the model's shapes.*mlp"):
        train(config)
    shutil.rmtree(tmp_path / "run")
    longer = _config(tmp_path, saved, model={"max_sequence_length": 4096, "rope_theta": 5e5})
    assert train(longer).is_finished


def test_a_filled_section_is_the_same_model() -> None:
    """It says every value, and reads no folder for them."""
    for preset in ("qwen3-next-toy", "gpt-toy"):
        section = ModelSection(preset=preset, num_layers=4)
        filled = section.filled()
        assert filled.resolve() == section.resolve()
        assert None not in [getattr(filled, f.name) for f in fields(ModelConfig)]
        assert replace(filled, from_hf="no/such/folder").resolve() == section.resolve()
