"""Learning rate schedules against formulas written out."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp.training.step.lr import LearningRate, Schedule
from tests.training.runs import tiny

PEAK, LOW = 3e-3, 3e-4


def _schedule(kind: str, shape: str = "linear") -> Schedule:
    return Schedule(
        kind=kind,
        peak=PEAK,
        minimum=LOW,
        warmup_samples=40,
        decay_start=40 if kind == "cosine" else 160,
        decay_samples=160 if kind == "cosine" else 40,
        decay_shape="cosine" if kind == "cosine" else shape,
    )


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
def test_warm_up_rises_linearly_to_the_peak(kind: str) -> None:
    """The rate is proportional to the samples until the peak is reached."""
    for n in (1, 8, 39, 40):
        assert _schedule(kind).at(n) == pytest.approx(PEAK * n / 40)


def test_cosine_is_half_a_period() -> None:
    """From the peak at the end of the warm-up to the minimum at the end of the run."""
    for n in range(40, 201, 8):
        naive = LOW + (PEAK - LOW) * (1 + math.cos(math.pi * (n - 40) / 160)) / 2
        assert _schedule("cosine").at(n) == pytest.approx(naive)


@pytest.mark.parametrize(
    ("shape", "naive"),
    [
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
        ("sqrt", lambda r: 1 - r**0.5),
        ("exponential", lambda r: 2 * 0.5**r - 1),
    ],
)
def test_wsd_stays_and_then_falls(shape: str, naive: object) -> None:
    """Flat until the decay starts, then each shape's own way down to the minimum."""
    schedule = _schedule("wsd", shape)
    assert [schedule.at(n) for n in (41, 100, 160)] == [PEAK] * 3
    for n in (161, 170, 199, 200):
        wanted = LOW + (PEAK - LOW) * naive((n - 160) / 40)  # type: ignore[operator]
        assert schedule.at(n) == pytest.approx(wanted)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_rate_stays_at_the_minimum_after_the_decay(kind: str) -> None:
    """A run that goes on does not rise or fall below the minimum."""
    assert [_schedule(kind).at(n) for n in (200, 201, 10**9)] == [LOW] * 3


def test_constant_does_not_fall() -> None:
    """Only the warm-up differs from the peak."""
    assert _schedule("constant").at(10**6) == PEAK


def test_no_warm_up_begins_at_the_peak(tmp_path: Path) -> None:
    """Zero warm-up samples divide by nothing."""
    schedule = Schedule.of(tiny(tmp_path, schedule={"kind": "constant", "warmup_samples": 0}))
    assert schedule.at(1) == schedule.peak == 1e-2


def test_defaults_follow_the_length_of_the_run(tmp_path: Path) -> None:
    """The cosine takes what the warm-up leaves, wsd the last fifth, never more than is left."""
    cosine = Schedule.of(tiny(tmp_path, schedule={"kind": "cosine"}))
    assert (cosine.decay_start, cosine.decay_samples) == (24, 48)
    wsd = Schedule.of(tiny(tmp_path))
    assert (wsd.decay_start, wsd.decay_samples) == (58, 14)
    short = Schedule.of(tiny(tmp_path, schedule={"warmup_samples": 70}))
    assert (short.decay_start, short.decay_samples) == (70, 2)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_run_may_end_within_its_warm_up(tmp_path: Path, kind: str) -> None:
    """A short trial of a long run's configuration rises as the long run does."""
    short = Schedule.of(tiny(tmp_path, schedule={"kind": kind, "warmup_samples": 100}))
    assert short.at(72) == pytest.approx(0.72 * short.peak)


def _learning_rate(schedule: Schedule, *, follows: bool) -> LearningRate:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=9.0)
    return LearningRate(optimizer, schedule, follows_checkpoint=follows)


def test_rate_is_set_in_every_group() -> None:
    """All parameter groups get the rate of the samples that the step completes."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=9.0)
    rate = LearningRate(optimizer, _schedule("wsd"), follows_checkpoint=False)
    rate.set_for(20)
    assert rate.rate == PEAK / 2
    assert [group["lr"] for group in optimizer.param_groups] == [PEAK / 2] * 2


def test_rate_of_a_group_is_times_its_multiplier() -> None:
    """At every sample, so in warm-up and decay too; what is logged is the rate."""
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    factors = [{"lr_multiplier": 0.5}, {"lr_multiplier": 0.0}, {}]
    groups = [{"params": [p]} | extra for p, extra in zip(parameters, factors, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=9.0)
    rate = LearningRate(optimizer, _schedule("wsd"), follows_checkpoint=False)
    for num_samples, wanted in ((20, PEAK / 2), (100, PEAK), (200, LOW)):
        rate.set_for(num_samples)
        assert rate.rate == wanted
        assert [group["lr"] for group in optimizer.param_groups] == [wanted / 2, 0.0, wanted]


@pytest.mark.parametrize("follows", [False, True])
def test_conflict_with_checkpoint_is_resolved_and_told(
    follows: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The configuration wins unless it says otherwise; both values are logged."""
    stored, own = _schedule("wsd"), replace(_schedule("wsd"), decay_samples=30)
    rate = _learning_rate(own, follows=follows)
    with caplog.at_level(logging.WARNING, logger="megafsdp.training"):
        rate.load_state_dict(_learning_rate(stored, follows=False).state_dict())
    assert rate.schedule == (stored if follows else own)
    assert "decay_samples 40 (checkpoint) 30 (config)" in caplog.text


def test_decay_of_a_constant_schedule_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """It has none, whatever the run's length was; its peak counts, and so does another kind."""
    stored = _schedule("constant")
    longer = replace(stored, decay_samples=400, minimum=LOW / 2)
    for own, is_reported in (
        (longer, False),
        (replace(longer, peak=PEAK / 2), True),
        (replace(longer, kind="wsd"), True),
    ):
        caplog.clear()
        rate = _learning_rate(own, follows=False)
        rate.load_state_dict(_learning_rate(stored, follows=False).state_dict())
        assert bool(caplog.records) == is_reported


def test_a_value_that_the_checkpoint_lacks_is_the_configured_one() -> None:
    """As of a version that had no choice of the decay's shape."""
    stored = _learning_rate(_schedule("wsd"), follows=False).state_dict()
    del stored["decay_shape"]
    own = replace(_schedule("wsd", "sqrt"), decay_samples=30)
    rate = _learning_rate(own, follows=True)
    rate.load_state_dict(stored)
    assert rate.schedule == replace(own, decay_samples=40)


def test_equal_schedules_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Resuming the same run says nothing."""
    rate = _learning_rate(_schedule("cosine"), follows=False)
    rate.load_state_dict(rate.state_dict())
    assert not caplog.records
