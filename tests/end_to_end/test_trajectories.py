"""Training sharded equals training in one process: every loss, norm and parameter.

Four steps by default, twenty with ``--full trajectories``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import clip_grad_norm_, full_tensor, fully_shard_model
from megafsdp.models import ModelConfig, build_model, presets, unit_classes
from tests.ranks import Ranks

GLOBAL_BATCH = 12
SEQUENCE_LENGTH = 12
SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "head_dim": 8,
    "ffn_hidden_size": 40,
    "vocab_size": 67,
    "max_sequence_length": SEQUENCE_LENGTH,
}
# The largest difference seen is 2e-6; different summation order over ranks feeds through 20 steps.
RTOL, ATOL = 1e-4, 1e-5


def tiny(architecture: str) -> ModelConfig:
    """Return a tiny model of an architecture."""
    config = {"gpt": presets["gpt-toy"], "qwen3": presets["qwen3-toy"]}[architecture]
    sizes = dict(SIZES)
    if architecture == "gpt":
        sizes |= {"num_query_groups": 4, "head_dim": 6}
    return type(config)(**{**vars_of(config), **sizes})


def vars_of(config: ModelConfig) -> dict[str, object]:
    """Return a config's fields."""
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def make_optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    """Return AdamW or SGD with momentum, in its foreach or fused form."""
    kind, form = name.split("-")
    forms = {"foreach": form == "foreach", "fused": form == "fused"}
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-5, **forms)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **forms)


@dataclass(frozen=True)
class OneProcess:
    """Losses, gradient norms and parameters of training in one process on the global batches."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]


@functools.cache
def one_process(architecture: str, optimizer_name: str, num_steps: int) -> OneProcess:
    """Train in one process."""
    model = build_model(tiny(architecture), seed=3)
    start = _parameters_of(model)
    optimizer = make_optimizer(model, optimizer_name)
    losses, norms = [], []
    for tokens, labels in _batches(num_steps):
        loss = model(tokens, labels)
        loss.backward()
        losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
    return OneProcess(losses, norms, start, _parameters_of(model))


def _parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _batches(num_steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    shape = (GLOBAL_BATCH, SEQUENCE_LENGTH + 1)
    drawn = [torch.randint(0, 67, shape, generator=generator) for _ in range(num_steps)]
    return [(ids[:, :-1], ids[:, 1:]) for ids in drawn]


def _trajectory(
    wanted: OneProcess,
    architecture: str,
    optimizer_name: str,
    strategy: str,
    mesh_shape: tuple[int, ...],
) -> None:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("o", "i")) if mesh_shape else None
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
    config = tiny(architecture)
    model = build_model(config, seed=3)
    fully_shard_model(model, unit_classes(config), strategy=strategy, mesh=mesh)
    optimizer = make_optimizer(model, optimizer_name)
    for step, (tokens, labels) in enumerate(_batches(len(wanted.losses))):
        loss = model(tokens[rows], labels[rows])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, wanted.losses[step], rtol=1e-5, atol=1e-5)
        norm = clip_grad_norm_(model, 1.0)
        torch.testing.assert_close(norm, wanted.norms[step], rtol=1e-4, atol=0)
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        full, expected = full_tensor(parameter.detach()), wanted.end[name]
        torch.testing.assert_close(
            full, expected, rtol=RTOL, atol=ATOL, msg=lambda m, n=name: n + m
        )
        assert not torch.equal(full, wanted.start[name]), f"{name} did not move"


def _check(
    ranks: Ranks,
    num_ranks: int,
    architecture: str,
    optimizer: str,
    strategy: str = "optim_grads_params",
    mesh_shape: tuple[int, ...] = (),
    *,
    num_steps: int = 4,
) -> None:
    wanted = one_process(architecture, optimizer, num_steps)
    ranks(num_ranks).run(_trajectory, wanted, architecture, optimizer, strategy, mesh_shape)


OPTIMIZERS = ("adamw-foreach", "adamw-fused", "sgd-foreach", "sgd-fused")
# Every pair of (ranks, architecture) and (architecture, optimizer) occurs.
SELECTED = [
    (1, "gpt", "adamw-foreach"),
    (1, "qwen3", "adamw-fused"),
    (2, "gpt", "sgd-fused"),
    (2, "qwen3", "sgd-foreach"),
    (3, "gpt", "adamw-fused"),
    (3, "qwen3", "sgd-fused"),
    (4, "gpt", "sgd-foreach"),
    (4, "qwen3", "adamw-foreach"),
]


@pytest.mark.parametrize(("num_ranks", "architecture", "optimizer"), SELECTED)
def test_sharded_steps_equal_one_process(
    ranks: Ranks, num_ranks: int, architecture: str, optimizer: str
) -> None:
    """ZeRO-3 on 1 to 4 ranks: losses, gradient norms and every parameter."""
    _check(ranks, num_ranks, architecture, optimizer)


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "architecture"),
    [
        (2, "optim", "gpt"),
        (3, "optim", "qwen3"),
        (2, "optim_grads", "qwen3"),
        (3, "no_shard", "gpt"),
    ],
)
def test_steps_of_other_strategies_equal_one_process(
    ranks: Ranks, num_ranks: int, strategy: str, architecture: str
) -> None:
    """ZeRO-1, ZeRO-2 and DDP train as ZeRO-3 does."""
    _check(ranks, num_ranks, architecture, "adamw-fused", strategy)


@pytest.mark.parametrize(
    "num_steps", [4, pytest.param(20, marks=pytest.mark.matrix("trajectories"))]
)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (4, 1)])
def test_steps_of_replicated_shards_equal_one_process(
    ranks: Ranks, mesh_shape: tuple[int, int], num_steps: int
) -> None:
    """HSDP trains as ZeRO-3 does."""
    strategy = "optim_grads_params"
    _check(ranks, 4, "qwen3", "adamw-foreach", strategy, mesh_shape, num_steps=num_steps)


# torch has no fused SGD for plain DTensors, which replicated parameters are; it says so itself.
PRODUCT = [
    (num_ranks, architecture, optimizer, strategy)
    for num_ranks in (1, 2, 3, 4)
    for architecture in ("gpt", "qwen3")
    for optimizer in OPTIMIZERS
    for strategy in ("optim_grads_params", "optim_grads", "optim", "no_shard")
    if (optimizer, strategy) != ("sgd-fused", "no_shard")
]


@pytest.mark.matrix("trajectories")
@pytest.mark.parametrize(("num_ranks", "architecture", "optimizer", "strategy"), PRODUCT)
def test_twenty_steps_of_the_whole_product(
    ranks: Ranks, num_ranks: int, architecture: str, optimizer: str, strategy: str
) -> None:
    """Every strategy, every optimizer form, both architectures, 1 to 4 ranks."""
    _check(ranks, num_ranks, architecture, optimizer, strategy, num_steps=20)
