"""How often to save, by Young's formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafsdp.errors import DataError
from megafsdp.training import train
from megafsdp.training.cli.main import main
from megafsdp.training.metrics.cadence import cadence
from tests.training.runs import tiny, write_corpus

STEPS = [{"step_s": value} for value in (0.5, 2.0, 0.4)]


def _lost(interval_s: float, stall_s: float, mtbf_s: float) -> float:
    return stall_s / interval_s + interval_s / (2 * mtbf_s)


def test_interval_loses_least() -> None:
    """Of medians; longer and shorter intervals lose more, and both losses are alike."""
    saves = [{"stall_s": s, "save_s": 9.0} for s in (8.0, 100.0, 7.0)] + [{"step": 1}]
    found = cadence(STEPS, saves, mtbf_s=24 * 3600)
    assert (found.num_saves, found.stall_s, found.save_s, found.step_s) == (3, 8.0, 9.0, 0.5)
    assert found.interval_s == pytest.approx((2 * 8.0 * 86400) ** 0.5)
    assert found.interval_steps == round(found.interval_s / 0.5) == 2352
    lost = _lost(found.interval_s, 8.0, 86400)
    assert found.lost_share == pytest.approx(lost)
    assert lost < min(_lost(f * found.interval_s, 8.0, 86400) for f in (0.8, 1.25))
    assert found.lost_share == pytest.approx(2 * 8.0 / found.interval_s)


def test_saves_in_the_background_are_no_closer_than_one_takes() -> None:
    """However short the training waits for them."""
    found = cadence(STEPS, [{"stall_s": 0.001, "save_s": 300.0}], mtbf_s=3600)
    assert found.interval_s == 300.0


def test_run_without_a_save_is_refused() -> None:
    """Runs of older versions have saves without times."""
    with pytest.raises(DataError, match=r"got 3 steps and 0 saves.*Let it save once"):
        cadence(STEPS, [{"step": 4}], mtbf_s=3600)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_measures_its_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_background: bool
) -> None:
    """Training waits for a save as long as it takes, or in the background for less."""
    write_corpus(tmp_path)
    sections = {"interval_steps": 2, "in_background": in_background}
    train(tiny(tmp_path, checkpoint=sections))
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    saves = [event for event in events if event["event"] == "saved"]
    assert [save["step"] for save in saves] == [2, 4, 6]
    assert all(0 < save["stall_s"] <= save["save_s"] < 60 for save in saves)
    if not in_background:
        assert all(save["save_s"] - save["stall_s"] < 0.5 for save in saves)
    capsys.readouterr()
    assert main(["ckpt", "cadence", str(tmp_path / "run"), "--mtbf-hours", "24"]) == 0
    assert "--checkpoint.interval_steps" in capsys.readouterr().out
    assert main(["ckpt", "cadence", str(tmp_path / "run"), "--mtbf-hours=24", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_saves"] == 3


def test_hours_must_be_above_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The option is named."""
    assert main(["ckpt", "cadence", str(tmp_path), "--mtbf-hours", "0"]) == 2
    assert "hours above 0, got 0.0. In --mtbf-hours" in capsys.readouterr().err


def test_an_interval_is_a_step_at_least() -> None:
    """Where saves cost nothing; a row without its time does not count."""
    steps = [{"step_s": 2.0}, {"step_s": None}, {"step_s": 0.0}]
    found = cadence(steps, [{"stall_s": 0.0, "save_s": 0.1}], mtbf_s=60.0)
    assert (found.step_s, found.interval_s, found.interval_steps) == (2.0, 2.0, 1)
