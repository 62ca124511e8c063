"""Hugging Face files from a checkpoint, and a checkpoint from such files, in one process.

No ranks, no GPU, no model in memory: tensors pass one by one. A checkpoint made here holds weights
alone and loads into any model of the same configuration, on any number of ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from megafsdp.checkpoint.format.regions import Stored, TensorPart, local_regions, local_view, whole
from megafsdp.checkpoint.huggingface.gather import Scratch
from megafsdp.checkpoint.huggingface.import_ import match_stored
from megafsdp.checkpoint.huggingface.mapping import full_names
from megafsdp.checkpoint.huggingface.output import (
    CONFIG_FILE,
    DEFAULT_SHARD_NBYTES,
    Export,
    FileSequence,
    SavesPretrained,
    plan_export,
    prepare,
    publish,
    write_entry,
)
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    Entry,
    HubPlan,
    hub_state,
    plan_model,
    plan_stored,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.checkpoint.state.fused import stored_form
from megafsdp.checkpoint.tools.progress import bytes_bar
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.device.memory import ByteLedger
from megafsdp.errors import CheckpointError, expected
from megafsdp.models import build_model, config_from_hugging_face

_PREFIX = "model."
# Where an imported checkpoint keeps the fields of config.json, in its extra.
_CONFIG_KEY = "hugging_face_config"
_CPU = torch.device("cpu")


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
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    tokenizer: SavesPretrained | None = None,
    show_progress: bool = False,
) -> Conversion:
    """Write a checkpoint's weights as ``transformers`` reads them; local, in one process.

    Args:
        directory: The save root, or one checkpoint's own directory.
        target: Made here; must not exist, or be empty.
        step: The step; None means the latest published one.
        config: Of the model, as for ``export_hf``; None takes what ``import_hf_checkpoint`` stored.
        dtype: Of floating-point tensors in the files; None keeps that of the main weights.
        max_shard_nbytes: Bytes in a file.
        tokenizer: Saved beside the model.
        show_progress: Draw a bar, on a terminal.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model, or the target is taken.
    """
    final = Path(target)
    with CheckpointReader(directory, step) as reader:
        export = _plan_export(reader, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
        temporary = prepare(final)
        try:
            _write_files(reader, export, temporary, show_progress)
            publish(temporary, final, export, tokenizer=tokenizer)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    tensors = [tensor for file in export.files for tensor in file.tensors]
    return Conversion(
        str(final),
        export.plan.model_type,
        len(tensors),
        sum(tensor.nbytes for tensor in tensors),
        tuple(file.name for file in export.files),
    )


def _plan_export(
    reader: CheckpointReader,
    config: ConfigLike | None,
    *,
    dtype: torch.dtype | None,
    max_shard_nbytes: int,
) -> Export:
    aliases = {k: v for k, v in reader.whole_aliases().items() if k.startswith(_PREFIX)}
    tied = {k.removeprefix(_PREFIX): v.removeprefix(_PREFIX) for k, v in aliases.items()}
    keys = [key for key in reader.whole_keys() if key.startswith(_PREFIX) and key not in aliases]
    facts = {key.removeprefix(_PREFIX): (reader.shape(key), _dtype(reader, key)) for key in keys}
    if config is None:
        config = stored_config(reader.object("extra"))
    return plan_export(facts, tied, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)


def stored_config(extra: object) -> dict[str, object] | None:
    """Return the config.json that an imported checkpoint keeps in its extra; None in others."""
    fields = extra.get(_CONFIG_KEY) if isinstance(extra, Mapping) else None
    return dict(fields) if isinstance(fields, Mapping) else None


def _dtype(reader: CheckpointReader, key: str) -> torch.dtype:
    stored = reader.fused[key]["parts"][0] if key in reader.fused else key
    return reader.manifest.tensors[stored].torch_dtype


def _write_files(
    reader: CheckpointReader, export: Export, temporary: Path, show_progress: bool
) -> None:
    files = FileSequence(temporary, export.files)
    scratch = Scratch(ByteLedger(), _CPU)
    total_nbytes = sum(tensor.nbytes for file in export.files for tensor in file.tensors)
    try:
        with bytes_bar("export", total_nbytes, is_wanted=show_progress) as bar:
            for index in range(len(export.files)):
                for entry, dtype in export.entries_of(index):
                    tensor = scratch.cast(reader.tensor(_PREFIX + entry.ours), dtype)
                    write_entry(files, index, entry, tensor, scratch)
                    scratch.free()
                    bar.update(sum(stored.nbytes for stored in entry.stored(dtype)))
        files.close(None)
    except Exception as error:
        files.close(error)
        raise


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
    """Make a checkpoint of weights from Hugging Face files; local, in one process.

    Args:
        source: What ``save_pretrained()`` or ``export_hf()`` wrote.
        directory: The save root.
        step: The step that the checkpoint is published as.
        padded_vocab_size: Rows of our embedding; None makes as many as there are.
        keeps_names: Store the tensors as they are, for a model of transformers; otherwise they are
            mapped to one of ``megafsdp.models``.
        dtype: Of floating-point tensors in the checkpoint, which is the model's main weights';
            None keeps that of the files.
        show_progress: Draw a bar, on a terminal.

    Raises:
        CheckpointError: The files are missing, damaged or not of their ``config.json``, or the step
            is published already.
        ConfigError: There is no such model in ``megafsdp.models``.
    """
    path = Path(source)
    fields = _read_fields(path)
    with SafetensorsReader(path) as files:
        if keeps_names:
            known = full_names(files.names, str(fields.get("model_type")))
            shapes = {name: files.shape(stored) for name, stored in known.items()}
            template, plan = None, plan_model(shapes, {}, fields)
        else:
            config = config_from_hugging_face(fields, padded_vocab_size=padded_vocab_size)
            with torch.device("meta"):
                template = build_model(config)
            state = hub_state(template)
            plan = plan_stored(state.shapes, state.tied, fields, files)
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
            _add_ties(writer, template)
            writer.add_object("extra", {_CONFIG_KEY: fields})
            final = writer.publish()
    names = tuple(sorted(p.name for p in final.glob("*.distcp")))
    return Conversion(str(final), plan.model_type, len(plan.entries), nbytes, names)


def _read_fields(path: Path) -> dict[str, object]:
    try:
        return dict(json.loads((path / CONFIG_FILE).read_text()))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            expected(
                "the fields of a model's config in JSON",
                f"{type(error).__name__}: {error}",
                where=f"'{path / CONFIG_FILE}'",
                hint="Give a directory that save_pretrained() or export_hf() wrote",
            )
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
    """Write a tensor as ``save`` would store the template's parameter of that name."""
    if template is None:
        writer.add_tensor(_PREFIX + name, tensor)
        return
    form = stored_form(name, template.get_parameter(name))
    keys = [_PREFIX + part for part in form.parts]
    for key, piece in zip(keys, form.pieces(tensor), strict=True):
        writer.add_tensor(key, _plain(piece), fused=form.grouping)
    if form.fused is not None:
        writer.fuse(_PREFIX + name, keys, dim=form.fused.dim, num_groups=form.fused.num_groups)


def _plain(piece: Stored) -> torch.Tensor:
    """Return a piece of a plain tensor as a tensor, a view where it lies together."""
    if not isinstance(piece, TensorPart):
        return piece
    regions = local_regions("", piece)
    if len(regions) == 1:
        return local_view(piece, regions[0])
    result = piece.tensor.new_empty(piece.shape)
    for region in regions:
        result[region.slices_in(whole(piece.shape))] = local_view(piece, region)
    return result


def _add_ties(writer: CheckpointWriter, template: nn.Module | None) -> None:
    if template is not None:
        for name, target in hub_state(template).tied.items():
            writer.alias(_PREFIX + name, _PREFIX + target)
