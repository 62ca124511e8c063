"""Lines of JSON that a run appends to, and what is read of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafsdp.training.metrics.json_lines import JsonLines, row_of

DAMAGED = [
    b'{"step": 3, "lo\n',
    b'{"step": "2"}\n',
    b'{"step": 1e999}\n',
    b'{"step": 2.5}\n',
    b'{"step": true}\n',
    b'{"step": -1}\n',
    b'{"step": 1' + 40 * b"0" + b"}\n",
    b"7\n",
    b"[" * 100_000 + b"\n",
    b"\xff\xfe\n",
]


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[:20])
def test_a_damaged_line_is_dropped_and_no_error(tmp_path: Path, line: bytes) -> None:
    """Between whole ones, which stay as they were written."""
    path = tmp_path / "rows.jsonl"
    whole = [b'{"step": 1, "loss": 2.0}\n', b'{"step": 2}\n']
    path.write_bytes(whole[0] + line + whole[1])
    assert row_of(line.decode(errors="replace")) is None
    lines = JsonLines(path, last_step=2)
    assert lines.rows() == [{"step": 1, "loss": 2.0}, {"step": 2}]
    lines.close()
    assert path.read_bytes() == b"".join(whole)


def test_lines_are_cut_replaced_and_appended(tmp_path: Path) -> None:
    """Later steps and a line without its end go; a removal and what follows it are in one file."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)) + '{"step": 2}'
    )
    lines = JsonLines(path, last_step=2)
    lines.append({"step": 2, "again": 1})
    lines.remove(lambda row: row == {"step": 2})
    lines.append({"step": 3})
    lines.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert found == [{"step": 1}, {"step": 2, "again": 1}, {"step": 3}]
    path.write_text('{"step": 0}\n')
    JsonLines(path, last_step=0).close()
    assert path.read_bytes() == b"", "a new run starts a new file"


def test_a_line_of_a_file_that_was_removed_is_an_error(tmp_path: Path) -> None:
    """It would be lost without a word, with the file that no name leads to."""
    path = tmp_path / "run/rows.jsonl"
    path.parent.mkdir()
    lines = JsonLines(path, last_step=0)
    lines.append({"step": 1})
    path.parent.rename(tmp_path / "moved")
    with pytest.raises(FileNotFoundError, match=r"run/rows\.jsonl"):
        lines.append({"step": 2})
    lines.close()
