"""Merge what each rank wrote into the manifest of a save.

A rank describes what it wrote as :class:`Written`: chunks with their places, and a :class:`Table`
of the keys that not all ranks have, such as a single expert's. The other keys are the same on all
ranks; a checksum proves it. In :func:`describe`, rank 0 compares the checksums, unites the tables
and collects the chunks of every tensor.

All of it is local; the exchange is in checkpoint/save.py.
"""

from __future__ import annotations

import importlib.metadata
import platform
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.checkpoint.format.manifest import Chunk, Manifest, Record, TensorEntry, dtype_name
from megafsdp.checkpoint.format.regions import is_filled
from megafsdp.checkpoint.state.canonical import CanonicalState
from megafsdp.errors import CheckpointError
from megafsdp.mesh.parallel_dims import DP_OUTER, DP_SHARD


@dataclass(frozen=True, slots=True)
class Table:
    """Stored tensors by key.

    Attributes:
        tensors: Entries without chunks.
        aliases: Further names of stored tensors.
        fused_into: Fused tensors that are stored in parts, as the manifest has them.
    """

    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]
    fused_into: dict[str, dict]


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank wrote, for rank 0.

    Attributes:
        table_crc32: Checksum of the names, shapes and dtypes that must be alike on all ranks.
        table: The keys of this rank that not all ranks have.
        chunks: Key and chunk of each tensor region.
        copies: Key and chunk of each region that ranks of another mesh write; this rank has only
            computed its checksum.
        objects: Records of non-tensor objects by key.
        files: Size in bytes of each file.
    """

    table_crc32: int
    table: Table
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    copies: list[tuple[str, Chunk]] = field(default_factory=list)
    objects: dict[str, Record] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


def checksum_of_common(state: CanonicalState) -> int:
    """Return a checksum of the names, shapes and dtypes that all ranks must have alike; local."""
    table = [
        (key, tuple(stored.shape), str(stored.dtype))
        for key, stored in state.tensors.items()
        if key not in state.ranks_of
    ]
    return zlib.crc32(repr(table).encode())


def table_of(state: CanonicalState, keys: Collection[str] | None = None) -> Table:
    """List the tensors that this rank stores, all of them or those with given keys; local."""
    chosen = state.tensors if keys is None else keys
    entries = {
        key: TensorEntry(
            tuple(stored.shape),
            dtype_name(stored.dtype),
            (),
            state.fused.get(key),
        )
        for key in chosen
        if (stored := state.tensors.get(key)) is not None
    }
    if keys is None:
        return Table(entries, state.aliases, state.fused_into)
    return Table(
        entries,
        {alias: key for alias, key in state.aliases.items() if alias in keys},
        {k: v for k, v in state.fused_into.items() if any(part in keys for part in v["parts"])},
    )


def library_versions() -> dict[str, str]:
    """Return the versions that a checkpoint records."""
    try:
        own = importlib.metadata.version("megafsdp")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {
        "megafsdp": own,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def model_degrees(model: nn.Module) -> dict[str, int]:
    """Return the number of ranks on each model axis of a model's parameters, by name; local.

    If the degrees and the number of ranks are equal, each rank plays the same role in training:
    data axes come first in a mesh, and rank r reads the same samples however the data axes divide
    parameters. An axis of one rank is left out, as it does not matter.
    """
    degrees: dict[str, int] = {}
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        mesh, num_data_axes = parameter.device_mesh, 0
        if isinstance(parameter, UnevenDTensor):
            num_data_axes = mesh.ndim - parameter.uneven_layout.num_model_axes
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        for name, size in list(zip(names, mesh.shape, strict=True))[num_data_axes:]:
            # In DTensors of other engines, data axes are recognized by name only.
            if size > 1 and name not in (DP_OUTER, DP_SHARD):
                degrees[name] = size
    return degrees


def common_facts(step: int, world_size: int, degrees: Mapping[str, int]) -> dict[str, object]:
    """Return the object ``common`` of a checkpoint.

    Args:
        step: Training step.
        world_size: Number of ranks whose random states are stored.
        degrees: Degrees of the model, as :func:`model_degrees` returns them.
    """
    return {
        "step": step,
        "world_size": world_size,
        "degrees": dict(degrees),
        "versions": library_versions(),
    }


def describe(step: int, state: CanonicalState, parts: list[Written]) -> Manifest:
    """Merge what the ranks wrote into the manifest; rank 0 only.

    Args:
        step: Training step.
        state: What rank 0 stores.
        parts: What each rank wrote, in rank order.

    Raises:
        CheckpointError: The ranks have different models, or the chunks do not fill a tensor, or
            copies of a tensor differ.
    """
    odd = [rank for rank, part in enumerate(parts) if part.table_crc32 != parts[0].table_crc32]
    if odd:
        raise CheckpointError.expected(
            "the same tensor names, shapes and dtypes on all ranks",
            f"others on ranks {odd[:8]} than on rank 0",
            where="checkpoint.save()",
            hint="Build the same model and optimizer, in the same order, on every rank",
        )
    table = _unite(table_of(state), (part.table for part in parts))
    chunks: dict[str, list[Chunk]] = {key: [] for key in table.tensors}
    for part in parts:
        for key, chunk in part.chunks:
            chunks[key].append(chunk)
    for key, entry in table.tensors.items():
        chunks[key].sort(key=lambda chunk: chunk.region.offsets)
        _require_filled(key, entry.shape, [chunk.region for chunk in chunks[key]])
    _require_equal_copies(parts, chunks)
    return Manifest(
        step=step,
        world_size=len(parts),
        versions=library_versions(),
        tensors={
            key: replace(entry, chunks=tuple(chunks[key])) for key, entry in table.tensors.items()
        },
        objects={key: record for part in parts for key, record in part.objects.items()},
        aliases=table.aliases,
        files={name: nbytes for part in parts for name, nbytes in part.files.items()},
        fused_into=table.fused_into,
    )


def _unite(own: Table, others: Iterable[Table]) -> Table:
    """Return the union of the tables of all ranks.

    Args:
        own: The full table of rank 0.
        others: For each rank, the table of the keys that not all ranks have.

    Raises:
        CheckpointError: Two ranks have different tensors under one name.
    """
    united = Table(dict(own.tensors), dict(own.aliases), dict(own.fused_into))
    for table in others:
        for key, entry in table.tensors.items():
            if united.tensors.setdefault(key, entry) != entry:
                raise CheckpointError.expected(
                    f"shape {united.tensors[key].shape} and {united.tensors[key].dtype}",
                    f"shape {entry.shape} and {entry.dtype} on another rank",
                    where=f"'{key}'",
                    hint="Declare the experts of each rank (ExpertRange) as they are",
                )
        united.aliases.update(table.aliases)
        united.fused_into.update(table.fused_into)
    return united


def _require_filled(key: str, shape: tuple[int, ...], regions: list[Region]) -> None:
    """Check that regions, sorted by offset, cover each element once."""
    if not (_are_consecutive_rows(shape, regions) or is_filled(whole(shape), regions)):
        raise CheckpointError.expected(
            f"chunks that fill the {whole(shape).numel} elements of shape {shape} once",
            f"{regions[:8]}",
            where=f"'{key}'",
            hint="Save from all ranks that hold the tensor, in one call; declare which ranks "
            "hold the same experts (ExpertRange)",
        )


def _are_consecutive_rows(shape: tuple[int, ...], regions: list[Region]) -> bool:
    """Return whether regions of whole rows follow each other; much faster than `is_filled`."""
    end = 0
    for region in regions:
        if region.offsets[:1] != (end,) or region.sizes[1:] != shape[1:]:
            return False
        end += region.sizes[0]
    return shape[:1] == (end,)


def _require_equal_copies(parts: list[Written], chunks: Mapping[str, list[Chunk]]) -> None:
    keys = {key for part in parts for key, _ in part.copies}
    sums = {(key, chunk.region): chunk.record.crc32 for key in keys for chunk in chunks[key]}
    for rank, part in enumerate(parts):
        for key, copy in part.copies:
            if sums.get((key, copy.region)) != copy.record.crc32:
                raise CheckpointError.expected(
                    "the same values on all ranks that hold a part of a tensor",
                    f"others on rank {rank} in {copy.region}",
                    where=f"'{key}'",
                    hint="Make replicas DTensors with Replicate() on that axis of the mesh; "
                    "declare which ranks hold the same experts (ExpertRange)",
                )
