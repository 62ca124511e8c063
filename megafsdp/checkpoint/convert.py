"""Convert a checkpoint to another format and back: the table of the converters.

A checkpoint of megafsdp is one end of every conversion. The formats themselves are described in the
files of their converters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path

from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import DCP_METADATA_FILE, MANIFEST_FILE
from megafsdp.checkpoint.megatron.exporter import to_megatron
from megafsdp.checkpoint.megatron.importer import from_megatron
from megafsdp.checkpoint.storage.locations import Location, is_folder, location_of
from megafsdp.checkpoint.tools.torch_file import from_torch, to_torch
from megafsdp.errors import CheckpointError


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
        CheckpointError: It is no checkpoint.
    """
    path = location_of(source)
    if isinstance(path, Path) and path.is_file():
        return Format.TORCH
    places = [path]
    if (chosen := save_root.latest_step(path) if step is None else step) is not None:
        places.append(save_root.step_directory(path, chosen))
    for place in places:
        if (place / MANIFEST_FILE).is_file():
            return Format.MEGAFSDP
        if (place / DCP_METADATA_FILE).is_file():
            return Format.NVIDIA
    if is_folder(path) and save_root.published_steps(path):
        # Raises if the step is not among them.
        save_root.find(path, step)
    raise CheckpointError.expected(
        f"a torch.save file, or a directory with '{MANIFEST_FILE}' or '{DCP_METADATA_FILE}'",
        "a directory with neither" if is_folder(path) else "no such file",
        where=f"'{path}'",
        hint="Give a checkpoint's directory, its save root, or a file",
    )


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options that some conversions take; None or empty if not given.

    Attributes:
        fused_like: A checkpoint of megafsdp that says which parameters of a torch file to split.
        precision: For ``to_megatron``: the precision of the Megatron-LM job; bf16 by default.
        transformer_impl: For ``to_megatron``: ``--transformer-impl`` of that job;
            transformer_engine by default.
        ignore: For ``from_megatron``: patterns (``fnmatch``) of Megatron-LM's keys to leave out.
        separate_experts: For ``from_megatron``: store each expert under its own name, for a model
            with a module per expert, instead of one stack.
    """

    fused_like: str | os.PathLike[str] | None = None
    precision: str | None = None
    transformer_impl: str | None = None
    ignore: Sequence[str] = ()
    separate_experts: bool = False


# Which options each conversion takes.
_OPTIONS: dict[tuple[Format, Format], frozenset[str]] = {
    (Format.MEGAFSDP, Format.TORCH): frozenset(),
    (Format.TORCH, Format.MEGAFSDP): frozenset({"fused_like"}),
    (Format.MEGAFSDP, Format.NVIDIA): frozenset({"precision", "transformer_impl"}),
    (Format.NVIDIA, Format.MEGAFSDP): frozenset({"ignore", "separate_experts"}),
}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    to: Format,
    step: int | None = None,
    *,
    options: ConvertOptions | None = None,
    show_progress: bool = False,
) -> Location:
    """Write a checkpoint in another format; local, tensor by tensor.

    Args:
        source: What to convert; its format is detected. Checkpoints may be in a store, torch
            files may not.
        destination: The file to write, or the save root to publish in; only checkpoints of megafsdp
            may go to a store.
        to: The format to write.
        step: The step to read, or to write if the source has none; None means the latest.
        options: Options of this conversion.
        show_progress: Draw a progress bar, if standard error is a terminal.

    Returns:
        The file or the published directory.

    Raises:
        CheckpointError: The source is no checkpoint, is damaged, or has the format already; or
            this conversion does not take an option.
    """
    given = options or ConvertOptions()
    pair = (format_of(source, step), to)
    _require_sense(location_of(source), pair, given)
    if pair == (Format.MEGAFSDP, Format.TORCH):
        return to_torch(source, destination, step, show_progress=show_progress)
    if pair == (Format.TORCH, Format.MEGAFSDP):
        like = given.fused_like
        return from_torch(source, destination, step, fused_like=like, show_progress=show_progress)
    if pair == (Format.MEGAFSDP, Format.NVIDIA):
        return to_megatron(
            source,
            destination,
            step=step,
            precision=given.precision or "bf16",
            transformer_impl=given.transformer_impl or "transformer_engine",
            show_progress=show_progress,
        )
    return from_megatron(
        source,
        destination,
        step=step,
        ignore=given.ignore,
        separate_experts=given.separate_experts,
        show_progress=show_progress,
    )


def _require_sense(source: Location, pair: tuple[Format, Format], given: ConvertOptions) -> None:
    names = " to ".join(part.value for part in pair)
    if pair not in _OPTIONS:
        raise CheckpointError.expected(
            f"a conversion between {Format.MEGAFSDP.value} and another format",
            f"one from {names}",
            where=f"'{source}'",
            hint="Convert to megafsdp first, and from there",
        )
    wrong = [
        field.name
        for field in fields(ConvertOptions)
        if getattr(given, field.name) and field.name not in _OPTIONS[pair]
    ]
    if wrong:
        raise CheckpointError.expected(
            f"options of a conversion from {names}: {sorted(_OPTIONS[pair]) or 'none'}",
            wrong,
            where=f"'{source}'",
            hint="Leave the others out",
        )
