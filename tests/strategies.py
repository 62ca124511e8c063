"""Hypothesis strategies of what megafsdp must get right: odd shapes, rank counts, dtypes."""

from __future__ import annotations

from hypothesis import strategies as st

Shape = tuple[int, ...]

# Sizes around vector widths and the 32-element shard unit, with coprime ones among them.
_SIZES = (1, 2, 3, 5, 7, 8, 16, 31, 32, 33, 64, 100, 257)
# Rows of these sizes have no small common multiple, which is what makes padding hard to avoid.
_COPRIME_ROWS = ((9, 7), (4, 11), (6, 13))

one_dim_shapes = st.tuples(st.sampled_from(_SIZES))
one_row_shapes = st.tuples(st.just(1), st.sampled_from(_SIZES))
matrix_shapes = st.tuples(st.sampled_from(_SIZES), st.sampled_from(_SIZES))
three_dim_shapes = st.tuples(*[st.sampled_from(_SIZES[:7])] * 3)
zero_dim_shapes: st.SearchStrategy[Shape] = st.just(())
empty_shapes = st.sampled_from([(0,), (0, 5), (3, 0), (2, 0, 4)])


def shapes(*, with_zero_dim: bool = True, with_empty: bool = True) -> st.SearchStrategy[Shape]:
    """Draw one tensor shape.

    Args:
        with_zero_dim: Also draw ``()``.
        with_empty: Also draw shapes without elements.
    """
    kinds = [matrix_shapes, one_dim_shapes, one_row_shapes, three_dim_shapes]
    kinds += [zero_dim_shapes] * with_zero_dim + [empty_shapes] * with_empty
    return st.one_of(kinds)


def shape_sets(
    *, max_size: int = 12, with_zero_dim: bool = True, with_empty: bool = True
) -> st.SearchStrategy[list[Shape]]:
    """Draw the shapes of one parameter group, some with rows of coprime sizes.

    Args:
        max_size: Largest number of tensors.
        with_zero_dim: Also draw ``()``.
        with_empty: Also draw shapes without elements.
    """
    any_shapes = st.lists(
        shapes(with_zero_dim=with_zero_dim, with_empty=with_empty), min_size=1, max_size=max_size
    )
    return any_shapes | any_shapes.map(lambda drawn: [*_COPRIME_ROWS, *drawn][:max_size])


def world_sizes(max_size: int = 64) -> st.SearchStrategy[int]:
    """Draw a number of ranks, 1 and odd ones among them."""
    return st.sampled_from([n for n in (1, 2, 3, 4, 5, 7, 8, 16, 64) if n <= max_size])


def mesh_shapes(max_size: int = 8) -> st.SearchStrategy[tuple[int, int]]:
    """Draw the sizes of a two-axis data-parallel mesh, outer axis first."""
    sizes = range(1, max_size + 1)
    return st.sampled_from([(m, n) for m in sizes for n in sizes if m * n <= max_size])


param_dtypes = st.sampled_from(["float32", "bfloat16", "float16", "float64"])
