"""Loading: bitwise, into any mesh, strict, and clear about what does not fit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from megafsdp.buffer.collectives import record_collectives
from megafsdp.buffer.uneven import UnevenDTensor
from megafsdp.checkpoint import load, save
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


def _trained(
    kind: str, *, is_sharded: bool, num_outer: int = 1
) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy()
    fill(model)
    if is_sharded:
        shard(model, whole_mesh(num_outer))
    optimizer = make_optimizer(kind, model)
    train(model, optimizer)
    return model, optimizer


def _fresh(kind: str, *, is_sharded: bool) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy()
    fill(model, salt=1)
    if is_sharded:
        # Other cuts than those that were saved.
        shard(model, whole_mesh(), padding_rows=1)
    return model, make_optimizer(kind, model)


def _save_sharded(root: Path, kind: str, num_outer: int = 1) -> dict[str, object]:
    model, optimizer = _trained(kind, is_sharded=True, num_outer=num_outer)
    save(root, step=2, model=model, optimizer=optimizer, extra={"consumed_samples": 16})
    return full_state(model, optimizer)


def _load_sharded(root: Path, kind: str) -> tuple[dict[str, object], dict[str, object], int, int]:
    model, optimizer = _fresh(kind, is_sharded=True)
    identities = [id(parameter) for parameter in model.parameters()]
    with record_collectives() as record:
        extra = load(root, model=model, optimizer=optimizer)
    assert [id(parameter) for parameter in model.parameters()] == identities
    for parameter, values in optimizer.state.items():
        assert all(type(v) is type(parameter.data) for k, v in values.items() if k != "step")
        assert not values.get("step", torch.tensor(0.0)).requires_grad
    rows = model.embed.weight.local.shape[0]
    state = full_state(model, optimizer)
    train(model, optimizer, 1)
    return (
        extra,
        {**state, **_prefixed(full_state(model, optimizer))},
        sum(record.calls.values()),
        rows,
    )


def _prefixed(state: dict[str, object]) -> dict[str, object]:
    return {f"after {name}": value for name, value in state.items()}


@pytest.mark.parametrize("kind", ["adamw-foreach", "adamw-fused", "sgd"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_ranks_save_and_any_number_loads_bitwise(
    ranks: Ranks, tmp_path: Path, kind: str, world_size: int
) -> None:
    """Weights, states, hyperparameters and extra come back bit by bit, in two collectives."""
    saved = ranks(2).run(_save_sharded, tmp_path, kind)[0]
    for extra, state, num_collectives, _ in ranks(world_size).run(_load_sharded, tmp_path, kind):
        assert extra == {"consumed_samples": 16}
        loaded = {name: value for name, value in state.items() if not name.startswith("after ")}
        assert differences(saved, loaded) == []
        assert differences(saved, _after(state)) != []
        assert num_collectives <= 2


def _after(state: dict[str, object]) -> dict[str, object]:
    after = {k: v for k, v in state.items() if k.startswith("after ")}
    return {name.removeprefix("after "): value for name, value in after.items()}


def test_replicas_of_shards_are_saved_once(ranks: Ranks, tmp_path: Path) -> None:
    """Four ranks in two replicas of two shards save what three shards load."""
    saved = ranks(4).run(_save_sharded, tmp_path, "adamw-foreach", 2)[0]
    _, state, _, _ = ranks(3).run(_load_sharded, tmp_path, "adamw-foreach")[0]
    loaded = {name: value for name, value in state.items() if not name.startswith("after ")}
    assert differences(saved, loaded) == []


def _save_odd_vocabulary(root: Path) -> int:
    model = Toy(vocabulary=321)
    fill(model)
    # As many padding rows as the vocabulary has leave the first shards empty.
    shard(model, whole_mesh(), padding_rows=321)
    save(root, step=1, model=model)
    return model.embed.weight.local.shape[0]


def _load_odd_vocabulary(root: Path, padding_rows: int) -> tuple[int, torch.Tensor]:
    model = shard(Toy(vocabulary=321), whole_mesh(), padding_rows=padding_rows)
    load(root, model=model)
    return model.embed.weight.local.shape[0], model.embed.weight.full_tensor().detach()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_odd_vocabulary_with_empty_shards_round_trips(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    """321 rows survive ranks that hold none of them, at save and at load."""
    saved_rows = ranks(4).run(_save_odd_vocabulary, tmp_path)
    assert 0 in saved_rows and sum(saved_rows) == 321
    expected_model = Toy(vocabulary=321)
    fill(expected_model)
    loaded = ranks(world_size).run(_load_odd_vocabulary, tmp_path, 321)
    assert 0 in [rows for rows, _ in loaded]
    for _, weight in loaded:
        assert torch.equal(weight, expected_model.embed.weight)


@pytest.mark.parametrize("kind", ["adamw", "adamw-fused", "sgd"])
def test_plain_modules_need_no_process_group(tmp_path: Path, kind: str) -> None:
    """A plain model resumes bit by bit, and the next steps equal the uninterrupted ones."""
    model, optimizer = _trained(kind, is_sharded=False)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    other, other_optimizer = _fresh(kind, is_sharded=False)
    load(tmp_path, model=other, optimizer=other_optimizer)
    assert differences(full_state(model, optimizer), full_state(other, other_optimizer)) == []
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    assert differences(full_state(model, optimizer), full_state(other, other_optimizer)) == []


def _load_plain_into_shards(root: Path) -> dict[str, object]:
    model, optimizer = _fresh("adamw", is_sharded=True)
    load(root, model=model, optimizer=optimizer)
    assert all(isinstance(parameter, UnevenDTensor) for parameter in model.parameters())
    return full_state(model, optimizer)


def test_one_process_saves_and_shards_load(ranks: Ranks, tmp_path: Path) -> None:
    """A plain model's checkpoint becomes a sharded model's state."""
    model, optimizer = _trained("adamw", is_sharded=False)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    for state in ranks(2).run(_load_plain_into_shards, tmp_path):
        assert differences(full_state(model, optimizer), state) == []


def test_weights_only_load_leaves_the_rest_alone(tmp_path: Path) -> None:
    """``load(model=...)`` of a full checkpoint touches neither optimizer nor random states."""
    model, optimizer = _trained("adamw", is_sharded=False)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    other, other_optimizer = _fresh("adamw", is_sharded=False)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(tmp_path, model=other)
    assert differences(full_state(model, None), full_state(other, None)) == []
    assert not other_optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_random_states_continue_where_they_were(tmp_path: Path) -> None:
    """After a resume Python, numpy and torch draw the numbers the saved run would have drawn."""
    model, optimizer = _trained("sgd", is_sharded=False)
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.randn()  # Leaves half of a Gaussian pair in the generator.
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    expected_draws = (random.random(), np.random.randn(), np.random.rand(), torch.rand(3).tolist())
    random.seed(7), np.random.seed(8), torch.manual_seed(9)
    load(tmp_path, model=model, optimizer=optimizer)
    assert expected_draws == (
        random.random(),
        np.random.randn(),
        np.random.rand(),
        torch.rand(3).tolist(),
    )


def test_other_world_size_keeps_random_states_and_says_so(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One process that loads what two ranks saved keeps its own random states."""
    ranks(2).run(_save_sharded, tmp_path, "sgd")
    model, optimizer = _fresh("sgd", is_sharded=False)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
        load(tmp_path, model=model, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    assert "saved by 2 ranks and is loaded by 1" in caplog.text


def test_schedulers_and_scalers_are_restored(tmp_path: Path) -> None:
    """A learning-rate schedule and a loss scaler continue where they were."""
    model, optimizer = _trained("adamw", is_sharded=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    save(
        tmp_path,
        step=1,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        loss_scaler=scaler,
    )
    other, other_optimizer = _fresh("adamw", is_sharded=False)
    other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, step_size=2, gamma=0.5)
    other_scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load(
        tmp_path,
        model=other,
        optimizer=other_optimizer,
        lr_scheduler=other_scheduler,
        loss_scaler=other_scaler,
    )
    assert other_scaler.state_dict() == scaler.state_dict()
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.005, abs=0)
    for stepped, schedule in ((optimizer, scheduler), (other_optimizer, other_scheduler)):
        stepped.step()
        schedule.step()
    assert other_scheduler.get_last_lr() == scheduler.get_last_lr()


class _WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.note = "fresh"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def test_extra_states_of_modules_are_restored(tmp_path: Path) -> None:
    """A module's ``get_extra_state`` comes back through ``set_extra_state``."""
    model = nn.Sequential(_WithExtraState())
    model[0].note = "saved"
    save(tmp_path, step=1, model=model)
    other = nn.Sequential(_WithExtraState())
    load(tmp_path, model=other)
    assert other[0].note == "saved"


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """A compiled model's checkpoint loads into the plain one."""
    model = Toy()
    fill(model)
    save(tmp_path, step=1, model=torch.compile(model, backend="eager"))
    other = Toy()
    load(tmp_path, model=other)
    assert differences(full_state(model, None), full_state(other, None)) == []


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
    model, _ = _trained("sgd", is_sharded=False)
    save(tmp_path, step=1, model=model)
    message = _refusal(tmp_path, _Other())
    assert "30 missing in the checkpoint: model.extra_layers.0.weight" in message
    assert "model.extra_layers.9.bias and 10 more" in message
    assert "1 in the checkpoint but not asked for: model.fused.weight" in message
    for hint in ("ignore=", "allow_missing=", "strict='model'", "strict='none'"):
        assert hint in message


def test_relaxed_loads_take_what_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Patterns or ``strict="none"`` load the common tensors and log what was left."""
    model, _ = _trained("sgd", is_sharded=False)
    save(tmp_path, step=1, model=model)
    patterns = {"ignore": ["fused.*"], "allow_missing": ["extra_layers.*"]}
    for options in (patterns, {"strict": "none"}):
        other = _Other()
        with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
            load(tmp_path, model=other, **options)
        assert torch.equal(other.embed.weight, model.embed.weight)
        assert "model.extra_layers.0.weight" in caplog.text
        caplog.clear()


def test_shapes_and_dtypes_must_agree(tmp_path: Path) -> None:
    """Another vocabulary or precision is refused by name; casts must be asked for."""
    model, _ = _trained("sgd", is_sharded=False)
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
    model, optimizer = _trained("adamw", is_sharded=False)
    save(tmp_path, step=1, model=model)
    assert "optimizer.param_groups" in _refusal(tmp_path, model, optimizer=optimizer)
    state = full_state(model, optimizer)
    load(tmp_path, model=model, optimizer=optimizer, strict="model")
    assert differences(state, full_state(model, optimizer)) == []


def test_contradicting_arguments_are_refused(tmp_path: Path) -> None:
    """An optimizer without a model, an unknown strictness, a lone pattern string."""
    model, optimizer = _trained("sgd", is_sharded=False)
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
    assert "published steps []" in _refusal(tmp_path / "elsewhere", model)


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
    elif kind == "other format":
        manifest = path / "manifest.json"
        manifest.write_text(
            manifest.read_text().replace('"format_version":1', '"format_version":99')
        )
        return "format version 1"
    return "__0_0.distcp"


DAMAGES = [
    "truncated",
    "flipped byte",
    "missing rank file",
    "half-written",
    "edited manifest",
    "no JSON",
    "other format",
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


def _refused_on_rank(root: Path) -> str:
    model = shard(Toy(), whole_mesh())
    return _refusal(root, model)


@pytest.mark.parametrize("kind", ["truncated", "flipped byte", "missing rank file"])
def test_all_ranks_refuse_alike(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    """Damage that one rank finds is raised by every rank with the same message, and none hangs."""
    ranks(2).run(_save_sharded, tmp_path, "sgd")
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
