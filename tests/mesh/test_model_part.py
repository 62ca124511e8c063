"""Parts of tensors, against torch.chunk and DTensor's own cuts."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.model_part import ModelPart, part_of, whole_part


@st.composite
def _parts(draw: st.DrawFn) -> list[ModelPart]:
    """Draw a tensor and what each rank of an axis has of it; some ranks have nothing."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    num_ranks = draw(st.integers(1, 4))
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    fused = None
    if dim is not None and (dim == 0 or dim < len(shape) - 1) and draw(st.booleans()):
        sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4).map(tuple))
        fused = FusedParts(tuple("abcd"[: len(sizes)]), sizes, dim)
        shape = (*shape[:dim], sum(sizes), *shape[dim + 1 :])
    return [part_of(shape, dim, num_ranks, rank, fused) for rank in range(num_ranks)]


def _numbers(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


def _chunks(part: ModelPart) -> torch.Tensor:
    """Return what a rank has by torch.chunk of each fused tensor by itself."""
    whole = _numbers(part.shape)
    if part.dim is None:
        return whole
    found = []
    for tensor in whole.split(part.fused_sizes, part.dim):
        chunks = tensor.chunk(part.num_ranks, part.dim)
        found += chunks[part.rank : part.rank + 1]
    return torch.cat([*found, whole.narrow(part.dim, 0, 0)], part.dim)


@given(_parts())
def test_parts_are_the_chunks_of_each_tensor(parts: list[ModelPart]) -> None:
    """A part is what torch.chunk gives; the ranks together have the whole, each element once."""
    whole = _numbers(parts[0].shape)
    for part in parts:
        wanted = _chunks(part)
        assert torch.equal(part.cut(whole), wanted)
        assert part.local_shape == tuple(wanted.shape)
        assert part.local_numel == wanted.numel()
        assert part.is_whole == (part.dim is None or part.num_ranks == 1)
        assert parts[0].of_rank(part.rank) == part
        assert pickle.loads(pickle.dumps(part)) == part
        assert hash(part) == hash(parts[0].of_rank(part.rank))
    cuts = [part.cut(whole) for part in parts]
    assert all(torch.equal(part.join(cuts), whole) for part in parts)
    if parts[0].dim is not None:
        held = sorted(int(n) for cut in cuts for n in cut.flatten())
        assert held == whole.flatten().tolist()


def test_gate_and_up_are_cut_each_by_itself() -> None:
    """The drawn example: rank 1 has the second half of gate, then that of up."""
    fused = FusedParts(("gate", "up"), (6, 6))
    part = part_of((12, 4), 0, 2, 1, fused)
    assert (part.pieces, part.local_shape) == (((3, 3), (9, 3)), (6, 4))
    # Six tensors of a gated delta net: as many pieces.
    six = FusedParts(tuple("qkvzba"), (4, 4, 8, 8, 2, 2))
    assert part_of((28, 3), 0, 2, 0, six).pieces == (
        (0, 2),
        (4, 2),
        (8, 4),
        (16, 4),
        (24, 1),
        (26, 1),
    )


def test_query_groups_are_not_divided() -> None:
    """A rank has whole groups of query, key and value; a degree that would cut one is refused."""
    fused = FusedParts(("query", "key", "value"), (4, 2, 2), num_groups=4)
    assert part_of((32, 5), 0, 2, 1, fused).pieces == ((16, 16),)
    with pytest.raises(ValueError, match=r"groups that 3 ranks divide, got 4 groups"):
        part_of((32, 5), 0, 3, 0, fused)
    # Along dim 1 the groups are not met.
    assert part_of((32, 6), 1, 3, 0, fused).local_shape == (32, 2)


def test_fused_columns_are_refused() -> None:
    """Parts along the last dim would make a row of several pieces; those of a stack do not."""
    with pytest.raises(NotImplementedError, match="parts along dim 1, which a model axis of 2"):
        part_of((4, 12), 1, 2, 0, FusedParts(("gate", "up"), (6, 6), dim=1))
    # One rank, or one part, has them in one piece.
    assert part_of((4, 12), 1, 1, 0, FusedParts(("gate", "up"), (6, 6), dim=1)).is_whole
    assert part_of((4, 12), 1, 2, 1, FusedParts(("up",), (12,), dim=1)).pieces == ((6, 6),)
    stack = part_of((3, 12, 5), 1, 2, 1, FusedParts(("gate", "up"), (6, 6), dim=1))
    assert stack.pieces == ((3, 3), (9, 3))


def test_a_tensor_without_a_model_axis_is_whole() -> None:
    """All of it, of any number of dimensions."""
    for shape in ((), (3,), (2, 0, 4)):
        assert (whole_part(shape).is_whole, whole_part(shape).local_shape) == (True, shape)
        assert whole_part(shape).pieces == ()
