"""Read and append files of JSON lines, each of one step of a run; cut them where the run resumes.

A job may be killed while it writes, and a disk may be full or lose bytes. Anything but a whole line
with a step is left out, without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafsdp.data.output_files import replace_text

Row = dict[str, Any]


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file with their ends; bytes that are not UTF-8 are replaced."""
    return path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)


def row_of(line: str) -> Row | None:
    """Return the object of a line; None unless its ``step`` is a whole number."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # The exact type: a bool is an int, but not a step.
    is_row = isinstance(row, dict) and type(row.get("step")) is int and 0 <= row["step"] < 2**63
    return row if is_row else None


class JsonLines:
    """A file that lines are appended to; each is flushed when ``append`` returns.

    Args:
        path: The file; its folder is there.
        last_step: Lines of later steps are removed: the run resumes after this step and writes them
            anew. 0 starts a new file.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._path, self._last_step = path, last_step
        if path.exists():
            self._rewrite(self._kept() if last_step else [])
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: Row) -> None:
        """Write one line.

        Raises:
            OSError: It cannot be written, or the file was removed or moved.
        """
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        # An open file takes lines also when no name leads to it any more.
        self._path.stat()

    def rows(self) -> list[Row]:
        """Return the objects up to the last step."""
        return [row for _, row in self._kept()]

    def remove(self, is_removed: Callable[[Row], bool]) -> None:
        """Remove the objects that a function selects, and those of later steps."""
        self._rewrite([(line, row) for line, row in self._kept() if not is_removed(row)])
        before, self._file = self._file, self._path.open("a", encoding="utf-8")
        before.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _kept(self) -> list[tuple[str, Row]]:
        """Return the whole lines up to the last step, and their objects."""
        whole = [line for line in lines_of(self._path) if line.endswith("\n")]
        found = [(line, row) for line in whole if (row := row_of(line)) is not None]
        return [(line, row) for line, row in found if row["step"] <= self._last_step]

    def _rewrite(self, kept: list[tuple[str, Row]]) -> None:
        replace_text(self._path, "".join(line for line, _ in kept))
