"""The commands of docs/training.md work as written, one after the other."""

from __future__ import annotations

import gzip
import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from transformers import AutoModelForCausalLM, Qwen3Config

from megafsdp.models import presets
from megafsdp.training.cli.main import main

_DOCS = Path(__file__).parents[2] / "docs" / "training.md"
_WORDS = ["</s>", "?", "The", "cat", "sat"]


def _blocks(language: str) -> list[str]:
    text = _DOCS.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def _write_inputs(folder: Path) -> None:
    """Write what the page takes for given: texts, and a saved model with its tokenizer."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("The cat sat " * 400)
    line = b'{"text": "The cat sat The cat"}\n'
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(line * 100))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["cat"] * 20}), folder / "table.parquet")
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            eos_token_id=0,
        )
    )
    model.save_pretrained(folder / "saved")
    words = {word: number for number, word in enumerate(_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "saved" / "tokenizer.json"))


@pytest.mark.filterwarnings("default")
def test_the_commands_of_the_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each exits with 0 and leaves what the page says; the tracker is the page's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _write_inputs(tmp_path)
    (tracker,) = _blocks("python")
    (tmp_path / "my_trackers.py").write_text(tracker)
    printed = {}
    commands = [line for block in _blocks("") for line in block.splitlines()]
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "megafsdp"
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        assert code == 0, command
        name = " ".join(words[: 1 + (words[0] == "ckpt")])
        printed[name] = capsys.readouterr().out
    assert len(commands) == 8
    assert printed["generate"].startswith("The")
    assert (
        "runs/tuned/checkpoints/iter_0000003: step 3, saved by 1 rank(s)" in printed["ckpt inspect"]
    )
    exported = tmp_path / "exported"
    assert (exported / "tokenizer.json").is_file()
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == 0
    trace = "runs/tuned/profile/steps_5-6_rank_0.trace.json.gz"
    assert trace in printed["train"] and (tmp_path / trace).is_file()
    lines = (tmp_path / "runs" / "tuned" / "plain.txt").read_text().splitlines()
    assert lines[-1].startswith("8 ")


def test_the_page_names_every_preset() -> None:
    """And no other."""
    table = _DOCS.read_text().partition("## Presets")[2].partition("## Text")[0]
    assert set(re.findall(r"`([\w.-]+-[\w.-]+)`", table)) - {"--model.preset"} == set(presets)
