"""The summary of a checkpoint: step, tensors, bytes, versions; nothing loaded, damage named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import inspect, save
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import Toy, make_optimizer, train


def _saved(root: Path) -> Path:
    model = Toy()
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    return save(root, step=50, model=model, optimizer=optimizer)


def test_the_summary_agrees_with_the_files(tmp_path: Path) -> None:
    """Step, sizes and versions are those on disk, in text and in JSON."""
    path = _saved(tmp_path)
    summary = inspect.inspect(tmp_path)
    assert summary == inspect.inspect(path) == inspect.inspect(tmp_path, step=50)
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert (summary.nbytes, summary.num_files) == (sum(f.stat().st_size for f in files), 2)
    body = json.loads(summary.to_json())
    assert body["step"] == 50 and body["versions"]["torch"] == str(torch.__version__)
    (embed,) = (t for t in body["tensors"] if t["name"] == "model.embed.weight")
    assert (embed["shape"], embed["dtype"], embed["num_chunks"]) == ([321, 6], "float32", 1)
    assert embed["nbytes"] == 321 * 6 * 4


def test_the_text_names_tensors_parts_and_ties(tmp_path: Path) -> None:
    """One line a tensor, grouped by section."""
    _saved(tmp_path)
    text = inspect.inspect(tmp_path).describe()
    assert "step 50, saved by 1 rank(s)" in text
    assert "model.fused.weight_w  float32 [5, 6]  1 chunk" in text
    assert "optimizer: 9 tensors" in text
    assert "tied: model.head.weight = model.embed.weight" in text
    assert "lr_scheduler" not in text


def test_an_incomplete_checkpoint_is_not_described(tmp_path: Path) -> None:
    """A missing file is named."""
    (_saved(tmp_path) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        inspect.inspect(tmp_path)
