"""Element ranges as regions, and layouts of unevenly cut tensors, against numpy arrays."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megafsdp.buffer.dtensor.uneven_layout import Region, UnevenLayout, regions_of_range, whole
from megafsdp.mesh.model_part import part_of, whole_part

_EXTENTS = st.integers(1, 5)


@st.composite
def _ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(_EXTENTS, min_size=1, max_size=4)))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


def _elements(shape: tuple[int, ...], region: Region) -> list[int]:
    """Return the flat numbers of the elements in a region, in its row-major order."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    return numbers[region.slices_in(whole(shape))].ravel().tolist()


@given(_ranges())
@example(((3, 1, 4), 2, 10))
@example(((2, 3, 4, 5), 1, 119))
def test_regions_cover_a_range_element_by_element(case: tuple[tuple[int, ...], int, int]) -> None:
    """Regions in order are exactly the range, one after the other, and at most 2N - 1."""
    shape, start, stop = case
    regions = regions_of_range(shape, start, stop)
    covered = []
    for region in regions:
        assert min(region.sizes) > 0
        assert region.numel == math.prod(region.sizes)
        covered += _elements(shape, region)
    assert covered == list(range(start, stop))
    assert len(regions) <= 2 * len(shape) - 1


def test_the_bound_on_regions_is_reached() -> None:
    """A range that starts and stops inside the innermost rows needs 2N - 1 regions."""
    assert [len(regions_of_range((4,) * n, 1, 4**n - 1)) for n in (1, 2, 3, 4)] == [1, 3, 5, 7]


def test_whole_rows_are_one_region() -> None:
    """Cuts between rows need one region, whatever the trailing dimensions."""
    assert regions_of_range((5, 2, 3), 6, 24) == [Region((1, 0, 0), (3, 2, 3))]


def test_a_scalar_is_one_region_without_dimensions() -> None:
    """A 0-dim tensor has one element and no extents."""
    assert regions_of_range((), 0, 1) == [Region((), ())]
    assert regions_of_range((), 0, 0) == []


def _layout(
    shape: tuple[int, ...], *, num_shards: int, shard: int = 0, first_row: int = 0, shard_rows: int
) -> UnevenLayout:
    """Cut the rows of a tensor that lies ``first_row`` rows after the start of its sub-buffer."""
    row_numel = math.prod(shape[1:])
    return UnevenLayout(
        part=whole_part(shape),
        row_numel=row_numel,
        buffer_offset=first_row * row_numel,
        shard_numel=shard_rows * row_numel,
        num_shards=num_shards,
        shard=shard,
    )


@given(
    shape=st.lists(_EXTENTS, min_size=1, max_size=3).map(tuple),
    num_shards=st.integers(1, 5),
    first_row=st.integers(0, 9),
    spare_rows=st.integers(0, 9),
)
def test_shards_partition_a_tensor(
    shape: tuple[int, ...], num_shards: int, first_row: int, spare_rows: int
) -> None:
    """Ranges join without gap, agree with the elements that lie in each shard, and keep rows."""
    shard_rows = -(-(first_row + shape[0] + spare_rows) // num_shards)
    layout = _layout(shape, num_shards=num_shards, first_row=first_row, shard_rows=shard_rows)
    owners = (np.arange(layout.numel) + layout.buffer_offset) // layout.shard_numel
    end = 0
    for shard in range(num_shards):
        start, stop = layout.element_range(shard)
        assert start <= stop
        if start < stop:
            assert start == end
            end = stop
        assert np.flatnonzero(owners == shard).tolist() == list(range(start, stop))
        assert layout.local_shape(shard) == ((stop - start) // layout.row_numel, *shape[1:])
        assert sum(region.numel for region in layout.regions(shard)) == stop - start
    assert end == layout.numel


def test_default_shard_is_the_own_one() -> None:
    """The layout knows which shard this rank holds."""
    layout = _layout((10, 4), num_shards=3, shard=1, first_row=4, shard_rows=10)
    assert layout.element_range() == layout.element_range(1) == (24, 40)
    assert layout.local_shape() == (4, 4)
    assert layout.regions() == [Region((6, 0), (4, 4))]
    assert (layout.local_shape(2), layout.regions(2)) == ((0, 4), [])


def test_stacked_experts_are_cut_between_their_rows() -> None:
    """(E, N, K) with rows of K: the local tensor is (rows, K), and regions cross expert borders."""
    layout = UnevenLayout(whole_part((3, 4, 5)), 5, 0, 35, 2, 0)
    assert [layout.local_shape(s) for s in range(2)] == [(7, 5), (5, 5)]
    assert layout.regions(0) == [Region((0, 0, 0), (1, 4, 5)), Region((1, 0, 0), (1, 3, 5))]
    assert layout.regions(1) == [Region((1, 3, 0), (1, 1, 5)), Region((2, 0, 0), (1, 4, 5))]


@pytest.mark.parametrize("tp_dim", [0, 1])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_tensor_parallel_part_is_a_region_of_a_larger_tensor(tp_dim: int, tp_rank: int) -> None:
    """Rows of a tensor-parallel part, cut over 3 data-parallel shards, are named globally."""
    shape = (8, 6)
    part = tuple(n // 2 if d == tp_dim else n for d, n in enumerate(shape))
    offsets = tuple(tp_rank * part[d] if d == tp_dim else 0 for d in range(2))
    numbers = np.arange(48).reshape(shape)
    part_of_tensor = tuple(slice(o, o + n) for o, n in zip(offsets, part, strict=True))
    elements = numbers[part_of_tensor].ravel()
    layout = UnevenLayout(
        part_of(shape, tp_dim, 2, tp_rank), part[1], 2 * part[1], 3 * part[1], 4, 0
    )
    seen = []
    for shard in range(4):
        start, stop = layout.element_range(shard)
        named = [n for region in layout.regions(shard) for n in _elements(shape, region)]
        assert named == elements[start:stop].tolist()
        seen += named
    assert seen == elements.tolist()
    assert layout.numel == elements.size


def test_layout_is_a_value() -> None:
    """Layouts survive pickling, compare by value and are hashable; shards differ."""
    layout = _layout((10, 4), num_shards=3, shard=1, shard_rows=4)
    copied = pickle.loads(pickle.dumps(layout))
    assert copied == layout
    assert hash(copied) == hash(layout)
    assert copied != _layout((10, 4), num_shards=3, shard=2, shard_rows=4)
