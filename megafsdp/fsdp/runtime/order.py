"""The order in which units run: recorded, followed, and given up when a run departs from it."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordedOrder(Generic[T]):
    """The order in which units ran last time, followed until a run departs from it.

    A run is recorded from :meth:`start` to the next. While it agrees with the record,
    :meth:`arrive` names the units that come next; after the first difference it names none, and the
    new order is what the next run follows.
    """

    def __init__(self) -> None:
        self._record: list[weakref.ref[T]] = []
        self._running: list[weakref.ref[T]] = []
        self._is_followed = False

    def start(self, guess: RecordedOrder[T] | None = None) -> None:
        """Begin a run; without a record the reverse of ``guess`` is followed."""
        if self._running:
            self._record = self._running
        elif guess is not None and not self._record:
            self._record = list(reversed(guess._running))
        self._running = []
        self._is_followed = bool(self._record)

    def arrive(self, unit: T, count: int) -> list[T]:
        """Note that ``unit`` runs and return up to ``count`` units expected after it."""
        position = len(self._running)
        self._running.append(weakref.ref(unit))
        expected = self._record[position] if position < len(self._record) else None
        if expected is None or expected() is not unit:
            self._is_followed = False
        return self.upcoming(count)

    def upcoming(self, count: int) -> list[T]:
        """Return up to ``count`` units expected after the last one that arrived."""
        position = len(self._running)
        expected = self._record[position : position + count] if self._is_followed else []
        return [u for u in (r() for r in expected) if u is not None]

    def is_last(self, unit: T) -> bool:
        """Tell whether ``unit`` is the last of the record, and the run agrees with it so far."""
        return self._is_followed and self._record[-1]() is unit
