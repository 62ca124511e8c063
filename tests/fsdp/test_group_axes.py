"""Groups of one unit with ranks of their own, as experts have them, exercised by a toy."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import full_tensor
from megafsdp.fsdp.division import UnitMeshes
from megafsdp.fsdp.fsdp_module import mix_in
from megafsdp.fsdp.grouping import find_parameters
from megafsdp.fsdp.params.group_buffers import GroupDtypes
from megafsdp.fsdp.params.mesh_axes import DataParallelAxes
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.fsdp.params.unit_ledger import UnitMemory
from megafsdp.fsdp.placing import place_parameters
from megafsdp.fsdp.runtime.schedule import UnitOptions
from megafsdp.fsdp.runtime.unit import FSDPUnit
from megafsdp.fsdp.weight_sync import watch_optimizer_steps
from tests.ranks import Ranks

FP32 = GroupDtypes(torch.float32, torch.float32, torch.float32, torch.float32)


def _make_unit(
    module: nn.Module,
    axes_of: Callable[[str], DataParallelAxes],
    scale_of: Callable[[str], float],
) -> FSDPUnit:
    """Make a unit with one group for each axes its parameters are given."""
    policy, memory = MixedPrecisionPolicy(), UnitMemory()
    found = find_parameters([module], (), policy)
    place_parameters(found, [module], UnitMeshes())
    by_axes: dict[DataParallelAxes, list] = {}
    for item in found:
        by_axes.setdefault(axes_of(item.record.name), []).append(item)
    groups = [
        ParameterGroup(
            [item.parameter for item in items],
            [item.record for item in items],
            axes=axes,
            dtypes=FP32,
            memory=memory,
            gradient_scale=scale_of(items[0].record.name),
        )
        for axes, items in by_axes.items()
    ]
    mix_in(module)
    watch_optimizer_steps()
    return FSDPUnit(
        [module],
        groups,
        policy=policy,
        memory=memory,
        options=UnitOptions(1, None),
    )


class Mixture(nn.Module):
    """A dense layer, and an expert that only this rank has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply both."""
        return self.expert(self.dense(x)).square().mean()


def _two_axes_in_one_unit() -> None:
    rank = dist.get_rank()
    reference = Mixture()
    net = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    axes = {name: DataParallelAxes.sharded(mesh[name]) for name in ("all", "alone")}
    _make_unit(
        net,
        lambda name: axes["alone" if name.startswith("expert") else "all"],
        lambda name: 0.5,
    )
    x = torch.arange(32.0).view(2, 2, 8) / 32
    for _ in range(2):
        losses = [reference(x[r]) for r in range(2)]
        dense = torch.autograd.grad(sum(losses) / 2, list(reference.dense.parameters()))
        expert = torch.autograd.grad(reference(x[rank]) / 2, list(reference.expert.parameters()))
        net.zero_grad()
        net(x[rank]).backward()
        for p, wanted in zip(net.parameters(), [*dense, *expert], strict=True):
            torch.testing.assert_close(full_tensor(p.grad), wanted)
    assert [g.axes.num_shards for g in net._fsdp_unit().groups] == [2, 1]


def test_dense_and_expert_parameters_share_a_unit(ranks: Ranks) -> None:
    """The group owns mesh, process group and divisor, not the unit."""
    ranks(2).run(_two_axes_in_one_unit)
