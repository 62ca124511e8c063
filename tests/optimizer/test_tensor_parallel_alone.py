"""Steps of models that only tensor parallelism has cut, against one process.

Their parameters are plain DTensors, and the gradient of a norm is an addend on each rank.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from megafsdp import full_state_dict
from megafsdp.optimizer import FusedAdam, Muon
from tests.parallel.cases import CONFIG, batch_of, build, mesh_of
from tests.ranks import Ranks


def _adam(model: nn.Module) -> list[Optimizer]:
    return [FusedAdam(model.parameters(), lr=1e-2, eps=1e-5)]


def _clipping_adam(model: nn.Module) -> list[Optimizer]:
    return [FusedAdam(model.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=0.5)]


def _muon_for_norms(model: nn.Module) -> list[Optimizer]:
    norms = [p for p in model.parameters() if p.ndim == 1]
    others = [p for p in model.parameters() if p.ndim > 1]
    return [Muon(norms, lr=1e-2, adamw_eps=1e-5), FusedAdam(others, lr=1e-2, eps=1e-5)]


_Optimizers = Callable[[nn.Module], list[Optimizer]]


def _weights(make_optimizers: _Optimizers, num_tp: int) -> dict[str, torch.Tensor]:
    model = build(CONFIG, torch.float32)
    if num_tp > 1:
        model.set_device_mesh(tp_mesh=mesh_of(1, num_tp)[1])
    optimizers = make_optimizers(model)
    for step in range(3):
        model(*batch_of(4, 8, step)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return full_state_dict(model)


@pytest.mark.parametrize("make_optimizers", [_adam, _clipping_adam, _muon_for_norms])
def test_steps_are_those_of_one_process(ranks: Ranks, make_optimizers: _Optimizers) -> None:
    """Norms that see a part of the sequence are stepped by the sum of all ranks."""
    wanted = _weights(make_optimizers, 1)
    for found in ranks(2).run(_weights, make_optimizers, 2):
        for name, weight in wanted.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
