"""Where a launcher finds why a process ended."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megafsdp.training.process.failure import report_failure


def test_the_message_is_printed_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reader of torchrun finds the message where it would look for a call stack."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report_failure("ConfigError: no")
    assert capsys.readouterr().err == "megafsdp: ConfigError: no\n"
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(path))
    assert failure.timestamp > 0
    assert json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"] == "ConfigError: no"


def test_a_process_without_a_launcher_only_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    report_failure("ConfigError: no")
    assert capsys.readouterr().err == "megafsdp: ConfigError: no\n"


def test_a_file_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message itself is still printed."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report_failure("ConfigError: no")
    first, second = capsys.readouterr().err.splitlines()
    assert "cannot be written" in first and second == "megafsdp: ConfigError: no"


def test_lines_of_ranks_do_not_run_into_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line and its end are one write, where launchers start Python without buffers."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    written: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("sys.stderr", SimpleNamespace(write=written.append, flush=lambda: None))
        report_failure("ConfigError: no")
    assert [text for text in written if text] == ["megafsdp: ConfigError: no\n"]
