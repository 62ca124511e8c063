"""Describe a checkpoint without loading its tensors."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megafsdp.checkpoint import directory as on_disk
from megafsdp.checkpoint.manifest import Manifest, TensorEntry, read_manifest, section_of
from megafsdp.checkpoint.records import require_files


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One stored tensor.

    Attributes:
        name: Its key.
        shape: Global shape.
        dtype: Name of the dtype.
        num_chunks: Number of stored pieces.
        nbytes: Size of its elements.
        parts: Names of the logical tensors fused in it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    nbytes: int
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """A checkpoint at a glance.

    Attributes:
        directory: Where it is.
        step: Training step.
        world_size: Number of ranks that saved it.
        versions: Library versions by name.
        nbytes: Bytes on disk, the manifest aside.
        num_files: Number of files, the manifest aside.
        tensors: All tensors.
        objects: Keys of the non-tensor values.
        aliases: Further names of tied tensors.
    """

    directory: str
    step: int
    world_size: int
    versions: dict[str, str]
    nbytes: int
    num_files: int
    tensors: tuple[TensorSummary, ...]
    objects: tuple[str, ...]
    aliases: dict[str, str]

    def to_json(self) -> str:
        """Return the summary as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def describe(self) -> str:
        """Return the summary as text, one line a tensor."""
        lines = [
            f"{self.directory}: step {self.step}, saved by {self.world_size} rank(s)",
            f"{self.nbytes:,} bytes in {self.num_files} files; "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]
        for section in dict.fromkeys(section_of(tensor.name) for tensor in self.tensors):
            members = [t for t in self.tensors if section_of(t.name) == section]
            lines.append(
                f"{section}: {len(members)} tensors, {sum(t.nbytes for t in members):,} bytes"
            )
            lines += [f"  {_line(tensor)}" for tensor in members]
        lines += [f"tied: {alias} = {name}" for alias, name in self.aliases.items()]
        lines.append(f"objects: {', '.join(self.objects)}")
        return "\n".join(lines)


def inspect(directory: str | os.PathLike[str], step: int | None = None) -> CheckpointSummary:
    """Read a checkpoint's manifest and check that its files are there; local.

    Args:
        directory: The save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.

    Raises:
        CheckpointError: There is none, or it is incomplete.
    """
    path = on_disk.find(Path(directory), step)
    manifest = read_manifest(path)
    require_files(manifest, path, manifest.files)
    return _summary(path, manifest)


def _summary(path: Path, manifest: Manifest) -> CheckpointSummary:
    return CheckpointSummary(
        directory=str(path),
        step=manifest.step,
        world_size=manifest.world_size,
        versions=manifest.versions,
        nbytes=sum(manifest.files.values()),
        num_files=len(manifest.files),
        tensors=tuple(_tensor_summary(key, entry) for key, entry in manifest.tensors.items()),
        objects=tuple(manifest.objects),
        aliases=manifest.aliases,
    )


def _tensor_summary(key: str, entry: TensorEntry) -> TensorSummary:
    return TensorSummary(
        name=key,
        shape=entry.shape,
        dtype=entry.dtype,
        num_chunks=len(entry.chunks),
        nbytes=math.prod(entry.shape) * entry.torch_dtype.itemsize,
        parts=entry.fused.names if entry.fused else (),
    )


def _line(tensor: TensorSummary) -> str:
    pieces = "1 chunk" if tensor.num_chunks == 1 else f"{tensor.num_chunks} chunks"
    parts = f" = {' | '.join(tensor.parts)}" if tensor.parts else ""
    return f"{tensor.name}  {tensor.dtype} {list(tensor.shape)}  {pieces}{parts}"
