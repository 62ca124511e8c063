"""Parts of a GPU suite that end in every way, for the tests of its driver; no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.gpu.part import Report, Size


def works(size: Size, report: Report) -> None:
    """Report a figure twice, a check, and a mark of speed that is missed."""
    report.figure("number", 1)
    report.figure("number", 2)
    report.check("right", True)
    report.mark("fast", 0.5, at_least=0.85)


def is_wrong(size: Size, report: Report) -> None:
    """Report a check that is not met."""
    report.check("right", False, "1 is not 2")


def raises(size: Size, report: Report) -> None:
    """Report a figure, then raise."""
    report.figure("number", 3)
    raise ValueError("the reason")


def hangs(size: Size, report: Report) -> None:
    """Start a process that would run on, then hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    report.figure("pid", child.pid)
    time.sleep(600)


def dies(size: Size, report: Report) -> None:
    """End by a signal, in the middle of a line of the report."""
    report.figure("number", 4)
    with report.path.open("a") as stream:
        stream.write('{"figure": "nu')
    os.kill(os.getpid(), signal.SIGKILL)


def reads_results(size: Size, report: Report) -> None:
    """Report what the parts before have written."""
    report.figure("lines", (size.out / "results.jsonl").read_text().splitlines())
