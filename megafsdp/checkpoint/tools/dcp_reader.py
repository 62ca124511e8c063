"""Read any directory that torch DCP wrote, tensor by tensor, in one process, without running code.

``.metadata`` and the records of non-tensors are pickles of any program; tools/safe_pickle.py reads
both as data. Tensors load with ``weights_only=True``. The meaning of the keys is not decided here:
for Megatron-LM's, see checkpoint/megatron.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import (
    DCP_METADATA_FILE,
    Chunk,
    Record,
    TensorEntry,
    dtype_name,
)
from megafsdp.checkpoint.storage.locations import Location, size_of
from megafsdp.checkpoint.tools.reader import ChunkReader
from megafsdp.checkpoint.tools.safe_pickle import Foreign, read_pickle, read_record
from megafsdp.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
# Arguments of the classes whose pickled form is a call with arguments, not a set of attributes.
_FIELDS = {
    f"{_METADATA}.MetadataIndex": ("fqn", "offset"),
    f"{_METADATA}.ChunkStorageMetadata": ("offsets", "sizes"),
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("relative_path", "offset", "length"),
}


class DCPDirectory(ChunkReader):
    """The tensors and objects of one directory of torch DCP; closes its file as a context manager.

    Args:
        directory: The directory with ``.metadata``, or a save root with a tracker file and
            directories ``iter_<step>``.
        step: The step of a save root; None means the one that the tracker names.

    Raises:
        CheckpointError: There is no such directory, or it is not what torch DCP writes.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, Record] = {}
        found = save_root.find(directory, step, marker=DCP_METADATA_FILE)
        super().__init__(found, self.tensors)
        path = found / DCP_METADATA_FILE
        try:
            self._describe(read_metadata(path))
        # Another program wrote the metadata: it may have any structure.
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise _untrusted(path, "torch DCP's metadata", error) from error
        self._require_files()

    def keys(self) -> list[str]:
        """List all keys, tensors first."""
        return [*self.tensors, *self.objects]

    def tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory.

        Raises:
            CheckpointError: Its chunks do not fill it, or a record is damaged.
        """
        return self.join_chunks(key)

    def value(self, key: str) -> Any:
        """Read a non-tensor: plain values, with ``Foreign`` in place of any other object.

        Raises:
            CheckpointError: The record is damaged.
        """
        record = self.objects[key]
        try:
            return read_record(self._at(record).read(record.nbytes))
        except ValueError as error:
            where = self.directory / record.file
            raise _untrusted(where, f"a record of '{key}'", error) from error

    def read_chunk(self, key: str, record: Record) -> torch.Tensor:
        """Read the record of one chunk, which has no checksum."""
        try:
            return self.read_tensor(record)
        # torch.load raises many classes on damaged input.
        except Exception as error:
            where = self.directory / record.file
            raise _untrusted(where, f"a record of '{key}'", error) from error

    def _describe(self, facts: dict[str, Any]) -> None:
        """Fill the entries from the attributes of torch's metadata object."""
        places = {key: _record(place) for key, place in places_of(facts).items()}
        for key, described in facts["state_dict_metadata"].items():
            if described.name == f"{_METADATA}.BytesStorageMetadata":
                self.objects[key] = places[key, None]
                continue
            entry = _attributes(described, "TensorStorageMetadata")
            regions = []
            for chunk in entry["chunks"]:
                of_chunk = _attributes(chunk, "ChunkStorageMetadata")
                regions.append(Region(tuple(of_chunk["offsets"]), tuple(of_chunk["sizes"])))
            dtype = next(v for v in entry["properties"].state if isinstance(v, torch.dtype))
            self.tensors[key] = TensorEntry(
                tuple(entry["size"]),
                dtype_name(dtype),
                # A rank without rows may have written an empty chunk, or none.
                tuple(Chunk(r, places[key, r.offsets]) for r in regions if r.numel),
            )

    def _require_files(self) -> None:
        ends: dict[str, int] = {}
        records = [c.record for entry in self.tensors.values() for c in entry.chunks]
        for record in (*records, *self.objects.values()):
            ends[record.file] = max(ends.get(record.file, 0), record.offset + record.nbytes)
        for name, end in ends.items():
            path = self.directory / name
            if os.path.basename(name) != name:
                raise _untrusted(self.directory, "records in files of its own", f"'{name}'")
            nbytes = size_of(path)
            if nbytes is None or nbytes < end:
                found = "no such file" if nbytes is None else f"{nbytes} bytes"
                raise _untrusted(path, f"a file of at least {end} bytes", found)


def read_metadata(path: Location) -> dict[str, Any]:
    """Read a ``.metadata`` file as data.

    Returns:
        The attributes of torch's ``Metadata``; objects among their values are ``Foreign``.

    Raises:
        ValueError: It is no pickle, or a pickle of something else.
    """
    return _attributes(read_pickle(path.read_bytes()), "Metadata")


def places_of(facts: dict[str, Any]) -> dict[tuple[str, tuple[int, ...] | None], object]:
    """Return the place of each record, by its key and, for a chunk, the offsets of its region."""
    places = {}
    for index, place in facts["storage_data"].items():
        at = _attributes(index, "MetadataIndex")
        offset = at.get("offset")
        places[at["fqn"], None if offset is None else tuple(offset)] = place
    return places


def _attributes(value: Any, name: str) -> dict[str, Any]:
    is_it = isinstance(value, Foreign) and value.name == f"{_METADATA}.{name}"
    attributes = _set_or_given(value) if is_it else None
    if attributes is None:
        raise ValueError(f"no {name} where one belongs")
    return attributes


def _set_or_given(value: Foreign) -> dict[str, Any] | None:
    """Return the attributes of an object, set as torch does or passed to its class."""
    attributes = value.attributes()
    if attributes is None and value.arguments and value.name in _FIELDS:
        return dict(zip(_FIELDS[value.name], value.arguments, strict=False))
    return attributes


def _record(place: object) -> Record:
    attributes = _set_or_given(place) if isinstance(place, Foreign) else None
    if attributes is None:
        raise ValueError("no place of a record")
    if attributes.get("transform_descriptors"):
        raise ValueError(f"records transformed by {attributes['transform_descriptors']}")
    file, offset, nbytes = (attributes[k] for k in ("relative_path", "offset", "length"))
    if not (isinstance(file, str) and isinstance(offset, int) and isinstance(nbytes, int)):
        raise ValueError("a record without a place")
    # torch DCP stores no checksums.
    return Record(file, offset, nbytes, 0)


def _untrusted(path: Location, what: str, got: object) -> CheckpointError:
    return CheckpointError.expected(
        what,
        got,
        where=f"'{path}'",
        hint="The directory is damaged, or another program's: use another checkpoint",
    )
