"""Test and measure megafsdp on a machine with one GPU, part by part, in at most eight minutes.

    python benchmarks/gpu_suite.py --out DIR [--parts 0,1,2]
    python benchmarks/gpu_suite.py --rehearse

Needs torch with CUDA, nvcc, pybind11, pytest, pytest-timeout, hypothesis and numba; no network and
no git. Each part is a process of its own with a time limit; when it ends, however it does, its
processes are killed and a line of JSON is written to ``DIR/results.jsonl``. A part may also use the
time that those before it left. ``--rehearse`` runs the same code on a CPU with tiny sizes, where
marks of speed do not count. The exit code is 1 if a part failed or missed a mark that counts.

This file imports only the standard library, so it reports even if torch cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
MAX_BUDGET_S = 480.0
# Budgets are for a GPU machine; a rehearsal shares two cores with other work.
_REHEARSAL_LIMIT_S = 300.0
_PASSED, _MISSED = "passed", "missed a mark"
_LOG = "log.txt"
_SHOWN_LINES = 40


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        number: Its number on the command line.
        function: ``module:function``, called with a ``Size`` and a ``Report`` of benchmarks.gpu.
        budget_s: Seconds on a GPU machine.
    """

    number: int
    function: str
    budget_s: float

    @property
    def name(self) -> str:
        """Return the name of its module."""
        return self.function.partition(":")[0].rpartition(".")[2]


PARTS = (
    Part(0, "benchmarks.gpu.machine:run", 48),
    Part(1, "benchmarks.gpu.marked_tests:run", 50),
    Part(2, "benchmarks.gpu.adam_kernel:run", 20),
    Part(3, "benchmarks.gpu.counters:run", 14),
    Part(4, "benchmarks.gpu.bits:run", 28),
    Part(5, "benchmarks.gpu.train_step:run", 100),
    Part(6, "benchmarks.gpu.overlap:run", 22),
    Part(7, "benchmarks.gpu.two_ranks:run", 24),
    Part(8, "benchmarks.gpu.offload:run", 58),
    Part(9, "benchmarks.gpu.checkpoint:run", 28),
    Part(10, "benchmarks.gpu.graphs:run", 26),
    Part(11, "benchmarks.gpu.quantize_kernels:run", 14),
    Part(12, "benchmarks.gpu.recipe_step:run", 48),
)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the chosen parts; return the exit code."""
    numbers = ",".join(str(part.number) for part in parts)
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--parts", default=numbers, help=f"by default {numbers}")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with tiny sizes")
    options = parser.parse_args(arguments)
    if options.out is None and not options.rehearse:
        parser.error("--out is required, but for --rehearse")
    wanted = set(options.parts.split(","))
    if unknown := wanted - set(numbers.split(",")):
        parser.error(f"--parts: expected some of {numbers}, got {', '.join(sorted(unknown))}")
    chosen = [part for part in parts if str(part.number) in wanted]
    with contextlib.ExitStack() as stack:
        out = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)
        lines = _run_parts(chosen, out.resolve(), rehearse=options.rehearse)
        summary = "\n".join(_describe(line) for line in lines)
        (out / "summary.txt").write_text(summary + "\n")
    num_passed = sum(line["status"] == _PASSED for line in lines)
    print(f"{summary}\n{num_passed} passed, {len(lines) - num_passed} failed")
    return int(num_passed < len(lines))


def _run_parts(parts: Sequence[Part], out: Path, *, rehearse: bool) -> list[dict[str, Any]]:
    lines = []
    end_s = time.monotonic()
    (out / _LOG).write_bytes(b"")
    with (out / "results.jsonl").open("w") as results:
        for part in parts:
            end_s += part.budget_s
            limit_s = _REHEARSAL_LIMIT_S if rehearse else end_s - time.monotonic()
            line = _run_part(part, out, limit_s, rehearse=rehearse)
            results.write(json.dumps(line) + "\n")
            results.flush()
            print(f"{part.number} {part.name}: {line['status']}, {line['seconds']} s", flush=True)
            lines.append(line)
    return lines


def _run_part(part: Part, out: Path, limit_s: float, *, rehearse: bool) -> dict[str, Any]:
    """Run a part to its end or its limit; return its line of the results."""
    # In the folder of the results, so that a part's report survives if this process is killed.
    report, log = out / "running.jsonl", out / _LOG
    report.write_bytes(b"")
    with log.open("ab") as stream:
        stream.write(f"\n== {part.number} {part.name}\n".encode())
        stream.flush()
        log_start = stream.tell()
        begin_s = time.monotonic()
        code = _run_process(_command(part, out, report, rehearse), stream, limit_s, rehearse)
        seconds = time.monotonic() - begin_s
    with log.open("rb") as stream:
        stream.seek(log_start)
        printed = stream.read().decode(errors="replace").splitlines()
    figures, checks = _read_report(report)
    report.unlink()
    is_missed = any(not c["is_met"] and not (rehearse and c["is_speed"]) for c in checks)
    line: dict[str, Any] = {
        "part": part.number,
        "name": part.name,
        "status": _status(code, limit_s, is_missed=is_missed),
        "seconds": round(seconds, 1),
        "limit_s": round(limit_s, 1),
        "is_rehearsal": rehearse,
        "figures": figures,
        "checks": checks,
    }
    if code != 0:
        line["error"] = next((text for text in reversed(printed) if text.strip()), "")
    if line["status"] != _PASSED:
        print("\n".join(printed[-_SHOWN_LINES:]), flush=True)
    return line


def _command(part: Part, out: Path, report: Path, rehearse: bool) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", part.function]
    command += ["--out", str(out), "--report", str(report)]
    return [*command, "--rehearse"] if rehearse else command


def _run_process(command: list[str], log: Any, limit_s: float, rehearse: bool) -> int | None:
    """Return the exit code, negative for a signal; None if the limit ended it."""
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1"}
    if rehearse:
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command,
        cwd=_ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Even if the part ended by itself: ranks and workers may have outlived it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_report(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures by name, the last of each, and the checks."""
    figures: dict[str, Any] = {}
    checks: list[dict[str, Any]] = []
    for text in path.read_text().splitlines():
        try:
            entry = json.loads(text)
        except ValueError:
            # A part that was killed may have written a part of its last line.
            continue
        if "figure" in entry:
            figures[entry["figure"]] = entry["value"]
        else:
            checks.append(entry)
    return figures, checks


def _status(code: int | None, limit_s: float, *, is_missed: bool) -> str:
    if code is None:
        return f"ended by its limit of {limit_s:.0f} s"
    if code < 0:
        return f"died of signal {-code}"
    if code > 0:
        return f"failed with code {code}"
    return _MISSED if is_missed else _PASSED


def _describe(line: dict[str, Any]) -> str:
    """Return a line of the results as text: its numbers, and each check."""
    texts = [f"{line['part']:>2} {line['name']}: {line['status']}, {line['seconds']} s"]
    if "error" in line:
        texts.append(f"     {line['error']}")
    for check in line["checks"]:
        met = "met" if check["is_met"] else "NOT MET"
        if check["is_speed"] and line["is_rehearsal"]:
            met = "not counted"
        detail = check["detail"].strip().rpartition("\n")[2]
        texts.append("     " + ": ".join(filter(None, [check["check"], detail, met])))
    for name, value in line["figures"].items():
        if isinstance(value, (int, float)):
            texts.append(f"     {name}: {value:.4g}")
        elif isinstance(value, str):
            texts.append(f"     {name}: {value}")
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
