"""Coverage: gaps and overlaps of regions, against a count of every element."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.checkpoint.format.regions import Region, is_filled, odd_cells


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
