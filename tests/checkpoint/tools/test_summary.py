"""The summary of a checkpoint: step, tensors, bytes, versions; nothing loaded, damage named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.tools import summary as inspect
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
    assert "fused: model.fused.weight = model.fused.weight_w | model.fused.weight_v" in text
    whole = "optimizer.state.fused.weight.exp_avg"
    assert f"fused: {whole} = optimizer.state.fused.weight_w.exp_avg | " in text


def test_sections_have_their_sizes(tmp_path: Path) -> None:
    """Tensors and objects are counted apart; the sections together are all keys."""
    path = _saved(tmp_path)
    summary = inspect.inspect(tmp_path)
    manifest = read_manifest(path)
    sections = summary.sections
    assert list(sections) == ["model", "optimizer", "common", "extra", "rng"]
    numel = sum(tensor.numel() for tensor in Toy().state_dict().values()) - 321 * 6
    # The counts are int64, everything else is fp32.
    assert sections["model"].nbytes == 4 * numel + 4 * 3
    assert sum(s.num_tensors for s in sections.values()) == len(manifest.tensors)
    assert sum(s.num_objects for s in sections.values()) == len(manifest.objects)
    assert sections["rng"].object_nbytes == manifest.objects["rng.0"].nbytes
    assert f"rng: 1 object, {manifest.objects['rng.0'].nbytes:,} bytes" in summary.describe()


def test_keys_are_chosen_by_patterns(tmp_path: Path) -> None:
    """A whole key finds its parts and a part its whole; sections are those of all keys."""
    _saved(tmp_path)
    everything = inspect.inspect(tmp_path)
    whole = inspect.inspect(tmp_path, keys=["model.fused.weight"])
    assert [t.name for t in whole.tensors] == ["model.fused.weight_v", "model.fused.weight_w"]
    assert {t.part_of for t in whole.tensors} == {"model.fused.weight"}
    part = inspect.inspect(tmp_path, keys=["model.*_w", "rng.*"])
    assert [t.name for t in part.tensors] == ["model.fused.weight_w"]
    assert list(part.fused_into) == ["model.fused.weight"] and list(part.objects) == ["rng.0"]
    tied = inspect.inspect(tmp_path, keys=["model.head.weight"])
    assert tied.aliases == {"model.head.weight": "model.embed.weight"} and tied.tensors == ()
    assert part.sections == whole.sections == everything.sections


def test_an_incomplete_checkpoint_is_not_described(tmp_path: Path) -> None:
    """A missing file is named."""
    (_saved(tmp_path) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        inspect.inspect(tmp_path)
