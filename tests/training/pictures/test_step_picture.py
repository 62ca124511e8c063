"""The events of a step on one axis, against the schedule and the dry run's own figures."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.step_recorder import BACKWARD, FORWARD, MEMORY, OPTIMIZER_STEP
from megafsdp.training.dry_run.dry_run import DryRunReport, dry_run
from megafsdp.training.pictures.step_picture import COMPUTE, GATHER, Bar, step_picture
from tests.training.runs import MIXTURE, tiny

ROOT = "LanguageModel"


def _report(folder: Path, num_ranks: int = 4, **sections: Any) -> DryRunReport:
    model = {"num_layers": 3} | sections.pop("model", {})
    return dry_run(tiny(folder, model=model, **sections), num_ranks)


def _short(bars: list[Bar]) -> list[str]:
    return [bar.unit.rpartition(".")[2] for bar in bars]


def _lane(report: DryRunReport, lane: str) -> list[Bar]:
    bars = step_picture(report.footprint.moments).bars
    return sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: bar.start)


def test_units_stand_as_the_schedule_runs_them(tmp_path: Path) -> None:
    """Forwards, backwards in reverse, the optimizer; one gather ahead, reductions one behind."""
    report = _report(tmp_path)
    compute = _lane(report, COMPUTE)
    assert _short(compute) == [ROOT, "0", "1", "2", "2", "1", "0", ROOT, OPTIMIZER_STEP]
    assert [bar.kind for bar in compute] == [FORWARD] * 4 + [BACKWARD] * 4 + [OPTIMIZER_STEP]
    for before, after in itertools.pairwise(compute):
        assert before.stop <= after.start
    forward, backward = compute[:4], compute[4:8]
    gathers = _lane(report, GATHER)
    # The last layer and the root stay unsharded.
    assert _short(gathers) == [ROOT, "0", "1", "2", "1", "0"]
    # Each ends where its unit begins, and all but the first begin with the computation before.
    consumers = [*forward, *backward[1:3]]
    assert [bar.stop for bar in gathers] == [bar.start for bar in consumers]
    assert gathers[0].start == 0 < gathers[0].stop
    assert [bar.start for bar in gathers[2:4]] == [bar.start for bar in forward[1:3]]
    assert [bar.start for bar in gathers[4:]] == [bar.start for bar in backward[:2]]
    reductions = _lane(report, "reduce-scatter")
    assert _short(reductions) == ["2", "1", "0", ROOT]
    assert [bar.start for bar in reductions] == [bar.stop for bar in backward]
    # Beside the next backward; after the last one the optimizer waits.
    assert [bar.stop for bar in reductions[:3]] == [bar.stop for bar in backward[1:]]
    assert reductions[3].stop == compute[-1].start


def test_without_prefetch_every_gather_holds_its_unit_up(tmp_path: Path) -> None:
    """No gather stands beside a computation."""
    report = _report(tmp_path, parallel={"prefetch": 0})
    computes = _lane(report, COMPUTE)
    for gather in _lane(report, GATHER):
        assert gather.stop > gather.start
        assert all(c.stop <= gather.start or c.start >= gather.stop for c in computes)


CASES: list[dict[str, Any]] = [
    {},
    {"parallel": {"strategy": "no_shard"}},
    {"parallel": {"strategy": "optim"}},
    {"parallel": {"strategy": "optim_grads", "dp_outer": 2}},
    {"parallel": {"dp_outer": 2, "ep": 2}, "model": MIXTURE},
    {"parallel": {"prefetch": 2}, "precision": {"param_dtype": "bf16"}},
    {"train": {"micro_batch_size": 1}},
]


@pytest.mark.parametrize("sections", CASES)
def test_peaks_of_the_picture_are_the_footprints(tmp_path: Path, sections: dict[str, Any]) -> None:
    """To the byte, all together and by category; the step ends as it rests."""
    footprint = _report(tmp_path, **sections).footprint
    picture = step_picture(footprint.moments)
    assert max(sum(level.live) for level in picture.levels) == footprint.peak_total
    for index, category in enumerate(Category):
        assert max(level.live[index] for level in picture.levels) == footprint.peak[category]
        assert picture.levels[-1].live[index] == footprint.resting[category]
    starts = [level.start for level in picture.levels]
    # Two at one place would be added up by a stacked chart.
    assert all(a < b for a, b in itertools.pairwise(starts))
    assert starts[0] >= 0 and starts[-1] < picture.length
    assert max(bar.stop for bar in picture.bars) <= picture.length


@pytest.mark.parametrize(("num_microbatches", "is_cut"), [(1, False), (2, False), (3, True)])
def test_microbatches_between_are_left_out(
    tmp_path: Path, num_microbatches: int, is_cut: bool
) -> None:
    """The first and the last are drawn, and a place between them where others were."""
    size = 12 // 2 // num_microbatches
    report = _report(tmp_path, 2, train={"micro_batch_size": size})
    assert report.num_microbatches == num_microbatches
    picture = step_picture(report.footprint.moments)
    forwards = [b for b in picture.bars if b.lane == COMPUTE and b.kind == FORWARD]
    assert len(forwards) == 4 * min(num_microbatches, 2)
    assert (picture.skipped_at is not None) == is_cut
    if picture.skipped_at is not None:
        assert forwards[3].stop < picture.skipped_at <= forwards[4].start


def test_moments_have_every_collective_of_a_unit(tmp_path: Path) -> None:
    """As many as the table counts; memory changes and ends as the ledger says."""
    report = _report(tmp_path, parallel={"dp_outer": 2})
    moments = report.footprint.moments
    for kind in ("all_gather", "reduce_scatter"):
        counted = sum(t.calls for (_, k), t in report.footprint.traffic.items() if k == kind)
        assert sum(moment.kind == kind for moment in moments) == counted > 0
    changes = [m for m in moments if m.kind == MEMORY]
    assert {m.label for m in changes} == {"unsharded", "main grad", "partial grad"}
