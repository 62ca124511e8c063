"""Regions: intersections agree with index arithmetic on real tensors; replicas share the work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.checkpoint.format.regions import (
    Region,
    ReplicaBalance,
    local_regions,
    local_view,
    whole,
)

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


def test_scalars_and_empty_tensors_have_regions() -> None:
    """A 0-d tensor is one region without dimensions; a tensor without elements has none."""
    scalar = torch.tensor(3.0)
    (region,) = local_regions("scalar", scalar)
    assert region == Region((), ()) and region.numel == 1
    assert region.intersect(region) == region
    assert local_view(scalar, region)[region.slices_in(region)].item() == 3.0
    assert local_regions("empty", torch.empty(0, 4)) == []


def test_replicas_agree_on_one_writer_and_share_the_bytes() -> None:
    """Each region has exactly one writer, and no rank writes much more than its share."""
    numels = [7, 1000, 3, 500, 500, 20, 1000, 1, 1, 400]
    balances = [ReplicaBalance(rank, 3) for rank in range(3)]
    loads = [0, 0, 0]
    for numel in numels:
        tensor = cast(torch.Tensor, SimpleNamespace(element_size=lambda: 4))
        writers = [b.is_mine(tensor, Region((0,), (numel,))) for b in balances]
        assert sum(writers) == 1
        loads[writers.index(True)] += numel
    assert max(loads) <= sum(numels) / 3 + max(numels)
    assert min(loads) > 0
