"""The numbers behind the charts of a report."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from megafsdp.training.pictures.curves import (
    MAX_POINTS,
    METRICS,
    Metric,
    curves_of,
    marks_of,
)
from megafsdp.training.pictures.run_folder import RunFolder, read_runs
from tests.training.pictures.folders import Rows, step_row, write_run
from tests.training.runs import SEQUENCE_LENGTH, tiny

METRIC = {metric.key: metric for metric in METRICS}


def _run(folder: Path, rows: Rows, **options: Any) -> RunFolder:
    (run,) = read_runs([write_run(folder / "run", rows, **options)])
    return run


def test_points_are_the_rows(tmp_path: Path) -> None:
    """Value, step, tokens and time as they are written, of steps and of evaluations."""
    evaluation = {"step": 2, "validation_loss": 2.5, "elapsed_s": 4.5, "consumed_tokens": 128}
    rows = [step_row(1), step_row(2), evaluation, step_row(3)]
    run = _run(tmp_path, rows)
    for key in ("loss", "grad_norm", "lr", "tokens_per_s", "memory_nbytes"):
        (curve,) = curves_of([run], METRIC[key])
        found = [(p.step, p.tokens, p.elapsed_s, p.value) for p in curve.points]
        steps = [row for row in rows if "loss" in row]
        assert found == [(r["step"], r["consumed_tokens"], r["elapsed_s"], r[key]) for r in steps]
    (curve,) = curves_of([run], METRIC["validation_loss"])
    assert [(p.step, p.tokens, p.elapsed_s, p.value) for p in curve.points] == [(2, 128, 4.5, 2.5)]


def test_runs_without_a_metric_have_no_curve_of_it(tmp_path: Path) -> None:
    """Neither where it is missing nor where it is null in every row."""
    dense = _run(tmp_path / "a", [step_row(1, expert_max_load=None)])
    mixture = _run(tmp_path / "b", [step_row(1, expert_max_load=1.5)])
    (curve,) = curves_of([dense, mixture], METRIC["expert_max_load"])
    assert [p.value for p in curve.points] == [1.5]
    assert curves_of([dense], METRIC["validation_loss"]) == []
    assert curves_of([_run(tmp_path / "c", [])], METRIC["loss"]) == []


def test_numbers_that_json_has_not_break_the_line(tmp_path: Path) -> None:
    """A loss that was not finite is null in the file; other programs may write NaN or text."""
    values = [4.0, None, math.nan, math.inf, "high", True, 3.0]
    run = _run(tmp_path, [step_row(i + 1, loss=value) for i, value in enumerate(values)])
    (curve,) = curves_of([run], METRIC["loss"])
    assert [p.value for p in curve.points] == [4.0, None, None, None, None, None, 3.0]


def test_tokens_follow_from_samples_in_files_of_older_versions(tmp_path: Path) -> None:
    """By the configured length, if it is known; times are not."""
    rows = [{"step": 3, "loss": 1.0, "consumed_samples": 12}]
    (point,) = curves_of([_run(tmp_path, rows, config=tiny(tmp_path))], METRIC["loss"])[0].points
    assert (point.tokens, point.elapsed_s) == (12 * SEQUENCE_LENGTH, None)
    (point,) = curves_of([_run(tmp_path / "bare", rows)], METRIC["loss"])[0].points
    assert point.tokens is None


def test_a_long_run_keeps_ends_and_extremes(tmp_path: Path) -> None:
    """Of three times as many rows as points: peaks of one step stay, and gaps."""
    source = random.Random(0)
    rows = [step_row(i, loss=2 + source.random()) for i in range(1, 3 * MAX_POINTS + 1)]
    rows[1234]["loss"], rows[4321]["loss"], rows[2500]["loss"] = 9.0, 0.5, None
    run = _run(tmp_path, rows)
    (curve,) = curves_of([run], METRIC["loss"])
    assert curve.is_thinned and curve.num_rows == len(rows)
    assert MAX_POINTS / 2 < len(curve.points) <= MAX_POINTS + 8
    by_step = {point.step: point.value for point in curve.points}
    assert {1, 1235, 4322, 2501, len(rows)} <= set(by_step)
    assert all(value == rows[step - 1]["loss"] for step, value in by_step.items())
    # Two runs share what one had.
    first, second = curves_of([run, run], METRIC["loss"])
    assert len(first.points) + len(second.points) <= MAX_POINTS + 16
    assert not curves_of([_run(tmp_path / "short", rows[:50])], METRIC["loss"])[0].is_thinned


def test_rows_out_of_order_are_drawn_in_order(tmp_path: Path) -> None:
    """Two files that were joined by hand."""
    run = _run(tmp_path, [step_row(3), step_row(1), step_row(2)])
    assert [p.step for p in curves_of([run], Metric("loss", "loss"))[0].points] == [1, 2, 3]


def test_marks_are_resumes_saves_and_skipped_steps(tmp_path: Path) -> None:
    """The first start is none, nor that of a job which only evaluates; tokens by proportion."""
    events = [
        {"event": "started", "step": 0, "num_ranks": 2, "elapsed_s": 0.0},
        {"event": "skipped", "step": 3, "elapsed_s": 6.0},
        {"event": "saved", "step": 4, "elapsed_s": 8.5},
        {"event": "started", "step": 4, "num_ranks": 8, "elapsed_s": 8.0},
        {"event": "text", "step": 8, "text": "ab"},
        {"event": "started", "step": 8, "num_ranks": 8},
        {"event": "another", "step": 8},
    ]
    # Rows of every fourth step, as logging.interval_steps leaves them.
    run = _run(tmp_path, [step_row(4), step_row(8)], events=events)
    found = [(m.kind, m.step, m.tokens, m.elapsed_s, m.text) for m in marks_of(run)]
    assert found == [
        ("skipped", 3, 192.0, 6.0, "skipped step 3"),
        ("saved", 4, 256.0, 8.5, "saved step 4"),
        ("resumed", 4, 256.0, 8.0, "resumed after step 4 on 8 rank(s)"),
    ]


@pytest.mark.parametrize("rows", [[], [{"step": 1, "loss": 1.0}]])
def test_marks_without_tokens_have_none(tmp_path: Path, rows: Rows) -> None:
    """Where the rows do not say."""
    times = [{}, *({"elapsed_s": value} for value in (None, True, math.inf, "late"))]
    run = _run(tmp_path, rows, events=[{"event": "saved", "step": 1} | time for time in times])
    assert [(m.tokens, m.elapsed_s) for m in marks_of(run)] == [(None, None)] * len(times)
