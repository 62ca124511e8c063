"""Hugging Face files from a model in memory, whatever its sharding.

One tensor at a time is gathered to the rank that writes its file; ranks write different files at
the same time. The inverse is import_.py; conversions without a model are in checkpoints.py.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, on_rank_zero, rank_and_world_size
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.huggingface.gather import gather_to, nbytes_to_gather
from megafsdp.checkpoint.huggingface.mapping import Entry
from megafsdp.checkpoint.huggingface.output import (
    DEFAULT_SHARD_NBYTES,
    Export,
    SavesPretrained,
    plan_export,
    prepare,
    publish,
    write_files,
)
from megafsdp.checkpoint.huggingface.plan import (
    ConfigLike,
    HubState,
    architecture_of,
    config_of,
    generation_config_of,
    hub_state,
)
from megafsdp.checkpoint.storage.locations import local_path
from megafsdp.errors import CheckpointError
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import require_initialized

GENERATION_CONFIG_FILE = "generation_config.json"
_HOST = torch.device("cpu")


def export_hf(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    config: ConfigLike | None = None,
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    tokenizer: SavesPretrained | None = None,
) -> Path:
    """Write a model as ``transformers`` reads it; collective over all ranks.

    Safetensors files, their index, ``config.json`` and the generation config, if the model has one,
    appear at once, by a rename. Each tensor takes one all-to-all. Beside its shards, a rank needs
    host memory for the tensors of the file that it writes, and memory for one gathered tensor.

    Args:
        model: One of ``megafsdp.models``, or a model of transformers; sharded or not.
        directory: Made here, on a file system that all ranks share; must not exist, or be empty.
        config: Goes to ``config.json``; None takes ``model.config``. Give Hugging Face fields (see
            ``config_to_hugging_face``) to cut padding off the vocabulary or to name special tokens.
        dtype: Dtype of floating-point tensors in the files; None keeps that of the main weights.
        max_shard_nbytes: Bytes in a file, at least 1.
        tokenizer: Saved beside the model, by rank 0.

    Returns:
        The directory.

    Raises:
        CheckpointError: The model cannot be expressed, ``dtype`` is not floating-point, the
            directory is taken, or a rank could not write or has no memory for it; on all ranks.
            Nothing is left behind.
    """
    target = local_path(directory, purpose="Hugging Face files")
    found, error = attempt(
        lambda: _plan(model, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
    )
    if len(set(agree(None if found is None else _digest(found[1]), error))) > 1:
        raise CheckpointError.expected(
            "the same tensors on all ranks",
            "different names, shapes, dtypes or orders of rows",
            where="export_hf()",
            hint="Build the same model on every rank and pass the same arguments",
        )
    assert found is not None, "ranks that failed to plan have raised"
    state, export = found
    temporary = on_rank_zero(lambda: prepare(target))
    try:
        agree(True, _write(state, export, temporary))
        return on_rank_zero(lambda: publish(temporary, target, export, _beside(model), tokenizer))
    except BaseException:
        if rank_and_world_size()[0] == 0 and temporary.exists():
            on_disk.remove(temporary)
        raise


def _plan(
    model: nn.Module, config: ConfigLike | None, *, dtype: torch.dtype | None, max_shard_nbytes: int
) -> tuple[HubState, Export]:
    require_initialized([model], where="export_hf()")
    state = hub_state(model)
    facts = {name: (tuple(t.shape), t.dtype) for name, t in state.tensors.items()}
    chosen = config_of(model) if config is None else config
    export = plan_export(facts, chosen, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
    if not export.plan.fields.get("architectures"):
        named = {**export.plan.fields, "architectures": [architecture_of(model)]}
        export = replace(export, plan=replace(export.plan, fields=named))
    _require_memory(model, state, export)
    return state, export


def _digest(export: Export) -> int:
    """Return a checksum of the files and of the place of each row in them."""
    runs = [entry.runs for file in export.files for entry, _ in file.entries]
    return zlib.crc32(repr((export.files, runs)).encode())


def _require_memory(model: nn.Module, state: HubState, export: Export) -> None:
    """Allocate what the largest gather and the largest file need on this rank, then free it.

    A rank that ran out of memory between two collectives would leave the others waiting.
    """
    rank, world_size = rank_and_world_size()
    gathers = (
        nbytes_to_gather(
            index % world_size,
            state.tensors[entry.ours],
            dtype,
            is_rank_zeros=entry.ours in state.rank_zero,
        )
        for index, file in enumerate(export.files)
        for entry, dtype in file.entries
    )
    written = (file.nbytes for file in export.files[rank::world_size])
    needs = ((max(gathers, default=0), device_below(model)), (max(written, default=0), _HOST))
    kept = [reserve(nbytes, device) for nbytes, device in needs]
    kept.clear()


def reserve(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _write(state: HubState, export: Export, temporary: Path) -> Exception | None:
    def gather(writer: int, entry: Entry, dtype: torch.dtype) -> torch.Tensor | None:
        is_rank_zeros = entry.ours in state.rank_zero
        tensor = state.tensors[entry.ours]
        return gather_to(writer, tensor, dtype=dtype, is_rank_zeros=is_rank_zeros)

    rank, world_size = rank_and_world_size()
    return write_files(export, temporary, gather, rank=rank, world_size=world_size)


def _beside(model: nn.Module) -> dict[str, str]:
    """Return the texts of further files, by name."""
    generation = generation_config_of(model)
    return {} if generation is None else {GENERATION_CONFIG_FILE: generation}
