"""The safetensors library reads what we write, whatever the dtypes, shapes and order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafsdp.checkpoint.huggingface.safetensors_files import (
    SafetensorsReader,
    SafetensorsWriter,
    StoredTensor,
    index_of,
    plan_files,
)
from megafsdp.errors import CheckpointError

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (3,), (5, 3), (2, 3, 4), (4, 0, 2))


def _tensors() -> dict[str, torch.Tensor]:
    return {
        f"{dtype} {shape}": torch.randint(0, 2, shape).to(dtype)
        for dtype in _DTYPES
        for shape in _SHAPES
    }


def _stored(tensors: dict[str, torch.Tensor]) -> list[StoredTensor]:
    return [StoredTensor(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]


def test_the_library_reads_every_dtype_and_shape(tmp_path: Path) -> None:
    """Written in another order than planned, bit-equal, and as long as the library's own file."""
    tensors = _tensors()
    (plan,) = plan_files([_stored(tensors)], 1)
    with SafetensorsWriter(tmp_path, plan) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    path = tmp_path / "model.safetensors"
    assert path.stat().st_size == plan.nbytes
    got = load_file(path)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name].float(), tensor.float()), name
    save_file(tensors, tmp_path / "library.safetensors")
    assert got[name].shape == load_file(tmp_path / "library.safetensors")[name].shape


def test_tensors_start_at_multiples_of_eight_bytes() -> None:
    """Readers map the file."""
    for length in range(1, 20):
        (plan,) = plan_files([[StoredTensor("n" * length, torch.float32, (2,))]], 1)
        assert plan.offsets["n" * length] % 8 == 0


def test_files_are_filled_in_order_and_groups_stay_together() -> None:
    """A group that is too large has a file of its own."""
    groups = [
        [StoredTensor(f"{i}.{j}", torch.uint8, (size,)) for j in range(2)]
        for i, size in enumerate((2, 3, 9, 1, 1))
    ]
    files = plan_files(groups, 10)
    names = [[tensor.name for tensor in file.tensors] for file in files]
    assert names == [["0.0", "0.1", "1.0", "1.1"], ["2.0", "2.1"], ["3.0", "3.1", "4.0", "4.1"]]
    assert [file.name for file in files][1] == "model-00002-of-00003.safetensors"
    index = json.loads(index_of(files))
    assert index["metadata"]["total_size"] == 32
    assert index["weight_map"]["2.1"] == "model-00002-of-00003.safetensors"


def test_a_dtype_without_a_name_is_refused() -> None:
    """Complex numbers have no place in the format as readers know it."""
    with pytest.raises(CheckpointError, match="complex64"):
        plan_files([[StoredTensor("z", torch.complex64, (2,))]], 1)


def test_a_tensor_that_was_not_written_is_our_bug(tmp_path: Path) -> None:
    """A file with a hole never looks complete."""
    (plan,) = plan_files([[StoredTensor("a", torch.uint8, (2,))]], 1)
    with pytest.raises(AssertionError, match="not written"), SafetensorsWriter(tmp_path, plan):
        pass


def test_slices_are_read_along_either_dimension(tmp_path: Path) -> None:
    """Rows or columns, also none."""
    tensor = torch.arange(20.0).reshape(5, 4)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    with SafetensorsReader(tmp_path) as reader:
        assert reader.names == ["t"]
        assert reader.shape("t") == (5, 4)
        assert torch.equal(reader.rows("t", 1, 3), tensor[1:3])
        assert torch.equal(reader.rows("t", 1, 3, dim=1), tensor[:, 1:3])
        assert torch.equal(reader.tensor("t"), tensor)
