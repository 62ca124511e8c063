"""``run.sh`` answers a question by itself, and draws the run that it was asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

_ROOT = Path(__file__).parents[1]
_TRAIN = "megafsdp train --config examples/configs/quickstart.yaml"


def _copy_script(folder: Path, python: str) -> None:
    """Copy the script, without its set-up, to be run by a Python."""
    shutil.copy(_ROOT / "run.sh", folder)
    shutil.copytree(_ROOT / "examples/configs", folder / "examples/configs")
    (folder / "scripts").mkdir()
    (folder / "scripts/setup_env.sh").write_text(f"PYTHON={python}\n")


def _run_script(folder: Path, words: Sequence[str], python: str) -> CompletedProcess[str]:
    _copy_script(folder, python)
    return subprocess.run(
        ["bash", "run.sh", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def _named_python(folder: Path) -> str:
    """Return a Python that says the module that it would run, with its options; code is run."""
    python = folder / "python"
    real = f'exec {sys.executable} "$@"'
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || {real}\nshift; echo "$*"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize(
    "words",
    [["--help"], ["--fresh", "-h", "schedule"], ["--print-config"], ["--fresh", "--dry-run=2"]],
)
def test_a_question_is_answered_once(tmp_path: Path, words: list[str]) -> None:
    """By one process, which makes no data, starts no ranks and draws no report."""
    ended = _run_script(tmp_path, words, python=_named_python(tmp_path))
    assert ended.returncode == 0, ended.stderr
    asked = [word for word in words if word != "--fresh"]
    assert ended.stdout == " ".join([_TRAIN, *asked]) + "\n"


def test_the_answer_is_that_of_the_quick_start(tmp_path: Path) -> None:
    """With options of one's own."""
    words = ["--fresh", "--train.steps", "7", "--dry-run", "2"]
    ended = _run_script(tmp_path, words, python=sys.executable)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("collectives of a step") == 1
    assert not (tmp_path / "runs").exists()


def test_the_report_is_drawn_where_the_run_lies(tmp_path: Path) -> None:
    """Where a file of options says, which other options come after."""
    (tmp_path / "mine.yaml").write_text("run: {directory: where mine.yaml says}\n")
    words = ["--config", "mine.yaml", "--train.steps=7"]
    ended = _run_script(tmp_path, words, python=_named_python(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "megafsdp report where mine.yaml says"


def test_a_mistake_is_said_once_before_anything_is_made(tmp_path: Path) -> None:
    """Not by each rank, and again by their launcher."""
    ended = _run_script(tmp_path, ["--fresh", "--train.stepz", "7"], python=sys.executable)
    assert ended.returncode == 2
    assert ended.stderr.count("'train.stepz'") == 1 and "Traceback" not in ended.stderr
    assert not (tmp_path / "runs").exists()


# In place of the launcher, and of a rank.
_WAITING = """
import pathlib, signal, sys
signal.alarm(120)
signal.signal(signal.SIGTERM, lambda *unused: (print("saved"), sys.exit()))
pathlib.Path("started").touch()
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """As SIGTERM: they save. The script ends after them, with their code, and draws nothing."""
    python = tmp_path / "python"
    (tmp_path / "waiting.py").write_text(_WAITING)
    waits = f'[ "$2" != torch.distributed.run ] || exec {sys.executable} waiting.py'
    python.write_text(f'#!/bin/sh\n{waits}\necho "$*"\n')
    python.chmod(0o755)
    _copy_script(tmp_path, str(python))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    # Under nohup SIGHUP is ignored, in the background of a script SIGINT.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with subprocess.Popen(
            ["bash", "run.sh"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        ) as job:
            deadline_s = time.monotonic() + 60
            while not (tmp_path / "started").exists():
                assert job.poll() is None and time.monotonic() < deadline_s
                time.sleep(0.05)
            job.send_signal(number)
            try:
                output, _ = job.communicate(timeout=60)
            finally:
                job.kill()
    finally:
        signal.signal(number, before)
    assert job.returncode == 0 and output.splitlines()[-1] == "saved"
