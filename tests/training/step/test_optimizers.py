"""Parameter groups and hyperparameters of the configured optimizer."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam
from megafsdp.models import ModelConfig, build_model
from megafsdp.optimizer.muon.muon import Muon
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.training.config.optimizer_sections import MuonSection, OptimizerSection
from megafsdp.training.step.optimizers import apply_hyperparameters, build_optimizer
from tests.training.runs import MODEL


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


def _moves(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    before = model[0].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return not torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
@pytest.mark.parametrize("implementation", ["fused", "foreach", "loop"])
def test_implementation_is_the_one_asked_for(kind: str, implementation: str) -> None:
    """The flags of torch's optimizer say which form runs, and it runs."""
    section = OptimizerSection(kind=kind, implementation=implementation)  # type: ignore[arg-type]
    model = _model()
    optimizer = build_optimizer(model, section)
    names = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}
    assert type(optimizer) is getattr(torch.optim, names[kind])
    assert optimizer.defaults["fused"] == (implementation == "fused")
    assert optimizer.defaults["foreach"] == (implementation == "foreach")
    assert _moves(model, optimizer)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_the_default_is_fused_adam(kind: str) -> None:
    """With coupled weight decay for adam, and states in the dtypes that are asked for."""
    section = OptimizerSection(kind=kind, exp_avg_dtype="bf16")  # type: ignore[arg-type]
    model = _model()
    optimizer = build_optimizer(model, section)
    assert isinstance(optimizer, FusedAdam)
    assert optimizer.adam_w_mode == (kind == "adamw")
    assert _moves(model, optimizer)
    state = optimizer.state[model[0].weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_our_adam_steps_as_torchs(kind: str) -> None:
    """Three steps of the two implementations of one section; fp32 rounding apart."""
    models = []
    for form in ("megafsdp", "loop"):
        torch.manual_seed(3)
        models.append(_model())
        # Only ours clips in its step.
        section = OptimizerSection(kind, 0.1, eps=1e-5, implementation=form, clip_norm=None)  # type: ignore[arg-type]
        optimizer = build_optimizer(models[-1], section)
        for step in range(3):
            models[-1](torch.full((1, 2), float(step))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_muon_steps_matrices_but_those_that_are_named() -> None:
    """Embeddings, the output layer and vectors are AdamW's; options reach every group."""
    model = build_model(ModelConfig(**MODEL, tie_embeddings=False))
    section = OptimizerSection(kind="muon", eps=1e-5, betas=(0.8, 0.9))
    muon = MuonSection(momentum=0.7, ns_steps=3, split_fused="groups", ns_dtype="fp32")
    optimizer = build_optimizer(model, section, muon)
    assert isinstance(optimizer, Muon)
    by_muon = {
        id(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if group["use_muon"] and p.ndim > 1
    }
    names = {name for name, p in model.named_parameters() if id(p) in by_muon}
    expected = {n for n, p in model.named_parameters() if "layers" in n and p.ndim > 1}
    assert names == expected
    assert expected
    for group in optimizer.param_groups:
        options: dict[str, Any] = {
            "momentum": 0.7,
            "ns_steps": 3,
            "split_fused": "groups",
            "adjust_lr_fn": "match_rms_adamw",
            "betas": (0.8, 0.9),
            "adamw_eps": 1e-5,
        }
        assert {name: group[name] for name in options} == options
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = {n: set(optimizer.state[p]) for n, p in model.named_parameters()}
    assert {n for n, states in kept.items() if states == {"momentum_buffer"}} == expected


def test_first_pattern_that_matches_sets_the_multiplier() -> None:
    """Groups part by factor and weight decay, and what no pattern names keeps the rate."""
    model = _model()
    section = OptimizerSection(lr_multipliers={"0.weight": 0.5, "0.*": 2.0})
    optimizer = build_optimizer(model, section)
    factors = {
        id(p): (group["lr_multiplier"], group["weight_decay"])
        for group in optimizer.param_groups
        for p in group["params"]
    }
    named = {name: factors[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    assert named == {
        "0.weight": (0.5, 0.1),
        "0.bias": (2.0, 0.0),
        "1.weight": (1.0, 0.0),
        "1.bias": (1.0, 0.0),
        "2.weight": (1.0, 0.1),
    }


def test_configured_hyperparameters_replace_loaded_ones() -> None:
    """All but the learning rate, which the schedule sets."""
    section = OptimizerSection(
        weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6, lr_multipliers={"2.*": 3.0}
    )
    model = _model()
    optimizer = build_optimizer(model, section)
    for group in optimizer.param_groups:
        group.update(weight_decay=7.0, betas=(0.1, 0.1), eps=1.0, lr=5.0, lr_multiplier=9.0)
    apply_hyperparameters(optimizer, model, section)
    matrices, others, vectors = optimizer.param_groups
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.2, 0.2, 0.0]
    assert [g["lr_multiplier"] for g in (matrices, others, vectors)] == [1.0, 3.0, 1.0]
    assert (matrices["betas"], matrices["eps"], matrices["lr"]) == ((0.8, 0.9), 1e-6, 5.0)


@pytest.mark.parametrize("speculate", [True, False, "auto"])
def test_choices_of_offload_reach_the_optimizer(speculate: bool | Literal["auto"]) -> None:
    """How it overlaps, whether it begins early, and by how many threads."""
    section = OptimizerSection(
        offload_fraction=1.0, offload_overlap=False, speculate=speculate, host_threads=2
    )
    optimizer = build_optimizer(_model(), section)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    assert (optimizer._ahead.forecaster.speculate, optimizer.overlap) == (speculate, False)
    assert optimizer.host_threads == 2


@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize(("clip_norm", "limit"), [(0.25, 0.25), (None, math.inf)])
def test_our_adam_clips_by_itself(fraction: float, clip_norm: float | None, limit: float) -> None:
    """By the configured norm; without one it measures all the same."""
    section = OptimizerSection(clip_norm=clip_norm, offload_fraction=fraction)
    optimizer = build_optimizer(_model(), section)
    assert isinstance(optimizer, HybridDeviceOptimizer) == bool(fraction)
    assert optimizer.max_grad_norm == limit
