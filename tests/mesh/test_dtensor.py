"""Placements of parts, and meshes joined of data axes and a model axis."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from megafsdp.mesh import dtensor
from megafsdp.mesh.dtensor import cut_dim, group_of_axes, joined_mesh, main_weight_placements
from megafsdp.mesh.model_part import part_of
from megafsdp.mesh.torch_private import StridedShard
from tests.ranks import Ranks


def test_placements_say_what_they_cut() -> None:
    """Strided shards cut too; replicas and partial sums do not."""
    cases: list[tuple[Placement, int | None]] = [
        (Shard(0), 0),
        (Shard(2), 2),
        (StridedShard(0, split_factor=2), 0),
        (StridedShard(1, split_factor=4), 1),
        (Replicate(), None),
        (Partial(), None),
    ]
    assert [cut_dim(placement) for placement, _ in cases] == [dim for _, dim in cases]


@pytest.mark.parametrize(
    ("num_data_axes", "num_shard_axes", "dim", "wanted"),
    [
        (1, 1, 0, (StridedShard(0, split_factor=2), Shard(0))),
        (1, 1, 1, (Shard(0), Shard(1))),
        (1, 1, None, (Shard(0), Replicate())),
        (1, 0, 0, (Replicate(), Shard(0))),
        (2, 1, 0, (Replicate(), StridedShard(0, split_factor=2), Shard(0))),
        (2, 2, 1, (Shard(0), Shard(0), Shard(1))),
        (2, 2, None, (Shard(0), Shard(0), Replicate())),
    ],
)
def test_main_weights_show_placements(
    num_data_axes: int, num_shard_axes: int, dim: int | None, wanted: tuple[Placement, ...]
) -> None:
    """Data axes, then the model axis; strided where both cut rows."""
    part = part_of((8, 6), dim, 2, 0)
    assert main_weight_placements(num_data_axes, num_shard_axes, part, 1) == wanted
    assert main_weight_placements(num_data_axes, num_shard_axes, part, 0) == tuple(
        Shard(0) if axis >= num_data_axes - num_shard_axes else Replicate()
        for axis in range(num_data_axes)
    )


def _placed_as_fsdp2(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    root = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data, tp = root[names[:-1]], root["tp"]
    linear = nn.Linear(4, 8)
    for name, dim in (("weight", 0), ("bias", None)):
        placement = Replicate() if dim is None else Shard(dim)
        cut = distribute_tensor(getattr(linear, name).detach(), tp, [placement])
        setattr(linear, name, nn.Parameter(cut))
    rows = nn.Linear(4, 8, bias=False)
    rows.weight = nn.Parameter(distribute_tensor(rows.weight.detach(), tp, [Shard(1)]))
    module = nn.Sequential(linear, rows)
    fully_shard(module, mesh=data)
    for parameter, dim in zip(module.parameters(), (0, None, 1), strict=True):
        assert isinstance(parameter, DTensor)
        part = part_of(tuple(parameter.shape), dim, 2, tp.get_local_rank())
        wanted = main_weight_placements(data.ndim, 1, part, 1)
        assert parameter.placements == wanted
        assert joined_mesh(data, tp) == parameter.device_mesh


def test_placements_are_those_of_fsdp2(ranks: Ranks) -> None:
    """Column, row and replicated weights, sharded and as HSDP: torch shows the same."""
    ranks(4).run(_placed_as_fsdp2, (2, 2), ("dp_shard", "tp"))
    ranks(4).run(_placed_as_fsdp2, (2, 1, 2), ("dp_outer", "dp_shard", "tp"))


def _joined(has_concatenate: bool) -> None:
    concatenate = dtensor.concatenate_meshes
    if not has_concatenate:
        # As torch 2.11, which has no such function.
        dtensor.concatenate_meshes = lambda meshes: None
    try:
        _check_joined()
    finally:
        dtensor.concatenate_meshes = concatenate


def _check_joined() -> None:
    root = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_outer", "dp_shard", "tp"))
    rank = torch.distributed.get_rank()
    joined = joined_mesh(root["dp_outer", "dp_shard"], root["tp"])
    assert joined.mesh.tolist() == root.mesh.tolist()
    assert joined.mesh_dim_names == root.mesh_dim_names
    for axis in range(3):
        assert joined.get_group(axis) is root.get_group(axis)
    _check_groups(joined, rank)
    # The model axis need not be the inner one.
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
    joined = joined_mesh(outer["dp_shard"], outer["tp"])
    assert joined.mesh.tolist() == [[0, 2], [1, 3]]
    assert joined.get_coordinate() == outer.get_coordinate()[::-1]
    assert joined["tp"].mesh.tolist() == outer["tp"].mesh.tolist()
    # Without names there are those of the data axes, and numbers.
    unnamed = [DeviceMesh.from_group(outer.get_group(axis), "cpu") for axis in ("dp_shard", "tp")]
    joined = joined_mesh(*unnamed)
    assert joined.mesh.tolist() == [[0, 2], [1, 3]]
    assert joined.mesh_dim_names == ("dp_shard", "model_0")
    # A rank would be there twice, or would be a fifth one.
    for members in (([0, 1], [1, 2]), ([1, 3], [1, 2])):
        groups = [torch.distributed.new_group(each) for each in members]
        if rank == 1:
            with pytest.raises(ValueError, match=r"in common, got ranks \[\["):
                joined_mesh(*(DeviceMesh.from_group(group, "cpu") for group in groups))
    # Meshes that were made apart.
    other_root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    apart = joined_mesh(other_root["x"], outer["dp_shard"])
    assert apart.mesh.tolist() == [[0, 1], [2, 3]]
    assert apart.mesh_dim_names == ("x", "dp_shard")
    for other in (root["tp"], outer["dp_shard"], root["dp_outer", "tp"]):
        with pytest.raises(ValueError, match=r"this rank alone in common, got ranks \[\d, \d"):
            joined_mesh(root["tp"], other)


def _check_groups(joined: DeviceMesh, rank: int) -> None:
    members = torch.distributed.get_process_group_ranks
    assert members(group_of_axes(joined, [0, 1, 2])) == [0, 1, 2, 3]
    assert members(group_of_axes(joined, [1, 2])) == ([0, 1], [2, 3])[rank // 2]
    assert members(group_of_axes(joined, [0, 1])) == ([0, 2], [1, 3])[rank % 2]
    assert members(group_of_axes(joined, [2])) == ([0, 1], [2, 3])[rank // 2]


@pytest.mark.parametrize("has_concatenate", [True, False])
def test_data_axes_and_a_model_axis_join(ranks: Ranks, has_concatenate: bool) -> None:
    """Ranks, names and groups are those of the meshes joined, also without torch's function."""
    ranks(4).run(_joined, has_concatenate)
