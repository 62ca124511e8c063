"""Write a directory of Hugging Face files: plan it, write the files one by one, publish it.

This is the same for a model on many ranks and for a checkpoint in one process. The sources of the
tensors are in export.py and checkpoints.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megafsdp.buffer.comm.agreement import attempt
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.huggingface.mapping import Entry
from megafsdp.checkpoint.huggingface.plan import ConfigLike, HubPlan, config_fields, plan_model
from megafsdp.checkpoint.huggingface.safetensors_files import (
    INDEX_FILE,
    SINGLE_FILE,
    require_library,
    write_file,
)
from megafsdp.errors import CheckpointError

CONFIG_FILE = "config.json"
DEFAULT_SHARD_NBYTES = 5 * 10**9
# The dtypes that all readers of safetensors files support.
_DTYPES = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn}
    | {torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
    | {torch.bool}
)


class SavesPretrained(Protocol):
    """A tokenizer of transformers."""

    def save_pretrained(self, directory: str, /) -> object:
        """Write its files."""


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """One file before it is written.

    Attributes:
        name: File name.
        entries: Our tensors that are stored in it, with the dtype of each in the file.
    """

    name: str
    entries: tuple[tuple[Entry, torch.dtype], ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its tensors."""
        return sum(entry.stored_numel * dtype.itemsize for entry, dtype in self.entries)


@dataclass(frozen=True, slots=True)
class Export:
    """An export that passed every check.

    Attributes:
        plan: The model.
        files: The files, with the tensors in each.
    """

    plan: HubPlan
    files: tuple[PlannedFile, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(file.nbytes for file in self.files)

    @property
    def file_of(self) -> dict[str, str]:
        """Return the file name of each stored tensor, by the tensor's name."""
        return {name: f.name for f in self.files for entry, _ in f.entries for name in entry.theirs}


def plan_export(
    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    config: ConfigLike | None,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
) -> Export:
    """Divide a model into files; local.

    The stored tensors of one of our tensors go to the same file.

    Args:
        tensors: Shape and dtype of each distinct tensor by name.
        config: Config of the model.
        dtype: Dtype of floating-point tensors in the files; None keeps the dtype of each.
        max_shard_nbytes: Bytes in a file, at least 1; a larger tensor has a file of its own.

    Raises:
        CheckpointError: The model cannot be expressed, a number or dtype is out of range, or the
            format lacks a dtype.
        ImportError: A library that writes the files is not installed.
    """
    require_floating(dtype, where="dtype= of an export")
    if max_shard_nbytes < 1:
        raise CheckpointError.expected(
            "at least 1 byte in a file",
            max_shard_nbytes,
            where="max_shard_nbytes= of an export",
            hint=f"Leave it out for {DEFAULT_SHARD_NBYTES}",
        )
    # Imported here, so that a missing library is found before the first gather.
    require_library("safetensors")
    split_into_files = require_library("huggingface_hub").split_state_dict_into_shards_factory
    # Further names of tied tensors are not written.
    plan = plan_model({name: shape for name, (shape, _) in tensors.items()}, {}, config)
    entries: dict[str, tuple[Entry, torch.dtype]] = {}
    for entry in plan.entries:
        kept = tensors[entry.ours][1]
        wanted = kept if dtype is None or not kept.is_floating_point else dtype
        if wanted not in _DTYPES:
            raise CheckpointError.expected(
                f"a dtype among {', '.join(sorted(map(str, _DTYPES)))}",
                wanted,
                where=f"'{entry.ours}', to be written as safetensors",
                hint="Convert the model to one of these first",
            )
        entries[entry.ours] = entry, wanted
    split = split_into_files(
        entries,
        get_storage_size=lambda stored: stored[0].stored_numel * stored[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_nbytes,
    )
    files = split.filename_to_tensors or {SINGLE_FILE: []}
    return Export(
        plan,
        tuple(PlannedFile(file, tuple(entries[n] for n in names)) for file, names in files.items()),
    )


def require_floating(dtype: torch.dtype | None, *, where: str) -> None:
    """Refuse a dtype that would round weights to whole numbers.

    Args:
        dtype: Target dtype of floating-point tensors; None if they keep theirs.
        where: The argument, to be named in the error.

    Raises:
        CheckpointError: It is no floating-point dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise CheckpointError.expected(
            "a floating-point dtype or None",
            repr(dtype),
            where=where,
            hint="Give one such as torch.bfloat16, or None to keep what is there",
        )


def prepare(target: Path) -> Path:
    """Make the temporary directory of an export; rank 0 only.

    Raises:
        CheckpointError: The target exists and is not empty.
    """
    target = _named(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError.expected(
            "a directory that does not exist or is empty",
            "something that is there",
            where=f"'{target}'",
            hint="Remove it or choose another name",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    on_disk.remove_leftovers(target.parent, target.name.__eq__)
    temporary = on_disk.temporary_beside(target)
    temporary.mkdir()
    return temporary


def _named(target: Path) -> Path:
    """Return the directory that a path names, if the path itself cannot be renamed to."""
    # Other paths stay as they are: the hosts of other ranks may mount what is above elsewhere.
    is_other = target.is_symlink() or target.name in ("", "..")
    return target.resolve() if is_other else target


@torch.no_grad()
def write_files(
    export: Export,
    directory: Path,
    gather: Callable[[int, Entry, torch.dtype], torch.Tensor | None],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Exception | None:
    """Gather and write all files, one at a time on each rank.

    A rank needs host memory for the tensors of the file that it writes, and memory for one
    gathered tensor.

    Args:
        export: The plan, the same on all ranks.
        directory: Where the files go.
        gather: Takes a writing rank, one of our tensors and a dtype, and returns the whole tensor
            on that rank. Every rank calls it for every tensor, in the same order, even after an
            error.
        rank: This rank.
        world_size: Number of ranks, which write different files at the same time.

    Returns:
        The first error of this rank, or None.
    """
    error: Exception | None = None
    for first in range(0, len(export.files), world_size):
        files = export.files[first : first + world_size]
        mine: dict[str, torch.Tensor] = {}
        for writer, file in enumerate(files):
            for entry, dtype in file.entries:
                whole = gather(writer, entry, dtype)
                if whole is not None and error is None:
                    _, error = attempt(functools.partial(_add, mine, entry, whole))
                # Free it before the next gather allocates.
                del whole
        if rank < len(files) and error is None:
            path = directory / files[rank].name
            _, error = attempt(functools.partial(write_file, path, mine))
    return error


def _add(tensors: dict[str, torch.Tensor], entry: Entry, whole: torch.Tensor) -> None:
    tensors.update((name, part.cpu()) for name, part in entry.split(whole).items())


def publish(
    temporary: Path,
    target: Path,
    export: Export,
    extras: Mapping[str, str] | None = None,
    tokenizer: SavesPretrained | None = None,
) -> Path:
    """Add the small files to the written tensors and rename the directory; rank 0 only."""
    dtypes = (dtype for file in export.files for _, dtype in file.entries)
    fields = config_fields(export.plan.fields, dtypes)
    texts = {CONFIG_FILE: json.dumps(fields, indent=2, sort_keys=True) + "\n", **(extras or {})}
    if len(export.files) > 1:
        numel = sum(entry.stored_numel for entry in export.plan.entries)
        index = {
            "metadata": {"total_parameters": numel, "total_size": export.nbytes},
            "weight_map": dict(sorted(export.file_of.items())),
        }
        texts[INDEX_FILE] = json.dumps(index, indent=2) + "\n"
    for name, text in texts.items():
        on_disk.write_durably(temporary / name, text)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(temporary))
        # It does not wait for the disk itself.
        for path in temporary.rglob("*"):
            (on_disk.sync_directory if path.is_dir() else on_disk.sync_file)(path)
    on_disk.sync_directory(temporary)
    final = _named(target)
    temporary.rename(final)
    on_disk.sync_directory(final.parent)
    return target
