"""Records: payloads one after another in a rank's file, each in the form of ``torch.save``.

This is the format of torch DCP's file-system storage (``__<rank>_0.distcp``). A record is a plain
tensor or a structure of plain values, and loads with ``weights_only=True``. The manifest says which
tensor a record belongs to.

``torch.save`` writes whole storages, while a shard is a view of a flat buffer; it also reads every
byte twice more for checksums. So large tensors are written here, straight from the view, and their
checksum is computed once: the record is the same zip archive with the same entries.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import IO, TypeVar

import torch

from megafsdp.checkpoint.format.manifest import ANOTHER_STEP, Manifest, Record
from megafsdp.checkpoint.storage.locations import Location, size_of
from megafsdp.checkpoint.storage.store_files import StoreOutput
from megafsdp.device.torch_private import tensor_rebuilder
from megafsdp.errors import CheckpointError, listed
from megafsdp.mesh.torch_private import file_view

# Checksums are computed in pieces of this size, so that verification needs little memory.
_PIECE_NBYTES = 1 << 24
# Below this size, torch.save on a copy is cheaper than an archive made in Python.
_LARGE_NBYTES = 1 << 18
_CRC32_POLYNOMIAL = 0xEDB88320
# The class by which torch.save names a storage; torch.save itself writes other dtypes.
_STORAGE_CLASSES = {
    torch.float32: torch.FloatStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.float16: torch.HalfStorage,
}


class RecordSums:
    """Assemble records and compute their checksums, without keeping their bytes.

    Attributes:
        file_name: Name of the file that the records go to; empty for none.
        nbytes: Bytes of all records so far.
    """

    def __init__(self, file_name: str = "") -> None:
        self.file_name = file_name
        self.nbytes = 0
        self._crc32 = 0
        self._sums_up = True

    def append_tensor(self, tensor: torch.Tensor) -> Record:
        """Append a plain tensor, on any device; only its own elements, not its whole storage."""
        on_cpu = tensor.detach().cpu().contiguous()
        if on_cpu.nbytes >= _LARGE_NBYTES and on_cpu.dtype in _STORAGE_CLASSES:
            return self._append_large(on_cpu)
        if on_cpu.untyped_storage().nbytes() != on_cpu.nbytes:
            on_cpu = on_cpu.clone()
        return self.append_object(on_cpu)

    def append_object(self, value: object) -> Record:
        """Append a structure of plain values, as ``plain_values.plain`` returns it."""
        start = self._begin()
        archive = io.BytesIO()
        torch.save(value, archive)
        self.write(archive.getbuffer())
        return self._end(start)

    def _append_large(self, tensor: torch.Tensor) -> Record:
        """Append the archive that ``torch.save`` would make, without a copy of the elements."""
        start = self._begin()
        payload = tensor.reshape(-1).view(torch.uint8).numpy().data
        pickled = io.BytesIO()
        _StoragePickler(pickled, protocol=2).dump(_Described(tensor))
        with zipfile.ZipFile(self, "w") as archive:  # type: ignore[call-overload]
            archive.writestr("archive/data.pkl", pickled.getvalue())
            archive.writestr("archive/byteorder", "little")
            entry = zipfile.ZipInfo("archive/data/0")
            entry.file_size = payload.nbytes
            with archive.open(entry, "w") as stream:
                # ZipFile computes the CRC of the entry; it is combined with ours below.
                before, self._sums_up = self._crc32, False
                stream.write(payload)
                self._crc32, self._sums_up, after = 0, True, self.nbytes
            before = joined_crc32(before, entry.CRC, payload.nbytes)
            self._crc32 = joined_crc32(before, self._crc32, self.nbytes - after)
            archive.writestr("archive/version", "3\n")
        return self._end(start)

    def _begin(self) -> int:
        self._crc32 = 0
        return self.nbytes

    def _end(self, start: int) -> Record:
        return Record(self.file_name, start, self.nbytes - start, self._crc32)

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes of a record to the checksum and the count."""
        nbytes = memoryview(data).nbytes
        if self._sums_up:
            self._crc32 = zlib.crc32(data, self._crc32)
        self.nbytes += nbytes
        return nbytes

    def flush(self) -> None:
        """Do nothing: the file is made durable once, at the end."""


class RecordWriter(RecordSums):
    """Append records to one rank's file; leaving the context without error makes it durable.

    Args:
        directory: Where the file goes.
        rank: The rank whose file it is.
        suffix: Suffix of the file name; tells apart attempts that write to one directory.
    """

    def __init__(self, directory: Location, rank: int, *, suffix: str = "") -> None:
        super().__init__(f"__{rank}_0{suffix}.distcp")
        # Unbuffered: small archives are assembled in memory, large tensors are written whole.
        self._stream = (directory / self.file_name).open("wb", buffering=0)

    def __enter__(self) -> RecordWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        """Close the file."""
        self.close(is_durable=kind is None)

    def close(self, *, is_durable: bool) -> None:
        """Close the file; if it will be published, wait until it is on the disk first."""
        if isinstance(self._stream, StoreOutput):
            if is_durable:
                self._stream.close()
            else:
                self._stream.discard()
            return
        with self._stream:
            if is_durable:
                os.fsync(self._stream.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes of a record and add them to the checksum."""
        left = memoryview(data)
        while left.nbytes:
            left = left[self._stream.write(left) :]
        return super().write(data)


_Reader = TypeVar("_Reader", bound="RecordReader")


class RecordReader:
    """Read records of one directory; a context manager that has one file open at a time.

    Args:
        directory: The checkpoint's own directory.
    """

    def __init__(self, directory: Location) -> None:
        self.directory = directory
        self._name = ""
        self._stream: IO[bytes] | None = None

    def __enter__(self: _Reader) -> _Reader:
        """Return the reader."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Close the open file."""
        if self._stream is not None:
            self._stream.close()

    def _at(self, record: Record) -> IO[bytes]:
        if self._stream is None or self._name != record.file:
            if self._stream is not None:
                self._stream.close()
            self._stream = self._open(record.file)
            self._name = record.file
        self._stream.seek(record.offset)
        return self._stream

    def _open(self, name: str) -> IO[bytes]:
        path = self.directory / name
        try:
            return path.open("rb")
        except FileNotFoundError as error:
            raise CheckpointError.expected(
                "a file that stays while its checkpoint is read",
                "no such file",
                where=f"'{path}'",
                hint="It is lost, or a save with keep_last has removed the step meanwhile: "
                f"{ANOTHER_STEP}",
            ) from error

    def checksum(self, record: Record) -> tuple[int, int]:
        """Return the CRC-32 of a record, read in pieces, and how many bytes the file lacks."""
        stream, num_left, found = self._at(record), record.nbytes, 0
        while num_left and (piece := stream.read(min(num_left, _PIECE_NBYTES))):
            found = zlib.crc32(piece, found)
            num_left -= len(piece)
        return found, num_left

    def verify(self, key: str, record: Record) -> None:
        """Compare a record's bytes with its checksum.

        Raises:
            CheckpointError: They differ.
        """
        found, num_left = self.checksum(record)
        if num_left or found != record.crc32:
            raise CheckpointError.expected(
                f"checksum {record.crc32}",
                f"{found} at byte {record.offset}",
                where=f"'{key}' in file '{self.directory / record.file}'",
                hint=f"The file is damaged: {ANOTHER_STEP}",
            )

    def read_tensor(self, record: Record) -> torch.Tensor:
        """Read a plain tensor to CPU memory."""
        return self._read(record)

    def read_object(self, key: str, record: Record) -> object:
        """Verify and read a structure of plain values."""
        self.verify(key, record)
        return self._read(record)

    def read_description(self, record: Record) -> object:
        """Read a record with its tensors on the meta device; no elements are read."""
        # The stubs do not know that a BinaryIO is an IOBase, and the view a BinaryIO.
        view = file_view(self._at(record), record.offset, record.nbytes)  # type: ignore[arg-type]
        return torch.load(view, weights_only=True, map_location="meta")  # type: ignore[arg-type]

    def _read(self, record: Record) -> torch.Tensor:
        payload = io.BytesIO(self._at(record).read(record.nbytes))
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return torch.load(payload, weights_only=True, map_location="cpu")


class _Described:
    """A tensor as pickle sees it: its shape, and a storage of only its elements."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[object, ...]:
        """Return what ``torch.save`` pickles for a tensor."""
        shape, strides = tuple(self._tensor.shape), self._tensor.stride()
        storage = _DescribedStorage(_STORAGE_CLASSES[self._tensor.dtype], self._tensor.numel())
        hooks: OrderedDict[int, object] = OrderedDict()
        return tensor_rebuilder(), (storage, 0, shape, strides, False, hooks)


class _DescribedStorage:
    """A storage as ``torch.save`` names it."""

    def __init__(self, storage_class: type, numel: int) -> None:
        self.name = ("storage", storage_class, "0", "cpu", numel)


class _StoragePickler(pickle.Pickler):
    """Pickle storages by name, as ``torch.load`` looks them up."""

    def persistent_id(self, obj: object) -> tuple[object, ...] | None:
        """Return the name of a storage."""
        return obj.name if isinstance(obj, _DescribedStorage) else None


def joined_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two byte strings in a row from those of each.

    A CRC is a remainder of polynomials over GF(2): the first string is shifted by the bits of the
    second, i.e. multiplied by x^(8 n) modulo the CRC's polynomial. Bit 31 is x^0.

    Args:
        first: CRC-32 of the first string.
        second: CRC-32 of the second.
        second_nbytes: Length of the second, in bytes.
    """
    shift, square = 1 << 31, 1 << 23
    while second_nbytes:
        if second_nbytes & 1:
            shift = _crc32_product(shift, square)
        square = _crc32_product(square, square)
        second_nbytes >>= 1
    return _crc32_product(shift, first) ^ second


def _crc32_product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_CRC32_POLYNOMIAL if b & 1 else 0)
    return product


def require_files(manifest: Manifest, directory: Location, names: Iterable[str]) -> None:
    """Check that files exist with the size that they were written with.

    Raises:
        CheckpointError: One is missing or has another size.
    """
    for name in names:
        path = directory / name
        found = size_of(path)
        if found != manifest.files[name]:
            raise CheckpointError.expected(
                f"a file of {manifest.files[name]} bytes",
                "no such file" if found is None else f"{found} bytes",
                where=f"'{path}'{_lost(manifest, name, found or 0)}",
                hint=f"The checkpoint is incomplete: {ANOTHER_STEP}",
            )


def _lost(manifest: Manifest, name: str, nbytes: int) -> str:
    """Name the tensors and objects that a file of so many bytes lacks, at most 20."""
    keys = [
        key
        for key in (*manifest.tensors, *manifest.objects)
        if any(
            record.file == name and record.offset + record.nbytes > nbytes
            for record in manifest.records([key])
        )
    ]
    if not keys:
        return ""
    return f", which lacks {listed(list(map(repr, keys)))}"
