"""The order of events of one step on meta devices: what is computed, sent, allocated and freed.

A :class:`StepRecorder` is a parent ledger of the engine's own, so each allocation and each release
reaches it. The engine notes when a unit is computed; collectives are taken from the record that
counts them. Times are not recorded: the meta device has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megafsdp.buffer.comm.collectives import CollectiveRecord
from megafsdp.device.memory import ByteLedger, Category

FORWARD, BACKWARD = "forward", "backward"
OPTIMIZER_STEP = "optimizer step"
MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Moment:
    """One event of a step.

    Attributes:
        kind: FORWARD, BACKWARD, OPTIMIZER_STEP, MEMORY, or the kind of a collective.
        label: The unit; for MEMORY the category that grew or shrank.
        live: Bytes alive after the event, in the order of Category.
        microbatch: Index of the microbatch.
    """

    kind: str
    label: str
    live: tuple[int, ...]
    microbatch: int


@dataclass
class StepRecorder(ByteLedger):
    """Record the moments of a step; the engine's ledger is merged into it.

    Attributes:
        record: The collectives of the step, while they are counted.
        moments: The events, in order.
        microbatch: Index of the microbatch that runs.
        is_recording: Whether moments are kept.
    """

    record: CollectiveRecord = field(default_factory=CollectiveRecord)
    moments: list[Moment] = field(default_factory=list)
    microbatch: int = 0
    is_recording: bool = True
    _num_taken: int = 0

    def note(self, kind: str, label: str) -> None:
        """Add an event, after the collectives that were issued before it."""
        # Collectives have no hook: add those issued since the last event first.
        self.take_collectives()
        self._add(kind, label)

    def take_collectives(self) -> None:
        """Add the collectives that were issued since the last event."""
        issued = self.record.events[self._num_taken :]
        self._num_taken += len(issued)
        for kind, label in issued:
            self._add(kind, label)

    def debit(self, category: Category, nbytes: int) -> None:
        """Count bytes that became alive."""
        # Add the collectives first, with the bytes before this allocation: they came earlier.
        self.take_collectives()
        super().debit(category, nbytes)
        self._add(MEMORY, category.value)

    def credit(self, category: Category, nbytes: int) -> None:
        """Count bytes that were freed."""
        self.take_collectives()
        super().credit(category, nbytes)
        self._add(MEMORY, category.value)

    def _add(self, kind: str, label: str) -> None:
        # Not always recording: hundreds of microbatches would have a hundred thousand moments.
        if self.is_recording:
            live = tuple(self.live.values())
            self.moments.append(Moment(kind, label, live, self.microbatch))
