"""Hugging Face files into a model in memory, whatever its sharding.

Each rank reads the slices that its shards need and nothing else. Everything that can be wrong is
found, and agreed on by all ranks, before a tensor of the model is touched.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, rank_and_world_size
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format.regions import Region, local_regions, local_view
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    Entry,
    HubPlan,
    config_of,
    hub_state,
    plan_stored,
    stored_names,
)
from megafsdp.checkpoint.huggingface.safetensors_files import SafetensorsReader
from megafsdp.checkpoint.state.canonical import canonical_name
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp import mark_main_weights_changed
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import give_memory_to_meta_tensors

# Tied tensors are compared in pieces of about this size.
_PIECE_NUMEL = 1 << 22
_MAX_NAMES = 20


def import_hf(
    model: nn.Module, directory: str | os.PathLike[str], *, config: ConfigLike | None = None
) -> None:
    """Fill a model from Hugging Face's safetensors files, in place; collective over all ranks.

    Parameter objects stay the same, and compute weights are fresh when this returns. Names must
    match both ways, and shapes; dtypes are converted, and rows of a padded vocabulary that the
    files lack become 0. A model on the meta device gets its memory here. Optimizers are left alone:
    make them afterwards. Models of transformers go by their names in memory: one that it stores in
    another form, as it does some mixtures of experts, cannot be filled from its files.

    Args:
        model: One of ``megafsdp.models``, or a model of transformers; sharded or not.
        directory: What ``save_pretrained()`` or ``export_hf()`` wrote.
        config: What the model is; None takes ``model.config``.

    Raises:
        CheckpointError: The files are missing, damaged or of another model; on all ranks, before
            any of them touched its model.
    """
    loading, error = attempt(lambda: _Import(model, Path(directory), config))
    agree(True, error)
    assert loading is not None, "ranks that failed to plan have raised"
    _, error = attempt(loading.run)
    agree(True, error)


class _Import:
    """An import that passed every check on this rank."""

    def __init__(self, model: nn.Module, directory: Path, config: ConfigLike | None) -> None:
        self._model = model
        self._reader = SafetensorsReader(directory)
        state = hub_state(model)
        chosen = config_of(model) if config is None else config
        self._plan = plan_stored(state.shapes, state.tied, chosen, self._reader)
        self._stored = match_stored(self._plan, self._reader, share=rank_and_world_size())

    @torch.no_grad()
    def run(self) -> None:
        """Write into the model."""
        SAVES.wait_until_staged()
        names = {entry.ours for entry in self._plan.entries}
        give_memory_to_meta_tensors(
            self._model,
            device_below(self._model),
            is_wanted=lambda name: canonical_name(name) in names,
        )
        tensors = hub_state(self._model).tensors
        with self._reader:
            for entry in self._plan.entries:
                tensor = tensors[entry.ours]
                for region in local_regions(entry.ours, tensor):
                    self._fill(entry, region, local_view(tensor, region))
        mark_main_weights_changed(self._model, tensors.values())

    def _fill(self, entry: Entry, region: Region, target: torch.Tensor) -> None:
        names = [self._stored[name] for name in entry.theirs]
        if not entry.shape:
            target.copy_(self._reader.tensor(names[0]))
            return
        start, num_rows = region.offsets[0], region.sizes[0]
        columns = Region(region.offsets[1:], region.sizes[1:])
        all_columns = Region((0,) * len(entry.shape[1:]), entry.shape[1:])
        inner = (slice(None), *columns.slices_in(all_columns))
        if entry.rule.is_padded:
            target.zero_()
        for run in entry.runs():
            first = max(start, run.our_start)
            last = min(start + num_rows, run.our_start + run.num_rows)
            if first >= last:
                continue
            theirs = first - run.our_start + run.their_start
            is_transposed = entry.rule.is_transposed
            rows = self._reader.rows(
                names[run.part], theirs, theirs + last - first, dim=int(is_transposed)
            )
            rows = rows.T if is_transposed else rows
            target[first - start : last - start].copy_(rows[inner])


def match_stored(
    plan: HubPlan, reader: SafetensorsReader, *, share: tuple[int, int] = (0, 1)
) -> dict[str, str]:
    """Check names, shapes and tied tensors of the files against a plan; local.

    Args:
        plan: The model.
        reader: The files.
        share: Number of this rank and of all ranks, which compare tied tensors together.

    Returns:
        The stored name by the name in the plan.

    Raises:
        CheckpointError: Something is missing, unknown, of another shape, or differs from what it
            is tied to.
    """
    stored = stored_names(plan, reader.names)
    odd = [
        f"'{name}' of shape {reader.shape(stored[name])} instead of {shape}"
        for entry in plan.entries
        for name, shape in zip(entry.theirs, entry.their_shapes(), strict=True)
        if reader.shape(stored[name]) != shape
    ]
    if odd:
        raise CheckpointError(
            expected(
                "tensors of the model's shapes",
                "; ".join(odd[:_MAX_NAMES]),
                where="the Hugging Face files",
                hint="Build the model that their config.json describes",
            )
        )
    for name, target in plan.tied.items():
        if name in stored and not _is_equal(reader, stored[name], stored[target], share):
            raise CheckpointError(
                expected(
                    f"'{name}' equal to '{target}'",
                    "two different tensors",
                    where="the Hugging Face files of a model whose weights are tied",
                    hint="Build the model with tie_embeddings=False (tie_word_embeddings)",
                )
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
