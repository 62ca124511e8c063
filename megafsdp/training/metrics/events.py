"""What happens in a run beside its metrics, in ``events.jsonl``: jobs, saves, skipped steps, texts.

Metrics are numbers at every few steps; an event is one fact at one step. Only the first rank writes
them. ``megafsdp report`` draws them as marks and prints the texts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

EVENTS_FILE = "events.jsonl"


class Event(Enum):
    """What an event says."""

    STARTED = "started"  # A job of the run: its ranks, machine and versions.
    SAVED = "saved"  # A checkpoint of the step is published.
    SKIPPED = "skipped"  # The step was not taken.
    TEXT = "text"  # What the model went on with from the prompt.
    ENDED = "ended"  # The job, finished or stopped.


class EventLog:
    """Append events to a file of JSON lines; each is flushed when ``log`` returns.

    Args:
        path: The file; its folder is there.
        last_step: Step that the run resumes after: events of later steps are removed, as those
            steps are taken anew. 0 starts a new file.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        if path.exists():
            kept = _kept(path, last_step) if last_step else []
            temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, event: Event, values: Mapping[str, object]) -> None:
        """Write one line; ``values`` has the step."""
        self._file.write(json.dumps({"event": event.value, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _kept(path: Path, last_step: int) -> list[str]:
    """Return the whole lines up to the last step."""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            # The last line of a job that was killed while it wrote.
            continue
        if step <= last_step and line.endswith("\n"):
            kept.append(line)
    return kept
