"""Hugging Face files into a model in memory, whatever its sharding.

Each rank reads only the slices that its shards need. Everything that can be wrong is found, and
agreed on by all ranks, before a tensor of the model is touched.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, rank_and_world_size
from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format.regions import local_regions, local_view
from megafsdp.checkpoint.huggingface.mapping import (
    Entry,
    expect_names,
    full_names,
    is_mapped,
    unbuilt_names,
)
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    HubPlan,
    config_of,
    hub_state,
    plan_model,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.checkpoint.state.canonical import canonical_name
from megafsdp.checkpoint.storage.locations import local_path
from megafsdp.errors import MAX_NAMED, CheckpointError, listed
from megafsdp.fsdp import mark_main_weights_changed
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import give_memory_to_meta_tensors
from megafsdp.fsdp.quantized_model import requantize_

_HINT_FOR_THEIRS = (
    "Check the class of the model and its sizes. If transformers stores it in another form than it "
    "has in memory, as it does Mixtral, GPT-NeoX and ViT, shard what from_pretrained() returns, or "
    "give its state_dict() to megafsdp.load_full_state_dict() on all ranks"
)
# Tied tensors are compared in pieces of about this size.
_PIECE_NUMEL = 1 << 22

_LOGGER = logging.getLogger("megafsdp.checkpoint")


def import_hf(
    model: nn.Module, directory: str | os.PathLike[str], *, config: ConfigLike | None = None
) -> None:
    """Fill a model from Hugging Face's safetensors files, in place; collective over all ranks.

    Parameter objects stay the same, and compute weights are fresh when this returns. Names must
    match both ways, and shapes must match; dtypes are converted, but not fractions to integers, and
    rows of a padded vocabulary that the files lack become 0. Experts are read from one tensor per
    expert, or from the packed tensors that some files have; layers of multi-token prediction are
    left out with a warning. A model on the meta device gets its memory here. Optimizers are left
    alone: make them afterwards.
    A model of transformers is matched by its names in memory: if transformers stores it in another
    form, as it does some mixtures of experts, its files cannot fill it; the error says what to do.

    Args:
        model: One of ``megafsdp.models``, or a model of transformers; sharded or not.
        directory: What ``save_pretrained()`` or ``export_hf()`` wrote.
        config: Config of the model; None takes ``model.config``.

    Raises:
        CheckpointError: The files are missing, damaged or of another model; on all ranks, before
            any of them touched its model.
    """
    planned, error = attempt(
        lambda: _plan(model, local_path(directory, purpose="Hugging Face files"), config)
    )
    agree(True, error)
    assert planned is not None, "ranks that failed to plan have raised"
    _, error = attempt(lambda: _fill(model, *planned))
    agree(True, error)
    # For plain models and those under torch's FSDP2; our units make codes in the next forward.
    requantize_(model)


def _plan(
    model: nn.Module, directory: Path, config: ConfigLike | None
) -> tuple[SafetensorsReader, HubPlan, dict[str, str]]:
    reader, state = SafetensorsReader(directory), hub_state(model)
    chosen = config_of(model) if config is None else config
    plan = plan_model(state.shapes, state.tied, chosen, reader=reader)
    stored = match_stored(plan, reader, share=rank_and_world_size())
    _require_fractions_kept(state.tensors, plan, reader, stored)
    return reader, plan, stored


def _require_fractions_kept(
    tensors: Mapping[str, torch.Tensor],
    plan: HubPlan,
    reader: SafetensorsReader,
    stored: Mapping[str, str],
) -> None:
    """Refuse to fill a tensor of integers from floating-point numbers, which would be cut off."""
    odd = [
        f"'{name}' of {reader.dtype_name(stored[name])} for {tensors[entry.ours].dtype}"
        for entry in plan.entries
        if not (tensors[entry.ours].is_floating_point() or tensors[entry.ours].is_complex())
        for name in entry.theirs
        if reader.dtype_name(stored[name]).startswith(("F", "BF"))
    ]
    if odd:
        raise CheckpointError.expected(
            "integers for the model's tensors of integers",
            "; ".join(odd[:MAX_NAMED]),
            where="the Hugging Face files",
            hint="Fill the model before its layers are quantized",
        )


@torch.no_grad()
def _fill(
    model: nn.Module, reader: SafetensorsReader, plan: HubPlan, stored: Mapping[str, str]
) -> None:
    SAVES.wait_until_staged()
    names = {entry.ours for entry in plan.entries}
    give_memory_to_meta_tensors(
        model, device_below(model), is_wanted=lambda name: canonical_name(name) in names
    )
    tensors = hub_state(model).tensors
    for entry in plan.entries:
        tensor = tensors[entry.ours]
        for region in local_regions(entry.ours, tensor):
            fill_region(local_view(tensor, region), region, entry, reader=reader, stored=stored)
    mark_main_weights_changed(model, tensors.values())


def fill_region(
    target: torch.Tensor,
    region: Region,
    entry: Entry,
    *,
    reader: SafetensorsReader,
    stored: Mapping[str, str],
) -> None:
    """Read one region of one of our tensors from the files.

    Args:
        target: The memory of the region.
        region: Its place in our tensor.
        entry: Our tensor.
        reader: The files.
        stored: The names in the files by the names in the entry.
    """
    names = [stored[name] for name in entry.theirs]
    if not entry.shape:
        target.copy_(reader.tensor(names[0]))
        return
    if entry.is_padded:
        target.zero_()
    if len(entry.matrix) < len(entry.shape):
        # The rows of each expert in a stack are a range of the entry's rows.
        blocks = [(e * entry.shape[1], t) for e, t in enumerate(target, region.offsets[0])]
        region = Region(region.offsets[1:], region.sizes[1:])
    else:
        blocks = [(0, target)]
    columns = Region(region.offsets[1:], region.sizes[1:]).slices_in(whole(entry.matrix[1:]))
    index = (slice(None), *columns)
    dim = int(entry.is_transposed)
    for origin, block in blocks:
        start = origin + region.offsets[0]
        for run in entry.runs:
            first = max(start, run.our_start)
            last = min(start + region.sizes[0], run.ours.stop)
            if first < last:
                shift = run.their_start - run.our_start
                rows = reader.rows(names[run.part], first + shift, last + shift, dim=dim)
                rows = rows.T if entry.is_transposed else rows
                block[first - start : last - start].copy_(rows[index])


def match_stored(
    plan: HubPlan, reader: SafetensorsReader, *, share: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Check names, shapes and tied tensors of the files against a plan; local.

    Args:
        plan: The model.
        reader: The files.
        share: This rank and the number of ranks: each compares its share of the tied tensors.

    Returns:
        The stored name by the name in the plan, including tied names.

    Raises:
        CheckpointError: A tensor is missing, unknown, of another shape, or differs from the one it
            is tied to.
    """
    wanted = {name for entry in plan.entries for name in entry.theirs}
    stored = full_names(reader.names, plan.model_type, wanted)
    hint = None if is_mapped(entry.ours for entry in plan.entries) else _HINT_FOR_THEIRS
    tied, where = set(plan.tied), "the Hugging Face files"
    expect_names(stored, wanted, optional=tied, where=where, hint=hint)
    if unbuilt := unbuilt_names(reader.names, plan.model_type):
        _LOGGER.warning("left out, as transformers does: %s", listed(unbuilt))
    odd = [
        f"'{name}' of shape {reader.shape(stored[name])} instead of {shape}"
        for entry in plan.entries
        for name, shape in entry.theirs.items()
        if reader.shape(stored[name]) != shape
    ]
    if odd:
        raise CheckpointError.expected(
            "tensors of the model's shapes",
            "; ".join(odd[:MAX_NAMED]),
            where="the Hugging Face files",
            hint="Build the model that their config.json describes",
        )
    for name, target in plan.tied.items():
        if name in stored and not _is_equal(reader, stored[name], stored[target], share):
            raise CheckpointError.expected(
                f"'{name}' equal to '{target}'",
                "two different tensors",
                where="the Hugging Face files of a model whose weights are tied",
                hint="Build the model with tie_embeddings=False (tie_word_embeddings)",
            )
    return stored


def _is_equal(reader: SafetensorsReader, left: str, right: str, share: tuple[int, int]) -> bool:
    shape = reader.shape(left)
    if shape != reader.shape(right):
        return False
    if not shape:
        return torch.equal(reader.tensor(left), reader.tensor(right))
    rank, world_size = share
    start, stop = (shape[0] * r // world_size for r in (rank, rank + 1))
    step = max(1, _PIECE_NUMEL * shape[0] // max(1, torch.Size(shape).numel()))
    return all(
        torch.equal(*(reader.rows(name, at, min(at + step, stop)) for name in (left, right)))
        for at in range(start, stop, step)
    )
