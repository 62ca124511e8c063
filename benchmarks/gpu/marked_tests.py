"""Part 1: the tests marked ``gpu``, and a few of them under compute-sanitizer.

The files are listed: collecting all tests would import packages that a GPU machine need not have.
Results are read line by line, so that those of a run that is cut off count too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.part import Report, Size

FILES = (
    "tests/optimizer/kernels/test_cuda.py",
    "tests/quantize/test_cuda.py",
    "tests/quantize/test_products.py",
    "tests/fsdp/test_cuda.py",
    "tests/optimizer/adam/test_capturable.py",
    "tests/optimizer/adam/test_step.py",
    "tests/optimizer/offload/test_hybrid.py",
    "tests/optimizer/offload/test_side_effects.py",
    "tests/checkpoint/test_load.py",
    "tests/models/test_causal_attention.py",
    "tests/models/test_gated_delta.py",
    "tests/parallel/test_context.py",
    "tests/device/test_host_memory.py",
    "tests/device/test_memory.py",
    "tests/device/test_streams.py",
    "tests/benchmarks/test_cases.py",
)
# Files with tests marked gpu that the part leaves out, each with the reason.
LEFT_OUT: dict[str, str] = {
    "tests/training/metrics/test_profile.py": "runs of the training loop need its packages",
}
# Settings and threads of pytest and its plugins must not differ between machines: threads that a
# plugin starts are alive when ranks are forked, and warnings of another torch are no errors.
PYTEST = (
    "-m",
    "pytest",
    "-p",
    "pytest_timeout",
    "-p",
    "_hypothesis_pytestplugin",
    "-p",
    "no:cacheprovider",
    "-o",
    "filterwarnings=default",
    "-m",
    "gpu",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
_SANITIZED = (
    "test_scalars_on_the_device or test_every_length or test_sum_of_squares_has_the_bits "
    "or test_tails_of_rows or test_codes_are_transposed_on_their_way"
)
_SANITIZED_FILES = FILES[:2]
_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
# Processes that run tests at once; a rehearsal has one, as it has two cores.
_NUM_GROUPS = 4
_COUNTED = ("PASSED", "FAILED", "ERROR", "SKIPPED")
_SHOWN_FAILURES = 20


def run(size: Size, report: Report) -> None:
    """Run the tests in several processes, beside them memcheck of each of its files."""
    command = [sys.executable, *PYTEST, "-v", "--timeout=60"]
    if size.is_rehearsal:
        command[3:3] = ["-p", "benchmarks.gpu.absent"]
    num_groups = size.either(_NUM_GROUPS, 1)
    groups = [FILES[i::num_groups] for i in range(num_groups)]
    with ThreadPoolExecutor(num_groups + len(_SANITIZED_FILES)) as pool:
        checks = [pool.submit(_run_memcheck, size, report, path) for path in _SANITIZED_FILES]
        found = list(
            pool.map(
                lambda i: _run_tests([*command, *groups[i]], report, f"tests {i}"),
                range(num_groups),
            )
        )
        for check in checks:
            check.result()
    failures = [test for _, failed, _ in found for test in failed]
    is_met = not failures and not any(code for _, _, code in found)
    report.check("no test failed", is_met, failures[:_SHOWN_FAILURES])
    # Without a GPU all tests are collected and skipped.
    wanted = size.either("PASSED", "SKIPPED")
    num_wanted = sum(counts[wanted] for counts, _, _ in found)
    report.check(f"tests {wanted.lower()}", num_wanted > 0, num_wanted)


def _run_memcheck(size: Size, report: Report, path: str) -> None:
    name = f"memcheck of {path}"
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or size.is_rehearsal:
        report.figure(name, "not available")
        return
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "99", sys.executable, *PYTEST]
    command += ["-v", "--timeout=60", "-k", _SANITIZED, path]
    counts, failures, code = _run_tests(command, report, name)
    report.check(f"{name} found nothing", code == 0 and counts["PASSED"] > 0, failures)


def _run_tests(
    command: list[str], report: Report, name: str
) -> tuple[Counter[str], list[str], int]:
    """Return counts by outcome, the names of failed tests, and the exit code."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    process = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None, "it is a pipe"
    for test, outcome in results_of(process.stdout):
        counts[outcome] += 1
        if outcome in ("FAILED", "ERROR"):
            failures.append(test)
        report.figure(name, {key.lower(): counts[key] for key in _COUNTED} | {"failures": failures})
    return counts, failures, process.wait()


def results_of(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """Print the lines of a verbose pytest; return each test with its outcome."""
    for line in lines:
        print(line, end="")
        if found := _RESULT.match(line):
            yield found[1], found[2]
