"""A directory of Hugging Face files in the making: its plan, its files one by one, its publication.

What is the same whether tensors come from a model on many ranks or from a checkpoint in one
process. Where they come from is ``hf``'s and ``hf_checkpoint``'s business.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.huggingface.gather import Scratch
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    Entry,
    HubPlan,
    config_fields,
    plan_model,
)
from megafsdp.checkpoint.huggingface.safetensors_files import (
    INDEX_FILE,
    FilePlan,
    SafetensorsWriter,
    index_of,
    plan_files,
)
from megafsdp.errors import CheckpointError, expected

CONFIG_FILE = "config.json"
DEFAULT_SHARD_NBYTES = 5 * 10**9


class SavesPretrained(Protocol):
    """A tokenizer of transformers."""

    def save_pretrained(self, directory: str, /) -> object:
        """Write its files."""


@dataclass(frozen=True, slots=True)
class Export:
    """An export that passed every check.

    Attributes:
        plan: The model.
        dtypes: Dtype of each entry in the files.
        files: What goes where.
    """

    plan: HubPlan
    dtypes: tuple[torch.dtype, ...]
    files: tuple[FilePlan, ...]

    def entries_of(self, index: int) -> Iterator[tuple[Entry, torch.dtype]]:
        """Yield the entries of one file with their dtypes."""
        names = {tensor.name for tensor in self.files[index].tensors}
        for entry, dtype in zip(self.plan.entries, self.dtypes, strict=True):
            if entry.theirs[0] in names:
                yield entry, dtype


def plan_export(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tied: Mapping[str, str],
    config: ConfigLike | None,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
) -> Export:
    """Divide a model into files; local.

    Args:
        tensors: Shape and dtype of each distinct tensor by name.
        tied: Further names of tied tensors.
        config: What the model is.
        dtype: Of floating-point tensors in the files; None keeps each one's.
        max_shard_nbytes: Bytes in a file.

    Raises:
        CheckpointError: The model cannot be expressed.
    """
    plan = plan_model({name: shape for name, (shape, _) in tensors.items()}, tied, config)
    kept = [tensors[entry.ours][1] for entry in plan.entries]
    dtypes = tuple(d if dtype is None or not d.is_floating_point else dtype for d in kept)
    groups = [entry.stored(d) for entry, d in zip(plan.entries, dtypes, strict=True)]
    return Export(plan, dtypes, tuple(plan_files(groups, max_shard_nbytes)))


def prepare(target: Path) -> Path:
    """Make the temporary directory of an export; rank 0 alone.

    Raises:
        CheckpointError: The target exists and is not empty.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(
            expected(
                "a directory that does not exist or is empty",
                "something that is there",
                where=f"'{target}'",
                hint="Remove it or choose another name",
            )
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    on_disk.remove_leftovers(target.parent, target.name.__eq__)
    temporary = on_disk.temporary_beside(target)
    temporary.mkdir()
    return temporary


def publish(
    temporary: Path,
    target: Path,
    export: Export,
    extras: Mapping[str, str] | None = None,
    tokenizer: SavesPretrained | None = None,
) -> Path:
    """Add the small files to written tensors and rename the directory; rank 0 alone."""
    stored = (tensor.dtype for file in export.files for tensor in file.tensors)
    fields = config_fields(export.plan.fields, stored)
    texts = {CONFIG_FILE: json.dumps(fields, indent=2, sort_keys=True) + "\n", **(extras or {})}
    if len(export.files) > 1:
        texts[INDEX_FILE] = index_of(export.files)
    for name, text in texts.items():
        on_disk.write_durably(temporary / name, text)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(temporary))
    on_disk.sync_directory(temporary)
    temporary.rename(target)
    on_disk.sync_directory(target.parent)
    return target


class FileSequence:
    """The writers of a rank's files, one open at a time."""

    def __init__(self, directory: Path, files: Sequence[FilePlan]) -> None:
        self._directory = directory
        self._files = files
        self._index = -1
        self._writer: SafetensorsWriter | None = None

    def at(self, index: int) -> SafetensorsWriter:
        """Return the writer of a file; the one before it is complete."""
        if self._writer is None or index != self._index:
            self.close(None)
            self._writer = SafetensorsWriter(self._directory, self._files[index])
            self._index = index
            self._writer.__enter__()
        return self._writer

    def close(self, error: Exception | None) -> None:
        """Make the open file durable, or drop it if there was an error."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.__exit__(None if error is None else type(error), error, None)


@torch.no_grad()
def write_entry(
    files: FileSequence, file: int, entry: Entry, whole: torch.Tensor, scratch: Scratch
) -> None:
    """Map one whole tensor and write its parts to a file, one at a time."""
    writer = files.at(file)
    for index, name in enumerate(entry.theirs):
        part = entry.part(index, whole, lambda shape: scratch.allocate(shape, whole.dtype))
        writer.write(name, part)
        del part
        scratch.free(kept=whole)
