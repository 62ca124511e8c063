"""Rectangles of layouts against the layout's own answers, element by element."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.buffer.layout import FlatLayout, Slot, SubBuffer, TensorSpec
from megafsdp.buffer.planner import plan_layout
from megafsdp.training.pictures.layout_picture import PADDING, Rectangle, rectangles_of

_SHAPES = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 40)),
        st.tuples(st.integers(1, 9), st.sampled_from([1, 3, 4, 7, 32])),
    ),
    min_size=1,
    max_size=5,
)


def _painted(layout: FlatLayout, rectangles: list[Rectangle]) -> np.ndarray:
    """Return (shards, elements) with the number of the tensor; each element is painted once."""
    names = {slot.spec.name: index for index, slot in enumerate(layout.slots)}
    grid = np.full((layout.num_shards, layout.shard_numel), -2)
    for r in rectangles:
        part = grid[r.first_shard : r.stop_shard, r.start : r.stop]
        assert part.size == r.area > 0
        assert (part == -2).all(), f"{r} lies over another"
        part[:] = -1 if r.tensor == PADDING else names[r.tensor]
    return grid


@given(shapes=_SHAPES, num_shards=st.sampled_from([1, 2, 3, 4, 8]))
def test_every_element_is_what_the_layout_says(
    shapes: list[tuple[int, ...]], num_shards: int
) -> None:
    """Owned ranges in every shard, and padding elsewhere."""
    specs = [TensorSpec(f"t{i}", shape) for i, shape in enumerate(shapes)]
    layout = plan_layout(specs, num_shards)
    wanted = np.full((num_shards, layout.shard_numel), -1)
    for index in range(len(specs)):
        for shard in range(num_shards):
            start, stop = layout.owned_range(index, shard)
            offset = layout.local_offset(index, shard)
            wanted[shard, offset : offset + stop - start] = index
    found = rectangles_of(layout)
    assert (_painted(layout, found) == wanted).all()
    padding = sum(r.area for r in found if r.tensor == PADDING)
    assert padding == sum(r.numel for r in found if r.tensor == PADDING) == layout.padding_numel


def test_a_tensor_may_begin_and_end_anywhere() -> None:
    """Every range of four shards of 4 elements, to the element."""
    sub_buffer = SubBuffer(0, 0, 4)
    for start in range(16):
        for stop in range(start + 1, 17):
            # Rows of one element may be cut everywhere.
            slot = Slot(TensorSpec("t", (stop - start,)), 0, start)
            layout = FlatLayout(4, (sub_buffer,), (slot,))
            flat = np.full(16, -1)
            flat[start:stop] = 0
            assert (_painted(layout, rectangles_of(layout)) == flat.reshape(4, 4)).all()


def test_a_thousand_shards_take_three_rectangles_a_tensor() -> None:
    """Pages stay small however many ranks there are."""
    layout = plan_layout([TensorSpec("a", (5000, 96)), TensorSpec("b", (7000, 96))], 1024)
    found = rectangles_of(layout)
    assert sum(r.area for r in found) == layout.gathered_numel
    for name in ("a", "b"):
        own = [r for r in found if r.tensor == name]
        assert len(own) <= 3
        assert {(r.shape, r.numel) for r in own} == {
            (f"{own[0].numel // 96} x 96", sum(r.area for r in own))
        }
