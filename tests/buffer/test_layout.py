"""Flat layouts: who owns what, what is free, and layouts of buffers with fewer elements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from megafsdp.buffer.layout import FlatLayout, Slot, SubBuffer, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.mesh.placement import TensorAtomic
from tests.strategies import shape_sets, world_sizes

NOBODY = -1
# Two ranks, the drawing of the module: A of rows of 3, B of rows of 4, shards of 24 elements.
DRAWN = FlatLayout(
    2,
    (SubBuffer(0, 0, 24),),
    (Slot(TensorSpec("a", (4, 3)), 0, 0), Slot(TensorSpec("b", (6, 4)), 0, 12)),
)


def _one(spec: TensorSpec, *, num_shards: int, shard_numel: int, offset: int = 0) -> FlatLayout:
    return FlatLayout(num_shards, (SubBuffer(0, 0, shard_numel),), (Slot(spec, 0, offset),))


def _tensor_of_each_element(layout: FlatLayout) -> np.ndarray:
    """Return, for each element of the gathered buffer, the tensor it belongs to, by slots alone."""
    owners = np.full(layout.gathered_numel, NOBODY)
    for index, slot in enumerate(layout.slots):
        start = layout.sub_buffers[slot.sub_buffer].gathered_offset + slot.offset
        assert (owners[start : start + slot.spec.numel] == NOBODY).all(), "tensors overlap"
        owners[start : start + slot.spec.numel] = index
    return owners


def _local_part(layout: FlatLayout, gathered: np.ndarray, shard: int) -> np.ndarray:
    """Return what a shard holds of a gathered array: its piece of every sub-buffer."""
    pieces = []
    for sub in layout.sub_buffers:
        start = sub.gathered_offset + shard * sub.shard_numel
        pieces.append(gathered[start : start + sub.shard_numel])
    return np.concatenate(pieces)


def test_drawn_layout_answers_as_drawn() -> None:
    """The example of the docstring, number by number."""
    assert [DRAWN.owned_range(0, s) for s in range(2)] == [(0, 12), (12, 12)]
    assert [DRAWN.owned_range(1, s) for s in range(2)] == [(0, 12), (12, 24)]
    assert [DRAWN.local_offset(1, s) for s in range(2)] == [12, 0]
    assert DRAWN.gathered_offset(1) == 12
    assert DRAWN.gaps() == [(36, 48)]
    assert [DRAWN.local_gaps(s) for s in range(2)] == [[], [(12, 24)]]
    assert (DRAWN.gathered_numel, DRAWN.shard_numel, DRAWN.padding_numel) == (48, 24, 12)


@given(shapes=shape_sets(with_zero_dim=False, with_empty=False, max_size=6), n=world_sizes(8))
def test_answers_agree_with_a_map_of_all_elements(shapes: list[tuple[int, ...]], n: int) -> None:
    """Owned ranges, offsets and gaps equal what a map from element to tensor says."""
    layout = plan_layout([TensorSpec(f"t{i}", s) for i, s in enumerate(shapes)], n)
    owners = _tensor_of_each_element(layout)
    numbers = np.zeros(layout.gathered_numel, dtype=np.int64)
    for index, slot in enumerate(layout.slots):
        start = layout.gathered_offset(index)
        numbers[start : start + slot.spec.numel] = np.arange(slot.spec.numel)
    free = np.concatenate([np.arange(*gap) for gap in layout.gaps()] or [np.arange(0)])
    assert np.array_equal(free, np.flatnonzero(owners == NOBODY))
    assert layout.padding_numel == free.size
    for shard in range(n):
        local, local_numbers = (_local_part(layout, a, shard) for a in (owners, numbers))
        for index in range(len(shapes)):
            start, stop = layout.owned_range(index, shard)
            where = np.flatnonzero(local == index)
            assert local_numbers[where].tolist() == list(range(start, stop))
            first = layout.local_offset(index, shard)
            assert where.tolist() == list(range(first, first + stop - start))
        gaps = [np.arange(*gap) for gap in layout.local_gaps(shard)]
        assert np.array_equal(
            np.concatenate(gaps or [np.arange(0)]), np.flatnonzero(local == NOBODY)
        )


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([("a", (2, 8), 0), ("b", (2, 8), 8)], "b overlaps"),
        ([("a", (9, 8), 0)], "a leaves"),
        ([("a", (2, 8), 60)], "a leaves"),
        ([("a", (3, 7), 20)], "a is cut inside a row"),
        ([("a", (2, 24), 0)], "a is cut inside a row"),
    ],
)
def test_broken_layout_is_an_assertion(
    slots: list[tuple[str, tuple[int, ...], int]], message: str
) -> None:
    """A planner's mistake is caught on construction and names the tensor."""
    with pytest.raises(AssertionError, match=message):
        FlatLayout(
            2,
            (SubBuffer(0, 0, 32),),
            tuple(Slot(TensorSpec(name, shape), 0, offset) for name, shape, offset in slots),
        )


def test_row_cut_beyond_the_first_boundary_is_an_assertion() -> None:
    """The first boundary may fall between rows and the second inside one."""
    with pytest.raises(AssertionError, match="a is cut"):
        _one(TensorSpec("a", (8, 12)), num_shards=4, shard_numel=32, offset=8)


def test_whole_tensors_are_not_cut_either() -> None:
    """A cut that rows allow is refused for a tensor that stays in one place."""
    shape = (8, 8)
    _one(TensorSpec("rows", shape), num_shards=2, shard_numel=32)
    with pytest.raises(AssertionError, match="cut inside"):
        _one(TensorSpec("kept", shape, TensorAtomic()), num_shards=2, shard_numel=32)


def test_spec_knows_its_granule() -> None:
    """A row by default, a declared row of stacked experts, 1 for vectors and scalars."""
    assert TensorSpec("t", (3, 4, 5)).granule == 20
    assert TensorSpec("t", (3, 4, 5), row_numel=5).granule == 5
    assert TensorSpec("t", (7,)).granule == 1
    assert (TensorSpec("t", ()).numel, TensorSpec("t", ()).granule) == (1, 1)
    assert TensorSpec("t", (0, 5)).numel == 0


def test_fingerprint_follows_the_layout() -> None:
    """Equal layouts agree; another shape, order, name or number of shards does not."""
    specs = [TensorSpec("a", (4, 8)), TensorSpec("b", (16,))]
    fingerprint = plan_layout(specs, 2).fingerprint()
    assert plan_layout(list(specs), 2).fingerprint() == fingerprint
    others = [
        plan_layout(specs, 3),
        plan_layout(specs[::-1], 2),
        plan_layout([specs[0], TensorSpec("b", (15,))], 2),
        plan_layout([specs[0], TensorSpec("c", (16,))], 2),
    ]
    prints = {layout.fingerprint() for layout in others}
    assert len(prints) == 4
    assert fingerprint not in prints


def test_description_shows_every_tensor_and_the_padding() -> None:
    """People see offsets, shapes and what is wasted."""
    assert DRAWN.describe().splitlines() == [
        "2 tensors, 2 shards of 24 elements, padding 12 (33.33 %)",
        "sub-buffer 0 at 0: shard 24",
        "             0 a (4, 3) granule 3",
        "            12 b (6, 4) granule 4",
    ]


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_packed_buffers_are_cut_between_the_same_rows(num_shards: int) -> None:
    """Element k stands for two elements: every shard owns the same rows of every tensor."""
    specs = [TensorSpec("a", (7, 64)), TensorSpec("b", (5, 96)), TensorSpec("c", (9, 64))]
    layout = plan_layout(specs, num_shards, itemsize=0.5)
    small = layout.packed(2)
    assert small.num_shards == num_shards
    assert 2 * small.gathered_numel == layout.gathered_numel
    for index, slot in enumerate(layout.slots):
        assert 2 * small.slots[index].spec.numel == slot.spec.numel
        assert 2 * small.gathered_offset(index) == layout.gathered_offset(index)
        for shard in range(num_shards):
            wanted = [bound // 2 for bound in layout.owned_range(index, shard)]
            assert list(small.owned_range(index, shard)) == wanted
            assert small.local_offset(index, shard) == layout.local_offset(index, shard) // 2
    assert layout.packed(1) is layout


def test_packing_rows_of_an_odd_length_is_an_assertion() -> None:
    """The engine packs what its format takes."""
    layout = plan_layout([TensorSpec("odd", (4, 3))], 2)
    with pytest.raises(AssertionError, match="odd has rows of whole elements"):
        layout.packed(2)


def test_merged_shards_hold_the_pieces_of_their_parts() -> None:
    """The gathered buffer stays; shard k of the merged layout is shards 2k and 2k + 1."""
    specs = [TensorSpec("a", (5, 6)), TensorSpec("b", (7, 10)), TensorSpec("c", (9,))]
    fine = plan_layout(specs, 4)
    merged = fine.merged(2)
    assert (merged.num_shards, merged.gathered_numel) == (2, fine.gathered_numel)
    for i in range(len(specs)):
        assert merged.gathered_offset(i) == fine.gathered_offset(i)
        for shard in range(2):
            first, second = fine.owned_range(i, 2 * shard), fine.owned_range(i, 2 * shard + 1)
            start, stop = merged.owned_range(i, shard)
            assert stop - start == first[1] - first[0] + second[1] - second[0]
            if stop > start:
                assert (start, stop) == (min(first[0], second[0]), max(first[1], second[1]))
    assert fine.merged(1) is fine
    with pytest.raises(ValueError, match="divisor of 4 shards, got 3"):
        fine.merged(3)
