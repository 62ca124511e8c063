"""Planning a save of 10,000 tensors at a world of 1,024, beside torch DCP's default planner.

One process, torch's ``fake`` backend, as rank 0. The local part is what every rank does: list its
tensors and what it writes of them. The global part is what one rank does with the lists of 1,024
ranks: read, check and describe them; ours also writes the manifest and DCP's metadata, DCP's
planner pickles its metadata. The lists of other ranks follow from the layouts, and making them is
not timed. The tensors themselves are not written, on either side.
"""

from __future__ import annotations

import argparse
import importlib
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import megafsdp
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.format.manifest import Chunk, Record
from megafsdp.optimizer.adam.fused_adam import FusedAdam

_ROWS, _ROW = 256, 128
_MATRICES_A_UNIT = 33
_STATES = 3  # A weight and two moments.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this half."""
    parser.add_argument("--plan-tensors", type=int, default=10_000)
    parser.add_argument("--plan-world", type=int, default=1024)
    parser.add_argument("--plan-repeats", type=int, default=2)


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Time both planners in turns."""
    world = options.plan_world
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        num_parameters = -(-options.plan_tensors // _STATES)
        model, optimizer = _build(num_parameters)
        tensors = _tensors(model, optimizer)
        rounds: dict[str, list[dict[str, float]]] = {"megafsdp": [], "dcp": []}
        num_chunks = 0
        for _ in range(options.plan_repeats):
            times, num_chunks = _plan_ours(model, optimizer, tensors, world)
            rounds["megafsdp"].append(times)
            rounds["dcp"].append(_plan_dcp(tensors, world))
    finally:
        dist.destroy_process_group()
    return {
        "num_tensors": len(tensors),
        "world": world,
        "num_chunks": num_chunks,
        "seconds": {
            side: {part: statistics.median(r[part] for r in all_rounds) for part in all_rounds[0]}
            for side, all_rounds in rounds.items()
        },
    }


def describe(plan: dict[str, Any]) -> str:
    """Return the results as a line for people."""
    sides = "; ".join(
        f"{side} {s['local'] + s['global']:.2f} s ({s['local']:.2f} on each rank, "
        f"{s['global']:.2f} on one)"
        for side, s in plan["seconds"].items()
    )
    return (
        f"plan for {plan['num_tensors']} tensors, {plan['num_chunks']} chunks, {plan['world']} "
        f"ranks: {sides}"
    )


def _build(num_parameters: int) -> tuple[nn.Module, FusedAdam]:
    """Return a sharded model of equal matrices and an optimizer that has taken a step."""
    units = []
    while num_parameters > 0:
        count = min(num_parameters, _MATRICES_A_UNIT)
        units.append(nn.Sequential(*(nn.Linear(_ROW, _ROWS, bias=False) for _ in range(count))))
        num_parameters -= count
    model = nn.Sequential(*units)
    for unit in units:
        megafsdp.fully_shard(unit)
    megafsdp.fully_shard(model)
    optimizer = FusedAdam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _tensors(model: nn.Module, optimizer: FusedAdam) -> dict[str, UnevenDTensor]:
    """Return weights and moments by the keys of a checkpoint."""
    found = {}
    for name, parameter in model.named_parameters():
        states = {f"optimizer.state.{name}.{k}": v for k, v in optimizer.state[parameter].items()}
        for key, tensor in {f"model.{name}": parameter, **states}.items():
            if isinstance(tensor, UnevenDTensor):
                found[key] = tensor
    return found


def _plan_ours(
    model: nn.Module, optimizer: FusedAdam, tensors: dict[str, UnevenDTensor], world: int
) -> tuple[dict[str, float], int]:
    save = importlib.import_module("megafsdp.checkpoint.save")
    with tempfile.TemporaryDirectory() as folder:
        begun, local_s = _timed(
            lambda: save.begin_save(
                Path(folder),
                1,
                save.TrainingState(model, optimizer, None, None),
                save.Retention(),
            )
        )
        own = save._write(begun)
        sent = [(pickle.dumps(own), None)]
        counts = set(begun.state.tensors) - set(tensors) - {key for key, _ in own.chunks}
        for rank in range(1, world):
            file = f"__{rank}_0.distcp"
            place = Record(file, 0, 1, 0)
            chunks = [
                (key, Chunk(Region(*region), place))
                for key, tensor in tensors.items()
                for region in tensor.uneven_layout.regions(rank)
            ]
            if rank == 1:
                # Every rank has the counts of steps; here rank 1 writes them.
                chunks += [(key, Chunk(Region((), ()), place)) for key in counts]
            written = replace(own, chunks=chunks, objects={}, files={file: 1})
            sent.append((pickle.dumps(written), None))

        _, global_s = _timed(lambda: save._publish(begun, sent))
        num_chunks = sum(len(pickle.loads(part).chunks) for part, _ in sent)
    return {"local": local_s, "global": global_s}, num_chunks


def _plan_dcp(tensors: dict[str, UnevenDTensor], world: int) -> dict[str, float]:
    planner = DefaultSavePlanner()

    def plan_local() -> SavePlan:
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        return planner.create_local_plan()

    own, local_s = _timed(plan_local)
    sent = [pickle.dumps(own)]
    for rank in range(1, world):
        items = [
            _write_item(key, tensor, region)
            for key, tensor in tensors.items()
            for region in tensor.uneven_layout.regions(rank)
        ]
        sent.append(pickle.dumps(replace(own, items=items)))

    def plan_global() -> bytes:
        plans, metadata = planner.create_global_plan([pickle.loads(part) for part in sent])
        return pickle.dumps((plans, metadata))

    _, global_s = _timed(plan_global)
    return {"local": local_s, "global": global_s}


def _write_item(key: str, tensor: UnevenDTensor, region: Region) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), tensor.shape)
    return WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    value = action()
    return value, time.perf_counter() - start
