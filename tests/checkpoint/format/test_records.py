"""Records: a view stores its own bytes only, and damage anywhere in a record is found."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch

from megafsdp.checkpoint.format.records import RecordReader, RecordWriter, joined_crc32
from megafsdp.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_of_a_large_buffer_is_stored_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    """Rows of a flat buffer come back bit by bit without the rest of the buffer."""
    buffer = torch.randint(0, 255, (100_000,), dtype=torch.uint8)
    if dtype is torch.bool:
        buffer = buffer % 2
    view = buffer.view(dtype)[8:32].view(2, 12)
    with RecordWriter(tmp_path, 3) as writer:
        record = writer.append_tensor(view)
    assert record.nbytes < 3000
    with RecordReader(tmp_path) as reader:
        loaded = reader.read_tensor(record)
    assert loaded.dtype == dtype and loaded.shape == (2, 12)
    assert torch.equal(loaded.view(torch.uint8), view.contiguous().view(torch.uint8))


def test_records_of_one_file_are_told_apart(tmp_path: Path) -> None:
    """Offsets and checksums belong to their own record, in any reading order."""
    with RecordWriter(tmp_path, 0) as writer:
        first = writer.append_tensor(torch.arange(5))
        second = writer.append_object({"a": [1, torch.ones(2)]})
        third = writer.append_tensor(torch.tensor(2.5))
    assert (tmp_path / "__0_0.distcp").stat().st_size == writer.nbytes
    with RecordReader(tmp_path) as reader:
        assert reader.read_tensor(third).item() == 2.5
        assert torch.equal(reader.read_tensor(first), torch.arange(5))
        value = reader.read_object("extra", second)
    assert isinstance(value, dict) and value["a"][0] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_large_record_is_what_torch_save_writes(tmp_path: Path, dtype: torch.dtype) -> None:
    """Its entries have torch's names and bytes, its own checksums and the record's are right."""
    tensor = torch.randn(2, 300_000).to(dtype)[:, :150_000]
    with RecordWriter(tmp_path, 0) as writer:
        writer.append_tensor(torch.zeros(3))
        record = writer.append_tensor(tensor)
        small = writer.append_tensor(torch.ones(3))
    content = (tmp_path / "__0_0.distcp").read_bytes()[record.offset :][: record.nbytes]
    assert zlib.crc32(content) == record.crc32
    buffer = io.BytesIO()
    torch.save(tensor.clone(), buffer)
    ours, theirs = zipfile.ZipFile(io.BytesIO(content)), zipfile.ZipFile(buffer)
    assert ours.testzip() is None
    assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), tensor)
    assert set(ours.namelist()) <= set(theirs.namelist())
    assert ours.read("archive/data/0") == theirs.read("archive/data/0")
    assert ours.read("archive/version").strip() == theirs.read("archive/version").strip()
    with RecordReader(tmp_path) as reader:
        reader.verify("small", small)
        assert torch.equal(reader.read_tensor(record), tensor)


def test_what_is_read_in_inference_mode_can_be_written_outside_of_it(tmp_path: Path) -> None:
    """A load in inference mode gives back tensors like any other."""
    with RecordWriter(tmp_path, 0) as writer:
        record = writer.append_tensor(torch.arange(3))
    with RecordReader(tmp_path) as reader, torch.inference_mode():
        read = reader.read_tensor(record)
    assert torch.equal(read.add_(1), torch.tensor([1, 2, 3]))


class _Trickle(io.FileIO):
    """A file that takes 1,000 bytes at a time, as Linux takes 2 GiB."""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        return super().write(memoryview(data)[:1000])


def test_a_file_that_takes_a_part_of_a_write_gets_the_rest(tmp_path: Path) -> None:
    """Small and large records are whole on the disk, and the next one lies behind them."""
    tensors = [torch.randn(200, 10), torch.randn(30, 2500), torch.randn(7)]
    with mock.patch.object(Path, "open", lambda path, *_, **__: _Trickle(path, "w")):
        writer = RecordWriter(tmp_path, 0)
    with writer:
        records = [writer.append_tensor(tensor) for tensor in tensors]
    with RecordReader(tmp_path) as reader:
        for tensor, record in zip(tensors, records, strict=True):
            reader.verify("weight", record)
            assert torch.equal(reader.read_tensor(record), tensor)


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 100_003])
def test_checksums_are_joined(nbytes: int) -> None:
    """The checksum of two strings in a row follows from those of each."""
    first, second = bytes(range(256)) * 3, bytes(k * 7 % 251 for k in range(nbytes))
    joined = joined_crc32(zlib.crc32(first), zlib.crc32(second), nbytes)
    assert joined == zlib.crc32(first + second)


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_is_found(tmp_path: Path, place: float) -> None:
    """One bit anywhere in the record changes its checksum; the neighbours stay valid."""
    with RecordWriter(tmp_path, 0) as writer:
        before = writer.append_tensor(torch.zeros(100))
        record = writer.append_tensor(torch.zeros(100))
    path = tmp_path / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[record.offset + int(place * (record.nbytes - 1))] ^= 4
    path.write_bytes(content)
    with RecordReader(tmp_path) as reader:
        reader.verify("model.before", before)
        with pytest.raises(CheckpointError, match=r"'model.weight' in file .*__0_0.distcp"):
            reader.verify("model.weight", record)
