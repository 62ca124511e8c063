"""Read what a run left in its folder: metrics, events and configuration, as far as they go.

A run may still write, or its disk may have been full: lines that are not rows are left out, and
``notes`` says which. :mod:`megafsdp.training.pictures.curves` makes curves of them.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megafsdp.errors import DataError, expected
from megafsdp.training.config.sections import CONFIG_FILE, METRICS_FILE
from megafsdp.training.metrics.events import EVENTS_FILE, Event
from megafsdp.training.metrics.json_lines import lines_of, row_of
from megafsdp.training.metrics.tracker import EVALUATION_KEY

_LOGGER = logging.getLogger("megafsdp.training")
_NUM_NAMED_LINES = 5

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run as its folder has it.

    Attributes:
        name: What the report calls it; differs from the other runs'.
        directory: The folder.
        steps: Rows of steps, in the order of the file.
        evaluations: Rows of evaluations.
        events: Events, in the order of the file.
        config: The configuration as nested dicts; empty if it is not known.
        notes: What could not be read, a sentence each.
    """

    name: str
    directory: Path
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    events: Sequence[Row]
    config: Mapping[str, Any]
    notes: Sequence[str]

    def events_of(self, kind: Event) -> list[Row]:
        """Return the events of one kind."""
        return [event for event in self.events if event["event"] == kind.value]

    @property
    def last_start(self) -> Row:
        """Return the start of the last job; empty if it is not known."""
        starts = self.events_of(Event.STARTED)
        return starts[-1] if starts else {}


def read_runs(directories: Sequence[str | Path]) -> list[RunFolder]:
    """Read the folders of runs; local.

    Args:
        directories: The folders, ``run.directory`` of each run.

    Raises:
        DataError: One is not the folder of a run.
    """
    paths = list(dict.fromkeys(Path(d) for d in directories))
    return [_read(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest endings of the paths that are all different."""
    parts = [path.absolute().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _read(directory: Path, name: str) -> RunFolder:
    metrics = directory / METRICS_FILE
    if not metrics.is_file():
        found = "a folder without it" if directory.is_dir() else "no such folder"
        raise DataError(
            expected(
                f"the folder of a run, with its {METRICS_FILE}",
                found,
                where=f"'{directory}'",
                hint="Name the run.directory of a run that has begun",
            )
        )
    notes: list[str] = []
    rows = [_numbers_of(row) for row in _read_lines(metrics, notes, key="step")]
    steps = [row for row in rows if EVALUATION_KEY not in row]
    if not steps:
        notes.append(f"{METRICS_FILE} has no row of a step: there is nothing to draw yet.")
    events_path = directory / EVENTS_FILE
    events = _read_lines(events_path, notes, key="event") if events_path.is_file() else []
    if not events_path.is_file():
        notes.append(f"There is no {EVENTS_FILE}: resumes, saves, texts and machine are not known.")
    config = _read_config(directory / CONFIG_FILE, notes)
    for note in notes:
        _LOGGER.warning("run '%s': %s", directory, note)
    return RunFolder(
        name=name,
        directory=directory,
        steps=steps,
        evaluations=[row for row in rows if EVALUATION_KEY in row],
        events=events,
        config=config,
        notes=notes,
    )


def _numbers_of(row: Row) -> Row:
    """Return a row with None for all but finite numbers; JSON reads 1e999 as infinity."""
    return {key: value if _is_number(value) else None for key, value in row.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def _read_lines(path: Path, notes: list[str], *, key: str) -> list[Row]:
    """Return the rows of a file of JSON lines that have a key; note the lines that are none."""
    rows: list[Row] = []
    bad: list[int] = []
    lines = lines_of(path)
    for number, line in enumerate(lines, start=1):
        row = row_of(line)
        if row is not None and key in row:
            rows.append(row)
        else:
            bad.append(number)
    if bad:
        more = f" and {len(bad) - _NUM_NAMED_LINES} more" if len(bad) > _NUM_NAMED_LINES else ""
        numbers = ", ".join(map(str, bad[:_NUM_NAMED_LINES])) + more
        is_cut = bad == [len(lines)]
        what = "breaks off in its last line," if is_cut else "has lines that are not whole,"
        notes.append(f"{path.name} {what} {numbers}: drawn is what can be read.")
    return rows


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__}).")
        return {}
    if not isinstance(config, Mapping):
        notes.append(f"{path.name} is no configuration.")
        return {}
    return config
