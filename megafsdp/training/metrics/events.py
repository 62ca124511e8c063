"""Events of a run, besides its metrics, in ``events.jsonl``: jobs, saves, skipped steps, texts.

Metrics are numbers at every few steps; an event is one fact at one step. Only the first rank writes
them. ``megafsdp report`` draws them as marks and prints the texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from megafsdp.training.metrics.json_lines import JsonLines

EVENTS_FILE = "events.jsonl"


class Event(Enum):
    """What an event says."""

    STARTED = "started"  # A job of the run: its ranks, machine and versions.
    SAVED = "saved"  # A checkpoint of the step is published.
    SKIPPED = "skipped"  # The step was not taken.
    TEXT = "text"  # How the model continued the prompt.
    ENDED = "ended"  # The job, finished or stopped.


class EventLog:
    """Append events to a file of JSON lines; each is flushed when ``log`` returns.

    Args:
        path: The file; its folder is there.
        last_step: Step that the run resumes after: events of later steps are removed, as those
            steps are taken anew. 0 starts a new file.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._lines = JsonLines(path, last_step=last_step)

    def log(self, event: Event, values: Mapping[str, object]) -> None:
        """Write one line; ``values`` has the step."""
        self._lines.append({"event": event.value, **values})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()
