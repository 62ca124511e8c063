"""Verify a checkpoint: everything that can be known of it without a model, every fault listed.

Looked at are the manifest's own checksum, the files and their sizes, the checksum and the content
of every record, that the records fill their files, that the chunks of every tensor cover each
element once, that names which stand for tensors do so, and that ``.metadata`` says what the
manifest says. Bytes are read once, in pieces; nothing is unpickled that could run code. Repairing
is not attempted.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata
from tqdm import tqdm

from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import (
    DCP_METADATA_FILE,
    MANIFEST_FILE,
    Chunk,
    Manifest,
    Record,
    read_manifest,
    write_dcp_metadata,
)
from megafsdp.checkpoint.format.regions import odd_cells
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.errors import CheckpointError
from megafsdp.mesh.torch_private import file_view

_PIECE_NBYTES = 1 << 24
# Of a tensor cut into many chunks, as many odd places are worth naming.
_MAX_ODD_CELLS = 8
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault.

    Attributes:
        file: Name of the file inside the checkpoint; empty where none is to blame.
        key: Key of the tensor or object; empty where the fault is the file's.
        problem: What is wrong.
    """

    file: str
    key: str
    problem: str

    def describe(self) -> str:
        """Return the fault as one line."""
        return ": ".join(filter(None, (self.file, self.key, self.problem)))


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What was looked at, and every fault that was found.

    Attributes:
        directory: The checkpoint.
        num_tensors: Number of tensors in its manifest.
        num_records: Number of records that were read.
        nbytes: Their size.
        findings: The faults; none means that the checkpoint is sound.
    """

    directory: str
    num_tensors: int
    num_records: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """Return whether nothing is wrong."""
        return not self.findings

    def to_json(self) -> str:
        """Return the report as one JSON object."""
        return json.dumps(asdict(self) | {"is_sound": self.is_sound}, indent=2)

    def describe(self) -> str:
        """Return the report as text, one line a fault."""
        num_faults = len(self.findings)
        verdict = f"{num_faults} fault{'s' if num_faults > 1 else ''}" if num_faults else "sound"
        summary = (
            f"{self.directory}: {verdict}; {self.num_tensors} tensors, "
            f"{self.num_records} records, {self.nbytes:,} bytes read"
        )
        return "\n".join([*(finding.describe() for finding in self.findings), summary])


def verify(
    directory: str | os.PathLike[str], step: int | None = None, *, show_progress: bool = False
) -> VerifyReport:
    """Read a whole checkpoint and list its faults; local, in constant memory.

    Args:
        directory: The save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    path = on_disk.find(Path(directory), step)
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return VerifyReport(str(path), 0, 0, 0, (Finding(MANIFEST_FILE, "", str(error)),))
    places = sorted(
        ((record, key) for key in _keys(manifest) for record in manifest.records([key])),
        key=lambda place: (place[0].file, place[0].offset),
    )
    # A record that two entries name is read for both: each says something else about it.
    nbytes = sum(record.nbytes for record, _ in places)
    findings = list(_odd_files(path, manifest))
    findings += _odd_layout(manifest, places)
    with bytes_bar("verify", nbytes, is_wanted=show_progress) as bar:
        findings += _odd_records(path, manifest, places, bar)
    findings += _odd_chunks(manifest)
    odd_names = [*_odd_names(manifest), *_odd_parts(manifest)]
    # Names that stand for nothing have no words in .metadata to compare with.
    findings += odd_names or _odd_metadata(path, manifest)
    return VerifyReport(str(path), len(manifest.tensors), len(places), nbytes, tuple(findings))


def _keys(manifest: Manifest) -> list[str]:
    return [*manifest.tensors, *manifest.objects]


def _odd_files(path: Path, manifest: Manifest) -> Iterator[Finding]:
    for name, nbytes in manifest.files.items():
        file = path / name
        if not file.is_file():
            yield Finding(name, "", f"missing; {nbytes} bytes in the manifest")
        elif file.stat().st_size != nbytes:
            yield Finding(name, "", f"{file.stat().st_size} bytes; {nbytes} in the manifest")
    for file in sorted(path.glob("*.distcp")):
        if file.name not in manifest.files:
            yield Finding(file.name, "", "not in the manifest")


def _odd_layout(manifest: Manifest, places: list[tuple[Record, str]]) -> Iterator[Finding]:
    """Find bytes of a file of records that belong to no record, or to two."""
    ends = {record.file: 0 for record, _ in places}
    for record, key in places:
        end = ends[record.file]
        if record.offset != end:
            fault = "in two records" if record.offset < end else "in no record"
            low, high = sorted((record.offset, end))
            yield Finding(record.file, key, f"bytes {low} to {high} before it are {fault}")
        ends[record.file] = max(end, record.offset + record.nbytes)
    for file, end in ends.items():
        if (size := manifest.files.get(file)) != end:
            yield Finding(file, "", f"records end at byte {end}; the manifest says {size} bytes")


def _odd_records(
    path: Path, manifest: Manifest, places: list[tuple[Record, str]], bar: tqdm
) -> Iterator[Finding]:
    """Compare every record's checksum and content with the manifest, file by file."""
    name, stream = "", None
    try:
        for record, key in places:
            if record.file != name:
                if stream is not None:
                    stream.close()
                name, file = record.file, path / record.file
                stream = file.open("rb") if file.is_file() else None
            if stream is None:
                yield Finding(name, key, "its file is missing")
            elif (problem := _fault_of_record(stream, record, manifest, key)) is not None:
                yield Finding(name, key, f"record at byte {record.offset}: {problem}")
            bar.update(record.nbytes)
    finally:
        if stream is not None:
            stream.close()


def _fault_of_record(stream: BinaryIO, record: Record, manifest: Manifest, key: str) -> str | None:
    stream.seek(record.offset)
    left, found = record.nbytes, 0
    while left and (piece := stream.read(min(left, _PIECE_NBYTES))):
        found = zlib.crc32(piece, found)
        left -= len(piece)
    if left:
        return f"the file ends {left} bytes before it does"
    if found != record.crc32:
        return f"checksum {found}; {record.crc32} in the manifest"
    # The view of a BinaryIO is one too; the stubs do not say so.
    view = file_view(stream, record.offset, record.nbytes)
    try:
        # On the meta device only the description of a tensor is read, not its elements.
        value = torch.load(view, weights_only=True, map_location="meta")  # type: ignore[arg-type]
    except Exception as error:
        # What torch raises on a stream that it did not write has no common type.
        return f"not loadable: {type(error).__name__}: {error}"
    entry = manifest.tensors.get(key)
    if entry is None:
        return None
    wanted = [(entry.dtype, chunk.region.sizes) for chunk in entry.chunks if chunk.record == record]
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}; a tensor in the manifest"
    content = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return None if content in wanted else f"{content}; {wanted[0]} in the manifest"


def _odd_chunks(manifest: Manifest) -> Iterator[Finding]:
    for key, entry in manifest.tensors.items():
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        for cell, count in odd[:_MAX_ODD_CELLS]:
            is_inside = all(
                start < extent for start, extent in zip(cell.offsets, entry.shape, strict=True)
            )
            stored = "never" if not count else "once" if count == 1 else f"{count} times"
            wanted = "once" if is_inside else "never: they lie outside"
            yield Finding(
                _files_at(entry.chunks, cell.offsets),
                key,
                f"elements of sizes {list(cell.sizes)} at {list(cell.offsets)} of shape "
                f"{list(entry.shape)} are stored {stored} instead of {wanted}",
            )
        if len(odd) > _MAX_ODD_CELLS:
            yield Finding("", key, f"{len(odd) - _MAX_ODD_CELLS} more such places")


def _files_at(chunks: tuple[Chunk, ...], index: tuple[int, ...]) -> str:
    """Name the files of the chunks that hold one element."""
    holders = [
        chunk.record.file
        for chunk in chunks
        if all(
            start <= i < start + size
            for i, start, size in zip(index, chunk.region.offsets, chunk.region.sizes, strict=True)
        )
    ]
    return ", ".join(dict.fromkeys(holders)) or MANIFEST_FILE


def _odd_names(manifest: Manifest) -> Iterator[Finding]:
    for alias, target in manifest.aliases.items():
        if target not in manifest.tensors:
            yield Finding(MANIFEST_FILE, alias, f"tied to '{target}', which is not stored")
    for key in sorted(
        (manifest.tensors.keys() & manifest.objects.keys())
        | (manifest.aliases.keys() & {*_keys(manifest)})
    ):
        yield Finding(MANIFEST_FILE, key, "stored twice")
    for key in ("extra", "common"):
        if key not in manifest.objects:
            yield Finding(MANIFEST_FILE, key, "not stored, but every checkpoint has it")


def _odd_parts(manifest: Manifest) -> Iterator[Finding]:
    """Find fused parameters whose parts are not stored, or could not be joined."""
    for key, fused in manifest.fused_into.items():
        parts = [manifest.aliases.get(part, part) for part in fused["parts"]]
        entries = [manifest.tensors[part] for part in parts if part in manifest.tensors]
        for part in parts:
            if part not in manifest.tensors:
                yield Finding(MANIFEST_FILE, key, f"its part '{part}' is not stored")
        if key in manifest.tensors:
            yield Finding(MANIFEST_FILE, key, "stored both whole and in parts")
        dim = fused["dim"]
        others = {
            (entry.dtype, entry.shape[:dim], entry.shape[dim + 1 :], len(entry.shape))
            for entry in entries
        }
        if len(others) > 1 or any(0 < len(entry.shape) <= dim for entry in entries):
            shapes = [[entry.dtype, list(entry.shape)] for entry in entries]
            yield Finding(MANIFEST_FILE, key, f"parts {shapes} cannot be joined along dim {dim}")


def _odd_metadata(path: Path, manifest: Manifest) -> Iterator[Finding]:
    """Compare ``.metadata`` with what the manifest would have written."""
    if not (path / DCP_METADATA_FILE).is_file():
        if DCP_METADATA_FILE not in manifest.files:
            yield Finding(DCP_METADATA_FILE, "", "missing")
        return
    try:
        found = _read_metadata(path / DCP_METADATA_FILE)
    except Exception as error:
        # A damaged pickle raises anything.
        yield Finding(DCP_METADATA_FILE, "", f"unreadable: {type(error).__name__}: {error}")
        return
    with tempfile.TemporaryDirectory() as folder:
        wanted = _read_metadata(write_dcp_metadata(manifest, Path(folder)))
    for what, left, right in (
        ("shape, dtype and chunks", wanted.state_dict_metadata, found.state_dict_metadata),
        ("nested names", wanted.planner_data, found.planner_data),
        ("places of records", _by_key(wanted), _by_key(found)),
    ):
        for key in dict.fromkeys([*left, *right]):
            if left.get(key) != right.get(key):
                yield Finding(DCP_METADATA_FILE, key, f"{what} differ from the manifest's")


def _by_key(metadata: Metadata) -> dict[str, dict]:
    """Return the place of each chunk by key and offset; an index's hint is no part of it."""
    places: dict[str, dict] = {}
    for index, place in metadata.storage_data.items():
        places.setdefault(index.fqn, {})[index.offset] = place
    return places


class _MetadataUnpickler(pickle.Unpickler):
    """Read the classes of torch's metadata and nothing else, so that no code can run."""

    def find_class(self, module: str, name: str) -> object:
        """Return an allowed name."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"'{module}.{name}' has no place in a {DCP_METADATA_FILE}")


def _read_metadata(path: Path) -> Metadata:
    with path.open("rb") as stream:
        metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(metadata).__name__}")
    return metadata
