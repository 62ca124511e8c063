"""torch.distributed.checkpoint and its state-dict helpers on uneven DTensors, unprepared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.model_part import part_of, whole_part
from tests.buffer.cuts import cut, random, whole_mesh
from tests.ranks import Ranks

SHAPES: list[tuple[int, ...]] = [(10, 4), (17,), (1, 5), (4, 2, 3)]


def _module(seed: int | None = 0) -> nn.ParameterList:
    """Return parameters cut over all ranks, each behind another number of rows; zeros if None."""
    mesh, world = whole_mesh(), dist.get_world_size()
    parameters = []
    for k, shape in enumerate(SHAPES):
        full = torch.zeros(shape) if seed is None else random(*shape, seed=seed + k)
        shard_rows = -(-(shape[0] + 3 * k + 4) // world)
        parameters.append(nn.Parameter(cut(full, mesh, skipped=3 * k + 2, shard_rows=shard_rows)))
    return nn.ParameterList(parameters)


def _assert_values(module: nn.ParameterList, seed: int) -> int:
    """Compare this rank's rows with the full values; return the number of empty shards."""
    num_empty = 0
    for k, (parameter, shape) in enumerate(zip(module, SHAPES, strict=True)):
        start, stop = parameter.uneven_layout.element_range()
        rows = random(*shape, seed=seed + k).reshape(-1)[start:stop]
        assert torch.equal(parameter.local.reshape(-1), rows), shape
        num_empty += start == stop
    return num_empty


def _save(directory: str, seed: int) -> int:
    module = _module(seed)
    dcp.save({"model": module.state_dict()}, checkpoint_id=directory)
    return _assert_values(module, seed)


def _load(directory: str, seed: int) -> int:
    module = _module(seed=None)
    dcp.load({"model": module.state_dict()}, checkpoint_id=directory)
    return _assert_values(module, seed)


def _load_and_save(source: str, target: str, seed: int) -> None:
    _load(source, seed)
    _save(target, seed)


def test_checkpoint_moves_between_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """Saved by 3 with empty shards, loaded by 2, by 1, saved by 1, loaded by 3: the same bits."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert sum(ranks(3).run(_save, first, 7)) > 0, "some shard is empty"
    ranks(2).run(_load, first, 7)
    ranks(1).run(_load_and_save, first, second, 7)
    ranks(3).run(_load, second, 7)
    ranks(4).run(_load, second, 7)


def test_stored_chunks_are_the_owned_rows(ranks: Ranks, tmp_path: Path) -> None:
    """Chunks tile every tensor, none is empty, and a whole-row cut needs one a rank."""
    ranks(3).run(_save, str(tmp_path), 0)
    stored = dcp.FileSystemReader(str(tmp_path)).read_metadata().state_dict_metadata
    assert len(stored) == len(SHAPES)
    for k, shape in enumerate(SHAPES):
        chunks = stored[f"model.{k}"].chunks
        assert all(min(chunk.sizes) > 0 for chunk in chunks)
        covered = torch.zeros(shape)
        for chunk in chunks:
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            covered[region] += 1
        assert (covered == 1).all()
        assert len(chunks) <= 3


def _load_whole(directory: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    whole = {name: torch.zeros(shape) for name, shape in shapes.items()}
    dcp.load(whole, checkpoint_id=directory)
    return whole


def test_plain_tensors_load_what_shards_saved(ranks: Ranks, tmp_path: Path) -> None:
    """One process without megafsdp reads the checkpoint as ordinary tensors."""
    ranks(3).run(_save, str(tmp_path), 3)
    shapes = {f"model.{k}": shape for k, shape in enumerate(SHAPES)}
    (whole,) = ranks(1).run(_load_whole, str(tmp_path), shapes)
    for k, shape in enumerate(SHAPES):
        assert torch.equal(whole[f"model.{k}"], random(*shape, seed=3 + k))


def _save_asynchronously(directory: str, kind: str) -> None:
    module = _module(11)
    future = dcp.async_save(
        {"model": module.state_dict()},
        checkpoint_id=directory,
        async_checkpointer_type=AsyncCheckpointerType[kind],
    )
    with torch.no_grad():
        for parameter in module:
            parameter.zero_()
    result: Any = future if hasattr(future, "result") else future.upload_completion
    result.result()


def test_asynchronous_save_holds_the_values_of_its_call(ranks: Ranks, tmp_path: Path) -> None:
    """Training goes on in place while a thread writes; the checkpoint does not see it."""
    ranks(3).run(_save_asynchronously, str(tmp_path), "THREAD")
    ranks(2).run(_load, str(tmp_path), 11)


@pytest.mark.matrix("uneven-dcp")
def test_save_in_another_process_holds_the_values_of_its_call(ranks: Ranks, tmp_path: Path) -> None:
    """The layout travels with the tensor to the process that writes."""
    ranks(2).run(_save_asynchronously, str(tmp_path), "PROCESS")
    ranks(3).run(_load, str(tmp_path), 11)


def _experts(seed: int | None) -> UnevenDTensor:
    """Return (3, 4, 5), cut between rows of 5 inside an expert."""
    shape, world = (3, 4, 5), dist.get_world_size()
    full = torch.zeros(shape) if seed is None else random(*shape, seed=seed)
    layout = UnevenLayout(whole_part(shape), 5, 10, 5 * -(-14 // world), world, dist.get_rank())
    start, stop = layout.element_range()
    rows = full.reshape(-1)[start:stop].clone().view(layout.local_shape())
    return UnevenDTensor.from_local_rows(rows, whole_mesh(), layout)


def _save_experts(directory: str) -> int:
    experts = _experts(5)
    dcp.save({"experts": experts}, checkpoint_id=directory)
    return len(experts.__create_chunk_list__())


def _load_experts(directory: str) -> None:
    experts = _experts(None)
    dcp.load({"experts": experts}, checkpoint_id=directory)
    assert torch.equal(experts.full_tensor(), random(3, 4, 5, seed=5))


def test_cuts_inside_an_expert_are_several_chunks(ranks: Ranks, tmp_path: Path) -> None:
    """Up to three regions a rank, written and read one by one."""
    assert max(ranks(3).run(_save_experts, str(tmp_path))) > 1
    ranks(2).run(_load_experts, str(tmp_path))


def _tensor_parallel_part(seed: int | None) -> tuple[UnevenDTensor, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    tp, shard = mesh.get_local_rank("tp"), mesh.get_local_rank("dp_shard")
    whole = random(8, 6, seed=seed or 0)
    layout = UnevenLayout(part_of((8, 6), 1, 2, tp), 3, 0, 15, 2, shard, num_model_axes=1)
    start, stop = layout.element_range()
    rows = whole[:, 3 * tp : 3 * tp + 3].reshape(-1)[start:stop].view(layout.local_shape())
    rows = torch.zeros_like(rows) if seed is None else rows.clone()
    return UnevenDTensor.from_local_rows(rows, mesh, layout), rows


def _save_tensor_parallel(directory: str) -> None:
    dcp.save({"w": _tensor_parallel_part(13)[0]}, checkpoint_id=directory)


def _load_tensor_parallel(directory: str) -> None:
    part, _ = _tensor_parallel_part(None)
    dcp.load({"w": part}, checkpoint_id=directory)
    assert torch.equal(part.local, _tensor_parallel_part(13)[1])


def test_tensor_parallel_parts_join_in_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Parts of two tensor-parallel ranks, each cut over two data-parallel ones, fill the tensor."""
    ranks(4).run(_save_tensor_parallel, str(tmp_path))
    (whole,) = ranks(1).run(_load_whole, str(tmp_path), {"w": (8, 6)})
    assert torch.equal(whole["w"], random(8, 6, seed=13))
    ranks(4).run(_load_tensor_parallel, str(tmp_path))


def _trained(seed: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    module = _module(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    for parameter in module:
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    return module, optimizer


def _state_dict_helpers(directory: str) -> None:
    module, optimizer = _trained(21)
    model_state = get_model_state_dict(module)
    optimizer_state = get_optimizer_state_dict(module, optimizer)
    assert all(type(value) is UnevenDTensor for value in model_state.values())
    assert type(optimizer_state["state"]["0"]["exp_avg"]) is UnevenDTensor
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)


def _restored(directory: str) -> None:
    trained, trained_optimizer = _trained(21)
    module = _module(seed=None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=True)
    model_state = get_model_state_dict(module)
    optimizer_state = get_optimizer_state_dict(module, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=directory)
    set_model_state_dict(module, model_state)
    set_optimizer_state_dict(module, optimizer, optimizer_state)
    for parameter, wanted in zip(module, trained, strict=True):
        assert torch.equal(parameter.local, wanted.local)
        own, wanted_state = optimizer.state[parameter], trained_optimizer.state[wanted]
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(own[key].local, wanted_state[key].local)
        assert own["step"] == wanted_state["step"] == 1


def test_state_dict_helpers_of_torch_carry_model_and_optimizer(
    ranks: Ranks, tmp_path: Path
) -> None:
    """get_ and set_ of model and optimizer state, saved by 2 ranks and restored on 3."""
    ranks(2).run(_state_dict_helpers, str(tmp_path))
    ranks(3).run(_restored, str(tmp_path))


def _full_states() -> None:
    module, optimizer = _trained(21)
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
    ):
        state = get_model_state_dict(module, options=options)
        optimizer_state = get_optimizer_state_dict(module, optimizer, options=options)
        states = optimizer_state.get("state", {})
        if options.cpu_offload and dist.get_rank() > 0:
            assert not state and not states, "torch gives full states to rank 0 alone"
        for k, parameter in enumerate(module):
            full, moment = parameter.full_tensor(), optimizer.state[parameter]["exp_avg"]
            moment = moment.full_tensor()
            if state:
                assert type(state[f"{k}"]) is torch.Tensor
                assert torch.equal(state[f"{k}"], full)
                assert torch.equal(states[f"{k}"]["exp_avg"], moment)


def test_full_state_dicts_are_whole(ranks: Ranks) -> None:
    """full_state_dict=True gives plain tensors of the whole, on the CPU if asked."""
    ranks(3).run(_full_states)
