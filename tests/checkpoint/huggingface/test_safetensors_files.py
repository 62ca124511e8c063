"""Files hold every dtype and shape, are divided as announced, and are read slice by slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megafsdp.checkpoint.huggingface.output import (
    Export,
    plan_export,
    prepare,
    publish,
    write_files,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader, write_file
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


def _plan(tensors: dict[str, torch.Tensor], max_nbytes: int) -> Export:
    facts = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return plan_export(facts, {}, dtype=None, max_shard_nbytes=max_nbytes)


@pytest.mark.parametrize("max_nbytes", [1, 10**9])
def test_the_library_reads_every_dtype_and_shape(tmp_path: Path, max_nbytes: int) -> None:
    """Bit-equal and contiguous, in one file, or one file a tensor with elements."""
    tensors = _tensors()
    export = _plan(tensors, max_nbytes)
    assert len(export.files) == (1 if max_nbytes > 1 else 48)
    target = tmp_path / "folder" / "below" / "exported"
    temporary = prepare(target)
    assert write_files(export, temporary, lambda _, entry, dtype: tensors[entry.ours]) is None
    publish(temporary, target, export)
    got = {k: t for file in export.files for k, t in load_file(target / file.name).items()}
    assert got.keys() == tensors.keys()
    names = SafetensorsReader(target).names
    # The order of the files, in every process.
    assert list(dict.fromkeys(map(export.file_of.get, names))) == [f.name for f in export.files]
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name].float(), tensor.float()), name


def test_files_are_filled_in_order_and_named_in_an_index(tmp_path: Path) -> None:
    """A tensor that is too large has a file of its own, before the file that is being filled."""
    sizes = (4, 6, 18, 2, 2)
    tensors = {str(i): torch.ones(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    export = _plan(tensors, 10)
    names = [[entry.ours for entry, _ in file.entries] for file in export.files]
    assert names == [["2"], ["0", "1"], ["3", "4"]]
    assert [file.nbytes for file in export.files] == [18, 10, 4]
    publish(prepare(tmp_path / "exported"), tmp_path / "exported", export)
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 32, "total_size": 32}
    assert index["weight_map"]["1"] == "model-00002-of-00003.safetensors"


@pytest.mark.parametrize("num_files", [1, 2])
def test_two_files_have_an_index(tmp_path: Path, num_files: int) -> None:
    """One file has none."""
    export = _plan({str(i): torch.ones(2) for i in range(num_files)}, 8)
    target = publish(prepare(tmp_path / "exported"), tmp_path / "exported", export)
    assert len(export.files) == num_files
    assert (target / "model.safetensors.index.json").exists() == (num_files == 2)


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path: Path) -> None:
    """As for any other file, for a caller who looks for a full disk."""
    with pytest.raises(OSError, match="No such file"):
        write_file(tmp_path / "nowhere" / "model.safetensors", {"t": torch.ones(2)})


def test_a_dtype_without_a_name_is_refused() -> None:
    """Complex numbers have no place in the format as readers know it."""
    with pytest.raises(CheckpointError, match="complex64"):
        _plan({"z": torch.ones(2, dtype=torch.complex64)}, 1)


def test_a_model_without_tensors_is_one_file() -> None:
    """The name is that of a model in one file."""
    (file,) = _plan({}, 1).files
    assert (file.name, file.entries) == ("model.safetensors", ())


def test_slices_are_read_along_either_dimension(tmp_path: Path) -> None:
    """Rows or columns, also none."""
    tensor = torch.arange(20.0).reshape(5, 4)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    reader = SafetensorsReader(tmp_path)
    assert reader.names == ["t"]
    assert reader.shape("t") == (5, 4)
    assert torch.equal(reader.rows("t", 1, 3), tensor[1:3])
    assert torch.equal(reader.rows("t", 1, 3, dim=1), tensor[:, 1:3])
    assert torch.equal(reader.tensor("t"), tensor)
