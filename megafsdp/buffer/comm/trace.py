"""Records of collectives: counts for tests and benchmarks, and labels that ranks compare.

``megafsdp.buffer.comm.collectives`` notes every collective here before issuing it.
:func:`record_collectives` counts calls and bytes. With ``MEGAFSDP_DEBUG=1`` ranks also compare
labels. Without this check, a unit that only some ranks run makes the others wait in another
collective, for ever or until sizes clash; with it all ranks raise an error that names the unit. The
check costs a second, small collective each time. The variable is read once, and again in each
root's forward: reading it before every collective would make hooks slower. :data:`issued` has the
number of collectives by group and the last collectives, for the report on a rank that leaves the
others waiting. This file makes and compares the labels; it exchanges nothing.
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
# How many of the last collectives are kept: more than ranks can be apart within a step.
_NUM_RECENT = 1024
# Bytes of a label. All labels have this length, because they are gathered into one tensor.
_WIDTH = 256


@dataclass(slots=True)
class CollectiveRecord:
    """Calls and bytes of the collectives made while the record was open.

    Attributes:
        calls: Number of collectives by kind; the coalesced sub-buffers of a group count as one.
        nbytes: Bytes by kind, measured on the full-size side of the flat buffers, padding included.
        calls_by_group: Number of collectives by (kind, name of the process group); the name is
            empty for the group of all ranks.
        nbytes_by_group: Bytes by the same keys.
        events: Every collective in order, as (kind, label).
    """

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    calls_by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    nbytes_by_group: Counter[tuple[str, str]] = field(default_factory=Counter)
    events: list[tuple[str, str]] = field(default_factory=list)


class IssuedCollectives:
    """The collectives that this rank has issued since the last :meth:`forget`.

    Attributes:
        counts: Number of collectives by the name of the process group (empty for all ranks).
        members: Ranks of each of these groups.
        recent: The last collectives, as (name of the group, number in it from 1, kind, label).
    """

    __slots__ = ("counts", "members", "recent")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.members: dict[str, Sequence[int]] = {}
        self.recent: deque[tuple[str, int, str, str]] = deque(maxlen=_NUM_RECENT)

    def forget(self) -> None:
        """Start anew, since process groups of other ranks may get the same names."""
        self.counts.clear()
        self.members.clear()
        self.recent.clear()


# Process-wide like the records, and always written: a hang is only examined after it has begun.
issued = IssuedCollectives()

# Process-wide, not thread-local: backward may issue collectives on another thread.
_open_records: list[CollectiveRecord] = []


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveRecord]:
    """Count this rank's collectives inside the context."""
    record = CollectiveRecord()
    _open_records.append(record)
    try:
        yield record
    finally:
        # Compare identity: different records may have equal counts, and they may end in any order.
        _open_records[:] = [r for r in _open_records if r is not record]


def note(kind: str, label: str, nbytes: int, group_name: str) -> None:
    """Count one collective, also in every open record; its group is already in the members."""
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
    """Return whether ranks compare labels, as the environment said when it was last read."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def read_environment() -> None:
    """Read the environment again: a user may set the variable after the import."""
    is_enabled.cache_clear()


def encode(kind: str, label: str, nbytes: int) -> torch.Tensor:
    """Encode a rank's next collective as ``(256,)`` uint8; a long label loses its beginning."""
    # Cut the front: long FQNs of neighbouring layers differ at their ends, and the bytes come last.
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
    # Quote one rank for each text: thousands of ranks issue only two or three different ones.
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
