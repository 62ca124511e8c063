"""Benchmarks run, refuse to print when a side is wrong, and write whole records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fsdp_step
from benchmarks.__main__ import main

TINY = [
    "--layers",
    "2",
    "--hidden",
    "16",
    "--sequence",
    "8",
    "--vocabulary",
    "32",
    "--repeats",
    "2",
]


def _only_record(directory: Path) -> dict[str, object]:
    (path,) = directory.iterdir()
    record = json.loads(path.read_text())
    assert set(record) == {"case", "date", "machine", "versions", "results"}
    assert path.name == f"{record['case']}_{record['machine']['hardware']}_{record['date']}.json"
    return record


def test_a_step_is_timed_against_fsdp2_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record holds the ratio, the spread, phases, collectives and bytes of both sides."""
    main(["--records", str(tmp_path), "fsdp_step", *TINY, "--dtypes", "fp32"])
    assert "ratio" in capsys.readouterr().out
    case = _only_record(tmp_path)["results"]["2x16 fp32"]
    for side in fsdp_step.SIDES:
        assert case["step_ms"][side]["count"] == 6
        assert case["bytes"][side]["peak"] > case["bytes"][side]["resting"] > 0
    assert case["collectives"]["megafsdp"]["calls"]["_allgather_base_"] == 4
    assert case["ratio"] > 0


def test_no_figure_is_given_when_the_sides_disagree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed correctness check ends the run before anything is timed or written."""
    monkeypatch.setenv("MEGAFSDP_BENCHMARK_TOLERANCE", "0")
    with pytest.raises(Exception, match="differs by"):
        main(["--records", str(tmp_path), "fsdp_step", *TINY, "--dtypes", "bf16"])
    assert not list(tmp_path.iterdir())


def test_the_layout_table_holds_what_the_planner_promises(tmp_path: Path) -> None:
    """Whole models pad less than 0.5 percent, where one buffer pads several."""
    main(["--records", str(tmp_path), "layout", "--timed-shards", "64"])
    table = _only_record(tmp_path)["results"]["padding"]
    for row in table.values():
        assert all(row[n]["padding_percent"] < 0.5 for n in ("8", "64", "512", "1024"))
    llama = table["Llama-3-8B"]
    assert llama["num_parameters"] == 8_030_261_248
    assert llama["1024"]["single_buffer_percent"] == pytest.approx(6.76, abs=0.01)
    assert llama["1024"]["padding_percent"] == pytest.approx(0.09, abs=0.005)
