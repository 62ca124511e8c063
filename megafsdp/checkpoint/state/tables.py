"""Tables: what the ranks store, by key, before it is known where each chunk lies.

Most keys are the same on all ranks, which a checksum proves. Keys that some ranks have alone, a
single expert's, are told to rank 0, which unites all. Arithmetic; the exchange is ``save``'s.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from megafsdp.checkpoint.format.manifest import TensorEntry
from megafsdp.checkpoint.state.canonical import CanonicalState
from megafsdp.errors import CheckpointError, expected


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


def checksum_of_common(state: CanonicalState) -> int:
    """Return a checksum of the names, shapes and dtypes that all ranks must have alike; local."""
    table = [
        (key, tuple(stored.shape), str(stored.dtype))
        for key, stored in state.tensors.items()
        if key not in state.own
    ]
    return zlib.crc32(repr(table).encode())


def table_of(state: CanonicalState) -> Table:
    """Return everything that this rank has; local."""
    return Table(_entries(state, state.tensors), state.aliases, state.fused_into)


def own_table(state: CanonicalState) -> Table:
    """Return what this rank has and not all ranks have; local."""
    return Table(
        _entries(state, state.own),
        {alias: key for alias, key in state.aliases.items() if alias in state.own},
        {k: v for k, v in state.fused_into.items() if not state.own.keys().isdisjoint(v["parts"])},
    )


def unite(own: Table, others: Iterable[Table]) -> Table:
    """Return what all ranks have together.

    Args:
        own: All that rank 0 has.
        others: What each rank has and not all ranks have.

    Raises:
        CheckpointError: Two ranks mean different tensors by one name.
    """
    united = Table(dict(own.tensors), dict(own.aliases), dict(own.fused_into))
    for table in others:
        for key, entry in table.tensors.items():
            if united.tensors.setdefault(key, entry) != entry:
                raise CheckpointError(
                    expected(
                        f"shape {united.tensors[key].shape} and {united.tensors[key].dtype}",
                        f"shape {entry.shape} and {entry.dtype} on another rank",
                        where=f"'{key}'",
                        mend="Declare the experts of each rank (ExpertRange) as they are",
                    )
                )
        united.aliases.update(table.aliases)
        united.fused_into.update(table.fused_into)
    return united


def _entries(state: CanonicalState, keys: Iterable[str]) -> dict[str, TensorEntry]:
    return {
        key: TensorEntry(
            tuple(stored.shape),
            str(stored.dtype).removeprefix("torch."),
            (),
            state.fused.get(key),
        )
        for key in keys
        if (stored := state.tensors.get(key)) is not None
    }
