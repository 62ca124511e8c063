"""events.jsonl: what is kept when a run resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafsdp.training.metrics.events import Event, EventLog


def _events(path: Path) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with four events of steps 0 to 5, and half a line."""
    path = tmp_path / "events.jsonl"
    log = EventLog(path, last_step=0)
    log.log(Event.STARTED, {"step": 0, "num_ranks": 2})
    log.log(Event.SKIPPED, {"step": 3})
    log.log(Event.SAVED, {"step": 4})
    log.log(Event.SKIPPED, {"step": 5})
    log.close()
    with path.open("a") as file:
        file.write('{"event": "saved", "st')
    return path


def test_events_of_steps_that_are_taken_again_go(path: Path) -> None:
    """Those up to the resumed step stay, its own included; half a line is dropped."""
    log = EventLog(path, last_step=4)
    log.log(Event.STARTED, {"step": 4})
    log.close()
    assert _events(path) == [("started", 0), ("skipped", 3), ("saved", 4), ("started", 4)]


def test_a_run_from_the_start_begins_a_new_file(path: Path) -> None:
    """Also after a job that ended before it saved."""
    EventLog(path, last_step=0).close()
    assert _events(path) == []
