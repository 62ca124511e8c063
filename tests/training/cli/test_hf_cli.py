"""The commands for Hugging Face files: from a run's checkpoint and back, in words and in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megafsdp import checkpoint
from megafsdp.models import ModelConfig, build_model
from megafsdp.training.cli.main import main
from tests.training.runs import MODEL, tiny

# transformers warns of its own future.
pytestmark = pytest.mark.filterwarnings("default")
_CONFIG = ModelConfig(vocab_size=320, **MODEL)


def _save_as_run(folder: Path) -> Path:
    """Save a checkpoint with what a run stores beside the weights."""
    root = folder / "checkpoints"
    config = tiny(folder).to_dict()
    checkpoint.save(root, step=3, model=build_model(_CONFIG, seed=0), extra={"config": config})
    return root


def test_a_run_is_exported_and_imported_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run says which model it is; padding can be cut off; the same tensors come back."""
    root, target = _save_as_run(tmp_path), tmp_path / "exported"
    words = ["ckpt", "export-hf", str(root), str(target)]
    tokenizer = tmp_path / "bpe.json"
    tokenizer.write_text("{}")
    more = ["--vocab-size", "300", "--tokenizer", str(tokenizer), "--json"]
    assert main([*words, *more]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["model_type"] == "qwen3"
    assert made["files"] == ["model.safetensors"]
    assert (target / "tokenizer.json").read_text() == "{}"
    loaded, report = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(report.values())
    weight = build_model(_CONFIG, seed=0).embedding.word_embeddings.weight
    assert torch.equal(loaded.get_input_embeddings().weight, weight[:300])

    again = tmp_path / "again"
    words = ["ckpt", "import-hf", str(target), str(again), "--step", "7"]
    assert main([*words, "--padded-vocab-size", "320", "--no-progress"]) == 0
    assert f"{again / 'iter_0000007'}: 18 tensors of a qwen3" in capsys.readouterr().out
    model = build_model(_CONFIG, seed=1)
    checkpoint.load(again, model=model)
    state = build_model(_CONFIG, seed=0).state_dict()
    for name, tensor in model.state_dict().items():
        rows = slice(300) if tensor.shape[0] == 320 else slice(None)
        assert torch.equal(tensor[rows], state[name][rows]), name


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_tokenizer_comes_with_its_configuration(tmp_path: Path, is_folder: bool) -> None:
    """Which says what ends a document; other files of its folder stay there."""
    saved, target = tmp_path / "saved", tmp_path / "exported"
    saved.mkdir()
    names = ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
    for name in [*names, "vocab.json"]:
        (saved / name).write_text(json.dumps({"name": name}))
    given = saved if is_folder else saved / "tokenizer.json"
    words = ["ckpt", "export-hf", str(_save_as_run(tmp_path)), str(target)]
    assert main([*words, "--tokenizer", str(given)]) == 0
    assert {path.name for path in target.glob("*.json")} == {"config.json", *names}
    for name in names:
        assert (target / name).read_text() == (saved / name).read_text()


def test_a_config_file_says_what_the_checkpoint_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without it the message asks for it; wrong files are named."""
    root = tmp_path / "root"
    checkpoint.save(root, step=1, model=build_model(_CONFIG, seed=0))
    words = ["ckpt", "export-hf", str(root), str(tmp_path / "exported")]
    assert main(words) == 1
    assert "Pass config=" in capsys.readouterr().err
    assert main([*words, "--config", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    assert main([*words, "--tokenizer", str(tmp_path / "none.json")]) == 2
    assert "--tokenizer" in capsys.readouterr().err
    checkpoint.export_hf(build_model(_CONFIG, seed=0), tmp_path / "other")
    assert main([*words, "--config", str(tmp_path / "other" / "config.json")]) == 0
    assert "bytes in 1 file(s)" in capsys.readouterr().out
    assert main(words) == 1, "the directory is taken"


@pytest.mark.parametrize("size", ["0", "-1", "1e-10", "nan", "inf"])
def test_a_file_has_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    """Of at least one byte; nothing is read or made."""
    words = ["ckpt", "export-hf", str(_save_as_run(tmp_path)), str(tmp_path / "exported")]
    assert main([*words, f"--max-shard-gb={size}"]) == 2
    assert f"a size above 0, got {float(size)}. In --max-shard-gb" in capsys.readouterr().err
    assert not (tmp_path / "exported").exists()
