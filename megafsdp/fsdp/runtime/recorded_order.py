"""The order in which units run, from which the schedule knows what comes next."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

T = TypeVar("T")


class RecordedOrder(Generic[T]):
    """The order in which units ran last time, followed until a run departs from it.

    A run is recorded from one :meth:`start` to the next. While it agrees with the record,
    :meth:`arrive` returns the units that come next; after the first difference it returns none, and
    the next run follows the new order.
    """

    def __init__(self) -> None:
        # Weak references: a record must not keep the units of a deleted model alive.
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

    def start_again(self, first: T) -> None:
        """Begin another run with ``first``, unless it alone has run since the last start."""
        if len(self._running) > 1:
            self.start()
            self.arrive(first, 0)

    def arrive(self, unit: T, count: int) -> list[T]:
        """Note that ``unit`` runs and return up to ``count`` units expected after it."""
        position = len(self._running)
        self._running.append(weakref.ref(unit))
        expected = self._record[position] if position < len(self._record) else None
        if expected is None or expected() is not unit:
            self._is_followed = False
        position += 1
        upcoming = self._record[position : position + count] if self._is_followed else []
        return [u for u in (r() for r in upcoming) if u is not None]

    def is_last(self, unit: T) -> bool:
        """Return whether ``unit`` is the last of the record, and the run agrees with it so far."""
        return self._is_followed and self._record[-1]() is unit
