"""Convert a checkpoint to another format and back: which converter goes from what to what.

A checkpoint of megafsdp is one end of every conversion. The formats themselves are described in the
files of their converters.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from megafsdp.checkpoint import directory as on_disk
from megafsdp.checkpoint.manifest import DCP_METADATA_FILE, MANIFEST_FILE
from megafsdp.checkpoint.torch_file import from_torch, to_torch
from megafsdp.errors import CheckpointError, expected


class Format(Enum):
    """What a checkpoint can be."""

    # A save root or a directory with a manifest.
    MEGAFSDP = "megafsdp"
    # One torch.save file.
    TORCH = "torch"
    # A directory of torch DCP without a manifest, with the names of NVIDIA's Megatron-FSDP.
    NVIDIA = "nvidia"


def format_of(source: str | os.PathLike[str], step: int | None = None) -> Format:
    """Return the format of a file or directory.

    Args:
        source: A file, a save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.

    Raises:
        CheckpointError: It is none.
    """
    path = Path(source)
    if path.is_file():
        return Format.TORCH
    places = [path]
    if (
        path.is_dir()
        and (chosen := on_disk.latest_step(path) if step is None else step) is not None
    ):
        places.append(on_disk.step_directory(path, chosen))
    for place in places:
        if (place / MANIFEST_FILE).is_file():
            return Format.MEGAFSDP
        if (place / DCP_METADATA_FILE).is_file():
            return Format.NVIDIA
    raise CheckpointError(
        expected(
            f"a torch.save file, or a directory with '{MANIFEST_FILE}' or '{DCP_METADATA_FILE}'",
            "a directory with neither" if path.is_dir() else "no such file",
            where=f"'{path}'",
            mend="Give a checkpoint's directory, its save root, or a file",
        )
    )


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: Format,
    step: int | None = None,
    *,
    fused_like: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
) -> Path:
    """Write a checkpoint in another format; local, tensor by tensor.

    Args:
        source: What to convert; its format is seen from it.
        destination: The file to write, or the save root to publish in.
        to: The format to write.
        step: The step to read, or to write where the source has none; None means the latest.
        fused_like: A checkpoint of megafsdp that says which parameters of a torch file to split.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The file or the published directory.

    Raises:
        CheckpointError: The source is no checkpoint, is damaged, or has the format already.
    """
    found = format_of(source, step)
    if (found, to) == (Format.MEGAFSDP, Format.TORCH):
        return to_torch(source, destination, step, show_progress=show_progress)
    if (found, to) == (Format.TORCH, Format.MEGAFSDP):
        return from_torch(
            source, destination, step, fused_like=fused_like, show_progress=show_progress
        )
    raise CheckpointError(
        expected(
            f"a conversion between {Format.MEGAFSDP.value} and another format",
            f"one from {found.value} to {to.value}",
            where=f"'{source}'",
            mend="Convert to megafsdp first, and from there",
        )
    )
