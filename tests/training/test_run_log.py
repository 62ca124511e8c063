"""What a run logs of times, tokens and events, across jobs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp.training import Config, train
from megafsdp.training.resume import RunState, find_stored
from megafsdp.training.step.train_step import StepResult, TrainStep
from tests.training.runs import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, rows, tiny, write_corpus


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder) if "loss" in row]


def test_a_run_logs_its_jobs_saves_and_text(tmp_path: Path) -> None:
    """In order, each with its step; a finished run that is started again adds a job."""
    write_corpus(tmp_path)
    config = tiny(
        tmp_path,
        train={"steps": 4},
        checkpoint={"interval_steps": 2},
        evaluation={"sample_prompt": "ab"},
    )
    summary = train(config)
    found = _events(tmp_path)
    assert [(e["event"], e["step"]) for e in found] == [
        ("started", 0),
        ("saved", 2),
        ("saved", 4),
        ("text", 4),
        ("ended", 4),
    ]
    start, end = found[0], found[-1]
    assert (start["num_ranks"], start["num_steps"], start["machine"]["device"]) == (1, 4, "cpu")
    assert start["num_parameters"] == start["num_active_parameters"] > 0
    assert start["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found[3]["text"] == summary.text
    assert end["is_finished"] is True
    assert 0 <= start["elapsed_s"] <= end["elapsed_s"]
    train(config)
    assert [(e["event"], e["step"]) for e in _events(tmp_path)][5:] == [
        ("started", 4),
        ("text", 4),
        ("ended", 4),
    ]


def test_seconds_go_on_after_a_pause(tmp_path: Path) -> None:
    """The clock's time jumps where a run rests, the run's own does not."""
    write_corpus(tmp_path)
    train(tiny(tmp_path, train={"steps": 2}))
    first = _steps(tmp_path)
    (path,) = tmp_path.glob("run/metrics.jsonl")
    # As if a day had gone by, and the job had taken an hour.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for row in lines:
        row["time"] -= 86_400.0
        row["elapsed_s"] += 3600.0
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    train(tiny(tmp_path, train={"steps": 4}, schedule={"from_checkpoint": True}))
    written = _steps(tmp_path)
    assert written[2]["time"] - written[1]["time"] > 86_000
    assert 3600 < written[1]["elapsed_s"] < written[2]["elapsed_s"] < 3700
    assert all(0 < row["step_s"] < 60 for row in [*first, *written])


def test_tokens_count_whatever_the_length_of_samples_was(tmp_path: Path) -> None:
    """A run that goes on with shorter samples."""
    write_corpus(tmp_path)
    train(tiny(tmp_path, train={"steps": 2}))
    half = SEQUENCE_LENGTH // 2
    train(tiny(tmp_path, train={"steps": 3}, data={"sequence_length": half}))
    tokens = [row["consumed_tokens"] for row in _steps(tmp_path)]
    before = GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH
    assert tokens == [before, 2 * before, 2 * before + GLOBAL_BATCH_SIZE * half]
    evaluations = [row for row in rows(tmp_path) if "validation_loss" in row]
    assert [row["consumed_tokens"] for row in evaluations] == [tokens[1], tokens[2]]


def test_checkpoints_of_older_versions_count_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens follow from the length that they were trained with."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, train={"steps": 2})
    plain = dict

    def without_tokens(state: RunState) -> dict[str, object]:
        names = ("step", "consumed_samples", "evaluated_step", "wandb_id")
        return plain((name, getattr(state, name)) for name in names)

    with monkeypatch.context() as patch:
        patch.setattr("megafsdp.training.resume.asdict", without_tokens)
        train(config)
    stored = find_stored(replace(config, train=replace(config.train, steps=3)))
    assert stored is not None
    assert stored.state.consumed_tokens == 2 * GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH


def _train_with_a_bad_step(config: Config, bad: int) -> None:
    """Train; the loss of one step is not finite."""
    plain, calls = TrainStep.settle, iter(range(1, 100))

    def settle(self: TrainStep, queued: Any) -> StepResult:
        result = plain(self, queued)
        is_bad = next(calls) == bad
        return replace(result, loss=float("nan"), is_skipped=True) if is_bad else result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainStep, "settle", settle)
        train(config)


def test_a_skipped_step_is_logged_between_rows_too(tmp_path: Path) -> None:
    """With its number; the rows stand at every third step alone."""
    write_corpus(tmp_path)
    _train_with_a_bad_step(tiny(tmp_path, logging={"interval_steps": 3}), bad=5)
    assert [row["step"] for row in _steps(tmp_path)] == [1, 3, 6]
    skipped = [e for e in _events(tmp_path) if e["event"] == "skipped"]
    assert [e["step"] for e in skipped] == [5]
    assert _steps(tmp_path)[-1]["num_skipped"] == 1
