"""Units that only some microbatches of a step run, on all ranks alike."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import full_tensor, fully_shard
from tests.end_to_end.strategy_cases import told
from tests.fsdp.toy import assert_same_grads, assert_same_parameters, fused_adamw, with_grads
from tests.pairwise import gate_of
from tests.ranks import Ranks

WIDTH = 6
NUM_EXPERTS = 3

NAMES = ("strategy", "mesh_shape", "kind")
PRODUCT = [
    (strategy, mesh_shape, kind)
    for strategy, mesh_shape in (
        ("no_shard", (1, 2)),
        ("optim", (1, 2)),
        ("optim_grads", (1, 2)),
        ("optim_grads_params", (1, 2)),
        ("optim_grads_params", (2, 2)),
        ("optim", (2, 2)),
    )
    for kind in ("plain", "microbatch", "no_sync", "mixed", "set_requires_all_reduce")
]


class Switch(nn.Module):
    """A stem and experts, each a unit; a forward runs one expert, and one of them never runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_EXPERTS))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return the mean square of what one expert makes of x."""
        return self.experts[expert](torch.tanh(self.stem(x))).square().mean()


EXPERTS_OF_STEP = ((0, 1, 0), (1, 1, 0), (0, 0, 1))


def _inputs_of_step(step: int, world_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (world_size, 2, WIDTH)
    return [torch.randn(shape, generator=generator) for _ in EXPERTS_OF_STEP[step]]


@functools.cache
def _references(world_size: int) -> list[nn.Module]:
    """Return the module before each optimizer step and after the last; once a rank."""
    reference = Switch()
    optimizer = fused_adamw(reference)
    states = []
    for step, experts in enumerate(EXPERTS_OF_STEP):
        for x, expert in zip(_inputs_of_step(step, world_size), experts, strict=True):
            (reference(x, expert) / len(experts)).backward()
        states.append(with_grads(reference))
        optimizer.step()
        optimizer.zero_grad()
    return [*states, reference]


def _steps(strategy: str, mesh_shape: tuple[int, ...], kind: str) -> list[list[bool]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner"))
    if mesh_shape[0] == 1:
        mesh = mesh["inner"]
    net = Switch()
    for expert in net.experts:
        fully_shard(expert, strategy=strategy, mesh=mesh)
    fully_shard(net, strategy=strategy, mesh=mesh)
    optimizer = fused_adamw(net)
    world, rank = dist.get_world_size(), dist.get_rank()
    *before_steps, end = _references(world)
    shown = []
    for step, experts in enumerate(EXPERTS_OF_STEP):
        inputs = _inputs_of_step(step, world)
        for k, expert in enumerate(experts):
            is_last = k == len(experts) - 1
            if kind == "set_requires_all_reduce":
                net.set_requires_all_reduce(is_last)
            with told(net, kind, k, len(experts)):
                (net(inputs[k][rank], expert) / len(experts)).backward()
            is_shown = any(p.grad is not None for p in net.parameters())
            assert is_shown or kind != "plain"
            assert not is_shown or is_last or kind != "no_sync"
        assert_same_grads(net, before_steps[step])
        shown.append([e.weight.grad is not None for e in net.experts])
        optimizer.step()
        optimizer.zero_grad()
    assert_same_parameters(net, end, rtol=1e-4, atol=1e-5)
    assert full_tensor(net.stem.weight.detach()).isfinite().all()
    return shown


@pytest.mark.parametrize(NAMES, gate_of(PRODUCT, "partly-used"), ids=str)
def test_a_unit_that_the_last_microbatch_skips_still_gets_its_gradients(
    ranks: Ranks, strategy: str, mesh_shape: tuple[int, int], kind: str
) -> None:
    """Sums that wait for the last microbatch are reduced in it, whichever units it runs."""
    world = math.prod(mesh_shape)
    shown = ranks(world).run(_steps, strategy, mesh_shape, kind)
    assert shown == [[[True, True, False]] * 3] * world
