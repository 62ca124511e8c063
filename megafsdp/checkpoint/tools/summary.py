"""Describe a checkpoint without loading its tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import Manifest, TensorEntry, read_manifest, section_of
from megafsdp.checkpoint.format.records import require_files
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.report import Report


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One stored tensor.

    Attributes:
        name: Its key.
        shape: Global shape.
        dtype: Name of the dtype.
        num_chunks: Number of stored pieces.
        nbytes: Size of its elements.
        parts: Names of the logical tensors fused in it, if it is stored whole.
        part_of: Key of the fused tensor of which it is a part; empty if there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_chunks: int
    nbytes: int
    parts: tuple[str, ...]
    part_of: str = ""


@dataclass(frozen=True, slots=True)
class SectionSummary:
    """One section of the keys: model, optimizer, extra, rng, and so on.

    Attributes:
        num_tensors: Number of its tensors.
        num_objects: Number of its non-tensor values.
        nbytes: Size of its tensors' elements.
        object_nbytes: Size of its objects on disk.
    """

    num_tensors: int
    num_objects: int
    nbytes: int
    object_nbytes: int

    def describe(self) -> str:
        """Return the counts and sizes that are not 0."""
        facts = []
        if self.num_tensors:
            facts.append(f"{_count(self.num_tensors, 'tensor')}, {self.nbytes:,} bytes")
        if self.num_objects:
            facts.append(f"{_count(self.num_objects, 'object')}, {self.object_nbytes:,} bytes")
        return "; ".join(facts)


@dataclass(frozen=True, slots=True)
class CheckpointSummary(Report):
    """A checkpoint at a glance.

    Attributes:
        directory: Where it is.
        step: Training step.
        world_size: Number of ranks that saved it.
        versions: Library versions by name.
        nbytes: Bytes on disk without the manifest.
        num_files: Number of files without the manifest.
        sections: Counts and sizes of each section, over all keys.
        tensors: The requested tensors.
        objects: The requested non-tensor values, with their size on disk.
        aliases: Further names of tied tensors.
        fused_into: Fused tensors that are stored in parts: key of the whole -> keys of the parts.
    """

    directory: str
    step: int
    world_size: int
    versions: dict[str, str]
    nbytes: int
    num_files: int
    sections: dict[str, SectionSummary]
    tensors: tuple[TensorSummary, ...]
    objects: dict[str, int]
    aliases: dict[str, str]
    fused_into: dict[str, list[str]]

    def lines(self) -> list[str]:
        """Return the summary line by line, one for each tensor."""
        lines = [
            f"{self.directory}: step {self.step}, saved by {self.world_size} rank(s)",
            f"{self.nbytes:,} bytes in {self.num_files} files; "
            + ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        ]
        for section, summary in self.sections.items():
            lines.append(f"{section}: {summary.describe()}")
            lines += [f"  {_line(t)}" for t in self.tensors if section_of(t.name) == section]
            lines += [
                f"  {key}  object, {nbytes:,} bytes"
                for key, nbytes in self.objects.items()
                if section_of(key) == section
            ]
        lines += [f"tied: {alias} = {name}" for alias, name in self.aliases.items()]
        lines += [
            f"fused: {whole} = {' | '.join(parts)}" for whole, parts in self.fused_into.items()
        ]
        return lines


def inspect(
    directory: str | os.PathLike[str], step: int | None = None, *, keys: Sequence[str] = ()
) -> CheckpointSummary:
    """Read a checkpoint's manifest and check that its files are there; local.

    Args:
        directory: The save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.
        keys: Patterns (``fnmatch``) of the keys to list, such as ``"model.*.bias"``; a fused tensor
            is found by its own key and by those of its parts. Empty lists all keys.

    Raises:
        CheckpointError: There is no such checkpoint, or it is incomplete.
    """
    path = on_disk.find(directory, step)
    manifest = read_manifest(path)
    require_files(manifest, path, manifest.files)
    return _summary(path, manifest, keys)


def _summary(path: Location, manifest: Manifest, patterns: Sequence[str]) -> CheckpointSummary:
    def is_wanted(*keys: str) -> bool:
        return not patterns or any(fnmatchcase(k, pattern) for k in keys for pattern in patterns)

    whole_by_part = {
        part: whole for whole, fused in manifest.fused_into.items() for part in fused["parts"]
    }
    tensors = {
        key: _tensor_summary(key, entry, whole_by_part.get(key, ""))
        for key, entry in manifest.tensors.items()
    }
    return CheckpointSummary(
        directory=str(path),
        step=manifest.step,
        world_size=manifest.world_size,
        versions=manifest.versions,
        nbytes=sum(manifest.files.values()),
        num_files=len(manifest.files),
        sections=_sections(manifest, list(tensors.values())),
        tensors=tuple(t for t in tensors.values() if is_wanted(t.name, t.part_of)),
        objects={k: record.nbytes for k, record in manifest.objects.items() if is_wanted(k)},
        aliases={alias: key for alias, key in manifest.aliases.items() if is_wanted(alias, key)},
        fused_into={
            whole: fused["parts"]
            for whole, fused in manifest.fused_into.items()
            if is_wanted(whole, *fused["parts"])
        },
    )


def _sections(manifest: Manifest, tensors: Sequence[TensorSummary]) -> dict[str, SectionSummary]:
    names = dict.fromkeys(section_of(key) for key in [*manifest.tensors, *manifest.objects])
    sections = {}
    for section in names:
        members = [tensor for tensor in tensors if section_of(tensor.name) == section]
        objects = [r for key, r in manifest.objects.items() if section_of(key) == section]
        sections[section] = SectionSummary(
            num_tensors=len(members),
            num_objects=len(objects),
            nbytes=sum(tensor.nbytes for tensor in members),
            object_nbytes=sum(record.nbytes for record in objects),
        )
    return sections


def _tensor_summary(key: str, entry: TensorEntry, part_of: str) -> TensorSummary:
    return TensorSummary(
        name=key,
        shape=entry.shape,
        dtype=entry.dtype,
        num_chunks=len(entry.chunks),
        nbytes=math.prod(entry.shape) * entry.torch_dtype.itemsize,
        parts=entry.fused.names if entry.fused else (),
        part_of=part_of,
    )


def _line(tensor: TensorSummary) -> str:
    pieces = _count(tensor.num_chunks, "chunk")
    parts = f" = {' | '.join(tensor.parts)}" if tensor.parts else ""
    return f"{tensor.name}  {tensor.dtype} {list(tensor.shape)}  {pieces}{parts}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
