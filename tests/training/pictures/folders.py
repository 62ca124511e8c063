"""Folders of runs for the tests of pictures: written line by line, or trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megafsdp.training import Config, to_yaml, train
from megafsdp.training.step.train_step import StepResult
from tests.training.runs import MIXTURE, tiny, write_corpus

Rows = Sequence[dict[str, Any]]


def step_row(step: int, **values: Any) -> dict[str, Any]:
    """Return a row as a run of 4 samples of 16 tokens a step writes it, two seconds each."""
    row: dict[str, Any] = {
        "step": step,
        "time": 1e9 + 2 * step,
        "elapsed_s": 2.0 * step,
        "loss": 4.0 / step,
        "grad_norm": 1.0 + step,
        "lr": 1e-3,
        "tokens_per_s": 32.0,
        "memory_nbytes": 10**9,
        "consumed_samples": 4 * step,
        "consumed_tokens": 64 * step,
    }
    return row | values


def write_run(
    folder: Path,
    rows: Rows,
    *,
    events: Rows | None = (),
    config: Config | None = None,
    tail: str = "",
) -> Path:
    """Write the files of a run; return its folder.

    Args:
        folder: Where.
        rows: Of metrics.jsonl.
        events: Of events.jsonl; None for no such file.
        config: Its configuration; None for no such file.
        tail: What follows the last whole line of metrics.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines + tail)
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    if config is not None:
        (folder / "config.yaml").write_text(to_yaml(config))
    return folder


class _Crash(Exception):
    """End a run without a word."""


def train_twice(folder: Path) -> Path:
    """Train a mixture of experts for three steps, then in a second job to the end of six.

    It is evaluated and saved every second step, and the first job ends after step 3: the second
    goes on after step 2. Returns the run's folder.
    """
    write_corpus(folder)
    config = tiny(
        folder,
        model=MIXTURE,
        evaluation={"interval_steps": 2, "sample_prompt": "ab", "sample_tokens": 8},
        checkpoint={"interval_steps": 2},
    )

    def crash(step: int, result: StepResult) -> None:
        if step == 3:
            raise _Crash

    try:
        train(config, on_step=crash)
    except _Crash:
        train(config)
    return config.run_directory
