"""Units that only some microbatches of a step run, on all ranks alike."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import full_tensor, fully_shard
from tests.end_to_end.strategy_cases import told
from tests.fsdp.toy import adamw, assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

WIDTH = 6
NUM_EXPERTS = 3


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


def _steps(
    strategy: str, kind: str, experts_of_step: list[list[int]], mesh_shape: tuple[int, ...]
) -> list[list[bool]]:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("outer", "inner"))
    if mesh_shape[0] == 1:
        mesh = mesh["inner"]
    reference = Switch()
    net = copy.deepcopy(reference)
    for expert in net.experts:
        fully_shard(expert, strategy=strategy, mesh=mesh)
    fully_shard(net, strategy=strategy, mesh=mesh)
    optimizers = [adamw(reference), adamw(net)]
    world, rank = dist.get_world_size(), dist.get_rank()
    shown = []
    for step, experts in enumerate(experts_of_step):
        generator = torch.Generator().manual_seed(step)
        for k, expert in enumerate(experts):
            x = torch.randn(world, 2, WIDTH, generator=generator)
            (reference(x, expert) / len(experts)).backward()
            is_last = k == len(experts) - 1
            if kind == "set_requires_all_reduce":
                net.set_requires_all_reduce(is_last)
            with told(net, kind, k, len(experts)):
                (net(x[rank], expert) / len(experts)).backward()
            is_shown = any(p.grad is not None for p in net.parameters())
            assert is_shown or kind != "plain"
            assert not is_shown or is_last or kind != "no_sync"
        assert_same_grads(net, reference)
        shown.append([e.weight.grad is not None for e in net.experts])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)
    assert full_tensor(net.stem.weight.detach()).isfinite().all()
    return shown


@pytest.mark.parametrize(
    "kind", ["plain", "microbatch", "no_sync", "mixed", "set_requires_all_reduce"]
)
@pytest.mark.parametrize(
    ("strategy", "mesh_shape"),
    [
        ("no_shard", (1, 2)),
        ("optim", (1, 2)),
        ("optim_grads", (1, 2)),
        ("optim_grads_params", (1, 2)),
        ("optim_grads_params", (2, 2)),
        ("optim", (2, 2)),
    ],
)
def test_a_unit_that_the_last_microbatch_skips_still_gets_its_gradients(
    ranks: Ranks, strategy: str, mesh_shape: tuple[int, int], kind: str
) -> None:
    """Sums that wait for the last microbatch are reduced in it, whichever units it runs."""
    steps = [[0, 1, 0], [1, 1, 0], [0, 0, 1]]
    world = mesh_shape[0] * mesh_shape[1]
    shown = ranks(world).run(_steps, strategy, kind, steps, mesh_shape)
    assert shown == [[[True, True, False]] * 3] * world
