"""What the ranks wrote, merged into the manifest of a save.

Each rank tells what it wrote as a :class:`Written`; rank 0 compares the ranks and puts the chunks
of every tensor together. Nothing is communicated or written here.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megafsdp.checkpoint.format.manifest import Chunk, Manifest, Record
from megafsdp.checkpoint.format.regions import whole
from megafsdp.checkpoint.state.canonical import CanonicalState
from megafsdp.checkpoint.state.tables import Table, table_of, unite
from megafsdp.errors import CheckpointError, expected


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank wrote, for rank 0.

    Attributes:
        table_crc32: Checksum of the names, shapes and dtypes that are alike on all ranks.
        own: What this rank has and not all ranks have.
        chunks: Key and chunk of each tensor region.
        objects: Records of non-tensor objects by key.
        files: Size in bytes of each file.
    """

    table_crc32: int
    own: Table
    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    objects: dict[str, Record] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)


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


def describe(step: int, state: CanonicalState, parts: list[Written]) -> Manifest:
    """Merge the ranks' parts into the manifest.

    Raises:
        CheckpointError: The ranks hold different models, or the chunks do not fill a tensor.
    """
    odd = [rank for rank, part in enumerate(parts) if part.table_crc32 != parts[0].table_crc32]
    if odd:
        raise CheckpointError(
            expected(
                "the same tensor names, shapes and dtypes on all ranks",
                f"others on ranks {odd[:8]} than on rank 0",
                where="checkpoint.save()",
                mend="Build the same model and optimizer, in the same order, on every rank",
            )
        )
    table = unite(table_of(state), (part.own for part in parts))
    chunks: dict[str, list[Chunk]] = {key: [] for key in table.tensors}
    for part in parts:
        for key, chunk in part.chunks:
            chunks[key].append(chunk)
    for key, entry in table.tensors.items():
        _require_filled(key, entry.shape, chunks[key])
    return Manifest(
        step=step,
        world_size=len(parts),
        versions=library_versions(),
        tensors={
            key: replace(
                entry, chunks=tuple(sorted(chunks[key], key=lambda chunk: chunk.region.offsets))
            )
            for key, entry in table.tensors.items()
        },
        objects={key: record for part in parts for key, record in part.objects.items()},
        aliases=table.aliases,
        files={name: nbytes for part in parts for name, nbytes in part.files.items()},
        fused_into=table.fused_into,
    )


def _require_filled(key: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    stored_numel = sum(chunk.region.numel for chunk in chunks)
    numel = whole(shape).numel
    if stored_numel != numel or len({chunk.region.offsets for chunk in chunks}) != len(chunks):
        raise CheckpointError(
            expected(
                f"chunks that fill the {numel} elements of shape {shape} once",
                f"{[chunk.region for chunk in chunks][:8]}",
                where=f"'{key}'",
                mend="Save from all ranks that hold the tensor, in one call; declare which ranks "
                "hold the same experts (ExpertRange)",
            )
        )
