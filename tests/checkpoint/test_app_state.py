"""A model of parallel layers and its optimizer through torch's own checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from megafsdp.checkpoint import AppState
from megafsdp.parallel import Linear, ParallelModule, RMSNorm
from tests.parallel.cases import mesh_of
from tests.ranks import Ranks

# (dp_shard, dp_outer, tp): FSDP with tp, HSDP, HSDP with tp.
_MESHES = [(2, 1, 2), (2, 2, 1), (1, 2, 2)]
_ENGINES = {"torch": torch_fully_shard, "megafsdp": megafsdp.fully_shard}


class _Block(ParallelModule):
    """A column, a row without rows for some ranks, and bytes of a size that depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = RMSNorm(6, sequence_parallel=True)
        self.up = Linear(6, 2, parallel_mode="column", sequence_parallel=True)
        self.down = Linear(2, 1, bias=False, parallel_mode="row", sequence_parallel=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        return self.down(self.up(self.norm(x))).square().sum()

    def get_extra_state(self) -> Tensor:
        """Return bytes as quantized modules do: of another length on each rank."""
        return torch.zeros(10 + dist.get_rank(), dtype=torch.uint8)

    def set_extra_state(self, state: object) -> None:
        """Refuse: nothing is stored."""
        raise AssertionError("extra states are not loaded")


def _local(value: Tensor) -> Tensor:
    # Copies: the optimizer counts steps in place.
    value = value.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


def _step(model: _Block, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 1, 6)).backward()
    optimizer.step()
    optimizer.zero_grad()


def _state(model: _Block, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state[p] for p in model.parameters()]
    values = [*model.parameters(), *(state[name] for state in states for name in sorted(state))]
    return [_local(value) for value in values]


def _save_and_load(folder: str, shape: tuple[int, int, int], engine: str) -> tuple[int, list[str]]:
    num_data, outer, num_tp = shape
    data, tp = mesh_of(num_data, num_tp, outer=outer)
    torch.manual_seed(0)
    model = _Block()
    if num_tp > 1:
        model.set_device_mesh(tp_mesh=tp)
    _ENGINES[engine](model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in (1, 2):
        _step(model, optimizer, seed)
    wanted = _state(model, optimizer)
    stored = AppState(model, optimizer)
    for values in stored.state_dict()["optimizer"]["state"].values():
        assert all(_local(value).numel() > 0 for value in values.values())
    dcp.save({"app": stored}, checkpoint_id=folder)
    # Other weights and states, and an optimizer without any.
    _step(model, optimizer, 3)
    assert not all(torch.equal(a, b) for a, b in zip(_state(model, optimizer), wanted, strict=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megafsdp.checkpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=folder)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    got = _state_of_loaded(model, optimizer, wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    return sum(v.numel() > 0 for v in wanted), records


def _state_of_loaded(
    model: _Block, optimizer: torch.optim.Optimizer, wanted: list[Tensor]
) -> list[Tensor]:
    """Return values as :func:`_state`, with an empty tensor for a state that was left out."""
    values = [_local(p) for p in model.parameters()]
    for parameter in model.parameters():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            value = optimizer.state[parameter].get(name)
            values.append(wanted[len(values)] if value is None else _local(value))
            assert value is not None or parameter.detach().to_local().numel() == 0
    return values


@pytest.mark.parametrize("engine", list(_ENGINES))
@pytest.mark.parametrize("shape", _MESHES)
def test_model_and_optimizer_come_back_bitwise(
    ranks: Ranks, tmp_path: Path, shape: tuple[int, int, int], engine: str
) -> None:
    """Saved, changed, loaded; what is left out is logged, and strict loading does not miss it."""
    by_rank = ranks(4).run(_save_and_load, str(tmp_path), shape, engine)
    assert all(num_values > 0 for num_values, _ in by_rank)
    for _, records in by_rank:
        assert any("leaves out 1 extra states: _extra_state" in record for record in records)
    # Fewer rows than ranks that divide them leave a rank without any.
    left_out = [any("empty optimizer states" in r for r in records) for _, records in by_rank]
    assert any(left_out) is (shape[0] > 1)


class _Branches(nn.Module):
    """Two layers, of which a forward takes the second only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, *, takes_both: bool) -> Tensor:
        """Return a number."""
        y = self.first(x)
        return (self.second(y) if takes_both else y).square().sum()


_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "FusedAdam": megafsdp.FusedAdam,
    "Muon": megafsdp.Muon,
    "on the host": partial(megafsdp.HybridDeviceOptimizer, offload_fraction=0.5),
}


def _trained(
    engine: str, optimizer: str, takes_both: Sequence[bool], seed: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = _ENGINES[engine](_Branches())
    made = _OPTIMIZERS[optimizer](model.parameters(), lr=0.1)
    _go_on(model, made, takes_both)
    return model, made


def _go_on(
    model: nn.Module, optimizer: torch.optim.Optimizer, takes_both: Sequence[bool]
) -> list[Tensor]:
    """Train, and return all parameters."""
    for index, each in enumerate(takes_both):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(index))
        model(x, takes_both=each).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [_local(p) for p in model.parameters()]


def _resumes(folder: str, engine: str, optimizer: str) -> None:
    nothing, first_alone, both = [], [False, False], [False, True]
    cases = [(first_alone, nothing), (first_alone, both), (both, first_alone)]
    for index, (saved, found) in enumerate(cases):
        place, train = f"{folder}/{index}", partial(_trained, engine, optimizer)
        wanted = _go_on(*train(saved, seed=0), [True] * 3)
        source, target = train(saved, seed=0), train(found, seed=1)
        dcp.save({"app": AppState(*source)}, checkpoint_id=place)
        dcp.load({"app": AppState(*target)}, checkpoint_id=place)
        for resumed in (source, target):
            got = _go_on(*resumed, [True] * 3)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(
    ("engine", "optimizer"), [("torch", "AdamW"), *(("megafsdp", name) for name in _OPTIMIZERS)]
)
def test_states_of_some_parameters_alone_come_back(
    ranks: Ranks, tmp_path: Path, engine: str, optimizer: str
) -> None:
    """Saved or found by the load; others begin anew. A save changes no later step."""
    ranks(2).run(_resumes, str(tmp_path), engine, optimizer)


def test_states_that_are_not_known_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As torch leaves them out; it makes all of a new optimizer."""
    model = _Branches()
    optimizer = torch.optim.ASGD(model.parameters())
    _go_on(model, optimizer, [False])
    assert set(AppState(model, optimizer).state_dict()["optimizer"]["state"]) == {
        "first.weight",
        "first.bias",
    }
    assert "states of some parameters alone" in caplog.text and "ASGD" in caplog.text
    caplog.clear()
    optimizer = torch.optim.ASGD(model.parameters())
    assert len(AppState(model, optimizer).state_dict()["optimizer"]["state"]) == 4
    assert not caplog.text
