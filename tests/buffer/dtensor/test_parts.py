"""Uneven DTensors of parts: data axes cut the rows of what a model axis has cut before."""

from __future__ import annotations

import io
import math
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout, whole
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.model_part import part_of
from tests.buffer.cuts import random
from tests.buffer.parts import joined, part_on
from tests.ranks import Ranks

GATE_AND_UP = FusedParts(("gate", "up"), (5, 5))
QKV = FusedParts(("query", "key", "value"), (3, 1, 1), num_groups=4)
# Shape, dim that tp cuts, fused tensors, elements of a row where they are not those of the part.
CASES: dict[str, tuple[tuple[int, ...], int | None, FusedParts | None, int | None]] = {
    "column": ((8, 4), 0, None, None),
    "column, uneven": ((9, 4), 0, None, None),
    "one row": ((1, 4), 0, None, None),
    "row": ((5, 6), 1, None, None),
    "row, uneven": ((5, 3), 1, None, None),
    "gate and up": ((10, 3), 0, GATE_AND_UP, None),
    "query, key, value": ((20, 3), 0, QKV, None),
    "replicated": ((7,), None, None, None),
    "bias": ((9,), 0, None, None),
    "stack of experts": ((3, 4, 5), 0, None, 5),
    "stack, columns": ((3, 4, 6), 2, None, 3),
    "stack, gate and up": ((3, 10, 4), 1, replace(GATE_AND_UP, dim=1), 4),
}


def _tensors(mesh: DeviceMesh, num_shard_axes: int = 1) -> dict[str, UnevenDTensor]:
    return {
        name: part_on(
            mesh,
            _full(name),
            dim,
            fused=fused,
            row_numel=row_numel,
            num_shard_axes=num_shard_axes,
        )
        for name, (_, dim, fused, row_numel) in CASES.items()
        # What no axis divides is a replicated DTensor, not an uneven one.
        if dim is not None or num_shard_axes
    }


def _full(name: str) -> torch.Tensor:
    return random(*CASES[name][0], seed=list(CASES).index(name))


@pytest.mark.parametrize("num_rows", [8, 9])
def test_rows_on_four_data_ranks_and_two_tp_ranks(num_rows: int) -> None:
    """Tp cuts first: data rank d of tp rank 0 has row d, of tp rank 1 row 4 + d; 9 rows too."""
    rows = {}
    for d in range(4):
        for t in range(2):
            part = part_of((num_rows, 3), 0, 2, t)
            layout = UnevenLayout(part, 3, 0, 3 * -(-part.local_shape[0] // 4), 4, d, 1)
            rows[d, t] = [r.offsets[0] + i for r in layout.regions() for i in range(r.sizes[0])]
    if num_rows == 8:
        assert rows == {(d, t): [4 * t + d] for d in range(4) for t in range(2)}
    else:
        # torch's cuts of the part: 5 rows as 2, 2, 1, 0.
        tp_0 = [[0, 1], [2, 3], [4], []]
        assert [rows[d, 0] for d in range(4)] == tp_0
        assert [rows[d, 1] for d in range(4)] == [[5], [6], [7], [8]]


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    dim=st.integers(0, 3),
    num_ranks=st.integers(1, 3),
    num_shards=st.integers(1, 4),
    padding_rows=st.integers(0, 4),
    is_fused=st.booleans(),
)
def test_regions_name_each_element_of_the_whole_once(
    shape: tuple[int, ...],
    dim: int,
    num_ranks: int,
    num_shards: int,
    padding_rows: int,
    is_fused: bool,
) -> None:
    """Regions of all parts and shards cover the tensor, in the order of the local elements."""
    dim = dim % len(shape)
    fused = None
    if is_fused and (dim == 0 or dim < len(shape) - 1) and shape[dim] > 1:
        fused = FusedParts(("a", "b"), (1, shape[dim] - 1), dim)
    numbers = torch.arange(math.prod(shape)).view(shape)
    seen: list[int] = []
    for rank in range(num_ranks):
        part = part_of(shape, dim, num_ranks, rank, fused)
        elements = part.cut(numbers).flatten().tolist()
        row_numel = math.prod(part.local_shape[1:])
        num_rows = part.local_shape[0] + padding_rows
        shard_numel = -(-num_rows // num_shards) * row_numel
        layout = UnevenLayout(part, row_numel, padding_rows * row_numel, shard_numel, num_shards, 0)
        for shard in range(num_shards):
            regions = layout.regions(shard)
            named = [n for r in regions for n in numbers[r.slices_in(whole(shape))].flatten()]
            start, stop = layout.element_range(shard)
            assert [int(n) for n in named] == elements[start:stop]
            assert math.prod(layout.local_shape(shard)) == stop - start
            seen += map(int, named)
    assert sorted(seen) == list(range(numbers.numel()))


def _gathered(shape: tuple[int, ...], num_shard_axes: int) -> list[str]:
    mesh = joined(*shape)
    empty = []
    for name, tensor in _tensors(mesh, num_shard_axes).items():
        full, dim = _full(name), CASES[name][1]
        assert tensor.shape == full.shape and tensor.device_mesh is mesh
        assert tensor.placements[-1] == (Replicate() if dim is None else Shard(dim))
        assert torch.equal(tensor.full_tensor(), full), name
        replicated = tensor.redistribute(placements=[Replicate()] * mesh.ndim)
        assert type(replicated) is DTensor and torch.equal(replicated.to_local(), full)
        assert tensor.redistribute() is tensor
        target = torch.zeros_like(tensor)
        target.copy_from_full_(full)
        assert torch.equal(target.local, tensor.local), name
        for chunk in tensor.__create_chunk_list__():
            place = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            stored = tensor.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
            assert torch.equal(stored, full[place])
        if not tensor.local.numel():
            empty.append(name)
    return empty


@pytest.mark.parametrize(
    ("shape", "num_shard_axes"),
    [((2, 2), 1), ((2, 2), 0), ((2, 1, 2), 1), ((2, 1, 2), 2), ((1, 4), 1)],
)
def test_parts_are_gathered_over_data_then_the_model_axis(
    ranks: Ranks, shape: tuple[int, ...], num_shard_axes: int
) -> None:
    """Every kind of part, uneven ones too, sharded, replicated, as HSDP and as HFSDP."""
    empty = ranks(4).run(_gathered, shape, num_shard_axes)
    assert any(empty) and min(map(len, empty)) < 3


def _groups() -> list[tuple[list[int], list[int], bool, bool]]:
    mesh = joined(2, 1, 2)
    found = []
    for num_shard_axes in (1, 2):
        cut = part_on(mesh, random(8, 4), 0, num_shard_axes=num_shard_axes)
        same = part_on(mesh, random(8), None, num_shard_axes=num_shard_axes)
        members = dist.get_process_group_ranks
        assert members(cut.copy_group) == members(same.copy_group)
        found.append(
            (members(cut.shard_group), members(cut.copy_group), cut.is_counted, same.is_counted)
        )
    return found


def test_a_copy_of_the_model_spans_the_model_axis(ranks: Ranks) -> None:
    """The ranks of one copy are those of the axes that cut rows, times tp; replicas count once."""
    answers = ranks(4).run(_groups)
    for rank, (hsdp, hfsdp) in enumerate(answers):
        outer, tp = divmod(rank, 2)
        assert hsdp == ([rank], [2 * outer, 2 * outer + 1], True, tp == 0)
        assert hfsdp == ([tp, 2 + tp], [0, 1, 2, 3], True, tp == 0)


def _statistics(shape: tuple[int, ...], num_shard_axes: int) -> None:
    for name, tensor in _tensors(joined(*shape), num_shard_axes).items():
        full = _full(name)
        for function in (
            torch.sum, torch.mean, torch.amax, torch.amin, torch.std, torch.var,
            torch.linalg.vector_norm, torch.count_nonzero,
        ):  # fmt: skip
            # Sums of four ranks have another order than the one of the whole.
            torch.testing.assert_close(function(tensor).full_tensor(), function(full))
        largest = torch.linalg.vector_norm(tensor, ord=math.inf).full_tensor()
        assert torch.equal(largest, full.abs().max())
        assert torch.equal(tensor, tensor.clone())
        same = torch._foreach_norm([tensor])[0].full_tensor()
        torch.testing.assert_close(same, full.norm())


@pytest.mark.parametrize(("shape", "num_shard_axes"), [((2, 2), 1), ((2, 2), 0), ((2, 1, 2), 2)])
def test_statistics_are_those_of_the_whole(
    ranks: Ranks, shape: tuple[int, ...], num_shard_axes: int
) -> None:
    """Each element counts once, however the axes divide it or repeat it."""
    ranks(4).run(_statistics, shape, num_shard_axes)


def _columns() -> None:
    mesh = joined(2, 2)
    rows, columns = part_on(mesh, random(9, 4), 0), part_on(mesh, random(8, 6, seed=1), 1)
    # A sum over all rows is one over ranks; where tp cuts columns no placement says whose they are.
    torch.testing.assert_close(rows.sum(0).full_tensor(), random(9, 4).sum(0))
    torch.testing.assert_close(rows.mean(0).full_tensor(), random(9, 4).mean(0))
    assert rows.sum(0).placements == (Partial(), Partial())
    with pytest.raises(NotImplementedError, match="'sum of each row'"):
        columns.sum(0)
    # Embeddings zero the row of their padding; that of a part cut by rows is on one tp rank.
    with torch.no_grad():
        columns[3].zero_()
    assert torch.equal(columns[5].full_tensor(), random(8, 6, seed=1)[5])
    wanted = random(8, 6, seed=1)
    wanted[3] = 0
    assert torch.equal(columns.full_tensor(), wanted)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="'select'"):
        rows[3].zero_()


def test_rows_and_columns_of_parts(ranks: Ranks) -> None:
    """Reductions over rows and single rows are right, or refused on all ranks alike."""
    ranks(4).run(_columns)


def _draws(shape: tuple[int, ...]) -> None:
    for name, tensor in _tensors(joined(*shape)).items():
        torch.manual_seed(5)
        tensor.normal_()
        torch.manual_seed(5)
        assert torch.equal(tensor.full_tensor(), torch.empty(CASES[name][0]).normal_())
    torch.manual_seed(dist.get_rank())
    replicated = part_on(joined(*shape), random(7), None)
    with pytest.raises(ValueError, match="random state"):
        replicated.normal_()


def test_draws_are_those_of_the_whole(ranks: Ranks) -> None:
    """A draw does not depend on the degree; replicas that would draw unequally are refused."""
    ranks(4).run(_draws, (2, 2))


def _pickled(shape: tuple[int, ...]) -> None:
    for name, tensor in _tensors(joined(*shape), 0).items():
        back = pickle.loads(ForkingPickler.dumps(tensor))
        assert back.uneven_layout == tensor.uneven_layout
        assert torch.equal(back.full_tensor(), _full(name))
        if tensor.local.numel() == tensor.numel():
            assert torch.equal(pickle.loads(pickle.dumps(tensor)).local, tensor.local)
            continue
        # All rows of a part are not those of the whole.
        with pytest.raises(RuntimeError, match="of which this rank has all rows"):
            torch.save(tensor, io.BytesIO())


def test_parts_go_to_processes_and_into_no_file(ranks: Ranks) -> None:
    """A file of one part would pass for the whole."""
    ranks(4).run(_pickled, (2, 2))


def _optimized() -> None:
    mesh = joined(2, 2)
    for name in CASES:
        _, dim, fused, row_numel = CASES[name]
        plain = torch.nn.Parameter(_full(name))
        ours = torch.nn.Parameter(part_on(mesh, _full(name), dim, fused=fused, row_numel=row_numel))
        plain.grad, grad = random(*plain.shape, seed=99), torch.zeros_like(ours)
        grad.copy_from_full_(plain.grad)
        ours.grad = grad
        for parameter in (plain, ours):
            torch.optim.AdamW([parameter], lr=0.1).step()
        assert torch.equal(ours.full_tensor(), plain.detach())
        factor = torch.tensor(0.5)
        torch._amp_foreach_non_finite_check_and_unscale_([grad], torch.zeros(()), factor)
        assert torch.equal(grad.full_tensor(), plain.grad * 0.5)


def test_operators_run_on_parts(ranks: Ranks) -> None:
    """Torch's AdamW and the loss scaler's operator give what they give of the whole."""
    ranks(4).run(_optimized)


def _save(directory: str, shape: tuple[int, ...]) -> int:
    tensors = _tensors(joined(*shape))
    dcp.save(tensors, checkpoint_id=directory)
    return sum(not tensor.local.numel() for tensor in tensors.values())


def _load(directory: str, shape: tuple[int, ...] | None) -> None:
    if shape is None:
        plain = {name: torch.zeros(CASES[name][0]) for name in CASES}
        dcp.load(plain, checkpoint_id=directory)
        assert all(torch.equal(plain[name], _full(name)) for name in CASES)
        return
    tensors = _tensors(joined(*shape))
    for tensor in tensors.values():
        tensor.zero_()
    dcp.load(tensors, checkpoint_id=directory)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.full_tensor(), _full(name)), name


def test_uneven_parts_of_eight_ranks_are_exact_in_files(ranks: Ranks, tmp_path: Path) -> None:
    """9 rows on 4 x 2 and all other parts: saved by torch, read by 1, 2, 3 and other ranks.

    torch's own DTensors lose rows there: its metadata and its shards disagree on rank 6 and 7.
    """
    assert max(ranks(8).run(_save, str(tmp_path), (4, 2))) > 0
    ranks(1).run(_load, str(tmp_path), None)
    ranks(2).run(_load, str(tmp_path), (1, 2))
    ranks(2).run(_load, str(tmp_path), (2, 1))
    ranks(3).run(_load, str(tmp_path), (3, 1))
    ranks(8).run(_load, str(tmp_path), (2, 2, 2))
