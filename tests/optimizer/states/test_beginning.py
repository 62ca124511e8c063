"""States that are made before the first step are those with which it begins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from megafsdp import FusedAdam, HybridDeviceOptimizer, MixedPrecisionPolicy, Muon, fully_shard
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.states.beginning import make_states
from tests.fsdp.toy import Net, batches, mine
from tests.ranks import Ranks

BF16 = MixedPrecisionPolicy(torch.bfloat16, main_params_dtype=torch.bfloat16)
DECAYS = {"weight_decay": 0.1, "lr": 0.01}
CASES: dict[str, Callable[..., Optimizer]] = {
    "Adadelta": partial(torch.optim.Adadelta, **DECAYS),
    "Adam": partial(torch.optim.Adam, amsgrad=True, **DECAYS),
    "AdamW": partial(torch.optim.AdamW, eps=0.0, **DECAYS),
    "Adamax": partial(torch.optim.Adamax, **DECAYS),
    "NAdam": partial(torch.optim.NAdam, **DECAYS),
    "RAdam": partial(torch.optim.RAdam, **DECAYS),
    "RMSprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True, **DECAYS),
    "SGD": partial(torch.optim.SGD, momentum=0.9, nesterov=True, **DECAYS),
    "SGD without momentum": partial(torch.optim.SGD, **DECAYS),
    "Adagrad": partial(torch.optim.Adagrad, **DECAYS),
    "FusedAdam": partial(FusedAdam, eps=0.0, **DECAYS),
    "FusedAdam in 8 bits": partial(FusedAdam, exp_avg_dtype=torch.float8_e4m3fn, **DECAYS),
    "FusedAdam with remainders": partial(FusedAdam, store_param_remainders=True, **DECAYS),
    "Muon": partial(Muon, **DECAYS),
    "on the host": partial(HybridDeviceOptimizer, offload_fraction=0.5, **DECAYS),
    "SGD on the host": partial(
        HybridDeviceOptimizer,
        cpu_optimizer_cls=torch.optim.SGD,
        cpu_optimizer_kwargs={"momentum": 0.9},
        **DECAYS,
    ),
    "Adagrad on the host": partial(
        HybridDeviceOptimizer, cpu_optimizer_cls=torch.optim.Adagrad, **DECAYS
    ),
}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return local_tensor(tensor.detach()).reshape(-1).clone().view(torch.uint8)


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        # Adding +0 would change it.
        net.blocks[0].up.weight[0] = -0.0
    policy = BF16 if "remainders" in name else MixedPrecisionPolicy()
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(net, mp_policy=policy)


def _train(name: str, *, early: bool) -> tuple[list[set[str]], list[torch.Tensor]]:
    """Return the names of each parameter's states before a step, and all bits after three."""
    model = _model(name)
    optimizer = CASES[name](model.parameters())
    made: list[set[str]] = []
    if early:
        before = [_bits(p) for p in model.parameters()]
        make_states(optimizer)
        make_states(optimizer)
        for parameter, bits in zip(model.parameters(), before, strict=True):
            assert torch.equal(_bits(parameter), bits)
            assert parameter.grad is None
        made = [set(s) for _, s in sorted(optimizer.state_dict()["state"].items())]
    for batch in batches(3):
        model(*mine(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    if early:
        assert made == [set(state) for state in states]
    values = [v for state in states for _, v in sorted(state.items())]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    return made, [_bits(t) for t in [*model.parameters(), *tensors]]


def _both(name: str) -> None:
    made, early = _train(name, early=True)
    _, late = _train(name, early=False)
    assert made or name == "SGD without momentum"
    assert len(early) == len(late)
    for a, b in zip(early, late, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_states_made_before_the_first_step_change_no_bit(ranks: Ranks, name: str) -> None:
    """Of weights, also when they are made, and of states; decay, eps=0 and -0 included."""
    ranks(2).run(_both, name)


class _Other(torch.optim.AdamW):
    """A class that may have states of its own."""


def test_states_that_are_not_known_are_refused() -> None:
    """With what loads them; nothing is made."""
    dampened = partial(torch.optim.SGD, momentum=0.9, dampening=0.1)
    for kind in (torch.optim.ASGD, dampened, _Other):
        optimizer = kind(nn.Linear(2, 2).parameters())
        with pytest.raises(
            NotImplementedError, match=r"get_optimizer_state_dict.*checkpoint\.load"
        ):
            make_states(optimizer)
        assert not optimizer.state


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam, HybridDeviceOptimizer, Muon])
def test_frozen_parameters_get_no_states(kind: type[Optimizer]) -> None:
    """No step would make them, and a checkpoint has none."""
    weight, frozen = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = kind([weight, frozen.requires_grad_(False)])
    make_states(optimizer)
    assert optimizer.state[weight] and not optimizer.state.get(frozen)
