"""Degrees of parallelism become device meshes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.mesh.parallel_dims import ParallelDims, default_mesh, flat_group
from tests.ranks import Ranks


@pytest.mark.parametrize("axis", ["dp_outer", "cp", "tp", "ep"])
@pytest.mark.parametrize("degree", [0, -1, "2", 2.0])
def test_degrees_must_be_positive_whole_numbers(axis: str, degree: Any) -> None:
    """Only dp_shard takes what is left."""
    with pytest.raises(ValueError, match=f"got {degree!r}.*'{axis}'"):
        ParallelDims(**{axis: degree})


@pytest.mark.parametrize("degree", [0, -2])
def test_shard_degree_is_positive_or_minus_one(degree: int) -> None:
    """-1 is the only negative degree with a meaning."""
    with pytest.raises(ValueError, match=f"got {degree}.*'dp_shard'"):
        ParallelDims(dp_shard=degree)


@pytest.mark.parametrize(
    ("dims", "world_size", "wanted"),
    [
        (ParallelDims(), 6, (1, 6)),
        (ParallelDims(dp_outer=2), 6, (2, 3)),
        (ParallelDims(dp_outer=6), 6, (6, 1)),
        (ParallelDims(dp_outer=2, dp_shard=4), 8, (2, 4)),
        (ParallelDims(), 1, (1, 1)),
        (ParallelDims(tp=2, cp=3), 12, (1, 2)),
        (ParallelDims(dp_outer=2, tp=2, ep=4), 16, (2, 4)),
    ],
)
def test_shard_degree_takes_what_is_left(
    dims: ParallelDims, world_size: int, wanted: tuple[int, int]
) -> None:
    """dp_shard is the world size over the other degrees, which stay; ep takes no ranks."""
    resolved = dims.resolve(world_size)
    assert (resolved.dp_outer, resolved.dp_shard) == wanted
    assert (resolved.cp, resolved.tp, resolved.ep) == (dims.cp, dims.tp, dims.ep)
    assert resolved.data_size == wanted[0] * wanted[1]


@pytest.mark.parametrize(
    ("dims", "world_size"),
    [
        (ParallelDims(dp_outer=4), 6),
        (ParallelDims(dp_outer=8), 6),
        (ParallelDims(dp_shard=4), 6),
        (ParallelDims(dp_outer=2, dp_shard=4), 6),
        (ParallelDims(tp=4), 6),
        (ParallelDims(dp_outer=2, cp=2), 6),
        (ParallelDims(dp_shard=2, tp=2), 6),
    ],
)
def test_degrees_must_multiply_to_the_world_size(dims: ParallelDims, world_size: int) -> None:
    """The message says the world size and how many processes would fit."""
    with pytest.raises(
        ValueError, match=f"world size {world_size}.*Start (a multiple of )?[48] processes"
    ):
        dims.resolve(world_size)


@pytest.mark.parametrize(("tp", "world_size"), [(3, 8), (4, 2)])
def test_a_shard_degree_of_minus_one_is_not_proposed_again(tp: int, world_size: int) -> None:
    """With it the other degrees alone are wrong: the cure is a multiple of them."""
    with pytest.raises(ValueError, match=f"Start a multiple of {tp} processes") as raised:
        ParallelDims(tp=tp).resolve(world_size)
    assert "-1" not in str(raised.value) and "dp_shard 0" not in str(raised.value)


def test_experts_are_shared_out_within_a_sharded_group() -> None:
    """Ranks of one ep group are neighbours, in one replica of the parameters."""
    assert ParallelDims(dp_outer=2, tp=2, ep=8).resolve(16).ep == 8
    with pytest.raises(ValueError, match=r"divisor of dp_shard x cp x tp = 8, got 16.*axis 'ep'"):
        ParallelDims(dp_outer=2, tp=2, ep=16).resolve(16)


@pytest.fixture
def fake_world(request: pytest.FixtureRequest) -> Iterator[int]:
    """Make this process rank 1029 of 4096 in a process group that communicates nothing."""
    dist.init_process_group("fake", rank=1029, world_size=4096)
    yield 4096
    dist.destroy_process_group()


def test_one_axis_over_4096_ranks(fake_world: int) -> None:
    """The default mesh is 1-D and holds every rank."""
    mesh = default_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_shard",)
    assert mesh.size() == fake_world
    assert mesh.get_local_rank() == 1029


def test_two_axes_over_4096_ranks(fake_world: int) -> None:
    """Neighbouring ranks share a shard group; rank 1029 is (2, 5) of (8, 512)."""
    mesh = ParallelDims(dp_outer=8).build("cpu").data
    assert mesh.mesh_dim_names == ("dp_outer", "dp_shard")
    assert tuple(mesh.shape) == (8, 512)
    assert tuple(mesh.get_coordinate()) == (2, 5)
    assert mesh["dp_shard"].mesh.tolist() == list(range(1024, 1536))
    assert mesh["dp_outer"].mesh.tolist() == list(range(5, 4096, 512))


def _own_ranks(mesh: DeviceMesh | None) -> list[int] | None:
    return None if mesh is None else mesh.mesh.tolist()


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(dp_outer=4, cp=4, tp=8, ep=16),
        ParallelDims(dp_outer=2, tp=8),
        ParallelDims(cp=2, tp=4, ep=2),
        ParallelDims(cp=8),
        ParallelDims(tp=4096),
        ParallelDims(ep=64),
    ],
    ids=str,
)
def test_every_degree_has_its_ranks_among_4096(fake_world: int, dims: ParallelDims) -> None:
    """Ranks of a mesh are those whose other coordinates equal this rank's, tp counted fastest."""
    dims = dims.resolve(fake_world)
    shape = (dims.dp_outer, dims.dp_shard, dims.cp, dims.tp)
    inner = fake_world // dims.dp_outer
    ranks = np.arange(fake_world)
    o, s, c, t = np.unravel_index(ranks, shape)
    # Experts: blocks of ep neighbours within a replica.
    block, e = ranks % inner // dims.ep, ranks % dims.ep
    has_experts = dims.ep > 1 or dims.tp > 1

    def alike(*coordinates: np.ndarray) -> list[int]:
        same = [axis == axis[1029] for axis in coordinates]
        return ranks[np.logical_and.reduce(same)].tolist()

    def divided(members: list[int]) -> list:
        return members if dims.dp_outer == 1 else np.reshape(members, (dims.dp_outer, -1)).tolist()

    meshes = dims.build("cpu")
    assert _own_ranks(meshes.data) == divided(alike(t))
    assert _own_ranks(meshes.tp) == (alike(o, s, c) if dims.tp > 1 else None)
    assert _own_ranks(meshes.cp) == (alike(o, s, t) if dims.cp > 1 else None)
    assert _own_ranks(meshes.experts) == (divided(alike(e)) if has_experts else None)
    assert _own_ranks(meshes.ep) == (alike(o, block) if dims.ep > 1 else None)
    assert meshes.data.mesh_dim_names == ("dp_outer", "dp_shard")[dims.dp_outer == 1 :]
    assert (meshes.data_rank, meshes.data_size) == (
        o[1029] * dims.dp_shard + s[1029],
        dims.dp_outer * dims.dp_shard,
    )


def test_mesh_that_does_not_fit_the_world_is_refused(fake_world: int) -> None:
    """The error comes before any group is made."""
    with pytest.raises(ValueError, match="world size 4096"):
        ParallelDims(dp_shard=3).build("cpu")


def _mesh_of_real_ranks() -> tuple[list[int], int, int]:
    mesh = ParallelDims(dp_outer=2).build("cpu").data
    return mesh.get_coordinate(), mesh.get_group(0).size(), mesh.get_group("dp_shard").rank()


def test_real_ranks_have_their_coordinates(ranks: Ranks) -> None:
    """Four gloo ranks make a 2 x 2 mesh with working groups."""
    assert [(tuple(c), m, s) for c, m, s in ranks(4).run(_mesh_of_real_ranks)] == [
        ((0, 0), 2, 0),
        ((0, 1), 2, 1),
        ((1, 0), 2, 0),
        ((1, 1), 2, 1),
    ]


def _sums_over_groups() -> dict[str, float]:
    meshes = ParallelDims(dp_outer=2, tp=2, ep=2).build("cpu")
    assert meshes.tp is not None and meshes.experts is not None and meshes.ep is not None
    groups = {
        "data": flat_group(meshes.data),
        "tp": meshes.tp.get_group(),
        "experts": flat_group(meshes.experts),
        "ep": meshes.ep.get_group(),
    }
    sums = {}
    for name, group in groups.items():
        number = torch.tensor(2.0 ** dist.get_rank())
        dist.all_reduce(number, group=group)
        sums[name] = number.item()
    return sums


def test_groups_of_every_mesh_communicate(ranks: Ranks) -> None:
    """Rank r adds 2**r: over data ranks 0 and 2 or 1 and 3, over tp and ep neighbours."""
    even, odd = {"data": 5.0, "experts": 5.0}, {"data": 10.0, "experts": 10.0}
    first, last = {"tp": 3.0, "ep": 3.0}, {"tp": 12.0, "ep": 12.0}
    wanted = [even | first, odd | first, even | last, odd | last]
    assert ranks(4).run(_sums_over_groups) == wanted


def _disagree() -> str:
    dims = ParallelDims(tp=2) if dist.get_rank() == 1 else ParallelDims(tp=2, ep=2)
    with pytest.raises(ValueError, match="the same degrees on all ranks") as error:
        dims.build("cpu")
    # Ranks that agree go on.
    assert ParallelDims(ep=2).build("cpu").experts is not None
    return str(error.value)


def test_ranks_with_other_degrees_are_refused_on_all(ranks: Ranks) -> None:
    """Where their process groups would wait for each other."""
    messages = ranks(4).run(_disagree)
    assert all("ep=1" in message and "ep=2" in message for message in messages)
