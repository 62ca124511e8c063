"""Degrees of parallelism become device meshes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megafsdp.mesh.parallel_dims import ParallelDims, default_mesh
from tests.ranks import Ranks


@pytest.mark.parametrize("axis", ["cp", "tp", "ep"])
def test_reserved_axes_are_not_built(axis: str) -> None:
    """A degree of context, tensor or expert parallelism is a wish for later, named."""
    with pytest.raises(NotImplementedError, match=f"got 2.*'{axis}'"):
        ParallelDims(**{axis: 2})


@pytest.mark.parametrize("axis", ["dp_outer", "cp", "tp", "ep"])
@pytest.mark.parametrize("degree", [0, -1])
def test_degrees_must_be_positive(axis: str, degree: int) -> None:
    """Only dp_shard takes what is left."""
    with pytest.raises(ValueError, match=f"got {degree}.*'{axis}'"):
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
    ],
)
def test_shard_degree_takes_what_is_left(
    dims: ParallelDims, world_size: int, wanted: tuple[int, int]
) -> None:
    """dp_shard is the world size over dp_outer."""
    resolved = dims.resolve(world_size)
    assert (resolved.dp_outer, resolved.dp_shard) == wanted


@pytest.mark.parametrize(
    ("dims", "world_size"),
    [
        (ParallelDims(dp_outer=4), 6),
        (ParallelDims(dp_outer=8), 6),
        (ParallelDims(dp_shard=4), 6),
        (ParallelDims(dp_outer=2, dp_shard=4), 6),
    ],
)
def test_degrees_must_multiply_to_the_world_size(dims: ParallelDims, world_size: int) -> None:
    """The message says the world size and how many processes would fit."""
    with pytest.raises(ValueError, match=f"world size {world_size}.*Start [48] processes"):
        dims.resolve(world_size)


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
    mesh = ParallelDims(dp_outer=8).build_mesh("cpu")
    assert mesh.mesh_dim_names == ("dp_outer", "dp_shard")
    assert tuple(mesh.shape) == (8, 512)
    assert tuple(mesh.get_coordinate()) == (2, 5)
    assert mesh["dp_shard"].mesh.tolist() == list(range(1024, 1536))
    assert mesh["dp_outer"].mesh.tolist() == list(range(5, 4096, 512))


def test_mesh_that_does_not_fit_the_world_is_refused(fake_world: int) -> None:
    """The error comes before any group is made."""
    with pytest.raises(ValueError, match="world size 4096"):
        ParallelDims(dp_shard=3).build_mesh("cpu")


def _mesh_of_real_ranks() -> tuple[list[int], int, int]:
    mesh = ParallelDims(dp_outer=2).build_mesh("cpu")
    return mesh.get_coordinate(), mesh.get_group(0).size(), mesh.get_group("dp_shard").rank()


def test_real_ranks_have_their_coordinates(ranks: Ranks) -> None:
    """Four gloo ranks make a 2 x 2 mesh with working groups."""
    assert [(tuple(c), m, s) for c, m, s in ranks(4).run(_mesh_of_real_ranks)] == [
        ((0, 0), 2, 0),
        ((0, 1), 2, 1),
        ((1, 0), 2, 0),
        ((1, 1), 2, 1),
    ]
