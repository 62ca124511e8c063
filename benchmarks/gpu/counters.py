"""Part 3: hardware counters of one launch of the Adam kernel, by Nsight Compute if it works."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

from benchmarks.gpu.part import Report, Size

_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op"
# A warp that stores 16 bytes a thread writes 16 sectors with one request.
METRICS = {
    "gpu__time_duration.sum": "duration",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM, % of its peak",
    f"{_SECTORS}_ld.ratio": "sectors a load request",
    f"{_SECTORS}_st.ratio": "sectors a store request",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots busy, %",
    "launch__registers_per_thread": "registers a thread",
}
# The program makes three launches; the last one is counted.
_SKIPPED_LAUNCHES = 2
_NONE = "not available"


def run(size: Size, report: Report) -> None:
    """Run one_launch.py under ncu; report that there is none, or why it could not read."""
    command = [sys.executable, "-m", "benchmarks.gpu", "benchmarks.gpu.one_launch:run"]
    command += ["--out", str(size.out), "--report", str(report.path)]
    ncu = None if size.is_rehearsal else shutil.which("ncu")
    if size.is_rehearsal:
        command.append("--rehearse")
    if ncu is not None:
        chosen = ["--kernel-name", "regex:adam_kernel", "--launch-skip", str(_SKIPPED_LAUNCHES)]
        chosen += ["--launch-count", "1", "--metrics", ",".join(METRICS)]
        command = [ncu, "--csv", "--print-units", "base", *chosen, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    counters = read_counters(done.stdout)
    if ncu is None or not counters:
        report.figure("counters", _NONE if ncu is None else f"{_NONE}: {_why(done.stdout)}")
    else:
        report.figure("counters", counters)
    if ncu is None:
        report.check("the launch ended well", done.returncode == 0, done.stderr[-500:])


def read_counters(printed: str) -> dict[str, str]:
    """Return the value of each metric in ncu's table, with its unit."""
    lines = printed.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not starts:
        return {}
    rows = csv.DictReader(lines[starts[0] :])
    return {
        METRICS[row["Metric Name"]]: f"{row['Metric Value']} {row['Metric Unit']}".strip()
        for row in rows
        if row.get("Metric Name") in METRICS
    }


def _why(printed: str) -> str:
    errors = [line for line in printed.splitlines() if line.startswith("==ERROR==")]
    return errors[0] if errors else "it printed no table"
