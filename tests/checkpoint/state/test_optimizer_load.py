"""Optimizers: any of torch's round-trips, groups are matched by names, running flags stay."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp import FusedAdam
from megafsdp.checkpoint import async_save, load, save
from megafsdp.errors import CheckpointError
from megafsdp.fsdp import fully_shard
from tests.checkpoint.sharding import differences, fill, fixed, full_state
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]

OPTIMIZERS = [
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
]


class _Small(nn.Module):
    """Parameters of three ranks, a scalar among them."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 3))
        self.vector = nn.Parameter(torch.zeros(4))
        self.scalar = nn.Parameter(torch.zeros(()))


def _model(salt: int) -> _Small:
    model = _Small()
    fill(model, salt)
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, salts: range) -> None:
    for salt in salts:
        for name, parameter in model.named_parameters():
            parameter.grad = fixed(name, tuple(parameter.shape), salt + 10)
        optimizer.step()


def _options(kind: type[torch.optim.Optimizer]) -> dict[str, float]:
    options: dict[str, float] = {"lr": 0.01}
    if "momentum" in inspect.signature(kind).parameters:
        options["momentum"] = 0.9
    return options


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_every_optimizer_of_torch_resumes_bitwise(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """States come back with the kinds torch gave them, and the next steps are equal."""
    model = _model(0)
    optimizer = kind(model.parameters(), **_options(kind))
    _step(model, optimizer, range(2))
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    other = _model(1)
    resumed = kind(other.parameters(), **_options(kind))
    load(tmp_path, model=other, optimizer=resumed)
    assert differences(full_state(model, optimizer), full_state(other, resumed)) == []
    _step(model, optimizer, range(2, 4))
    _step(other, resumed, range(2, 4))
    assert differences(full_state(model, optimizer), full_state(other, resumed)) == []


def test_a_used_optimizer_takes_over_every_state(tmp_path: Path) -> None:
    """States that the checkpoint has not are dropped, the others overwritten in place."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.matrix.grad = torch.ones(4, 3)
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _model(1)
    used = torch.optim.AdamW(other.parameters(), lr=0.01)
    _step(other, used, range(3))
    average = used.state[other.matrix]["exp_avg"]
    load(tmp_path, model=other, optimizer=used)
    assert set(used.state) == {other.matrix}
    assert used.state[other.matrix]["exp_avg"] is average
    assert torch.equal(average, optimizer.state[model.matrix]["exp_avg"])


def _grouped(model: _Small, **options: object) -> torch.optim.AdamW:
    groups = [
        {"params": [model.matrix], "weight_decay": 0.5},
        {"params": [model.vector, model.scalar], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **options)


def test_hyperparameters_follow_the_names_and_flags_stay(tmp_path: Path) -> None:
    """Groups in another order get their own values; foreach and fused are the running job's."""
    model = _model(0)
    optimizer = _grouped(model, lr=0.01, betas=(0.8, 0.88), foreach=True)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _model(1)
    turned = torch.optim.AdamW(
        [
            {"params": [other.vector, other.scalar], "weight_decay": 9.0},
            {"params": [other.matrix]},
        ],
        lr=3.0,
        fused=True,
    )
    load(tmp_path, model=other, optimizer=turned)
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.5]
    assert turned.param_groups[1]["initial_lr"] == 0.25
    for group in turned.param_groups:
        assert (group["lr"], group["betas"]) == (0.01, (0.8, 0.88))
        assert (group["fused"], group["foreach"]) == (True, None)


@pytest.mark.parametrize("are_saved", [False, True], ids=["unnamed", "named"])
def test_an_optimizer_keeps_the_names_it_was_built_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_saved: bool
) -> None:
    """Names go with an optimizer's own order; one built without names gets none."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    _step(model, optimizer, range(1))
    if are_saved:
        # A checkpoint may have them.
        monkeypatch.setattr("megafsdp.checkpoint.state.canonical.GROUP_MEMBERS", {"params"})
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    turned = torch.optim.AdamW(reversed(list(model.named_parameters())), lr=0.3)
    load(tmp_path, model=model, optimizer=turned)
    (group,) = turned.param_groups
    assert group["param_names"] == ["scalar", "vector", "matrix"] and group["lr"] == 0.01
    bare = torch.optim.AdamW(model.parameters())
    load(tmp_path, model=model, optimizer=bare)
    bare.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert all("param_names" not in group for group in bare.param_groups)
    assert any(b"param_names" in f.read_bytes() for f in tmp_path.rglob("*.*")) == are_saved


def test_a_tensor_learning_rate_stays_the_same_tensor(tmp_path: Path) -> None:
    """Between a number and a tensor the value is carried over, the kind is the running job's."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    by_number = torch.optim.AdamW(model.parameters(), lr=0.1)
    load(tmp_path, model=model, optimizer=by_number)
    taken = by_number.param_groups[0]["lr"]
    assert isinstance(taken, float) and taken == 0.5
    save(tmp_path, step=2, model=model, optimizer=by_number)
    rate = torch.tensor(0.1)
    by_tensor = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    load(tmp_path, model=model, optimizer=by_tensor)
    assert by_tensor.param_groups[0]["lr"] is rate and rate.item() == 0.5


def test_groups_without_parameters_load_in_their_order(tmp_path: Path) -> None:
    """Trainers make them for parts that are frozen, with rates that schedulers go on from."""
    rates = [0.1, 0.2, 0.4]

    def made(rates: list[float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(2, 2)
        members = [[], list(model.parameters()), []]
        groups = [{"params": p, "lr": lr} for p, lr in zip(members, rates, strict=True)]
        return model, torch.optim.AdamW(groups)

    model, optimizer = made(rates)
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other, loaded = made([1.0, 1.0, 1.0])
    load(tmp_path, model=other, optimizer=loaded)
    assert [group["lr"] for group in loaded.param_groups] == rates


def test_another_grouping_is_refused_with_names(tmp_path: Path) -> None:
    """Parameters that changed groups are named, with the way to keep the own values."""
    model = _model(0)
    optimizer = _grouped(model, lr=0.01)
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _model(1)
    regrouped = torch.optim.AdamW(
        [{"params": [other.matrix, other.vector]}, {"params": [other.scalar]}], lr=7.0
    )
    with pytest.raises(CheckpointError, match=r"param_groups\[0\]") as caught:
        load(tmp_path, model=other, optimizer=regrouped)
    assert "vector" in str(caught.value) and "strict='model'" in str(caught.value)
    assert not regrouped.state


def test_relaxed_groups_keep_their_own_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With ``strict="model"`` the states are loaded and the differing groups logged."""
    model = _model(0)
    optimizer = _grouped(model, lr=0.01)
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    single = torch.optim.AdamW(model.parameters(), lr=7.0)
    with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
        load(tmp_path, model=model, optimizer=single, strict="model")
    assert single.param_groups[0]["lr"] == 7.0
    assert single.state[model.matrix]["step"].item() == 1
    assert "optimizer.param_groups[0]" in caplog.text


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """SGD's checkpoint lacks what AdamW computes with, and the message says what."""
    model = _model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    before = full_state(model, None)
    with pytest.raises(CheckpointError, match="hyperparameters of AdamW") as caught:
        load(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    assert "'betas'" in str(caught.value)
    assert differences(before, full_state(model, None)) == []


def _decays(
    model: _Small, kind: type[torch.optim.Optimizer], **options: object
) -> torch.optim.Optimizer:
    return kind(model.parameters(), lr=0.1, weight_decay=0.5, **options)


@pytest.mark.parametrize(
    ("saves", "loads", "options"),
    [
        (torch.optim.Adam, torch.optim.AdamW, {}),
        (torch.optim.AdamW, torch.optim.Adam, {}),
        (torch.optim.NAdam, torch.optim.NAdam, {"decoupled_weight_decay": True}),
    ],
)
def test_decay_is_what_torch_makes_of_it(
    tmp_path: Path,
    saves: type[torch.optim.Optimizer],
    loads: type[torch.optim.Optimizer],
    options: dict[str, bool],
) -> None:
    """AdamW decays as AdamW whatever it loads; an option of other optimizers is the saved one."""
    model = _model(0)
    optimizer = _decays(model, saves, **options)
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    wanted = _model(0)
    wanted.load_state_dict(model.state_dict())
    by_torch = _decays(wanted, loads)
    by_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = _model(1)
    loaded = _decays(other, loads)
    load(tmp_path, model=other, optimizer=loaded)
    decays = [o.param_groups[0]["decoupled_weight_decay"] for o in (loaded, by_torch)]
    assert decays[0] == decays[1]
    _step(other, loaded, range(1, 3))
    _step(wanted, by_torch, range(1, 3))
    assert differences(full_state(other, loaded), full_state(wanted, by_torch)) == []


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
def test_states_that_are_ignored_stay_where_none_are_stored(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """Of a parameter that was frozen in the saved run; those not ignored are dropped."""
    model = _model(0)
    model.vector.requires_grad_(False)
    optimizer = kind(model.parameters(), lr=0.01)
    model.matrix.grad = torch.ones(4, 3)
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _model(1)
    used = kind(other.parameters(), lr=0.01)
    _step(other, used, range(3))
    before = copy.deepcopy(used.state[other.vector])
    load(tmp_path, model=other, optimizer=used, ignore=["vector.*"])
    assert set(used.state) == {other.matrix, other.vector}
    assert used.state[other.matrix]["step"] == 1
    after = used.state[other.vector]
    assert after.keys() == before.keys() and float(after["step"]) == 3
    assert all(torch.equal(after[name], before[name]) for name in before)
    load(tmp_path, model=other, optimizer=used, ignore=["*.exp_avg"])
    assert list(used.state[other.vector]) == ["exp_avg"] or kind is FusedAdam
    assert torch.equal(used.state[other.vector]["exp_avg"], before["exp_avg"])
    load(tmp_path, model=other, optimizer=used)
    assert set(used.state) == {other.matrix}


@pytest.mark.parametrize(
    ("saves", "loads", "option"),
    [
        (torch.optim.AdamW, FusedAdam, "amsgrad=True"),
        (torch.optim.AdamW, FusedAdam, "maximize=True"),
        (FusedAdam, torch.optim.AdamW, "bias_correction=False"),
    ],
)
def test_an_option_that_the_optimizer_ignores_is_refused(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    saves: type[torch.optim.Optimizer],
    loads: type[torch.optim.Optimizer],
    option: str,
) -> None:
    """As by load_state_dict; where options may differ, a warning says so, and none is taken."""
    model = _model(0)
    name, _, value = option.partition("=")
    optimizer = saves(model.parameters(), **{name: value == "True"})
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = _model(1)
    ours = loads([other.matrix, other.vector, other.scalar])
    before = full_state(other, ours)
    with pytest.raises(CheckpointError, match=rf"{option}.*\n?.*param_groups\[0\]"):
        load(tmp_path, model=other, optimizer=ours, ignore=["*.max_exp_avg_sq"])
    assert differences(before, full_state(other, ours)) == []
    with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
        load(tmp_path, model=other, optimizer=ours, strict="model", ignore=["*.max_exp_avg_sq"])
    assert option in caplog.text
    assert name not in ours.param_groups[0]


def test_an_option_that_the_saved_optimizer_has_not_is_refused(tmp_path: Path) -> None:
    """Unless it is off: the maxima that it needs are not stored."""
    model = _model(0)
    optimizer = FusedAdam(model.parameters(), weight_decay=0.01)
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    load(tmp_path, model=model, optimizer=torch.optim.AdamW(model.parameters()))
    other = torch.optim.AdamW(model.parameters(), amsgrad=True)
    with pytest.raises(CheckpointError, match=r"a stored group without \['amsgrad'\]"):
        load(tmp_path, model=model, optimizer=other)


def test_a_neutral_option_that_the_optimizer_ignores_is_left_out(tmp_path: Path) -> None:
    """A group shows what its optimizer computes with."""
    model = _model(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    save(tmp_path, step=0, model=model, optimizer=optimizer)
    ours = FusedAdam(model.parameters())
    load(tmp_path, model=model, optimizer=ours)
    (group,) = ours.param_groups
    assert group["lr"] == 0.25 and group.keys() == {"params", *ours.defaults}


def test_an_option_of_one_group_comes_back(tmp_path: Path) -> None:
    """Also if the optimizer has no default of it; a group with another value is refused."""
    model = _model(0)

    def optimizer_with(is_corrected: bool) -> FusedAdam:
        apart = {"params": [model.vector], "bias_correction": is_corrected}
        return FusedAdam([{"params": [model.matrix, model.scalar]}, apart])

    save(tmp_path, step=0, model=model, optimizer=optimizer_with(False))
    ours = optimizer_with(False)
    load(tmp_path, model=model, optimizer=ours)
    assert [group.get("bias_correction") for group in ours.param_groups] == [None, False]
    with pytest.raises(CheckpointError, match=r"bias_correction=False.*param_groups\[1\]"):
        load(tmp_path, model=model, optimizer=optimizer_with(True))
    save(tmp_path, step=1, model=model, optimizer=FusedAdam(model.parameters()))
    apart = {"params": [*model.parameters()], "bias_correction": False}
    with pytest.raises(CheckpointError, match=r"a stored group without \['bias_correction'\]"):
        load(tmp_path, model=model, optimizer=FusedAdam([apart]))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, FusedAdam])
def test_states_take_the_dtype_of_the_model_that_they_are_cast_for(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    """A step goes on as after torch's own load; FusedAdam keeps the dtype of its moments."""
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    cast, other = (nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(2))
    loaded, own = (kind(m.parameters(), lr=0.1) for m in (cast, other))
    load(tmp_path, model=cast, optimizer=loaded, strict="none")
    other.load_state_dict(model.state_dict())
    own.load_state_dict(optimizer.state_dict())
    for each, stepped in ((cast, loaded), (other, own)):
        each(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        stepped.step()
    assert differences(full_state(cast, loaded), full_state(other, own)) == []


def test_a_resized_layer_can_be_left_out_with_its_states(tmp_path: Path) -> None:
    """A state of the old shape never lands beside a parameter of the new one."""
    model = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 5)})
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, optimizer, range(1))
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = nn.ModuleDict({"body": nn.Linear(3, 3), "head": nn.Linear(3, 7)})
    fresh = torch.optim.AdamW(other.parameters())
    with pytest.raises(CheckpointError, match=r"optimizer.state.head.bias.exp_avg stored \(5,\)"):
        load(tmp_path, model=other, optimizer=fresh, ignore=["model.head.*"])
    load(tmp_path, model=other, optimizer=fresh, ignore=["head.*"])
    assert set(fresh.state) == set(other["body"].parameters())
    assert torch.equal(other["body"].weight, model["body"].weight)
    _step(other, fresh, range(1))


@pytest.mark.parametrize(
    "options",
    [
        {"kind": torch.optim.AdamW},
        {"kind": FusedAdam},
        {"kind": FusedAdam, "exp_avg_dtype": torch.bfloat16},
        {"kind": FusedAdam, "store_param_remainders": True},
    ],
    ids=str,
)
def test_a_load_in_inference_mode_leaves_states_to_train_with(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """What it creates is written by the next step, outside of that mode; saves work there too."""
    options = dict(options)
    kind = options.pop("kind")
    dtype = torch.bfloat16 if "store_param_remainders" in options else torch.float32
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(dtype)
    optimizer = kind(model.parameters(), **options)
    model(torch.ones(2, 4, dtype=dtype)).sum().backward()
    optimizer.step()
    with torch.inference_mode():
        async_save(tmp_path, step=1, model=model, optimizer=optimizer).result()
        save(tmp_path, step=2, model=model, optimizer=optimizer, extra={"ids": torch.ones(2)})
    for step in (1, 2):
        other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to(dtype)
        resumed = kind(other.parameters(), **options)
        with torch.inference_mode():
            extra = load(tmp_path, step=step, model=other, optimizer=resumed)
        states = [v for states in resumed.state.values() for v in states.values()]
        made = [*states, *other.parameters(), *other.buffers(), *extra.values()]
        assert not any(t.is_inference() for t in made if isinstance(t, torch.Tensor))
        assert differences(full_state(model, optimizer), full_state(other, resumed)) == []
        other(torch.ones(2, 4, dtype=dtype)).sum().backward()
        resumed.step()


def test_a_load_in_inference_mode_gives_memory_to_train_with(tmp_path: Path) -> None:
    """To a model on the meta device, parameters and buffers alike."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    save(tmp_path, step=1, model=model)
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.inference_mode():
        load(tmp_path, model=other)
    assert differences(full_state(model, None), full_state(other, None)) == []
    other(torch.ones(2, 4)).sum().backward()
    torch.optim.AdamW(other.parameters()).step()


class _Momentum(torch.optim.Optimizer):
    """A user's optimizer whose states have names that torch gives to scalars."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                for name in ("mu", "eta", "step"):
                    average = state.setdefault(name, torch.zeros_like(parameter))
                    average.mul_(0.9).add_(parameter.grad)
                parameter.add_(state["mu"], alpha=-group["lr"])


def _resume_momentum(root: Path) -> list[str]:
    models = [fully_shard(_trainable(salt)) for salt in (0, 1)]
    optimizers = [_Momentum(model.parameters()) for model in models]

    def step(index: int) -> None:
        models[index](torch.ones(2, 5)).sum().backward()
        optimizers[index].step()
        optimizers[index].zero_grad()

    step(0)
    save(root, step=1, model=models[0], optimizer=optimizers[0])
    load(root, model=models[1], optimizer=optimizers[1])
    for parameter in models[1].parameters():
        assert all(isinstance(v, DTensor) for v in optimizers[1].state[parameter].values())
    for index in (0, 1):
        step(index)
    states = [full_state(*pair) for pair in zip(models, optimizers, strict=True)]
    assert any("/mu" in key for key in states[0])
    return differences(*states)


def _trainable(salt: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    fill(model, salt)
    return model


def test_a_state_named_as_a_scalar_is_sharded_as_its_parameter(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Where it has the parameter's shape, ``mu``, ``eta`` and ``step`` are states like others."""
    assert ranks(2).run(_resume_momentum, tmp_path) == [[]] * 2


def _resume_scalar(root: Path) -> list[str]:
    models = [fully_shard(_model(salt)) for salt in (0, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]

    def step(index: int) -> None:
        for parameter in models[index].parameters():
            parameter.grad = parameter.detach().clone()
        optimizers[index].step()

    step(0)
    save(root, step=1, model=models[0], optimizer=optimizers[0])
    load(root, model=models[1], optimizer=optimizers[1])
    assert isinstance(optimizers[1].state[models[1].scalar]["exp_avg"], DTensor)
    for index in (0, 1):
        step(index)
    return differences(*(full_state(*pair) for pair in zip(models, optimizers, strict=True)))


def test_moments_of_a_scalar_are_like_it(ranks: Ranks, tmp_path: Path) -> None:
    """Only counts of steps and the like are plain beside a sharded parameter."""
    assert ranks(2).run(_resume_scalar, tmp_path) == [[]] * 2
