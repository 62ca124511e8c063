"""Hugging Face files from a checkpoint, and a checkpoint from Hugging Face files, in one process.

No ranks, no GPU, no model in memory: an export makes its files one at a time, and an import copies
tensors one by one. A checkpoint made here holds only weights and loads into any model of the same
configuration, on any number of ranks.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from megafsdp.checkpoint.format.save_root import require_ahead
from megafsdp.checkpoint.huggingface.import_ import match_stored
from megafsdp.checkpoint.huggingface.mapping import Entry, full_names
from megafsdp.checkpoint.huggingface.output import (
    CONFIG_FILE,
    DEFAULT_SHARD_NBYTES,
    Export,
    SavesPretrained,
    plan_export,
    prepare,
    publish,
    require_floating,
    write_files,
)
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    HubPlan,
    hub_state,
    plan_model,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.checkpoint.state.fused import stored_form
from megafsdp.checkpoint.storage.locations import file_names, local_path
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from megafsdp.models import build_model, config_from_hugging_face

_PREFIX = "model."
# Where an imported checkpoint keeps the fields of config.json, in its extra.
_CONFIG_KEY = "hugging_face_config"


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion made.

    Attributes:
        directory: The new directory.
        model_type: Hugging Face's name of the model's type.
        num_tensors: Number of tensors in it.
        nbytes: Bytes of their elements.
        files: Its weight files.
    """

    directory: str
    model_type: str
    num_tensors: int
    nbytes: int
    files: tuple[str, ...]

    def to_json(self) -> str:
        """Return the facts as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def describe(self) -> str:
        """Return the facts as one line."""
        return (
            f"{self.directory}: {self.num_tensors} tensors of a {self.model_type or 'model'}, "
            f"{self.nbytes:,} bytes in {len(self.files)} file(s)"
        )


def export_hf_checkpoint(
    directory: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    step: int | None = None,
    config: ConfigLike | None = None,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    tokenizer: SavesPretrained | None = None,
    show_progress: bool = False,
) -> Conversion:
    """Write a checkpoint's weights as ``transformers`` reads them; local, in one process.

    Args:
        directory: The save root, or one checkpoint's own directory.
        target: A local path, made here; must not exist, or be empty.
        step: The step; None means the latest published one.
        config: Config of the model, as for ``export_hf``; None takes the one that
            ``import_hf_checkpoint`` stored.
        dtype: Dtype of floating-point tensors in the files; None keeps that of the main weights.
        max_shard_nbytes: Bytes in a file, at least 1.
        tokenizer: Saved beside the model.
        show_progress: Draw a bar, on a terminal.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model, ``dtype`` is not
            floating-point, or the target is taken.
    """
    final = local_path(target, purpose="Hugging Face files")
    with CheckpointReader(directory, step) as reader:
        export = _plan_export(reader, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
        temporary = prepare(final)
        try:
            with bytes_bar("export", export.nbytes, is_wanted=show_progress) as bar:
                error = write_files(export, temporary, functools.partial(_read, reader, bar))
            if error is not None:
                raise error
            publish(temporary, final, export, tokenizer=tokenizer)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    names = tuple(file.name for file in export.files)
    return Conversion(str(final), export.plan.model_type, len(export.file_of), export.nbytes, names)


def _read(
    reader: CheckpointReader, bar: tqdm, _: int, entry: Entry, dtype: torch.dtype
) -> torch.Tensor:
    bar.update(entry.stored_numel * dtype.itemsize)
    return reader.tensor(_PREFIX + entry.ours).to(dtype)


def _plan_export(
    reader: CheckpointReader,
    config: ConfigLike | None,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
) -> Export:
    keys = [key for key in reader.whole_keys() if key.startswith(_PREFIX)]
    facts = {key.removeprefix(_PREFIX): (reader.shape(key), reader.dtype(key)) for key in keys}
    if config is None:
        config = stored_config(reader.object("extra"))
    return plan_export(facts, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)


def stored_config(extra: object) -> dict[str, object] | None:
    """Return the config.json that an import stored in the extra of a checkpoint, or None."""
    fields = extra.get(_CONFIG_KEY) if isinstance(extra, Mapping) else None
    return dict(fields) if isinstance(fields, Mapping) else None


def import_hf_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    step: int = 0,
    padded_vocab_size: int | None = None,
    keeps_names: bool = False,
    dtype: torch.dtype | None = torch.float32,
    show_progress: bool = False,
) -> Conversion:
    """Make a checkpoint of the weights in Hugging Face files; local, in one process.

    Args:
        source: What ``save_pretrained()`` or ``export_hf()`` wrote.
        directory: The save root, a path or the URL of a store.
        step: The step that the checkpoint is published as.
        padded_vocab_size: Rows of our embedding; None means as many as in the files.
        keeps_names: Store the tensors as they are, for a model of transformers, of the class that
            ``config.json`` names; otherwise they are mapped to one of ``megafsdp.models``.
        dtype: Dtype of floating-point tensors in the checkpoint, i.e. of the main weights; None
            keeps that of the files.
        show_progress: Draw a bar, on a terminal.

    Raises:
        CheckpointError: The files are missing, damaged or do not match their ``config.json``,
            ``dtype`` is not floating-point, or the step is published already or lower than the
            latest.
        ConfigError: ``megafsdp.models`` has no such model.
    """
    path = local_path(source, purpose="Hugging Face files")
    require_floating(dtype, where="dtype= of an import")
    require_ahead(directory, step)
    fields = _read_fields(path)
    files = SafetensorsReader(path)
    if keeps_names:
        known = full_names(files.names, str(fields.get("model_type")))
        if _has_no_head(fields):
            known = {stored: stored for stored in known.values()}
        shapes = {name: files.shape(stored) for name, stored in known.items()}
        template, tied, plan = None, {}, plan_model(shapes, {}, fields)
    else:
        config = config_from_hugging_face(fields, padded_vocab_size=padded_vocab_size)
        with torch.device("meta"):
            template = build_model(config)
        state = hub_state(template)
        tied, plan = state.tied, plan_model(state.shapes, state.tied, fields, reader=files)
    stored = match_stored(plan, files)
    nbytes = 0
    with (
        CheckpointWriter(directory, step) as writer,
        bytes_bar("import", _total_nbytes(plan, dtype), is_wanted=show_progress) as bar,
    ):
        for entry in plan.entries:
            tensor = _read_entry(entry, stored, files, dtype)
            nbytes += tensor.nbytes
            _add(writer, entry.ours, tensor, template)
            bar.update(tensor.nbytes)
        for name, target in tied.items():
            writer.alias(_PREFIX + name, _PREFIX + target)
        writer.add_object("extra", {_CONFIG_KEY: fields})
        final = writer.publish()
    names = tuple(name for name in file_names(final) if name.endswith(".distcp"))
    return Conversion(str(final), plan.model_type, len(plan.entries), nbytes, names)


def _has_no_head(fields: Mapping[str, Any]) -> bool:
    """Return whether the files are of a bare model such as ``Qwen3Model``: names lack a prefix."""
    named = fields.get("architectures") or []
    return bool(named) and not any("For" in name or "Head" in name for name in named)


def _read_fields(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads((path / CONFIG_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError.expected(
            "the fields of a model's config in JSON",
            f"{type(error).__name__}: {error}",
            where=f"'{path / CONFIG_FILE}'",
            hint="Give a directory that save_pretrained() or export_hf() wrote",
        ) from error


def _read_entry(
    entry: Entry, stored: dict[str, str], files: SafetensorsReader, dtype: torch.dtype | None
) -> torch.Tensor:
    tensor = entry.join([files.tensor(stored[name]) for name in entry.theirs])
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _total_nbytes(plan: HubPlan, dtype: torch.dtype | None) -> int:
    itemsize = (dtype or torch.bfloat16).itemsize
    return sum(torch.Size(entry.shape).numel() for entry in plan.entries) * itemsize


def _add(
    writer: CheckpointWriter, name: str, tensor: torch.Tensor, template: nn.Module | None
) -> None:
    """Write a tensor in the form in which ``save`` stores the template's parameter of that name."""
    if template is None:
        writer.add_tensor(_PREFIX + name, tensor)
        return
    form = stored_form(name, template.get_parameter(name))
    keys, pieces = [_PREFIX + part for part in form.parts], [tensor]
    if form.fused is not None:
        dim, num_groups = form.fused.dim, form.fused.num_groups
        groups = tensor.unflatten(dim, (num_groups, -1)).split(list(form.fused.sizes), dim + 1)
        pieces = [piece.flatten(dim, dim + 1) for piece in groups]
    for key, piece in zip(keys, pieces, strict=True):
        writer.add_tensor(key, piece, fused=form.grouping)
    if form.fused is not None:
        writer.fuse(_PREFIX + name, keys, dim=dim, num_groups=num_groups)
