"""Parameter groups and hyperparameters of the configured optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp.training.config import OptimizerSection
from megafsdp.training.optimizers import apply_hyperparameters, build_optimizer


def _model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model[2].bias.requires_grad_(False)
    return model


def test_vectors_are_not_decayed() -> None:
    """Norms and biases stand in a group without weight decay; frozen parameters in none."""
    model = _model()
    optimizer = build_optimizer(model, OptimizerSection(weight_decay=0.3))
    matrices, vectors = optimizer.param_groups
    assert {id(p) for p in matrices["params"]} == {id(model[0].weight), id(model[2].weight)}
    assert len(vectors["params"]) == 3
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)


def test_vectors_are_decayed_on_request() -> None:
    """There is one group then."""
    optimizer = build_optimizer(_model(), OptimizerSection(decay_vectors=True))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_implementation_is_the_one_asked_for(kind: str, implementation: str) -> None:
    """The flags of torch's optimizer say which form runs, and it runs."""
    section = OptimizerSection(kind=kind, implementation=implementation)  # type: ignore[arg-type]
    model = _model()
    optimizer = build_optimizer(model, section)
    assert optimizer.defaults["fused"] == (implementation == "fused")
    assert optimizer.defaults["foreach"] == (implementation == "foreach")
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def test_configured_hyperparameters_replace_loaded_ones() -> None:
    """All but the learning rate, which the schedule sets."""
    section = OptimizerSection(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)
    optimizer = build_optimizer(_model(), section)
    for group in optimizer.param_groups:
        group.update(weight_decay=7.0, betas=(0.1, 0.1), eps=1.0, lr=5.0)
    apply_hyperparameters(optimizer, section)
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert (matrices["betas"], matrices["eps"], matrices["lr"]) == ((0.8, 0.9), 1e-6, 5.0)
