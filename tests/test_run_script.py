"""``run.sh`` answers a question by itself, and draws the run that it was asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

_ROOT = Path(__file__).parents[1]


def _run_script(folder: Path, words: Sequence[str], python: str) -> CompletedProcess[str]:
    """Run a copy of the script, without its set-up, by a Python."""
    shutil.copy(_ROOT / "run.sh", folder)
    shutil.copytree(_ROOT / "examples/configs", folder / "examples/configs")
    (folder / "scripts").mkdir()
    (folder / "scripts/setup_env.sh").write_text(f"PYTHON={python}\n")
    return subprocess.run(
        ["bash", "run.sh", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "usage: megafsdp train"),
        (["--fresh", "-h", "schedule"], "--schedule.kind"),
        (["--train.steps", "7", "--print-config"], "steps: 7"),
    ],
)
def test_a_question_is_answered_once(tmp_path: Path, words: list[str], shown: str) -> None:
    """By one process, which makes no data, starts no ranks and draws no report."""
    ended = _run_script(tmp_path, words, python=sys.executable)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(shown) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        (["--run.directory=there"], "there"),
        (["--config", "mine.yaml"], "where mine.yaml says"),
        (["--config", "mine.yaml", "--run.directory", "there"], "there"),
    ],
)
def test_the_report_is_drawn_where_the_run_lies(
    tmp_path: Path, words: list[str], directory: str
) -> None:
    """Be it said by an option, or by a file of options."""
    (tmp_path / "mine.yaml").write_text("run: {directory: where mine.yaml says}\n")
    # It says the modules that it would run; code is run.
    python = tmp_path / "python"
    real = f'exec {sys.executable} "$@"'
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {real}\nshift; echo "$*"\n')
    python.chmod(0o755)
    ended = _run_script(tmp_path, words, python=str(python))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == f"megafsdp report {directory}"
