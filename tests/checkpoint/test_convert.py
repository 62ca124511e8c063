"""Converting: the format is seen from the source, and what no converter does is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megafsdp import FusedAdam, MixedPrecisionPolicy, fully_shard_model
from megafsdp.checkpoint import latest_step, save
from megafsdp.checkpoint.convert import ConvertOptions, Format, convert, format_of
from megafsdp.checkpoint.tools.diff import diff
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.errors import CheckpointError
from megafsdp.models import build_model, presets
from tests.checkpoint.megatron import megatron_toy as toy
from tests.checkpoint.sharding import Toy, fill
from tests.ranks import Ranks


def _save(root: Path) -> Path:
    model = Toy()
    fill(model)
    return save(root, step=4, model=model)


def test_the_format_is_seen(tmp_path: Path) -> None:
    """A root and a directory with a manifest, one without, a file; anything else is refused."""
    path = _save(tmp_path / "a")
    assert format_of(tmp_path / "a") == format_of(path) == Format.MEGAFSDP
    assert format_of(tmp_path / "a", step=4) == Format.MEGAFSDP
    torch.save({}, tmp_path / "file.pt")
    assert format_of(tmp_path / "file.pt") == Format.TORCH
    (path / "manifest.json").unlink()
    assert format_of(tmp_path / "a") == format_of(path) == Format.NVIDIA
    for nothing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match=r"Give a checkpoint's directory"):
            format_of(nothing)
    with pytest.raises(CheckpointError, match=r"of step 5, got published steps \[4\]"):
        format_of(tmp_path / "a", step=5)
    (tmp_path / "a" / "latest_checkpointed_iteration.txt").unlink()
    assert format_of(tmp_path / "a") == Format.NVIDIA


def test_there_and_back_is_equal(tmp_path: Path) -> None:
    """To one file and to a checkpoint again."""
    _save(tmp_path / "a")
    file = convert(tmp_path / "a", tmp_path / "a.pt", Format.TORCH)
    path = convert(file, tmp_path / "b", Format.MEGAFSDP)
    assert diff(tmp_path / "a", path, ignore=["common"]).is_equal
    path = convert(file, tmp_path / "b", Format.MEGAFSDP, 7)
    assert path.name == "iter_0000007"


def test_megatron_lm_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """From their directory to ours, to theirs in another precision, and to ours again."""
    model, _ = toy.make(tmp_path / "theirs", "qwen3")
    assert format_of(tmp_path / "theirs") == Format.NVIDIA
    ours = convert(tmp_path / "theirs", tmp_path / "ours", Format.MEGAFSDP)
    key = "model.decoder.layers.0.mlp.linear_fc1.weight"
    with CheckpointReader(ours) as reader:
        assert torch.equal(reader.tensor(key), model.get_parameter(key.removeprefix("model.")))
    options = ConvertOptions(precision="fp32", transformer_impl="local")
    back = convert(ours, tmp_path / "back", Format.NVIDIA, options=options)
    again = convert(
        back, tmp_path / "again", Format.MEGAFSDP, options=ConvertOptions(ignore=["no.such"])
    )
    # Their groups carry the schedule's bounds as well.
    assert diff(ours, again, ignore=["extra", "common", "optimizer.param_groups"]).is_equal
    names = toy.read(back)
    prefix = "optimizer.state.module.module.decoder"
    assert any(name.startswith(prefix) for name in names)


def test_a_conversion_does_not_take_a_save_root_back(tmp_path: Path) -> None:
    """Nor does it replace a step: neither the latest one nor one that is published beyond it."""
    root = tmp_path / "root"
    for step in (10, 30, 20):
        save(root, step=step, model=Toy())
    torch.save(Toy().state_dict(), tmp_path / "a.pt")
    toy.make(tmp_path / "theirs", "qwen3")
    theirs = tmp_path / "job"
    for step in (10, 30):
        save(tmp_path / "other", step=step, model=Toy())
    convert(tmp_path / "other", theirs, Format.NVIDIA)
    before = sorted([*root.rglob("*"), *theirs.rglob("*")])
    refused = pytest.raises(CheckpointError, match=r"the latest is 20.*Give --step 31 or above")
    for step in (None, 10, 19, 20, 30):
        with refused:
            convert(tmp_path / "a.pt", root, Format.MEGAFSDP, step)
    # The step is the source's own. A source that is its own target would be lost.
    for source, target, to, latest in (
        (tmp_path / "theirs", root, Format.MEGAFSDP, 20),
        (tmp_path / "other", theirs, Format.NVIDIA, 30),
        (root, root, Format.NVIDIA, 20),
    ):
        with pytest.raises(CheckpointError, match=rf"the latest is {latest}\. .*\. Give another"):
            convert(source, target, to, None if to is Format.MEGAFSDP else 10)
    assert sorted([*root.rglob("*"), *theirs.rglob("*")]) == before
    for step in (25, 31):
        convert(tmp_path / "a.pt", root, Format.MEGAFSDP, step)
        assert latest_step(root) == step


def _save_with_histories(root: Path) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, recipe="fp8_delayed")
    model = build_model(presets["qwen3-toy"], seed=0)
    fully_shard_model(model, ["TransformerLayer"], mp_policy=policy)
    optimizer = FusedAdam(model.parameters())
    model(torch.arange(16)[None]).square().mean().backward()
    optimizer.step()
    save(root, step=1, model=model, optimizer=optimizer)


def test_histories_of_delayed_scaling_go_where_they_can(ranks: Ranks, tmp_path: Path) -> None:
    """To one file and back; Megatron-LM's jobs begin theirs anew, and all else goes there."""
    ranks(2).run(_save_with_histories, tmp_path / "a")
    file = convert(tmp_path / "a", tmp_path / "a.pt", Format.TORCH)
    again = convert(file, tmp_path / "again", Format.MEGAFSDP)
    assert diff(tmp_path / "a", again, ignore=["common", "rng.*"]).is_equal
    theirs = convert(tmp_path / "a", tmp_path / "theirs", Format.NVIDIA)
    back = convert(theirs, tmp_path / "back", Format.MEGAFSDP)
    ignored = ["extra", "common", "optimizer.param_groups", "lr_scheduler", "rng.*"]
    found = diff(tmp_path / "a", back, ignore=ignored)
    assert found.only_left and all(key.startswith("quantize.") for key in found.only_left)
    assert diff(tmp_path / "a", back, ignore=[*ignored, "quantize.*"]).is_equal


def test_experts_become_a_stack_or_keep_their_names(tmp_path: Path) -> None:
    """One tensor for a layer, unless they are asked for apart; equal either way."""
    toy.make(tmp_path / "theirs", "qwen3_next")
    options = ConvertOptions(separate_experts=True)
    stacked = convert(tmp_path / "theirs", tmp_path / "stacked", Format.MEGAFSDP)
    apart = convert(tmp_path / "theirs", tmp_path / "apart", Format.MEGAFSDP, options=options)
    stack = "model.decoder.layers.1.mlp.experts.linear_fc2.weight"
    with CheckpointReader(stacked) as of_layer, CheckpointReader(apart) as of_experts:
        wanted = torch.stack([of_experts.tensor(f"{stack}{i}") for i in range(3)])
        assert torch.equal(of_layer.tensor(stack), wanted)
        assert stack not in of_experts.whole_keys()
        assert f"{stack}0" not in of_layer.whole_keys()


def test_options_of_other_conversions_are_refused(tmp_path: Path) -> None:
    """Nothing that was asked for is ignored."""
    path = _save(tmp_path / "a")
    options = ConvertOptions(fused_like=path, ignore=["x"])
    with pytest.raises(CheckpointError, match=r"megafsdp to torch: none, got \['fused_like', 'ig"):
        convert(path, tmp_path / "a.pt", Format.TORCH, options=options)
    file = convert(path, tmp_path / "a.pt", Format.TORCH)
    with pytest.raises(CheckpointError, match=r"\['fused_like'\], got \['precision'\]"):
        convert(file, tmp_path / "b", Format.MEGAFSDP, options=ConvertOptions(precision="fp32"))
    split = convert(file, tmp_path / "b", Format.MEGAFSDP, options=ConvertOptions(fused_like=path))
    with CheckpointReader(split) as reader:
        assert "model.fused.weight" in reader.fused


def test_what_no_converter_does_is_refused(tmp_path: Path) -> None:
    """From a format to itself, or between two that are not ours."""
    path = _save(tmp_path / "a")
    with pytest.raises(CheckpointError, match="from megafsdp to megafsdp"):
        convert(path, tmp_path / "b", Format.MEGAFSDP)
    torch.save({}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match="from torch to torch"):
        convert(tmp_path / "a.pt", tmp_path / "b.pt", Format.TORCH)
    with pytest.raises(CheckpointError, match=r"a file to write, got a directory"):
        convert(path, tmp_path, Format.TORCH)
