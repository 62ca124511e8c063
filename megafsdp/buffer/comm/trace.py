"""Records of collectives: counts for tests and benchmarks, labels that ranks compare.

``megafsdp.buffer.comm.collectives`` notes every collective here before it issues it.
:func:`record_collectives` counts calls and bytes. With ``MEGAFSDP_DEBUG=1`` ranks also compare
labels: a unit that only some ranks run makes the others wait in another collective, for ever or
until sizes clash, and with the check all ranks raise an error that names the unit. That costs a
second, small collective each time. The variable is read once, and again by each root's forward:
a look before every collective would be a part of what hooks cost. :data:`issued` has the number of
collectives by group and the last ones, for the report on a rank that leaves the others waiting.
This file makes and compares the labels and exchanges nothing.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megafsdp.errors import MAX_RANKS, expected, listed

DEBUG_VARIABLE = "MEGAFSDP_DEBUG"
# How many of the last collectives are remembered: more than ranks differ by in a step.
_NUM_RECENT = 1024
# Bytes of a label. Equal on all ranks, because labels are gathered into one tensor.
_WIDTH = 256


@dataclass(slots=True)
class CollectiveRecord:
    """Calls and bytes of the collectives made while the record was open.

    Attributes:
        calls: Number of collectives by kind; the coalesced sub-buffers of a group count as one.
        nbytes: Bytes by kind, measured on the full-size side of the flat buffers, padding included.
        calls_by_group: Number of collectives by (kind, name of the process group), empty for all
            ranks.
        nbytes_by_group: Bytes by the same keys.
        events: Every collective in order, as (kind, label).
    """

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    calls_by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    nbytes_by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: list[tuple[str, str]] = field(default_factory=list)


class IssuedCollectives:
    """How far this rank has come, since the last :meth:`forget`.

    Attributes:
        counts: Number of collectives by the name of the process group, empty for all ranks.
        members: Ranks of each of these groups.
        recent: The last ones as (name of the group, number in the group from 1, kind, label).
    """

    __slots__ = ("counts", "members", "recent")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.members: dict[str, Sequence[int]] = {}
        self.recent: deque[tuple[str, int, str, str]] = deque(maxlen=_NUM_RECENT)

    def forget(self) -> None:
        """Start anew, as process groups of other ranks may get the same names."""
        self.counts.clear()
        self.members.clear()
        self.recent.clear()


# Process-wide like the records, and always written: a hang is explained after it has begun.
issued = IssuedCollectives()

# Process-wide, not of one thread: backward may issue collectives on another thread.
_open_records: list[CollectiveRecord] = []


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveRecord]:
    """Count this rank's collectives inside the context."""
    record = CollectiveRecord()
    _open_records.append(record)
    try:
        yield record
    finally:
        # By identity: records with equal counts are not the same, and may end in any order.
        _open_records[:] = [r for r in _open_records if r is not record]


def note(kind: str, label: str, nbytes: int, group_name: str) -> None:
    """Count one collective, in every open record too; its group is among the members."""
    number = issued.counts[group_name] = issued.counts.get(group_name, 0) + 1
    issued.recent.append((group_name, number, kind, label))
    key = (kind, group_name)
    for record in _open_records:
        record.calls[kind] += 1
        record.nbytes[kind] += nbytes
        record.calls_by_group[key] += 1
        record.nbytes_by_group[key] += nbytes
        record.events.append((kind, label))


@functools.cache
def is_enabled() -> bool:
    """Return whether ranks compare labels, as the environment said at the last look."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def read_environment() -> None:
    """Look at the environment anew: a user may set the variable after the import."""
    is_enabled.cache_clear()


def encode(kind: str, label: str, nbytes: int) -> torch.Tensor:
    """Encode what a rank is about to do as ``(256,)`` uint8; a long label loses its beginning."""
    # Cut at the front: long FQNs of neighbours differ at their ends, and the bytes come last.
    text = f"{kind} of '{label}', {nbytes} bytes".encode()[-_WIDTH:]
    return torch.tensor(list(text.ljust(_WIDTH)), dtype=torch.uint8, device="cpu")


def require_same(labels: torch.Tensor, ranks: Sequence[int]) -> None:
    """Raise on all ranks alike if they are about to issue different collectives.

    Args:
        labels: ``(ranks, 256)`` uint8 on the CPU, as :func:`encode` makes them.
        ranks: The global rank of each.

    Raises:
        RuntimeError: The labels differ.
    """
    texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in labels]
    if len(set(texts)) == 1:
        return
    # One rank for each text: thousands of ranks issue two or three different collectives.
    first: dict[str, int] = {}
    for rank, text in zip(ranks, texts, strict=True):
        first.setdefault(text, rank)
    quoted = [f"rank {rank}: {text}" for text, rank in first.items()]
    raise RuntimeError(
        expected(
            "the same collective on all ranks",
            listed(quoted, separator="; ", limit=MAX_RANKS),
            where=f"a process group of ranks {listed([str(r) for r in ranks])}",
            hint="Run every unit on all ranks, in the same order; where a rank has no input for a "
            "unit, run it on any input and multiply the result by 0",
        )
    )
