"""Refusals: other models, damaged files, contradictory arguments; clear, early, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, Muon
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint import async_save, load, save
from megafsdp.checkpoint.format.manifest import Manifest, Record, read_manifest, write_manifest
from megafsdp.checkpoint.format.records import RecordReader
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import (
    Toy,
    differences,
    fill,
    full_state,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _trained(kind: str) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy()
    fill(model)
    optimizer = make_optimizer(kind, model)
    train(model, optimizer)
    return model, optimizer


def _save_sharded(root: Path) -> None:
    model = Toy()
    fill(model)
    save(root, step=2, model=shard(model, whole_mesh()))


def _refusal(root: Path, model: nn.Module, **options: object) -> str:
    """Return the message of a load that must fail and must not touch the model."""
    before = full_state(model, None)
    with pytest.raises(CheckpointError) as caught:
        load(root, model=model, **options)
    assert differences(before, full_state(model, None)) == []
    return str(caught.value)


class _Other(Toy):
    def __init__(self) -> None:
        super().__init__()
        del self.fused
        self.extra_layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(15))


def test_another_model_is_refused_with_its_names(tmp_path: Path) -> None:
    """Missing and superfluous names are listed, at most 20 of each, with the way to relax."""
    model, _ = _trained("sgd")
    save(tmp_path, step=1, model=model)
    message = _refusal(tmp_path, _Other())
    assert "30 missing in the checkpoint: model.extra_layers.0.weight" in message
    assert "model.extra_layers.9.bias and 10 more" in message
    superfluous = "model.fused.weight_v, model.fused.weight_w"
    assert f"2 in the checkpoint but not asked for: {superfluous}" in message
    for hint in ("ignore=", "allow_missing=", "strict='model'", "strict='none'"):
        assert hint in message


def test_a_caller_says_what_its_users_can_do(tmp_path: Path) -> None:
    """In the place of arguments that they cannot pass, for tensors and for groups."""
    model, optimizer = _trained("sgd")
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"model\.extra_layers.*Set depth back\.$"):
        load(tmp_path, model=_Other(), hint="Set depth back")
    split = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"param_groups\[.*Set depth back\.$"):
        load(tmp_path, model=model, optimizer=split, hint="Set depth back")


def test_relaxed_loads_take_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Patterns or ``strict="none"`` load the common tensors and log what was left."""
    model, _ = _trained("sgd")
    save(tmp_path, step=1, model=model)
    patterns = {"ignore": ["fused.*"], "allow_missing": ["extra_layers.*"]}
    for options in (patterns, {"strict": "none"}):
        other = _Other()
        with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
            load(tmp_path, model=other, **options)
        assert torch.equal(other.embed.weight, model.embed.weight)
        assert "model.extra_layers.0.weight" in caplog.text
        caplog.clear()


def test_a_pattern_that_leaves_nothing_alone_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What its misspelt name was to keep is loaded over."""
    model, optimizer = _trained("sgd")
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    patterns = ["embde.*", "fused.*", "embed.weight", "optimizer.*"]
    load(tmp_path, model=model, ignore=patterns)
    assert "1 patterns of ignore match no key: ['embde.*']" in caplog.text


def test_shapes_and_dtypes_must_agree(tmp_path: Path) -> None:
    """Another vocabulary or precision is refused by name; casts must be asked for."""
    model, _ = _trained("sgd")
    save(tmp_path, step=1, model=model)
    message = _refusal(tmp_path, Toy(vocabulary=320))
    assert "model.embed.weight stored (321, 6), wanted (320, 6)" in message
    _refusal(tmp_path, Toy(vocabulary=320), strict="none")
    load(tmp_path, model=Toy(vocabulary=320), ignore=["embed.*"])
    message = _refusal(tmp_path, Toy().double())
    assert "model.embed.weight stored torch.float32, wanted torch.float64" in message
    wide = Toy().double()
    load(tmp_path, model=wide, strict="none")
    assert torch.equal(wide.embed.weight, model.embed.weight.double())


def test_an_optimizer_needs_its_section(tmp_path: Path) -> None:
    """A checkpoint without optimizer leaves one as it is only if asked, by ``strict="model"``."""
    model, optimizer = _trained("adamw")
    save(tmp_path, step=1, model=model)
    assert "optimizer.param_groups" in _refusal(tmp_path, model, optimizer=optimizer)
    state = full_state(model, optimizer)
    load(tmp_path, model=model, optimizer=optimizer, strict="model")
    assert differences(state, full_state(model, optimizer)) == []


@pytest.mark.parametrize("kind", [torch.optim.Adamax, Muon])
def test_states_of_another_kind_of_optimizer_are_refused(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """FusedAdam would begin with the count of steps and without moments; relaxed, it does anew."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    adam = FusedAdam(model.parameters())
    name = "exp_inf" if kind is torch.optim.Adamax else "momentum_buffer"
    message = _refusal(tmp_path, model, optimizer=adam)
    assert f"not asked for: optimizer.state.0.weight.{name}, " in message.replace(
        "0.bias", "0.weight"
    )
    load(tmp_path, model=model, optimizer=adam, strict="none")
    assert all(name not in states for states in adam.state.values())


def test_a_step_that_is_no_number_is_refused(tmp_path: Path) -> None:
    """The steps that are there are named."""
    save(tmp_path, step=1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"step latest, got published steps \[1\]"):
        load(tmp_path, model=nn.Linear(2, 2), step="latest")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2).state_dict(), [nn.Linear(2, 2)]])
def test_what_is_no_module_is_refused(tmp_path: Path, wrong: Any) -> None:
    """A state dict as torch's dcp takes it, or a list of pipeline stages."""
    message = f"Expected a module, got a {type(wrong).__name__}"
    for call in (save, async_save):
        with pytest.raises(TypeError, match=message):
            call(tmp_path, step=1, model=wrong)
    with pytest.raises(TypeError, match=message):
        load(tmp_path, model=wrong)


class _Averaging(FusedAdam):
    """Keeps a state of its own."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = parameter.clone()


def test_a_subclass_loads_states_of_its_own(tmp_path: Path) -> None:
    """What a user adds beside the moments is saved, and belongs to the optimizer that has it."""
    model = nn.Linear(3, 2)
    optimizer = _Averaging(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _Averaging(model.parameters())
    load(tmp_path, model=model, optimizer=other)
    other.load_state_dict(optimizer.state_dict())
    for parameter in model.parameters():
        expected = optimizer.state[parameter]["average"]
        assert torch.equal(other.state[parameter]["average"], expected)


def test_contradicting_arguments_are_refused(tmp_path: Path) -> None:
    """An optimizer without a model, an unknown strictness, a lone pattern string."""
    model, optimizer = _trained("sgd")
    with pytest.raises(ValueError, match="optimizer alone"):
        load(tmp_path, optimizer=optimizer)
    with pytest.raises(ValueError, match="strict to be one of"):
        load(tmp_path, model=model, strict="some")
    with pytest.raises(ValueError, match="sequence of patterns"):
        load(tmp_path, model=model, ignore="head.*")


def test_extra_alone_can_be_read(tmp_path: Path) -> None:
    """``load(directory)`` returns what the caller stored, tensors included."""
    extra = {"consumed": 12, "config": {"lr": 0.1, "names": ["a", None]}, "ids": torch.arange(3)}
    save(tmp_path, step=1, model=nn.Linear(1, 1), extra=extra)
    loaded = load(tmp_path)
    assert loaded["config"] == extra["config"]
    assert torch.equal(loaded["ids"], torch.arange(3))


def _two_steps(root: Path) -> Toy:
    model = Toy()
    for step in (1, 2):
        fill(model, salt=step)
        save(root, step=step, model=model)
    return model


def test_any_published_step_can_be_chosen(tmp_path: Path) -> None:
    """``step=`` or a checkpoint's own directory chooses; a refusal lists the steps there are."""
    _two_steps(tmp_path)
    wanted, model = Toy(), Toy()
    fill(wanted, salt=1)
    load(tmp_path, model=model, step=1)
    assert torch.equal(model.embed.weight, wanted.embed.weight)
    load(tmp_path / "iter_0000001", model=model)
    assert torch.equal(model.embed.weight, wanted.embed.weight)
    assert "published steps [1, 2]" in _refusal(tmp_path, model, step=3)
    assert "no such folder" in _refusal(tmp_path / "elsewhere", model)


def _damage(path: Path, kind: str) -> str:
    """Damage a checkpoint and return what the message must name."""
    data = path / "__0_0.distcp"
    if kind == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    elif kind == "flipped byte":
        content = bytearray(data.read_bytes())
        content[content.index(b"__0_0") if b"__0_0" in content else 2000] ^= 1
        data.write_bytes(content)
    elif kind == "missing rank file":
        data.unlink()
    elif kind == "half-written":
        (path / "manifest.json").unlink()
        return "manifest.json"
    elif kind == "edited manifest":
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"step":2', '"step":3'))
        return "manifest.json"
    elif kind == "no JSON":
        (path / "manifest.json").write_text("{")
        return "manifest.json"
    elif kind in ("earlier format", "later format"):
        manifest, other = path / "manifest.json", 1 if kind == "earlier format" else 99
        manifest.write_text(
            manifest.read_text().replace('"format_version":2', f'"format_version":{other}')
        )
        return "format version 2"
    return "__0_0.distcp"


DAMAGES = [
    "truncated",
    "flipped byte",
    "missing rank file",
    "half-written",
    "edited manifest",
    "no JSON",
    "earlier format",
    "later format",
]


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_before_anything_is_touched(tmp_path: Path, kind: str) -> None:
    """Every kind of damage names the file, keeps the model, and leaves older steps loadable."""
    _two_steps(tmp_path)
    name = _damage(tmp_path / "iter_0000002", kind)
    model = Toy()
    assert name in _refusal(tmp_path, model)
    load(tmp_path, model=model, step=1)


def test_a_step_that_was_never_finished_is_no_checkpoint(tmp_path: Path) -> None:
    """An empty directory of the right name is refused, and so is a tracker with nonsense."""
    model = _two_steps(tmp_path)
    (tmp_path / "iter_0000003").mkdir()
    assert "half-written" in _refusal(tmp_path, model, step=3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("soon")
    assert "'soon'" in _refusal(tmp_path, model)


def test_chunks_that_leave_elements_out_are_refused(tmp_path: Path) -> None:
    """A manifest that lost a part of a tensor never leaves those elements as they were."""
    model, _ = _trained("sgd")
    path = save(tmp_path, step=1, model=model)
    manifest = read_manifest(path)
    entry = manifest.tensors["model.embed.weight"]
    (chunk,) = entry.chunks
    shorter = chunk._replace(region=chunk.region._replace(sizes=(320, 6)))
    manifest.tensors["model.embed.weight"] = replace(entry, chunks=(shorter,))
    write_manifest(manifest, path)
    message = _refusal(tmp_path, Toy())
    assert "'model.embed.weight'" in message and "(320, 6)" in message


def _saved_with_optimizer(root: Path) -> tuple[Path, Manifest]:
    model, optimizer = _trained("adamw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"config": list(range(300))}
    state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler, "extra": extra}
    path = save(root, step=2, **state)
    return path, read_manifest(path)


class _Run:
    """A run that resumes from damaged checkpoints: each load must fail and must touch nothing."""

    def __init__(self) -> None:
        self.model, self.optimizer = _trained("adamw")
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)
        self.before = full_state(self.model, self.optimizer), self.scheduler.state_dict()

    def refused_resume(self, root: Path) -> str:
        """Return the message of a load that fails."""
        random = torch.get_rng_state()
        with pytest.raises(CheckpointError) as caught:
            load(root, model=self.model, optimizer=self.optimizer, lr_scheduler=self.scheduler)
        tensors, scheduler = self.before
        assert differences(tensors, full_state(self.model, self.optimizer)) == []
        assert self.scheduler.state_dict() == scheduler
        assert torch.equal(torch.get_rng_state(), random)
        return str(caught.value)


# Tensors and objects of every section.
DAMAGED_KEYS = [
    "model.embed.weight",
    "model.fused.weight_v",
    "model.count",
    "optimizer.state.embed.weight.exp_avg",
    "optimizer.state.embed.weight.step",
    "optimizer.param_groups",
    "lr_scheduler",
    "extra",
    "rng.0",
]


@pytest.mark.parametrize("kind", ["flipped byte", "truncated file"])
def test_damage_is_named_by_file_and_key(tmp_path: Path, kind: str) -> None:
    """Whichever record is damaged, and wherever in it: nothing of the run is touched."""
    path, manifest = _saved_with_optimizer(tmp_path)
    run = _Run()
    for key in DAMAGED_KEYS:
        (record,) = manifest.records([key])
        data = path / record.file
        content = bytearray(data.read_bytes())
        for position in (0, record.nbytes // 2, record.nbytes - 1):
            damaged = bytearray(content)
            damaged[record.offset + position] ^= 1
            if kind == "truncated file":
                del damaged[record.offset + position :]
            data.write_bytes(damaged)
            message = run.refused_resume(tmp_path)
            assert f"'{key}'" in message and str(data) in message, (key, position)
        data.write_bytes(content)


def test_a_missing_file_is_named_with_its_keys(tmp_path: Path) -> None:
    """Of the tensors and objects that it held, twenty are named and the others counted."""
    path, manifest = _saved_with_optimizer(tmp_path / "a")
    (path / "__0_0.distcp").unlink()
    message = _Run().refused_resume(tmp_path / "a")
    keys = [*manifest.tensors, *manifest.objects]
    assert len(keys) == 20 and {*DAMAGED_KEYS} < {*keys}
    assert str(path / "__0_0.distcp") in message and "no such file" in message
    assert all(f"'{key}'" in message for key in keys) and "more" not in message
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(12))
    (save(tmp_path / "b", step=1, model=model) / "__0_0.distcp").unlink()
    message = _refusal(tmp_path / "b", model)
    assert message.count("'model.") == 20 and "and 7 more" in message


def _moved(manifest: Manifest, key: str) -> str:
    (record,) = manifest.records([key])
    _replace_record(manifest, key, record._replace(offset=record.offset + 64))
    return "checksum"


def _other_checksum(manifest: Manifest, key: str) -> str:
    (record,) = manifest.records([key])
    _replace_record(manifest, key, record._replace(crc32=record.crc32 ^ 1))
    return "checksum"


def _shorter(manifest: Manifest, key: str) -> str:
    (record,) = manifest.records([key])
    _replace_record(manifest, key, record._replace(nbytes=record.nbytes - 1))
    return "checksum"


def _replace_record(manifest: Manifest, key: str, record: Record) -> None:
    if key in manifest.objects:
        manifest.objects[key] = record
    else:
        entry = manifest.tensors[key]
        (chunk,) = entry.chunks
        manifest.tensors[key] = replace(entry, chunks=(chunk._replace(record=record),))


@pytest.mark.parametrize("edit", [_moved, _other_checksum, _shorter])
def test_an_edited_manifest_is_named_by_file_and_key(
    tmp_path: Path, edit: Callable[[Manifest, str], str]
) -> None:
    """Even with a checksum that was made to fit, what it says is compared with the records."""
    path, _ = _saved_with_optimizer(tmp_path)
    text, run = (path / "manifest.json").read_text(), _Run()
    for key in DAMAGED_KEYS:
        (path / "manifest.json").write_text(text)
        manifest = read_manifest(path)
        problem = edit(manifest, key)
        write_manifest(manifest, path)
        message = run.refused_resume(tmp_path)
        assert problem in message and f"'{key}'" in message and "__0_0.distcp" in message, key


def test_an_edited_manifest_without_its_checksum_is_refused(tmp_path: Path) -> None:
    """Whatever was edited, the manifest is not believed, and its file is named."""
    path, manifest = _saved_with_optimizer(tmp_path)
    file, run = path / "manifest.json", _Run()
    text = file.read_text()
    for key in DAMAGED_KEYS:
        (record,) = manifest.records([key])
        place = f",{record.offset},{record.nbytes},{record.crc32}]"
        assert text.count(place) == 1
        file.write_text(text.replace(place, f"{place[:-1]}0]"))
        message = run.refused_resume(tmp_path)
        assert "checksum" in message and str(file) in message, key


def test_a_chunk_twice_for_another_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Chunks that add up to the tensor's size but leave elements out are found."""
    ranks(2).run(_save_sharded, tmp_path)
    path = tmp_path / "iter_0000002"
    manifest = read_manifest(path)
    key = "model.norm.weight"
    entry = manifest.tensors[key]
    assert sum(chunk.region.numel for chunk in entry.chunks) == 6
    first, *_ = entry.chunks
    halves = [first._replace(region=Region((0,), (3,))) for _ in range(2)]
    manifest.tensors[key] = replace(entry, chunks=tuple(halves))
    write_manifest(manifest, path)
    message = _refusal(tmp_path, Toy())
    assert f"'{key}'" in message and "once" in message


def _refused_on_rank(root: Path) -> str:
    model = shard(Toy(), whole_mesh())
    return _refusal(root, model)


@pytest.mark.parametrize("kind", ["truncated", "flipped byte", "missing rank file"])
def test_all_ranks_refuse_alike(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Damage that one rank finds is raised by every rank with the same message, and none hangs."""
    ranks(2).run(_save_sharded, tmp_path)
    _damage(tmp_path / "iter_0000002", kind)
    messages = ranks(3).run(_refused_on_rank, tmp_path)
    assert len(set(messages)) == 1
    assert "__0_0.distcp" in messages[0]


def _load_different_steps(root: Path) -> str:
    rank = torch.distributed.get_rank()
    return _refusal(root, shard(Toy(), whole_mesh()), step=1 + rank)


def test_ranks_must_load_the_same_step(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that see different checkpoints raise instead of mixing them."""
    _two_steps(tmp_path)
    for message in ranks(2).run(_load_different_steps, tmp_path):
        assert "one checkpoint for all ranks" in message


def _load_different_saves(first: Path, second: Path) -> str:
    rank = torch.distributed.get_rank()
    return _refusal((first, second)[rank], shard(Toy(), whole_mesh()), step=2)


def test_ranks_must_load_the_same_save_of_a_step(ranks: Ranks, tmp_path: Path) -> None:
    """A run that went back saves a step again: ranks that see both raise instead of mixing them."""
    roots = (tmp_path / "first", tmp_path / "second")
    for root in roots:
        _two_steps(root)
    fill(model := Toy(), salt=3)
    save(roots[1], step=1, model=model)
    save(roots[1], step=2, model=model)
    for message in ranks(2).run(_load_different_saves, *roots):
        assert "one checkpoint for all ranks" in message


@pytest.mark.parametrize("change", ["replaced", "removed"])
def test_a_step_that_changes_while_it_is_copied_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """What was verified is what must be copied, though files of the same name are there."""
    fill(model := Toy(), salt=1)
    for step in (1, 2):
        save(tmp_path, step=step, model=model)
    fill(model, salt=2)
    read = RecordReader.read_tensor

    def read_later(self: RecordReader, record: Record) -> torch.Tensor:
        monkeypatch.setattr(RecordReader, "read_tensor", read)
        if change == "replaced":
            save(tmp_path, step=1, model=model)
        else:
            save(tmp_path, step=3, model=model, keep_last=1)
        return read(self, record)

    monkeypatch.setattr(RecordReader, "read_tensor", read_later)
    with pytest.raises(CheckpointError, match="stays until it is loaded") as caught:
        load(tmp_path, model=Toy(), step=1)
    assert "iter_0000001" in str(caught.value)
    load(tmp_path, model=(loaded := Toy()))
    assert differences(full_state(loaded, None), full_state(model, None)) == []


def test_a_manifest_that_lost_its_last_newline_is_the_same(tmp_path: Path) -> None:
    """As a copy by hand may leave it; what it says has a checksum."""
    fill(model := Toy(), salt=1)
    manifest = save(tmp_path, step=1, model=model) / "manifest.json"
    manifest.write_text(manifest.read_text().rstrip())
    load(tmp_path, model=(loaded := Toy()))
    assert differences(full_state(loaded, None), full_state(model, None)) == []
