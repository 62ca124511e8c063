"""The tools stream: a checkpoint far larger than the memory that they may take goes through."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint.tools.diff import diff
from megafsdp.checkpoint.tools.torch_file import from_torch, to_torch
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.checkpoint.tools.writer import CheckpointWriter

_NUM_TENSORS = 24
_ROWS = 2048
_TENSOR_NBYTES = _ROWS * 512 * 4
# A sixth of the tensors: two whole ones, a chunk of each, and what small objects need.
_BUDGET_NBYTES = _NUM_TENSORS * _TENSOR_NBYTES // 6


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


def _work_within_budget(root: Path) -> None:
    path = _write(root / "a")
    verify(path)
    with _limited(_BUDGET_NBYTES):
        with pytest.raises((RuntimeError, MemoryError)):
            torch.empty(_NUM_TENSORS * _TENSOR_NBYTES, dtype=torch.uint8)
        assert verify(path).is_sound
        assert diff(path, path).is_equal
        file = to_torch(path, root / "a.pt")
    again = from_torch(file, root / "b")
    assert diff(path, again).is_equal


def test_tensors_go_through_one_by_one(tmp_path: Path) -> None:
    """With memory for a sixth of the tensors, all tools do their work."""
    # The process has a heap of its own, and the threshold stays fixed: else freed tensors stay in
    # the heap of all tests, where small objects cut them up, and what is taken hangs on its past.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, tmp_path], env=environment, check=True, timeout=120)


if __name__ == "__main__":
    _work_within_budget(Path(sys.argv[1]))
