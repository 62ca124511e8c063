"""Loading: bitwise, into any mesh, strict, and clear about what does not fit."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megafsdp import fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.tools.torch_file import to_torch
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import (
    Toy,
    differences,
    fill,
    fixed,
    full_state,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.pairwise import gate_of
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


_WORLDS_AND_KINDS = tuple(product((1, 2, 3), ("adamw-foreach", "adamw-fused", "sgd")))
_IN_GATE = {(1, "sgd"), (2, "adamw-fused"), (3, "adamw-foreach")}


@pytest.mark.parametrize(
    ("world_size", "kind"), gate_of(_WORLDS_AND_KINDS, "round-trips", _IN_GATE)
)
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


def _on_axis(axis: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build a model of one parameter, divided over a mesh axis of all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(axis,))
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(12.0).view(4, 3))
    if axis == "workers":
        # An axis of the engine's is a data axis by whatever name.
        fully_shard(model, mesh=mesh)
    else:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _save_over(root: Path, axis: str) -> None:
    model, optimizer = _on_axis(axis)
    torch.manual_seed(40 + dist.get_rank())
    save(root, step=1, model=model, optimizer=optimizer)


def _load_over(root: Path, axis: str) -> tuple[bool, bool, list[str]]:
    """Return whether the weight is the saved one and the random state too, and the warnings."""
    model, optimizer = _on_axis(axis)
    saved = model.weight.full_tensor().detach().clone()
    with torch.no_grad():
        model.weight.to_local().zero_()
    torch.manual_seed(50)
    with pytest.MonkeyPatch.context() as patch:
        warnings: list[str] = []
        logger = logging.getLogger("megafsdp.checkpoint")
        patch.setattr(logger, "warning", lambda text, *parts: warnings.append(text % parts))
        load(root, model=model, optimizer=optimizer)
    is_weight = torch.equal(model.weight.full_tensor(), saved)
    own = torch.Generator().manual_seed(40 + dist.get_rank())
    return is_weight, torch.equal(torch.get_rng_state(), own.get_state()), warnings


@pytest.mark.parametrize(
    ("before", "after", "is_restored"),
    [
        ("tp", "tp", True),
        ("dp_shard", "dp_outer", True),
        ("workers", "dp_shard", True),
        ("tp", "workers", False),
    ],
)
def test_random_states_go_to_ranks_of_the_same_part_in_training(
    ranks: Ranks, tmp_path: Path, before: str, after: str, is_restored: bool
) -> None:
    """Tensor-parallel ranks draw alike, data-parallel ones do not; weights come back either way."""
    ranks(2).run(_save_over, tmp_path, before)
    for is_weight, is_state, warnings in ranks(2).run(_load_over, tmp_path, after):
        assert is_weight
        assert is_state == is_restored
        degrees = "with degrees {'tp': 2} and {}: random states were left"
        assert [degrees in warning for warning in warnings] == [True] * (not is_restored)


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


class _Counter:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> list[int]:
        return [self.value]

    def load_state_dict(self, state_dict: list[int], /) -> None:
        (self.value,) = state_dict


def test_a_state_that_is_no_dict_is_restored(tmp_path: Path) -> None:
    """A scheduler or scaler of the user's own gets back what it has given."""
    model = nn.Linear(1, 1)
    save(tmp_path, step=1, model=model, lr_scheduler=_Counter(3), loss_scaler=_Counter(0))
    scheduler, scaler = _Counter(1), _Counter(1)
    load(tmp_path, model=model, lr_scheduler=scheduler, loss_scaler=scaler)
    assert (scheduler.value, scaler.value) == (3, 0)


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


class _WithEmptyState(nn.Linear):
    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        raise AssertionError(state)


def test_empty_extra_states_may_be_missing(tmp_path: Path) -> None:
    """As in converted checkpoints; one that is not empty must be there."""
    save(tmp_path, step=1, model=nn.Sequential(nn.Linear(2, 2, bias=False)))
    load(tmp_path, model=nn.Sequential(_WithEmptyState(2, 2, bias=False)))
    save(tmp_path, step=2, model=nn.Sequential(nn.ParameterDict({"weight": torch.ones(2)})))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: model\.0\._extra_state"):
        load(tmp_path, model=nn.Sequential(_WithExtraState()))


class _TwoNames(nn.Module):
    """One module below two names, with a buffer of two names and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm1d(3), _WithExtraState())
        self.second = self.first
        self.register_buffer("count", torch.ones(2))
        self.register_buffer("total", self.count)


def _tied(salt: int) -> Toy:
    model = Toy()
    fill(model, salt)
    model.norm.register_buffer("again", model.count.fill_(salt))
    return model


def test_tied_tensors_without_memory_stay_tied(tmp_path: Path) -> None:
    """A plain model on the meta device receives them under each of their names."""
    source = _tied(3)
    save(tmp_path, step=1, model=source)
    with torch.device("meta"):
        model = _tied(0)
    load(tmp_path, model=model)
    assert model.head.weight is model.embed.weight and model.norm.again is model.count
    assert differences(source.state_dict(), model.state_dict()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_module_of_two_names_is_stored_under_both(tmp_path: Path) -> None:
    """A model without the tie, a plain ``load_state_dict`` and torch's own load find all names."""
    model = _TwoNames()
    model.first[0].running_mean.fill_(3)
    model.first[1].note = "saved"
    model.count.fill_(5)
    path = save(tmp_path / "a", step=1, model=model)
    wanted = model.state_dict()
    apart = _TwoNames()
    apart.second = nn.Sequential(nn.BatchNorm1d(3), _WithExtraState())
    apart.total = torch.ones(2)
    load(path, model=apart)
    assert differences(wanted, apart.state_dict()) == []
    again = _TwoNames()
    load(path, model=again)
    assert differences(wanted, again.state_dict()) == []
    tree = torch.load(to_torch(path, tmp_path / "whole.pt"), weights_only=True)
    assert nn.Module.load_state_dict(_TwoNames(), tree["model"]).missing_keys == []
    tensors = {name: torch.zeros_like(v) for name, v in wanted.items() if "extra" not in name}
    dcp.load({"model": tensors}, checkpoint_id=path)
    assert differences(tensors, {name: wanted[name] for name in tensors}) == []


def test_checkpoints_with_the_first_name_alone_still_load(tmp_path: Path) -> None:
    """As those of a module that has got its second name since."""
    model = _TwoNames()
    model.first[1].note = "saved"
    del model.second
    save(tmp_path, step=1, model=model)
    again = _TwoNames()
    load(tmp_path, model=again)
    assert again.first[1].note == "saved"


def test_wrappers_do_not_change_names(tmp_path: Path) -> None:
    """A compiled model's checkpoint loads into the plain one."""
    model = Toy()
    fill(model)
    save(tmp_path, step=1, model=torch.compile(model, backend="eager"))
    other = Toy()
    load(tmp_path, model=other)
    assert differences(full_state(model, None), full_state(other, None)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw-foreach", "adamw-fused"])
def test_a_cuda_run_resumes_bitwise(tmp_path: Path, kind: str) -> None:
    """States return to the devices where torch keeps them, and CUDA's random state continues."""
    model = Toy().cuda()
    fill(model)
    optimizer = make_optimizer(kind, model)
    _train_on_cuda(model, optimizer, 2)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    draws = torch.rand(4, device="cuda")
    other = Toy().cuda()
    resumed = make_optimizer(kind, other)
    load(tmp_path, model=other, optimizer=resumed)
    assert torch.equal(torch.rand(4, device="cuda"), draws)
    devices = {v.device.type for values in resumed.state.values() for v in values.values()}
    assert devices == ({"cuda"} if kind == "adamw-fused" else {"cuda", "cpu"})
    for run in ((model, optimizer), (other, resumed)):
        _train_on_cuda(*run, 2)
    assert differences(full_state(model, optimizer), full_state(other, resumed)) == []


def _train_on_cuda(model: Toy, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for salt in range(num_steps):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = fixed(name, tuple(parameter.shape), salt).cuda()
        optimizer.step()
