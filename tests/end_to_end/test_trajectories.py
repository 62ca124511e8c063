"""Training sharded equals training in one process: twenty steps, every loss and every parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import clip_grad_norm_, full_tensor, fully_shard_model
from megafsdp.models import ModelConfig, build_model, presets, unit_classes
from tests.ranks import Ranks

NUM_STEPS = 20
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


def _trajectory(
    architecture: str,
    optimizer_name: str,
    strategy: str,
    mesh_shape: tuple[int, ...] = (),
) -> float:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("o", "i")) if mesh_shape else None
    world, rank = dist.get_world_size(), dist.get_rank()
    config = tiny(architecture)
    reference = build_model(config, seed=3)
    start = copy.deepcopy(reference)
    model = build_model(config, seed=3)
    fully_shard_model(model, unit_classes(config), strategy=strategy, mesh=mesh)
    optimizers = [make_optimizer(m, optimizer_name) for m in (reference, model)]
    generator = torch.Generator().manual_seed(7)
    for _ in range(NUM_STEPS):
        ids = torch.randint(0, 67, (GLOBAL_BATCH, SEQUENCE_LENGTH + 1), generator=generator)
        tokens, labels = ids[:, :-1], ids[:, 1:]
        wanted = reference(tokens, labels)
        wanted.backward()
        rows = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss = model(tokens[rows], labels[rows])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        torch.testing.assert_close(mean, wanted.detach(), rtol=1e-5, atol=1e-5)
        norms = [
            nn.utils.clip_grad_norm_(reference.parameters(), 1.0),
            clip_grad_norm_(model, 1.0),
        ]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wanted_parameters, first = dict(reference.named_parameters()), dict(start.named_parameters())
    worst = 0.0
    for name, parameter in model.named_parameters():
        full, expected = full_tensor(parameter.detach()), wanted_parameters[name].detach()
        torch.testing.assert_close(
            full, expected, rtol=RTOL, atol=ATOL, msg=lambda m, n=name: n + m
        )
        worst = max(worst, (full - expected).abs().max().item())
        assert not torch.equal(full, first[name].detach()), f"{name} did not move"
    return worst


OPTIMIZERS = ("adamw-foreach", "adamw-fused", "sgd-foreach", "sgd-fused")
# Every pair of (ranks, architecture), (ranks, optimizer) and (architecture, optimizer) occurs.
PAIRWISE = [
    (1, "gpt", "adamw-foreach"),
    (1, "qwen3", "adamw-fused"),
    (1, "gpt", "sgd-fused"),
    (1, "qwen3", "sgd-foreach"),
    (2, "qwen3", "adamw-foreach"),
    (2, "gpt", "adamw-fused"),
    (2, "qwen3", "sgd-fused"),
    (2, "gpt", "sgd-foreach"),
    (3, "gpt", "adamw-foreach"),
    (3, "qwen3", "adamw-fused"),
    (3, "gpt", "sgd-fused"),
    (3, "qwen3", "sgd-foreach"),
    (4, "qwen3", "adamw-foreach"),
    (4, "gpt", "adamw-fused"),
    (4, "qwen3", "sgd-fused"),
    (4, "gpt", "sgd-foreach"),
]


@pytest.mark.parametrize(("num_ranks", "architecture", "optimizer"), PAIRWISE)
def test_twenty_sharded_steps_equal_one_process(
    ranks: Ranks, num_ranks: int, architecture: str, optimizer: str
) -> None:
    """ZeRO-3 on 1 to 4 ranks: losses, gradient norms and every parameter."""
    ranks(num_ranks).run(_trajectory, architecture, optimizer, "optim_grads_params")


@pytest.mark.parametrize(
    ("num_ranks", "strategy", "architecture"),
    [
        (2, "optim", "gpt"),
        (3, "optim", "qwen3"),
        (2, "optim_grads", "qwen3"),
        (3, "no_shard", "gpt"),
    ],
)
def test_twenty_steps_of_other_strategies_equal_one_process(
    ranks: Ranks, num_ranks: int, strategy: str, architecture: str
) -> None:
    """ZeRO-1, ZeRO-2 and DDP train as ZeRO-3 does."""
    ranks(num_ranks).run(_trajectory, architecture, "adamw-fused", strategy)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (1, 4), (4, 1)])
def test_twenty_steps_of_replicated_shards_equal_one_process(
    ranks: Ranks, mesh_shape: tuple[int, int]
) -> None:
    """HSDP trains as ZeRO-3 does."""
    ranks(4).run(_trajectory, "qwen3", "adamw-foreach", "optim_grads_params", mesh_shape)


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
    ranks(num_ranks).run(_trajectory, architecture, optimizer, strategy)
