"""The driver of the GPU suite: nothing that a part does ends another, and all is written down."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_suite, record
from benchmarks.gpu import counters, marked_tests, train_step
from benchmarks.gpu.part import ABSENT, Report
from benchmarks.gpu_suite import MAX_BUDGET_S, PARTS, Part
from tests.benchmarks import broken_parts

_ROOT = Path(__file__).parents[2]


def _part(name: str, budget_s: float = 60.0) -> Part:
    functions = [n for n in vars(broken_parts) if not n.startswith("_")]
    return Part(functions.index(name), f"tests.benchmarks.broken_parts:{name}", budget_s)


def _run(out: Path, *parts: Part, rehearse: bool = False) -> tuple[int, list[dict[str, Any]]]:
    arguments = ["--out", str(out), *(["--rehearse"] if rehearse else [])]
    code = gpu_suite.main(arguments, parts)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line["part"] for line in lines] == [part.number for part in parts]
    return code, lines


def test_budgets_fit_in_one_call() -> None:
    """Eight of the ten minutes; each part has its own number and its function."""
    assert sum(part.budget_s for part in PARTS) <= MAX_BUDGET_S == 480
    assert [part.number for part in PARTS] == list(range(13))
    for part in PARTS:
        path = _ROOT / (part.function.partition(":")[0].replace(".", "/") + ".py")
        assert "\ndef run(size: Size, report: Report)" in path.read_text()


def test_parts_that_break_end_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One raises, one hangs, one dies: each is reported with what it found, and the next runs."""
    # What a part leaves of its time, the next may use: the one with a limit comes first.
    parts = [_part("hangs", 2.0), _part("raises"), _part("dies"), _part("works")]
    code, (hung, raised, died, worked) = _run(tmp_path, *parts)
    assert code == 1
    assert hung["status"] == "ended by its limit of 2 s" and hung["seconds"] < 30
    assert raised["status"] == "failed with code 1" and raised["figures"] == {"number": 3}
    assert raised["error"] == "ValueError: the reason"
    assert died["status"] == "died of signal 9" and died["figures"] == {"number": 4}
    assert worked["status"] == "missed a mark" and worked["figures"] == {"number": 2}
    printed = capsys.readouterr().out.splitlines()
    assert "ValueError: the reason" in printed and printed[-1] == "0 passed, 4 failed"
    for _ in range(100):
        if not Path(f"/proc/{hung['figures']['pid']}/cmdline").exists():
            break
        time.sleep(0.05)
    else:
        status = Path(f"/proc/{hung['figures']['pid']}/status").read_text()
        assert "State:\tZ" in status, "what a part has started is killed with it"


def test_speed_counts_but_in_a_rehearsal(tmp_path: Path) -> None:
    """A missed mark of speed fails a run; a failed check fails a rehearsal too."""
    for rehearse, code, status in ((False, 1, "missed a mark"), (True, 0, "passed")):
        assert _run(tmp_path, _part("works"), rehearse=rehearse)[0] == code
        (line,) = _run(tmp_path, _part("works"), rehearse=rehearse)[1]
        assert line["status"] == status and [c["is_met"] for c in line["checks"]] == [True, False]
        assert all(0.0 <= check["at_s"] <= line["seconds"] for check in line["checks"])
    code, (line,) = _run(tmp_path, _part("is_wrong"), rehearse=True)
    assert code == 1 and line["status"] == "missed a mark"
    assert line["checks"][0]["detail"] == "1 is not 2"


def test_lines_are_written_after_each_part(tmp_path: Path) -> None:
    """A part finds those of the parts before it; few files are left."""
    _, (_, line) = _run(tmp_path, _part("works"), _part("reads_results"))
    (text,) = line["figures"]["lines"]
    assert json.loads(text)["figures"] == {"number": 2}
    assert {path.name for path in tmp_path.iterdir()} == {"log.txt", "results.jsonl", "summary.txt"}


def test_parts_are_chosen_by_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their own order; an unknown number is refused, and so is a run that keeps nothing."""
    parts = [_part("works"), _part("is_wrong"), _part("raises")]
    numbers = f"{parts[2].number},{parts[0].number}"
    gpu_suite.main(["--out", str(tmp_path), "--parts", numbers], parts)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["broken_parts"] * 2
    assert [json.loads(line)["part"] for line in lines] == [parts[0].number, parts[2].number]
    for arguments in (["--rehearse", "--parts", "0,99"], []):
        with pytest.raises(SystemExit):
            gpu_suite.main(arguments, PARTS)
    assert "got 99" in capsys.readouterr().err


def test_a_nan_meets_no_mark(tmp_path: Path) -> None:
    """Neither a least nor a largest value."""
    report = Report(tmp_path / "report")
    report.mark("speed", float("nan"), at_least=0.0)
    report.mark("time", float("nan"), at_most=0.0)
    checks = gpu_suite._read_report(tmp_path / "report")[1]
    assert [c["is_met"] for c in checks] == [False, False]


def test_a_rehearsal_cannot_import_what_a_gpu_machine_lacks(tmp_path: Path) -> None:
    """An import of it raises as where it is not installed."""
    program = f"import benchmarks.gpu.absent, {ABSENT[0]}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=_ROOT, capture_output=True, text=True
    )
    assert f"ModuleNotFoundError: import of {ABSENT[0]} halted" in done.stderr


def test_every_gpu_test_is_run_or_left_out_with_a_reason() -> None:
    """Each file that names the mark is in one of the two lists."""
    marked = {
        str(path.relative_to(_ROOT))
        for path in (_ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bmark\.gpu\b", path.read_text())
    }
    assert marked == set(marked_tests.FILES) | set(marked_tests.LEFT_OUT)
    assert not set(marked_tests.FILES) & set(marked_tests.LEFT_OUT)
    assert all(marked_tests.LEFT_OUT.values())


def test_gpu_tests_need_nothing_that_a_gpu_machine_lacks() -> None:
    """The named files are imported without the packages of training, with the suite's options."""
    options = [*marked_tests.PYTEST, "-p", "benchmarks.gpu.absent", "--collect-only", "-q"]
    done = subprocess.run(
        [sys.executable, *options, *marked_tests.FILES],
        cwd=_ROOT,
        env=os.environ | marked_tests.ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for path in marked_tests.FILES:
        assert f"{path}::" in done.stdout


def test_outcomes_are_read_as_they_are_printed() -> None:
    """Names with spaces, and lines that are no outcome."""
    lines = [
        "tests/a.py::test_one[zero-3 bf16 on the host] PASSED [ 10%]\n",
        "tests/a.py::test_two FAILED\n",
        "E   AssertionError: PASSED\n",
    ]
    assert list(marked_tests.results_of(iter(lines))) == [
        ("tests/a.py::test_one[zero-3 bf16 on the host]", "PASSED"),
        ("tests/a.py::test_two", "FAILED"),
    ]


def test_counters_are_read_from_the_table_of_ncu() -> None:
    """Behind what the program prints; a table that is not there gives none."""
    names = list(counters.METRICS)
    printed = (
        "==PROF== Connected to process 7\nsomething\n"
        '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        f'"0","7","adam_kernel(KernelArguments)","{names[0]}","ns","1,024"\n'
        f'"0","7","adam_kernel(KernelArguments)","{names[1]}","%","81.5"\n'
        '"0","7","adam_kernel(KernelArguments)","another","%","3"\n'
    )
    wanted = {counters.METRICS[names[0]]: "1,024 ns", counters.METRICS[names[1]]: "81.5 %"}
    assert counters.read_counters(printed) == wanted
    assert counters.read_counters("==ERROR== LibraryNotLoaded\n") == {}


def test_idle_time_is_what_no_kernel_covers() -> None:
    """Spans may overlap, lie within each other, and come in any order."""
    assert train_step.idle_share([]) is None
    assert train_step.idle_share([(60, 100), (0, 30), (10, 20), (25, 40)]) == pytest.approx(0.2)


def test_records_are_made_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No program, or no repository: the commit is unknown, and the record is written."""
    monkeypatch.setattr(record, "_ROOT", tmp_path)
    assert record.versions()["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    versions = json.loads(record.write("case", {}, directory=tmp_path).read_text())["versions"]
    assert versions["commit"] is None and versions["is_dirty"] is None
