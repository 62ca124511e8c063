"""The tools stream: a checkpoint far larger than the memory that they may take goes through."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint.diff import diff
from megafsdp.checkpoint.torch_file import from_torch, to_torch
from megafsdp.checkpoint.verify import verify
from megafsdp.checkpoint.writer import CheckpointWriter

_NUM_TENSORS = 24
_ROWS = 2048
_TENSOR_NBYTES = _ROWS * 512 * 4


def _write(root: Path) -> Path:
    with CheckpointWriter(root, step=1) as writer:
        for i in range(_NUM_TENSORS):
            tensor = torch.full((_ROWS, 512), float(i))
            writer.add_tensor(f"model.a{i}", tensor, chunk_rows=_ROWS // 2)
        return writer.publish()


@contextmanager
def _limited(nbytes: int) -> Iterator[None]:
    """Let the process take so much more memory; what is mapped from files is the disk's."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmData" in s)
    taken_nbytes = int(line.split()[1]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken_nbytes + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def test_tensors_go_through_one_by_one(tmp_path: Path) -> None:
    """With memory for a third of the tensors, all tools do their work."""
    path = _write(tmp_path / "a")
    verify(path)
    budget_nbytes = _NUM_TENSORS * _TENSOR_NBYTES // 3
    with _limited(budget_nbytes):
        with pytest.raises((RuntimeError, MemoryError)):
            torch.empty(_NUM_TENSORS * _TENSOR_NBYTES, dtype=torch.uint8)
        assert verify(path).is_sound
        assert diff(path, path).is_equal
        file = to_torch(path, tmp_path / "a.pt")
    again = from_torch(file, tmp_path / "b")
    assert diff(path, again).is_equal
