"""Records: payloads one after another in a rank's file, each as ``torch.save`` writes it.

This is the format of torch DCP's file-system storage (``__<rank>_0.distcp``). A record holds a
plain tensor or a structure of plain values and loads with ``weights_only=True``. What a record
means is the manifest's.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import torch

from megafsdp.checkpoint.manifest import Manifest, Record
from megafsdp.errors import CheckpointError, expected

# A checksum is made in pieces of this size, so that verifying needs no memory to speak of.
_PIECE_NBYTES = 1 << 24


class RecordWriter:
    """Append records to one rank's file; leaving the context makes the file durable.

    Args:
        directory: Where the file goes.
        rank: The rank whose file it is.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.file_name = f"__{rank}_0.distcp"
        self.nbytes = 0
        self._crc32 = 0
        self._stream: BinaryIO = (directory / self.file_name).open("wb")

    def __enter__(self) -> RecordWriter:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush to the disk and close."""
        with self._stream:
            if error is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())

    def append_tensor(self, tensor: torch.Tensor) -> Record:
        """Append a plain tensor, on any device; only its own elements are written."""
        on_cpu = tensor.detach().cpu().contiguous()
        if on_cpu.untyped_storage().nbytes() != on_cpu.nbytes:
            # torch.save writes whole storages, and a shard is a view of a flat buffer.
            on_cpu = on_cpu.clone()
        return self._append(on_cpu)

    def append_object(self, value: object) -> Record:
        """Append a structure of plain values, as ``state_dict.plain`` makes it."""
        return self._append(value)

    def _append(self, value: object) -> Record:
        start = self.nbytes
        self._crc32 = 0
        # torch.save streams into anything with write() and flush().
        torch.save(value, self)  # type: ignore[arg-type]
        return Record(self.file_name, start, self.nbytes - start, self._crc32)

    def write(self, data: bytes | memoryview) -> int:
        """Take bytes from ``torch.save``."""
        self._crc32 = zlib.crc32(data, self._crc32)
        written = self._stream.write(data)
        self.nbytes += written
        return written

    def flush(self) -> None:
        """Do nothing: the file is flushed once, at the end."""


class RecordReader:
    """Read records of one checkpoint, keeping one file open at a time.

    Args:
        directory: The checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._name = ""
        self._stream: BinaryIO | None = None

    def __enter__(self) -> RecordReader:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the open file."""
        if self._stream is not None:
            self._stream.close()

    def _at(self, record: Record) -> BinaryIO:
        if self._stream is None or self._name != record.file:
            if self._stream is not None:
                self._stream.close()
            self._stream = (self._directory / record.file).open("rb")
            self._name = record.file
        self._stream.seek(record.offset)
        return self._stream

    def verify(self, key: str, record: Record) -> None:
        """Compare a record's bytes with its checksum.

        Raises:
            CheckpointError: They differ.
        """
        stream, left, found = self._at(record), record.nbytes, 0
        while left and (piece := stream.read(min(left, _PIECE_NBYTES))):
            found = zlib.crc32(piece, found)
            left -= len(piece)
        if left or found != record.crc32:
            raise CheckpointError(
                expected(
                    f"checksum {record.crc32}",
                    f"{found} at byte {record.offset}",
                    where=f"'{key}' in file '{self._directory / record.file}'",
                    mend="The file is damaged: load another step (step=...)",
                )
            )

    def read_tensor(self, record: Record) -> torch.Tensor:
        """Read a plain tensor to CPU memory."""
        return self._read(record)

    def read_object(self, key: str, record: Record) -> object:
        """Verify and read a structure of plain values."""
        self.verify(key, record)
        return self._read(record)

    def _read(self, record: Record) -> torch.Tensor:
        payload = io.BytesIO(self._at(record).read(record.nbytes))
        return torch.load(payload, weights_only=True, map_location="cpu")


def require_files(manifest: Manifest, directory: Path, names: Iterable[str]) -> None:
    """Check that files are there with the size they were written with.

    Raises:
        CheckpointError: One is missing or has another size.
    """
    for name in names:
        path = directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != manifest.files[name]:
            raise CheckpointError(
                expected(
                    f"a file of {manifest.files[name]} bytes",
                    "no such file" if found is None else f"{found} bytes",
                    where=f"'{path}'",
                    mend="The checkpoint is incomplete: load another step (step=...)",
                )
            )
