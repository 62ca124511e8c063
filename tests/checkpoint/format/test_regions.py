"""Regions agree with index arithmetic on real tensors; gaps, overlaps, replicas are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor

from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.checkpoint.format.regions import (
    ReplicaBalance,
    is_filled,
    local_regions,
    local_view,
    odd_cells,
)
from megafsdp.errors import CheckpointError
from tests.ranks import Ranks

_SHAPE = (5, 4, 3)


@st.composite
def _regions(draw: st.DrawFn) -> Region:
    offsets = tuple(draw(st.integers(0, n - 1)) for n in _SHAPE)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(_SHAPE, offsets, strict=True))
    return Region(offsets, sizes)


@given(left=_regions(), right=_regions())
def test_intersections_select_the_common_elements(left: Region, right: Region) -> None:
    """What two regions share is what both select from the whole tensor."""
    tensor = torch.arange(60).view(_SHAPE)
    everything = whole(_SHAPE)
    left_part, right_part = tensor[left.slices_in(everything)], tensor[right.slices_in(everything)]
    common = set(left_part.flatten().tolist()) & set(right_part.flatten().tolist())
    piece = left.intersect(right)
    assert piece == right.intersect(left)
    if piece is None:
        assert not common
        return
    assert set(left_part[piece.slices_in(left)].flatten().tolist()) == common
    assert torch.equal(left_part[piece.slices_in(left)], right_part[piece.slices_in(right)])
    assert piece.numel == len(common)


@given(data=st.data(), shape=st.lists(st.integers(1, 5), max_size=3).map(tuple))
def test_cells_agree_with_a_count_of_elements(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Whatever the regions, the odd cells hold exactly the elements that are not met once."""
    counts = torch.zeros(shape, dtype=torch.int64)
    regions = []
    for _ in range(data.draw(st.integers(0, 4))):
        offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        sizes = tuple(
            data.draw(st.integers(0, n - start)) for n, start in zip(shape, offsets, strict=True)
        )
        regions.append(Region(offsets, sizes))
        if regions[-1].numel:
            counts[regions[-1].slices_in(Region((0,) * len(shape), shape))] += 1
    found = torch.ones(shape, dtype=torch.int64)
    for cell, count in odd_cells(shape, regions):
        found[cell.slices_in(Region((0,) * len(shape), shape))] = count
    assert torch.equal(found, counts)


def test_a_region_outside_of_the_tensor_is_odd() -> None:
    """What reaches over the end is named."""
    assert odd_cells((2,), [Region((0,), (3,))]) == [(Region((2,), (1,)), 1)]


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_tensor_needs_no_region(shape: tuple[int, ...]) -> None:
    """Nothing is left out of nothing."""
    assert odd_cells(shape, []) == []


def test_pieces_fill_a_region_once() -> None:
    """Neither a gap nor an overlap passes, nor both of the same size."""
    region = Region((2, 1), (4, 3))
    top, bottom = Region((2, 1), (2, 3)), Region((4, 1), (2, 3))
    assert is_filled(region, [region]) and is_filled(region, [bottom, top])
    for pieces in ([], [top], [top, top], [top, bottom, top], [top, Region((3, 1), (2, 3))]):
        assert not is_filled(region, pieces)


def test_scalars_and_empty_tensors_have_regions() -> None:
    """A 0-d tensor is one region without dimensions; a tensor without elements has none."""
    scalar = torch.tensor(3.0)
    (region,) = local_regions("scalar", scalar)
    assert region == Region((), ()) and region.numel == 1
    assert region.intersect(region) == region
    assert local_view(scalar, region)[region.slices_in(region)].item() == 3.0
    assert local_regions("empty", torch.empty(0, 4)) == []


def _refused_rank(placement: Placement, numels: tuple[int, int]) -> None:
    """Ask for the regions of a DTensor of 5 elements, of which each rank has so many."""
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(numels[mesh.get_rank()])
    tensor = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=torch.Size((5,)), stride=(1,)
    )
    with pytest.raises(CheckpointError, match="'weight'"):
        local_regions("weight", tensor)


@pytest.mark.parametrize(("placement", "numels"), [(Partial(), (5, 5)), (Shard(0), (1, 4))])
def test_elements_that_regions_do_not_describe_are_refused(
    ranks: Ranks, placement: Placement, numels: tuple[int, int]
) -> None:
    """Sums that are not added up yet, and rows that torch takes for equal chunks."""
    ranks(2).run(_refused_rank, placement, numels)


def _num_regions() -> int:
    """Return how many regions this rank has of a row on all ranks, and on the first alone."""
    meshes = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [0])
    rows = [distribute_tensor(torch.ones(1, 2), mesh, [Shard(0)]) for mesh in meshes]
    return sum(len(local_regions("weight", tensor)) for tensor in rows)


def test_ranks_without_elements_have_no_regions(ranks: Ranks) -> None:
    """Not even empty ones, within the mesh or outside of it."""
    assert ranks(2).run(_num_regions) == [2, 0]


@pytest.mark.parametrize(
    "tensors",
    [
        [(numel, 4) for numel in (7, 1000, 3, 500, 500, 20, 1000, 1, 1, 400)],
        [(1000, 8), (1000, 1), (1000, 1)] * 4,
        [(1000, 4), (1000, 4), *[(1, 4)] * 300],
    ],
    ids=["one dtype", "dtypes", "scalars"],
)
def test_replicas_agree_on_one_writer_and_share_the_bytes(tensors: list[tuple[int, int]]) -> None:
    """Each region has one writer, and no rank much more than its share; scalars cost a record."""
    balances = [ReplicaBalance(rank, 3) for rank in range(3)]
    costs = [max(64, numel * itemsize) for numel, itemsize in tensors]
    loads = [0, 0, 0]
    for (numel, itemsize), cost in zip(tensors, costs, strict=True):
        tensor = cast(torch.Tensor, SimpleNamespace(element_size=lambda own=itemsize: own))
        writers = [b.is_mine(tensor, Region((0,), (numel,))) for b in balances]
        assert sum(writers) == 1
        loads[writers.index(True)] += cost
    assert max(loads) <= sum(costs) / 3 + max(costs)
    assert min(loads) > 0
