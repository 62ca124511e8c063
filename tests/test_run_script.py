"""``run.sh`` answers a question by itself, without the work of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]


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
    shutil.copy(_ROOT / "run.sh", tmp_path)
    shutil.copytree(_ROOT / "examples/configs", tmp_path / "examples/configs")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/setup_env.sh").write_text(f"PYTHON={sys.executable}\n")
    ended = subprocess.run(
        ["bash", "run.sh", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count(shown) == 1
    assert not (tmp_path / "runs").exists()
