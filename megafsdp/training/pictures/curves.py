"""The numbers behind each chart of a report: curves of metrics over steps, tokens and time; marks.

A curve has the values of ``metrics.jsonl`` as they are. Where a run has more rows than a chart has
pixels, the least and the largest of neighbouring values stand for them. How it looks is in
:mod:`megafsdp.training.pictures.charts`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megafsdp.training.metrics.events import Event
from megafsdp.training.metrics.tracker import EVALUATION_KEY
from megafsdp.training.pictures.run_folder import Row, RunFolder

# Points of all runs in one chart. More would not be seen, and would slow a phone down.
MAX_POINTS = 2000
RESUMED = "resumed"


@dataclass(frozen=True, slots=True)
class Metric:
    """One chart of a report.

    Attributes:
        key: The metric's name in ``metrics.jsonl``, and the chart's in the page.
        title: What the chart is called.
        unit: Unit of the vertical axis; empty for none.
        format: How a value is written, in d3's notation.
        scale: What a value is divided by before it is drawn.
        is_from_zero: Whether the vertical axis begins at 0.
        may_be_log: Whether the page's switch to a logarithmic axis changes this chart.
        caption: What a reader should know; empty for nothing.
    """

    key: str
    title: str
    unit: str = ""
    format: str = ".4f"
    scale: float = 1.0
    is_from_zero: bool = False
    may_be_log: bool = False
    caption: str = ""


METRICS = (
    Metric("loss", "Training loss", "nats a token", may_be_log=True),
    Metric(EVALUATION_KEY, "Validation loss", "nats a token", may_be_log=True),
    Metric(
        "grad_norm",
        "Gradient norm",
        format=".3f",
        may_be_log=True,
        is_from_zero=True,
        caption="Of all gradients, before clipping.",
    ),
    Metric("lr", "Learning rate", format=".2e", is_from_zero=True),
    Metric(
        "tokens_per_s",
        "Speed",
        "tokens a second",
        ",.0f",
        is_from_zero=True,
        caption="Of all ranks together; evaluations and saves are left out.",
    ),
    Metric("memory_nbytes", "Memory of the first rank", "GB", ",.3f", 1e9, is_from_zero=True),
    Metric(
        "expert_max_load",
        "Load of the busiest expert",
        "times the mean",
        ".2f",
        caption="1 is a mixture whose experts get equally many tokens.",
    ),
    Metric("loss_scale", "Loss scale", "", ",.0f", is_from_zero=True),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve and where it stands; a value of None breaks the line.

    Attributes:
        step: The step.
        tokens: Tokens trained on; None where the file does not say.
        elapsed_s: Seconds since the run began, pauses left out; None where the file does not say.
        value: The metric; None where it was not finite.
    """

    step: int
    tokens: int | None
    elapsed_s: float | None
    value: float | None


@dataclass(frozen=True, slots=True)
class Curve:
    """The values of one metric of one run.

    Attributes:
        run: Name of the run.
        points: In the order of steps.
        num_rows: Rows that they were made from.
    """

    run: str
    points: Sequence[Point]
    num_rows: int

    @property
    def is_thinned(self) -> bool:
        """Return whether points stand for several rows."""
        return len(self.points) < self.num_rows


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened at a step.

    Attributes:
        run: Name of the run.
        kind: resumed, saved or skipped.
        step: The step.
        tokens: Tokens trained on by then; None where it is not known.
        elapsed_s: Seconds since the run began; None where it is not known.
        text: What a reader sees.
    """

    run: str
    kind: str
    step: int
    tokens: float | None
    elapsed_s: float | None
    text: str


def curves_of(runs: Sequence[RunFolder], metric: Metric) -> list[Curve]:
    """Return the curves of a metric, for the runs that have values of it."""
    budget = MAX_POINTS // max(len(runs), 1)
    curves = []
    for run in runs:
        rows = run.evaluations if metric.key == EVALUATION_KEY else run.steps
        points = [_point(run, row, metric.key) for row in rows if metric.key in row]
        if any(point.value is not None for point in points):
            points.sort(key=lambda point: point.step)
            curves.append(Curve(run.name, _thinned(points, budget), len(points)))
    return curves


def _point(run: RunFolder, row: Row, key: str) -> Point:
    return Point(
        int(row["step"]), _tokens(run, row), _finite(row.get("elapsed_s")), _finite(row[key])
    )


def _finite(value: object) -> float | None:
    """Return a finite number as it is, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _tokens(run: RunFolder, row: Row) -> int | None:
    """Return the tokens of a row; files of older versions only count samples."""
    if isinstance(tokens := row.get("consumed_tokens"), int):
        return tokens
    samples = row.get("consumed_samples")
    data = run.config.get("data")
    length = data.get("sequence_length") if isinstance(data, dict) else None
    return samples * length if isinstance(samples, int) and isinstance(length, int) else None


def _thinned(points: Sequence[Point], budget: int) -> list[Point]:
    """Return at most about ``budget`` points: first, last, least and largest of each bucket."""
    if len(points) <= budget:
        return list(points)
    kept = {0, len(points) - 1}
    bounds = np.linspace(0, len(points), budget // 2 + 1).astype(int)
    for start, stop in itertools.pairwise(bounds):
        values = [(points[i].value, i) for i in range(start, stop)]
        # One gap stands for all gaps of its bucket.
        kept.update([i for value, i in values if value is None][:1])
        if finite := [(value, i) for value, i in values if value is not None]:
            kept.update((min(finite)[1], max(finite)[1]))
    return [points[i] for i in sorted(kept)]


def marks_of(run: RunFolder) -> list[Mark]:
    """Return resumes, saves and skipped steps of a run, in the order of its file."""
    last_step = max((int(row["step"]) for row in run.steps), default=0)
    marks = []
    for event in run.events:
        kind, step = event["event"], event["step"]
        if kind == Event.STARTED.value:
            # A job that only evaluated a finished run takes no step.
            if not 0 < step < last_step:
                continue
            ranks = event.get("num_ranks")
            kind, text = RESUMED, f"resumed after step {step:,} on {ranks} rank(s)"
        elif kind == Event.SAVED.value:
            text = f"saved step {step:,}"
        elif kind == Event.SKIPPED.value:
            text = f"skipped step {step:,}"
        else:
            continue
        tokens, elapsed_s = _tokens_at(run, step), _finite(event.get("elapsed_s"))
        marks.append(Mark(run.name, kind, step, tokens, elapsed_s, text))
    return marks


def _tokens_at(run: RunFolder, step: int) -> float | None:
    """Return the tokens trained on after a step, between rows by proportion."""
    known = sorted(
        (int(row["step"]), tokens) for row in run.steps if (tokens := _tokens(run, row)) is not None
    )
    if not known:
        return None
    steps, counts = zip(*[(0, 0), *known], strict=True)
    return float(np.interp(step, steps, counts))
