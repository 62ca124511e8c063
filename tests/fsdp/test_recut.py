"""Values and states that torch has cut by ``torch.chunk``, given to sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from megafsdp import FusedAdam, Muon, full_state_dict, full_tensor, fully_shard
from tests.fsdp.toy import assert_same_parameters, options_of_strategies
from tests.ranks import Ranks


class Net(nn.Module):
    """A matrix of rows that no number of ranks divides, a stack, and biases with few elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.stack = nn.Parameter(torch.randn(3, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs (rows, 2)."""
        return (torch.tanh(self.second(torch.tanh(self.first(x)))) @ self.stack).sum(0)


def _cut(full: torch.Tensor, like: torch.Tensor, src: int | None = 0) -> torch.Tensor:
    assert isinstance(like, DTensor)
    return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=src)


def _copied() -> None:
    torch.manual_seed(0)
    reference = Net()
    x = torch.randn(4, 5)
    for options in options_of_strategies():
        for src in (0, None):
            for on_data in (True, False):
                net = fully_shard(copy.deepcopy(reference), **options)
                for parameter in net.parameters():
                    parameter.data.zero_()
                net(x)
                for (name, parameter), full in zip(
                    net.named_parameters(), reference.parameters(), strict=True
                ):
                    # Of another dtype too, as in checkpoints of bf16 models.
                    dtype = torch.float64 if name == "stack" else torch.float32
                    value = _cut(full.detach().to(dtype), parameter, src)
                    with torch.no_grad():
                        (parameter.data if on_data else parameter).copy_(value)
                assert_same_parameters(net, reference, rtol=0, atol=0)
                torch.testing.assert_close(net(x), reference(x))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_parameters_copy_from_tensors_that_torch_has_cut(ranks: Ranks, num_ranks: int) -> None:
    """Every element arrives, and the next forward computes with it."""
    ranks(num_ranks).run(_copied)


def _adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, eps=1e-3, **options)


OPTIMIZERS = {
    "adamw": _adamw(),
    "one by one": _adamw(foreach=False),
    "fused": _adamw(fused=True),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "FusedAdam": lambda net: FusedAdam(net.parameters(), lr=0.1, eps=1e-3),
    "Muon": lambda net: Muon([net.first.weight, net.second.weight], lr=0.1),
}


def _resumed(kind: str) -> None:
    make = OPTIMIZERS[kind]
    torch.manual_seed(0)
    start = Net()
    for options in options_of_strategies():
        net = fully_shard(copy.deepcopy(start), **options)
        optimizer = make(net)
        inputs = torch.randn(4, 4, 5)

        def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(net, optimizer, inputs[0])
        values, state = full_state_dict(net), _cloned(optimizer.state_dict())
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state["state"] = {
            index: {
                name: _cut(full_tensor(value), parameters[index])
                if isinstance(value, torch.Tensor) and value.ndim
                else value
                for name, value in states.items()
            }
            for index, states in state["state"].items()
        }
        for x in inputs[1:]:
            step(net, optimizer, x)
        other = Net()
        other.load_state_dict(values)
        fully_shard(other, **options)
        resumed = make(other)
        # Before the first step, and again after one.
        for _ in range(2):
            # torch's optimizers keep the given tensors, and step them in place.
            resumed.load_state_dict(_cloned(state))
            other.load_state_dict(
                {n: _cut(values[n], p) for n, p in other.named_parameters()}, assign=True
            )
            for x in inputs[1:]:
                step(other, resumed, x)
            assert_same_parameters(other, _whole(net, start), rtol=0, atol=0)


def _cloned(state: dict[str, Any]) -> dict[str, Any]:
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, state)


def _whole(net: nn.Module, like: nn.Module) -> nn.Module:
    whole = copy.deepcopy(like)
    whole.load_state_dict(full_state_dict(net))
    return whole


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_resume_from_states_that_torch_has_cut(ranks: Ranks, kind: str) -> None:
    """The steps after a load are those without it."""
    ranks(2).run(_resumed, kind)
