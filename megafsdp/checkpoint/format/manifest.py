"""The manifest: the contents of a checkpoint, readable without unpickling anything.

``manifest.json`` lists every tensor with its global shape, dtype and the place of each stored
chunk, which tensors are the parts of a fused one, every non-tensor object, the size of every file,
and what made the checkpoint. It carries its own checksum and one for every record. ``.metadata`` is
derived from the manifest and holds the same facts in torch DCP's form, so that
``torch.distributed.checkpoint`` can read the directory without us; loading here never opens it.
"""

from __future__ import annotations

import copyreg
import json
import os
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.format.regions import with_extent
from megafsdp.checkpoint.storage.locations import L, Location, joined
from megafsdp.checkpoint.storage.store_path import StorePath
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import FusedParts
from megafsdp.mesh.torch_private import StorageInfo

MANIFEST_FILE = "manifest.json"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
# The remedy in error messages if a checkpoint cannot be read.
ANOTHER_STEP = f"load another step: pass step=, or write its number into {TRACKER_FILE}"
DCP_METADATA_FILE = ".metadata"
FORMAT_VERSION = 2
# Bytes that may follow the last brace: an editor or a copy may change the end of the line.
_MOST_SPACE = 2


class Record(NamedTuple):
    """Where a payload lies on disk.

    Attributes:
        file: File name inside the checkpoint.
        offset: First byte.
        nbytes: Length.
        crc32: Checksum of the bytes.
    """

    file: str
    offset: int
    nbytes: int
    crc32: int


class Chunk(NamedTuple):
    """A stored region of a tensor and its record."""

    region: Region
    record: Record


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A stored tensor.

    Attributes:
        shape: Global shape.
        dtype: Name of the dtype without ``torch.``.
        chunks: Regions that cover the tensor, each once.
        fused: If a fused tensor is stored whole, its logical parts, as the layer declared them.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]
    fused: FusedParts | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch's object."""
        return getattr(torch, self.dtype)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that a checkpoint records about itself.

    Attributes:
        step: Training step.
        world_size: Number of ranks that saved.
        versions: Library versions by name.
        tensors: Stored tensors by key.
        objects: Records of non-tensor objects by key.
        aliases: Further names of stored tensors (tied parameters): key -> stored key.
        files: Size in bytes of every other file.
        fused_into: Key of each fused tensor that is stored in parts -> ``{"parts": keys in order,
            "dim": the dim that joins them}``, and ``"num_groups"`` if the saved module had the
            parts in several groups. Scalars, such as a count of steps, are equal in all parts.
        has_whole_order: Whether each fused tensor is in the order of the whole. If not, a fused
            tensor of a model that our engine had not cut may be in the order of the ranks.
        checksum: Checksum of ``manifest.json``, which differs between two saves of a step; None if
            the manifest was not read from a file.
    """

    step: int
    world_size: int
    versions: dict[str, str]
    tensors: dict[str, TensorEntry]
    objects: dict[str, Record]
    aliases: dict[str, str]
    files: dict[str, int]
    fused_into: dict[str, dict] = field(default_factory=dict)
    has_whole_order: bool = True
    checksum: int | None = field(default=None, compare=False)

    def stored(self) -> set[str]:
        """Return the keys of all tensors, tied names included."""
        return self.tensors.keys() | self.aliases.keys()

    def records(self, keys: Iterable[str]) -> Iterator[Record]:
        """Yield the records of some keys, tensors and objects alike."""
        for key in keys:
            if key in self.tensors:
                yield from (chunk.record for chunk in self.tensors[key].chunks)
            else:
                yield self.objects[key]

    def places(self, keys: Iterable[str]) -> list[tuple[Record, str]]:
        """List the records of some keys, each with its key, in the order of the files."""
        places = ((record, key) for key in keys for record in self.records([key]))
        return sorted(places, key=lambda place: (place[0].file, place[0].offset))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def joining(parts: list[str], dim: int, num_groups: int = 1) -> dict[str, Any]:
    """Return the entry of a fused tensor in ``fused_into``.

    Args:
        parts: Keys of the parts, in their order along ``dim``.
        dim: The dimension along which they are joined.
        num_groups: How many times the sequence of all parts repeats in the whole tensor, each time
            with the next piece of each part.
    """
    groups = {"num_groups": num_groups} if num_groups > 1 else {}
    return {"parts": parts, "dim": dim} | groups


def section_of(key: str) -> str:
    """Return the first part of a key: model, optimizer, lr_scheduler, rng, extra, and so on."""
    return key.split(".", 1)[0]


def path_of(key: str) -> tuple[str, ...]:
    """Return the nested path of a key; the name of a parameter is one component of it.

    ``optimizer.state.blocks.0.weight.sum`` is ``("optimizer", "state", "blocks.0.weight", "sum")``.
    """
    if key.startswith("optimizer.state."):
        name, _, state = key.removeprefix("optimizer.state.").rpartition(".")
        return ("optimizer", "state", name, state)
    return tuple(key.split(".", 1))


def write_manifest(manifest: Manifest, directory: L) -> L:
    """Write ``manifest.json`` and return its path; the caller makes it durable."""
    files = list(manifest.files)
    number = {file: i for i, file in enumerate(files)}
    body = {
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "files": [[file, manifest.files[file]] for file in files],
        "tensors": {
            key: {
                "shape": entry.shape,
                "dtype": entry.dtype,
                "chunks": [
                    [c.region.offsets, c.region.sizes, *_record_to_json(c.record, number)]
                    for c in entry.chunks
                ],
            }
            | ({"fused": _grouping_to_json(entry.fused)} if entry.fused else {})
            for key, entry in manifest.tensors.items()
        },
        "objects": {k: _record_to_json(r, number) for k, r in manifest.objects.items()},
        "aliases": manifest.aliases,
        "fused_into": manifest.fused_into,
        "has_whole_order": manifest.has_whole_order,
    }
    text = _canonical(body)
    path = joined(directory, MANIFEST_FILE)
    # The checksum is spliced in as the last key, so a large manifest is encoded only once.
    path.write_text(f'{text[:-1]},"crc32":{zlib.crc32(text.encode())}}}\n')
    return path


def read_manifest(directory: Location) -> Manifest:
    """Read and check ``manifest.json``.

    Raises:
        CheckpointError: It is missing, is not what was written, or has another format version.
    """
    path = directory / MANIFEST_FILE
    try:
        body = json.loads(path.read_text())
        checksum = body.pop("crc32")
        version = body["format_version"]
    except FileNotFoundError:
        if (directory / DCP_METADATA_FILE).is_file():
            raise CheckpointError.expected(
                f"a checkpoint of megafsdp, with '{MANIFEST_FILE}'",
                f"one of torch or Megatron-LM, with '{DCP_METADATA_FILE}' alone, or a half-written "
                "one",
                where=f"'{directory}'",
                hint="Convert Megatron-LM's fsdp_dtensor by megafsdp ckpt convert --to megafsdp, "
                f"load torch's by torch.distributed.checkpoint; else {ANOTHER_STEP}",
            ) from None
        raise _untrusted(path, "a complete checkpoint", "no such file") from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _untrusted(path, "a manifest in JSON", f"{type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError.expected(
            f"format version {FORMAT_VERSION}",
            version,
            where=f"'{path}'",
            hint="Load it with the megafsdp release that wrote it",
        )
    found = zlib.crc32(_canonical(body).encode())
    if found != checksum:
        raise _untrusted(path, f"checksum {checksum}", found)
    return _manifest_from_json(body, checksum)


def _manifest_from_json(body: dict, checksum: int) -> Manifest:
    files = [file for file, _ in body["files"]]

    def record(index: int, offset: int, nbytes: int, crc32: int) -> Record:
        return Record(files[index], offset, nbytes, crc32)

    def fused(parts: dict | None) -> FusedParts | None:
        if parts is None:
            return None
        names, sizes = tuple(parts["names"]), tuple(parts["sizes"])
        return FusedParts(names, sizes, parts["dim"], parts["num_groups"])

    return Manifest(
        step=body["step"],
        world_size=body["world_size"],
        versions=body["versions"],
        tensors={
            key: TensorEntry(
                tuple(entry["shape"]),
                entry["dtype"],
                tuple(
                    Chunk(Region(tuple(offsets), tuple(sizes)), record(*place))
                    for offsets, sizes, *place in entry["chunks"]
                ),
                fused(entry.get("fused")),
            )
            for key, entry in body["tensors"].items()
        },
        objects={key: record(*place) for key, place in body["objects"].items()},
        aliases=body["aliases"],
        files=dict(map(tuple, body["files"])),
        fused_into=body["fused_into"],
        # Releases that stored the order of the ranks did not write this field.
        has_whole_order=body.get("has_whole_order", False),
        checksum=checksum,
    )


def require_same(manifest: Manifest, directory: Location) -> None:
    """Check that a directory still has the files that its manifest was read with.

    Args:
        manifest: What was read there.
        directory: The checkpoint's own directory.

    Raises:
        CheckpointError: The checkpoint was removed, or replaced by another one of that name.
    """
    if isinstance(directory, StorePath):
        # In a store, the files of another save have other names.
        return
    end = f'"crc32":{manifest.checksum}}}'.encode()
    try:
        with (directory / MANIFEST_FILE).open("rb") as stream:
            stream.seek(-min(len(end) + _MOST_SPACE, stream.seek(0, os.SEEK_END)), os.SEEK_END)
            found = stream.read()
    except FileNotFoundError:
        found = b""
    if not found.rstrip().endswith(end):
        raise CheckpointError.expected(
            "a checkpoint that stays until it is loaded",
            "another one of the same step" if found else "none any more",
            where=f"'{directory}'",
            hint="Another job saves there, and the model is filled in part: load again",
        )


def write_dcp_metadata(
    manifest: Manifest,
    directory: L,
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
) -> L:
    """Write ``.metadata``, the same facts in torch DCP's form, and return its path.

    A fused tensor is also described under its whole name, with the records of its parts as chunks,
    so that ``dcp.load`` of a module's own ``state_dict()`` finds it.

    Args:
        manifest: The facts.
        directory: Where the file goes.
        paths: Nested path of each key; None means the paths from :func:`path_of`.
    """
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    stored = dict(manifest.tensors)
    stored |= {key: manifest.tensors[target] for key, target in manifest.aliases.items()}
    for key, fused in manifest.fused_into.items():
        # A manifest may lack a part, and verification must survive that: skip the whole then.
        is_complete = stored.keys() >= set(fused["parts"])
        if is_complete and fused.get("num_groups", 1) == 1:
            stored[key] = _joined([stored[part] for part in fused["parts"]], fused["dim"])
    # Equal regions recur in layers and states: each is one shared object, which is pickled once.
    made: dict[Region, ChunkStorageMetadata] = {}
    for key, entry in stored.items():
        chunks = [made.get(c.region) or _chunk(c.region, made) for c in entry.chunks]
        described[key] = TensorStorageMetadata(
            TensorProperties(dtype=entry.torch_dtype), torch.Size(entry.shape), chunks
        )
        for chunk, (_, record) in zip(chunks, entry.chunks, strict=True):
            storage[MetadataIndex(key, chunk.offsets)] = _place(record)
    for key, record in manifest.objects.items():
        described[key] = BytesStorageMetadata()
        storage[MetadataIndex(key)] = _place(record)
    metadata = Metadata(
        state_dict_metadata=described,
        planner_data={key: paths[key] if paths else path_of(key) for key in described},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    path = joined(directory, DCP_METADATA_FILE)
    with path.open("wb") as stream:
        pickler = pickle.Pickler(stream)
        # There may be a million of these, and their own __getstate__ is slow.
        pickler.dispatch_table = copyreg.dispatch_table | {StorageInfo: _reduce_place}
        pickler.dump(metadata)
    return path


def _chunk(region: Region, made: dict[Region, ChunkStorageMetadata]) -> ChunkStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size(region.offsets), torch.Size(region.sizes))
    made[region] = chunk
    return chunk


def _joined(parts: list[TensorEntry], dim: int) -> TensorEntry:
    """Describe the concatenation of parts; for scalars, which are equal, return the first."""
    first = parts[0]
    if not first.shape:
        return first
    chunks, extent = [], 0
    for part in parts:
        for chunk in part.chunks:
            offsets = list(chunk.region.offsets)
            offsets[dim] += extent
            chunks.append(Chunk(Region(tuple(offsets), chunk.region.sizes), chunk.record))
        extent += part.shape[dim]
    return TensorEntry(with_extent(first.shape, dim, extent), first.dtype, tuple(chunks))


def _reduce_place(place: StorageInfo) -> tuple[Any, tuple[Any, ...], Any]:
    """Return the reduce value that pickle would make of a place itself."""
    state = {
        "relative_path": place.relative_path,
        "offset": place.offset,
        "length": place.length,
    }
    return copyreg.__newobj__, (StorageInfo,), state  # type: ignore[attr-defined]


def _place(record: Record) -> StorageInfo:
    return StorageInfo(record.file, record.offset, record.nbytes)


def _record_to_json(record: Record, number: dict[str, int]) -> list[int]:
    return [number[record.file], record.offset, record.nbytes, record.crc32]


def _grouping_to_json(fused: FusedParts) -> dict[str, object]:
    return {name: getattr(fused, name) for name in ("names", "sizes", "dim", "num_groups")}


def _canonical(body: dict) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _untrusted(path: Location, what: str, got: object) -> CheckpointError:
    return CheckpointError.expected(
        what,
        got,
        where=f"'{path}'",
        hint=f"The checkpoint is half-written or damaged: {ANOTHER_STEP}",
    )
