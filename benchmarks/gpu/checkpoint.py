"""Part 9: saves, asynchronous saves and loads; and an asynchronous save while memory is reused.

The files lie in memory if there is room: a disk would hide our own costs.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

import megafsdp
from benchmarks import checkpoint as case
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from megafsdp import checkpoint
from megafsdp.buffer.dtensor.uneven import local_tensor

_MEMORY_FOLDER = Path("/dev/shm")
_NEEDED_NBYTES = 16 << 30
_NUM_ALLOCATIONS = 200


def run(size: Size, report: Report) -> None:
    """Check a save under memory pressure, then measure."""
    has_room = _MEMORY_FOLDER.is_dir() and shutil.disk_usage(_MEMORY_FOLDER).free > _NEEDED_NBYTES
    parent = _MEMORY_FOLDER if has_room and not size.is_rehearsal else None
    report.figure("files in memory", parent is not None)
    with one_rank(size) as device, tempfile.TemporaryDirectory(dir=parent) as folder:
        _save_under_pressure(size, device, Path(folder, "pressure"), report)
        shape = size.either(case.Shape(2, 1024, 8_192), case.Shape(1, 16, 32))
        measured = case.measure(shape, 1, folder)
        report.figure("megabytes", round(measured["nbytes"] / 1e6, 3))
        for act in ("save", "load"):
            rates = {
                side: measured["nbytes"] / seconds["median"] / 1e9
                for side, seconds in measured[f"{act}_s"].items()
            }
            report.figure(f"{act}, GB/s", rates)
        report.figure("asynchronous save", measured["async"])
        # The case has compared the weights after each load.
        report.check("loaded what was saved", True)


class _Net(nn.Module):
    """Weights that take a while to copy, then a buffer that is saved too."""

    def __init__(self, width: int, buffer_numel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.register_buffer("counts", torch.arange(buffer_numel, dtype=torch.float32))


def _save_under_pressure(size: Size, device: torch.device, folder: Path, report: Report) -> None:
    """Allocate and fill memory that the save may have freed too early, then check the files."""
    width, buffer_numel = size.either((4096, 1 << 18), (32, 16))

    def new() -> _Net:
        with device:
            return megafsdp.fully_shard(_Net(width, buffer_numel))

    net = new()
    pending = checkpoint.async_save(folder, step=1, model=net)
    poison = [
        torch.full((buffer_numel,), float("nan"), device=device) for _ in range(_NUM_ALLOCATIONS)
    ]
    path = pending.result()
    del poison
    other = new()
    with torch.no_grad():
        other.counts.zero_()
    checkpoint.load(path, model=other)
    report.check("buffer under pressure", torch.equal(other.counts, net.counts))
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    are_equal = all(
        torch.equal(local_tensor(a.detach()), local_tensor(b.detach())) for a, b in pairs
    )
    report.check("weights under pressure", are_equal)
