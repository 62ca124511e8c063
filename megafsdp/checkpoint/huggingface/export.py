"""Hugging Face files from a model in memory, whatever its sharding.

One tensor at a time is gathered to the rank that writes its file, mapped, and written at its known
place; ranks write different files at the same time. The way back is ``hf_load``'s, checkpoints
without a model are ``hf_checkpoint``'s.
"""

from __future__ import annotations

import functools
import os
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from megafsdp.buffer.comm.agreement import agree, attempt, on_rank_zero, rank_and_world_size
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.huggingface.gather import Scratch, gather_to, nbytes_to_gather
from megafsdp.checkpoint.huggingface.output import (
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
    HubState,
    architecture_of,
    config_of,
    generation_config_of,
    hub_state,
)
from megafsdp.device.memory import ByteLedger
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.full_params import device_below
from megafsdp.fsdp.params.meta import require_initialized
from megafsdp.fsdp.runtime.unit import units_below

GENERATION_CONFIG_FILE = "generation_config.json"


def export_hf(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    config: ConfigLike | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_nbytes: int = DEFAULT_SHARD_NBYTES,
    tokenizer: SavesPretrained | None = None,
) -> Path:
    """Write a model as ``transformers`` reads it; collective over all ranks.

    Safetensors files, their index, ``config.json`` and, where there is one, the generation config
    appear at once, by a rename. One all-to-all a tensor; no rank holds more than two of the largest
    tensors beside its shards.

    Args:
        model: One of ``megafsdp.models``, or a model of transformers; sharded or not.
        directory: Made here, on a file system that all ranks share; must not exist, or be empty.
        config: Goes to ``config.json``; None takes ``model.config``. Give Hugging Face fields (see
            ``config_to_hugging_face``) to cut padding off the vocabulary or to name special tokens.
        dtype: Of floating-point tensors in the files; None keeps that of the main weights.
        max_shard_nbytes: Bytes in a file.
        tokenizer: Saved beside the model, by rank 0.

    Returns:
        The directory.

    Raises:
        CheckpointError: The model cannot be expressed, the directory is taken, or a rank could not
            write or has no memory for it; on all ranks. Nothing is left behind.
    """
    target = Path(directory)
    found, error = attempt(
        lambda: _plan(model, config, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
    )
    digest = None if found is None else zlib.crc32(repr(found[1].files).encode())
    if len(set(agree(digest, error))) > 1:
        raise CheckpointError(
            expected(
                "the same tensors on all ranks",
                "different names, shapes or dtypes",
                where="export_hf()",
                hint="Build the same model on every rank and pass the same arguments",
            )
        )
    assert found is not None, "ranks that failed to plan have raised"
    state, export = found
    temporary = on_rank_zero(lambda: prepare(target))
    try:
        agree(True, _write(model, state, export, temporary))
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
    export = plan_export(facts, state.tied, chosen, dtype=dtype, max_shard_nbytes=max_shard_nbytes)
    if not export.plan.fields.get("architectures"):
        named = {**export.plan.fields, "architectures": [architecture_of(model)]}
        export = replace(export, plan=replace(export.plan, fields=named))
    _require_memory(model, state, export)
    return state, export


def _require_memory(model: nn.Module, state: HubState, export: Export) -> None:
    """Allocate at once what the largest gather needs on this rank, and let go of it again.

    A rank that ran out of memory between two collectives would leave the others waiting.
    """
    _, world_size = rank_and_world_size()
    needs = [
        nbytes_to_gather(file % world_size, state.tensors[entry.ours], dtype)
        for file in range(len(export.files))
        for entry, dtype in export.entries_of(file)
    ]
    scratch = Scratch(_ledger_of(model), device_below(model))
    try:
        for nbytes in max(needs, key=sum, default=()):
            scratch.allocate((nbytes,), torch.uint8)
    finally:
        scratch.free()


def _write(model: nn.Module, state: HubState, export: Export, temporary: Path) -> Exception | None:
    """Gather and write all files; every rank takes part in every gather, whatever fails.

    Returns:
        This rank's error.
    """
    rank, world_size = rank_and_world_size()
    scratch = Scratch(_ledger_of(model), device_below(model))
    queues = [
        [
            (file, entry, dtype)
            for file in range(writer, len(export.files), world_size)
            for entry, dtype in export.entries_of(file)
        ]
        for writer in range(world_size)
    ]
    mine, error = FileSequence(temporary, export.files), None
    for turn in range(max(map(len, queues))):
        whole = None
        for writer, queue in enumerate(queues):
            if turn >= len(queue):
                continue
            _, entry, dtype = queue[turn]
            result = gather_to(
                writer,
                state.tensors[entry.ours],
                dtype=dtype,
                is_rank_zeros=entry.ours in state.rank_zero,
                scratch=scratch,
            )
            whole = result if writer == rank else whole
            scratch.free(kept=whole)
        if whole is not None:
            file, entry, _ = queues[rank][turn]
            if error is None:
                write = functools.partial(write_entry, mine, file, entry, whole, scratch)
                _, error = attempt(write)
            scratch.free()
    _, closing = attempt(lambda: mine.close(error))
    return error or closing


def _ledger_of(model: nn.Module) -> ByteLedger:
    units = list(units_below([model]).values())
    return units[0].ledger if units else ByteLedger()


def _beside(model: nn.Module) -> dict[str, str]:
    """Return the text of further files by name."""
    generation = generation_config_of(model)
    return {} if generation is None else {GENERATION_CONFIG_FILE: generation}
