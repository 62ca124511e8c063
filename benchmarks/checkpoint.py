"""Saving and loading a 200M-parameter model with Adam, beside the disk and torch DCP.

In turn, on the same ranks and the same disk: raw (each rank writes, or reads, the bytes of its own
file in one call, with memory already there), ``checkpoint.save`` with its checksums, ``dcp.save``
of the same tensors. Every side ends with its files on the disk (fsync); removing them is not timed.
Reads begin with the files' pages dropped from memory. The figure is a ratio of medians. The
blocking time of an asynchronous save is the call and the wait for its copies, which a step right
after it would wait for. ``benchmarks.checkpoint_plan`` is the second half: how long planning takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import megafsdp
from benchmarks import checkpoint_plan
from benchmarks.launch import device_type, launch
from benchmarks.record import CheckError, spread
from megafsdp import checkpoint
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.optimizer.adam.fused_adam import FusedAdam

SIDES = ("raw", "megafsdp", "dcp")
_STEP = 1


@dataclass(frozen=True)
class Shape:
    """The model whose state is saved.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size; feed-forward 4 times as wide.
        vocabulary: Rows of the embedding, which the output layer shares.
    """

    layers: int
    hidden: int
    vocabulary: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="times each side is measured")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=48_000)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one by default")
    checkpoint_plan.add_arguments(parser)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure bandwidth on ranks of their own, planning in this process."""
    shape = Shape(options.layers, options.hidden, options.vocabulary)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = launch(measure, shape, options.repeats, folder, num_ranks=options.ranks)
    assert isinstance(measured, dict)
    return {
        "num_ranks": options.ranks,
        "device": device_type(options.ranks),
        "shape": asdict(shape),
        **measured,
        "plan": checkpoint_plan.measure(options),
    }


def describe(results: dict[str, Any]) -> str:
    """Return the results as lines for people."""
    size = results["nbytes"] / 1e9
    lines = [
        f"{results['num_parameters'] / 1e6:.0f}M parameters, {size:.2f} GB in "
        f"{results['num_ranks']} files"
    ]
    for act in ("save", "load"):
        seconds = results[f"{act}_s"]
        rates = ", ".join(f"{side} {size / s['median']:.2f}" for side, s in seconds.items())
        lines.append(f"{act}: GB/s {rates}; of raw {results[f'{act}_of_raw']:.2f}")
    blocking = results["async"]
    lines.append(
        f"asynchronous save: blocks {blocking['blocking_s']['median'] * 1e3:.0f} ms, "
        f"{blocking['of_sync']:.3f} of a save (the first one "
        f"{blocking['first_blocking_s'] * 1e3:.0f} ms), done after "
        f"{blocking['total_s']['median']:.2f} s"
    )
    return "\n".join([*lines, checkpoint_plan.describe(results["plan"])])


def measure(shape: Shape, repeats: int, folder: str) -> dict[str, object]:
    """Time all sides in a folder; called by every rank.

    Raises:
        CheckError: A load has changed the weights.
    """
    model, optimizer = _build(shape)
    root = Path(folder)
    path = checkpoint.save(root / "first", step=_STEP, model=model, optimizer=optimizer)
    own = path / f"__{dist.get_rank()}_0.distcp"
    nbytes = own.stat().st_size
    bench = _Bench(model, optimizer, root, nbytes)
    saves: dict[str, list[float]] = {side: [] for side in SIDES}
    blocking: list[float] = []
    total: list[float] = []
    for turn in range(repeats + 1):
        for side in SIDES:
            saves[side].append(bench.time_save(side))
        blocked, whole = bench.time_async()
        blocking.append(blocked)
        total.append(whole)
        if turn == 0:
            for side in SIDES:
                saves[side].clear()
            first, total = blocking.pop(), []
    checkpoint.release_staging_memory()
    loads = bench.time_loads(path, repeats)
    all_nbytes = sum(f.stat().st_size for f in path.glob("*.distcp"))
    save_median = statistics.median(saves["megafsdp"])
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "nbytes": all_nbytes,
        "save_s": {side: spread(values) for side, values in saves.items()},
        "save_of_raw": statistics.median(saves["raw"]) / save_median,
        "load_s": {side: spread(values) for side, values in loads.items()},
        "load_of_raw": statistics.median(loads["raw"]) / statistics.median(loads["megafsdp"]),
        "async": {
            "blocking_s": spread(blocking),
            "first_blocking_s": first,
            "total_s": spread(total),
            "of_sync": statistics.median(blocking) / save_median,
        },
    }


def _build(shape: Shape) -> tuple[torch.nn.Module, FusedAdam]:
    """Return a sharded model and an optimizer that has taken a step."""
    config = ModelConfig(
        architecture="gpt",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=16,
        num_query_groups=16,
        head_dim=shape.hidden // 16,
        ffn_hidden_size=4 * shape.hidden,
        vocab_size=shape.vocabulary,
        max_sequence_length=128,
    )
    with torch.device("meta"):
        model = build_model(config)
    device = device_type(dist.get_world_size())
    mesh = torch.distributed.init_device_mesh(device, (dist.get_world_size(),))
    megafsdp.fully_shard_model(model, unit_classes(config), mesh=mesh)
    torch.manual_seed(0)
    megafsdp.materialize(model)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class _Bench:
    """The sides, on one rank; every time is that of the slowest rank, on all ranks."""

    def __init__(
        self, model: torch.nn.Module, optimizer: FusedAdam, root: Path, nbytes: int
    ) -> None:
        self.model, self.optimizer, self.root = model, optimizer, root
        self.raw = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        self.turn = 0
        self.actions: dict[str, Callable[[Path], object]] = {
            "raw": self._write_raw,
            "megafsdp": lambda folder: self._save(checkpoint.save, folder),
            "dcp": lambda folder: dcp.save(self._torch_state(), checkpoint_id=folder),
        }

    def time_save(self, side: str) -> float:
        """Return the seconds of one save, its files removed afterwards."""
        folder = self._next_folder()
        seconds = _timed(lambda: self.actions[side](folder))
        self._remove(folder)
        return seconds

    def time_async(self) -> tuple[float, float]:
        """Return the seconds that an asynchronous save blocks, and those until it is published."""
        folder = self._next_folder()
        dist.barrier()
        start = time.perf_counter()
        pending = self._save(checkpoint.async_save, folder)
        assert isinstance(pending, checkpoint.PendingSave)
        pending.wait_staged()
        blocked = time.perf_counter() - start
        pending.result()
        whole = time.perf_counter() - start
        self._remove(folder)
        times = torch.tensor([blocked, whole])
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return float(times[0]), float(times[1])

    def time_loads(self, path: Path, repeats: int) -> dict[str, list[float]]:
        """Return the seconds of loads from files that are not in memory."""
        own = path / f"__{dist.get_rank()}_0.distcp"
        by_dcp = self.root / "dcp"
        dcp.save(self._torch_state(), checkpoint_id=by_dcp)
        target = self.raw.numpy().data
        before = [p.detach().to_local().clone() for p in self.model.parameters()]

        def read_raw() -> None:
            with own.open("rb", buffering=0) as stream:
                left = target
                while count := stream.readinto(left):
                    left = left[count:]

        sides: dict[str, tuple[Path, Callable[[], object]]] = {
            "raw": (path, read_raw),
            "megafsdp": (
                path,
                lambda: checkpoint.load(path, model=self.model, optimizer=self.optimizer),
            ),
            "dcp": (by_dcp, lambda: dcp.load(self._torch_state(), checkpoint_id=by_dcp)),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(repeats):
            for side, (folder, action) in sides.items():
                _drop_from_memory(folder)
                times[side].append(_timed(action))
        after = [p.detach().to_local() for p in self.model.parameters()]
        if not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)):
            raise CheckError("loading has changed the weights that were saved")
        return times

    def _save(self, act: Callable[..., object], folder: Path) -> object:
        return act(folder, step=_STEP, model=self.model, optimizer=self.optimizer)

    def _write_raw(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with (folder / f"raw{dist.get_rank()}").open("wb", buffering=0) as stream:
            left = self.raw.numpy().data
            while left.nbytes:
                left = left[stream.write(left) :]
            os.fsync(stream.fileno())

    def _torch_state(self) -> dict[str, object]:
        names = {p: name for name, p in self.model.named_parameters()}
        states = {names[p]: dict(state) for p, state in self.optimizer.state.items()}
        return {"model": dict(self.model.named_parameters()), "optimizer": states}

    def _next_folder(self) -> Path:
        self.turn += 1
        return self.root / str(self.turn)

    def _remove(self, folder: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        dist.barrier()


def _timed(action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def _drop_from_memory(folder: Path) -> None:
    dist.barrier()
    for path in folder.glob("*.distcp"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    dist.barrier()
