"""torch's writer and reader of safetensors files on uneven DTensors: right, or refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megafsdp.buffer.comm.collectives import barrier
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.model_part import whole_part
from megafsdp.mesh.torch_private import planned_writer
from tests.buffer.cuts import cut, random, whole_mesh
from tests.buffer.parts import part_on
from tests.ranks import Ranks

# Where rows are whole slices of dim 0, every rank has one region.
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (10, 4),
    "vector": (17,),
    "one_row": (1, 5),
    "kernel": (5, 2, 3, 3),
}
STACK = (3, 4, 5)


def _stack(full: torch.Tensor, *, shard_rows: int, skipped: int = 0) -> UnevenDTensor:
    """Cut a stack (E, N, K) between rows of K elements."""
    shape, mesh, numel = tuple(full.shape), whole_mesh(), full.shape[-1]
    layout = UnevenLayout(
        whole_part(shape),
        numel,
        skipped * numel,
        shard_rows * numel,
        mesh.size(),
        dist.get_rank(),
    )
    start, stop = layout.element_range()
    rows = full.reshape(-1)[start:stop].clone().view(layout.local_shape())
    return UnevenDTensor.from_local_rows(rows, mesh, layout)


def _rows_state(*, is_zero: bool = False) -> dict[str, UnevenDTensor]:
    """Return tensors that are cut unevenly, and a stack that is cut between matrices."""
    state, mesh, world = {}, whole_mesh(), dist.get_world_size()
    for k, (name, shape) in enumerate(SHAPES.items()):
        full = random(*shape, seed=k) * (not is_zero)
        state[name] = cut(full, mesh, skipped=k + 1, shard_rows=-(-(shape[0] + k + 3) // world))
    whole = random(*STACK, seed=9) * (not is_zero)
    return {**state, "stack": _stack(whole, shard_rows=8)}


def _expected() -> dict[str, torch.Tensor]:
    rows = {name: random(*shape, seed=k) for k, (name, shape) in enumerate(SHAPES.items())}
    return {**rows, "stack": random(*STACK, seed=9)}


def _files(folder: Path) -> dict[str, torch.Tensor]:
    safetensors = pytest.importorskip("safetensors.torch")
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(safetensors.load_file(file))
    return found


def _assert_equal(got: dict[str, torch.Tensor]) -> None:
    expected = _expected()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def _save(folder: str, is_consolidated: bool) -> int:
    writer = dcp.HuggingFaceStorageWriter(
        folder, save_distributed=True, enable_consolidation=is_consolidated
    )
    state = _rows_state()
    dcp.save(state, storage_writer=writer)
    return sum(not tensor.uneven_layout.regions() for tensor in state.values())


@pytest.mark.parametrize("is_consolidated", [True, False])
def test_tensors_of_one_region_a_rank_are_written(
    ranks: Ranks, tmp_path: Path, is_consolidated: bool
) -> None:
    """Rows of a vector, a matrix, a kernel, and whole matrices of a stack, joined then or later."""
    pytest.importorskip("safetensors")
    assert sum(ranks(3).run(_save, str(tmp_path), is_consolidated)), "some shard is empty"
    target = tmp_path
    if not is_consolidated:
        target = tmp_path / "joined"
        target.mkdir()
        indices = dict.fromkeys(_expected(), 1)
        consolidate_safetensors_files(str(tmp_path), str(target), indices)
    _assert_equal(_files(target))


def _refusal(state: dict[str, UnevenDTensor], folder: str, **options: bool) -> str:
    """Return the error of a save, after the ranks have compared what it left behind."""
    writer = dcp.HuggingFaceStorageWriter(folder, **options)  # type: ignore[arg-type]
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state, storage_writer=writer)
    errors = [type(failure[0]) for failure in caught.value.failures.values()]
    assert errors == [NotImplementedError] * dist.get_world_size()
    barrier()
    assert not os.path.exists(folder)
    return str(caught.value)


def _refuse_cut_matrix(folder: str) -> list[str]:
    stack = _stack(random(*STACK), shard_rows=5)
    assert stack.uneven_layout.regions()
    kept = _rows_state()
    return [
        _refusal({**kept, "experts": stack}, folder, save_distributed=True, **consolidation)
        for consolidation in ({}, {"enable_consolidation": True})
    ]


def test_a_stack_cut_inside_a_matrix_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Also on ranks with one region, before anything is written, with a way that works."""
    for errors in ranks(3).run(_refuse_cut_matrix, str(tmp_path / "files")):
        for error in errors:
            assert "one region of the tensor on each rank, got up to 2" in error
            assert "'experts' of shape (3, 4, 5)" in error
            assert "export_hf" in error
            assert "full_state_dict=True" in error


def _refuse_fused_parts(folder: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    halves = FusedParts(("gate", "up"), (6, 6))
    fused = part_on(mesh, random(12, 4), 0, fused=halves, padding_rows=2)
    return _refusal({"fc1": fused}, folder, save_distributed=True)


def test_fused_tensors_cut_by_a_model_axis_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A rank's rows of gate and up are two regions of the whole."""
    for error in ranks(4).run(_refuse_fused_parts, str(tmp_path / "files")):
        assert "'fc1' of shape (12, 4)" in error


def _refuse_one_file(folder: str) -> list[str]:
    state = {"matrix": _rows_state()["matrix"]}
    return [_refusal(state, folder), _refusal(state, folder, enable_consolidation=True)]


def test_shards_in_one_file_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Without save_distributed, every rank would write the same file, with its rows alone."""
    for errors in ranks(2).run(_refuse_one_file, str(tmp_path / "files")):
        for error in errors:
            assert "Expected save_distributed=True, got save_distributed=False" in error


def _refuse_scalar(folder: str) -> str:
    layout = UnevenLayout(whole_part(()), 1, 0, 1, dist.get_world_size(), dist.get_rank())
    rows = torch.ones(layout.local_shape())
    scalar = UnevenDTensor.from_local_rows(rows, whole_mesh(), layout)
    return _refusal({"scale": scalar}, folder, save_distributed=True)


def test_scalars_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A 0-d tensor would become 0 where the files of ranks are joined."""
    for error in ranks(2).run(_refuse_scalar, str(tmp_path / "files")):
        assert "got a 0-d tensor" in error


def _refuse_in_background(folder: str) -> str:
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    future = dcp.async_save(
        {"experts": _stack(random(*STACK), shard_rows=5)}, storage_writer=writer
    )
    result = future if hasattr(future, "result") else future.upload_completion
    with pytest.raises(CheckpointException) as caught:
        result.result()
    barrier()
    assert not os.path.exists(folder)
    return str(caught.value)


def test_a_background_save_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """The thread that writes also plans."""
    for error in ranks(3).run(_refuse_in_background, str(tmp_path / "files")):
        assert "one region of the tensor on each rank" in error


def _save_alone(folder: str) -> None:
    """Save by one rank, which has every tensor whole."""
    state = {**_rows_state(), "stack": _stack(random(*STACK, seed=9), shard_rows=12)}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder))


def test_one_rank_writes_whole_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """Without save_distributed too, as no other rank has rows."""
    pytest.importorskip("safetensors")
    ranks(1).run(_save_alone, str(tmp_path))
    _assert_equal(_files(tmp_path))


def _load(folder: str, shard_rows: int) -> int:
    """Load by torch's reader, and return the number of regions of this rank's stack."""
    state = _rows_state(is_zero=True)
    state["stack"] = _stack(torch.zeros(STACK), shard_rows=shard_rows, skipped=1)
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
    _assert_equal({name: tensor.full_tensor() for name, tensor in state.items()})
    return len(state["stack"].uneven_layout.regions())


def _save_as_torch(folder: str) -> None:
    mesh = whole_mesh()
    state = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in _expected().items()}
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    dcp.save(state, storage_writer=writer)


@pytest.mark.parametrize("num_savers", [1, 2])
def test_the_reader_fills_stacks(ranks: Ranks, tmp_path: Path, num_savers: int) -> None:
    """From whole tensors and from torch's shards, however the stack is cut."""
    pytest.importorskip("safetensors")
    ranks(num_savers).run(_save_as_torch if num_savers > 1 else _save_alone, str(tmp_path))
    assert max(ranks(3).run(_load, str(tmp_path), 5)) > 1


class _Noting(dcp.FileSystemWriter):
    """A writer that a plan is made for."""


class _Asking(dcp.DefaultSavePlanner):
    """A planner that notes the writer it plans for."""

    found: dcp.StorageWriter | None = None

    def create_local_plan(self) -> dcp.SavePlan:
        self.found = planned_writer()
        return super().create_local_plan()


def _ask(folder: str) -> None:
    writer, planner = _Noting(folder), _Asking()
    dcp.save({"x": torch.ones(2)}, storage_writer=writer, planner=planner)
    assert planner.found is writer
    assert planned_writer() is None


def test_the_writer_of_a_plan_is_found(ranks: Ranks, tmp_path: Path) -> None:
    """While a save plans, and not after it."""
    ranks(1).run(_ask, str(tmp_path))
