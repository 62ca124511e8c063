"""The count of collectives and their bytes, for tests, benchmarks and people who want to know.

``megafsdp.buffer.comm.collectives`` notes every collective that it issues.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


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


# Process-wide like the process group itself: backward may run in other threads than the recording
# one.
_open_records: list[CollectiveRecord] = []


@contextlib.contextmanager
def record_collectives() -> Iterator[CollectiveRecord]:
    """Count this rank's collectives inside the context."""
    record = CollectiveRecord()
    _open_records.append(record)
    try:
        yield record
    finally:
        _open_records[:] = [r for r in _open_records if r is not record]


def note(kind: str, label: str, nbytes: int, group_name: str) -> None:
    """Count one collective in every open record."""
    key = (kind, group_name)
    for record in _open_records:
        record.calls[kind] += 1
        record.nbytes[kind] += nbytes
        record.calls_by_group[key] += 1
        record.nbytes_by_group[key] += nbytes
        record.events.append((kind, label))
