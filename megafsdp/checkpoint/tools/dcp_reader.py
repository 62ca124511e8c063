"""Read any directory that torch DCP wrote, tensor by tensor, in one process, running no code of it.

``.metadata`` and the records of non-tensors are pickles; both are read as data by ``plain_pickle``,
tensors with ``weights_only=True``. What the keys mean is the caller's business.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import DCP_METADATA_FILE, Chunk, Record, TensorEntry
from megafsdp.checkpoint.format.records import RecordReader
from megafsdp.checkpoint.format.regions import Region, odd_cells, whole
from megafsdp.checkpoint.tools.safe_pickle import Foreign, read_pickle, read_record
from megafsdp.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
# Arguments of the classes that ``write_dcp_metadata`` has called rather than filled.
_FIELDS = {
    f"{_METADATA}.MetadataIndex": ("fqn", "offset"),
    f"{_METADATA}.ChunkStorageMetadata": ("offsets", "sizes"),
    "torch.distributed.checkpoint.filesystem._StorageInfo": ("relative_path", "offset", "length"),
}


class DCPDirectory:
    """The tensors and objects of one directory; a context manager that closes its file.

    Args:
        directory: The directory that holds ``.metadata``, or a save root with a tracker file and
            directories ``iter_<step>``.
        step: The step of a save root; None means the one that the tracker names.

    Raises:
        CheckpointError: There is no such directory, or it is not what torch DCP writes.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        self.directory = _find(Path(directory), step)
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: dict[str, Record] = {}
        path = self.directory / DCP_METADATA_FILE
        try:
            self._describe(read_pickle(path.read_bytes()))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise _untrusted(path, "torch DCP's metadata", error) from error
        self._records = RecordReader(self.directory)
        self._require_files()

    def __enter__(self) -> DCPDirectory:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the open file."""
        self._records.__exit__(kind, error, trace)

    def keys(self) -> list[str]:
        """List all keys, tensors first."""
        return [*self.tensors, *self.objects]

    def tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory.

        Raises:
            CheckpointError: Its chunks do not fill it, or a record is damaged.
        """
        entry = self.tensors[key]
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        if odd:
            raise CheckpointError.expected(
                f"chunks that fill shape {entry.shape} once",
                f"{odd[0][1]} chunks at {odd[0][0]}",
                where=f"'{key}' of '{self.directory}'",
                hint="The directory is incomplete: use another checkpoint",
            )
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        for chunk in entry.chunks:
            piece = self._chunk(key, chunk, entry.torch_dtype)
            tensor[chunk.region.slices_in(whole(entry.shape))] = piece
        return tensor

    def value(self, key: str) -> Any:
        """Read what is no tensor: plain values, with ``Foreign`` for what is none.

        Raises:
            CheckpointError: The record is damaged.
        """
        record = self.objects[key]
        with (self.directory / record.file).open("rb") as stream:
            stream.seek(record.offset)
            data = stream.read(record.nbytes)
        try:
            return read_record(data)
        except ValueError as error:
            where = self.directory / record.file
            raise _untrusted(where, f"a record of '{key}'", error) from error

    def _chunk(self, key: str, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        try:
            piece = self._records.read_tensor(chunk.record)
        # torch.load raises many classes on damaged input.
        except Exception as error:
            where = self.directory / chunk.record.file
            raise _untrusted(where, f"a record of '{key}'", error) from error
        if (piece.dtype, tuple(piece.shape)) != (dtype, chunk.region.sizes):
            found = f"{piece.dtype} {tuple(piece.shape)}"
            where = self.directory / chunk.record.file
            raise _untrusted(where, f"{dtype} {chunk.region.sizes} for '{key}'", found)
        return piece

    def _describe(self, metadata: object) -> None:
        """Take the entries out of torch's metadata object."""
        facts = _attributes(metadata, "Metadata")
        places: dict[tuple[str, tuple[int, ...] | None], Record] = {}
        for index, place in facts["storage_data"].items():
            at = _attributes(index, "MetadataIndex")
            offset = at.get("offset")
            places[at["fqn"], None if offset is None else tuple(offset)] = _record(place)
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
                str(dtype).removeprefix("torch."),
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
            if Path(name).name != name:
                raise _untrusted(self.directory, "records in files of its own", f"'{name}'")
            nbytes = path.stat().st_size if path.is_file() else None
            if nbytes is None or nbytes < end:
                found = "no such file" if nbytes is None else f"{nbytes} bytes"
                raise _untrusted(path, f"a file of at least {end} bytes", found)


def _find(directory: Path, step: int | None) -> Path:
    if step is None and (directory / DCP_METADATA_FILE).is_file():
        return directory
    chosen = on_disk.latest_step(directory) if step is None else step
    found = None if chosen is None else on_disk.step_directory(directory, chosen)
    if found is None or not (found / DCP_METADATA_FILE).is_file():
        what = f"a '{DCP_METADATA_FILE}' file or a '{on_disk.TRACKER_FILE}'"
        raise CheckpointError.expected(
            what if chosen is None else f"a torch DCP directory of step {chosen}",
            f"steps {on_disk.published_steps(directory)}",
            where=f"'{directory}'",
            hint="Give the directory of one step, or the root with the right step",
        )
    return found


def _attributes(value: Any, name: str) -> dict[str, Any]:
    is_it = isinstance(value, Foreign) and value.name == f"{_METADATA}.{name}"
    attributes = _set_or_given(value) if is_it else None
    if attributes is None:
        raise ValueError(f"no {name} where one belongs")
    return attributes


def _set_or_given(value: Foreign) -> dict[str, Any] | None:
    """Return the attributes of an object, be they set, as torch does, or given to its class."""
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
    # torch DCP keeps no checksums.
    return Record(file, offset, nbytes, 0)


def _untrusted(path: Path, what: str, got: object) -> CheckpointError:
    return CheckpointError.expected(
        what,
        got,
        where=f"'{path}'",
        hint="The directory is damaged, or another program's: use another checkpoint",
    )
