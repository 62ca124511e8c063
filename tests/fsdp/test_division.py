"""Arguments of ``fully_shard`` become the ranks that divide a unit, or are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megafsdp import fully_shard
from megafsdp.fsdp.division import UnitMeshes, division_of, strategy_of
from megafsdp.fsdp.params.policy import Average, Strategy
from megafsdp.mesh.spmd import spmd_mesh_of
from tests.fsdp.test_spmd_mesh import Dims
from tests.ranks import Ranks

ZERO_3 = Strategy.OPTIM_GRADS_PARAMS


def _reshards() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "alone"))
    division = division_of(mesh["all"], UnitMeshes(), ZERO_3, "no_shard", Average.RANK)
    found = [division.reshard_of(choice) for choice in (None, True, False, 1, 2)]
    # Compared by identity: 1 is equal to True.
    assert all(f is w for f, w in zip(found, (None, True, False, False, True), strict=True))
    experts = UnitMeshes(experts=mesh["alone"])
    division = division_of(mesh["all"], experts, ZERO_3, "no_shard", Average.RANK)
    assert division.reshard_of(1) is False
    assert division.reshard_of(2) == 2 and division.reshard_of(2) is not True


def test_a_number_of_ranks_that_divides_nothing_keeps_or_frees_weights(ranks: Ranks) -> None:
    """One rank has all of them, and all ranks have a shard each: neither makes a slice."""
    ranks(2).run(_reshards)


def _devices() -> None:
    mesh = init_device_mesh("cpu", (2,))
    other: Any = SimpleNamespace(device_type="cuda", ndim=1, shape=(2,))
    with pytest.raises(ValueError, match=r"of the device 'cpu', as the other has, got.*'cuda'"):
        division_of(mesh, UnitMeshes(experts=other), ZERO_3, "no_shard", Average.RANK)


def test_a_mesh_of_experts_of_another_device_is_refused(ranks: Ranks) -> None:
    """One unit's buffers are on one device."""
    ranks(2).run(_devices)


def _replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for dims, strategy in (
        (Dims(shard_names=("dp",)), ZERO_3),
        (Dims(replicate_names=("dp",)), Strategy.NO_SHARD),
    ):
        layer = nn.Linear(4, 4, bias=False)
        whole = layer.weight.detach()
        layer.weight = nn.Parameter(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
        fully_shard(layer, mesh=mesh, dp_mesh_dims=dims)
        (group,) = layer._fsdp_unit().groups
        assert group.axes.is_sharded == (strategy is ZERO_3)
        assert strategy_of("optim_grads_params", spmd_mesh_of(mesh, dims)) is strategy


def test_axes_that_only_repeat_make_replicas(ranks: Ranks) -> None:
    """Whatever the strategy: a full mesh then names no axis that divides, as in torch."""
    ranks(2).run(_replicas)
