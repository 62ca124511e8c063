"""Part 0: the machine, the extensions built for its GPU, and the speeds of copies and products.

The extensions are built before anything imports megafsdp, so this file imports no torch.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.gpu.part import Report, Size

_GPU_FIELDS = "name,driver_version,compute_cap,memory.total,clocks.max.sm"
_TOOLS = ("nvcc", "compute-sanitizer", "ncu", "git")


def run(size: Size, report: Report) -> None:
    """Describe the machine, build, and measure."""
    gpu = _first_gpu()
    report.figure("gpu", gpu)
    report.figure("tools", {tool: shutil.which(tool) for tool in _TOOLS})
    report.figure("nvcc", _last_line(["nvcc", "--version"]))
    header = Path(sysconfig.get_path("include"), "Python.h")
    report.figure("Python.h", str(header) if header.exists() else None)
    _build(size, report, gpu.get("compute_cap", ""))
    importlib.import_module("benchmarks.gpu.rates").measure(size, report)


def _first_gpu() -> dict[str, str]:
    line = _last_line(["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"])
    values = (line or "").split(", ")
    names = _GPU_FIELDS.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _last_line(command: list[str]) -> str | None:
    """Return the last line that a command prints; None if there is no such command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return (done.stdout.strip() or done.stderr.strip()).rpartition("\n")[2]


def _build(size: Size, report: Report, compute_capability: str) -> None:
    """Build in place; a rehearsal only loads setup.py, since others use what is built."""
    environment = dict(os.environ)
    if not size.is_rehearsal:
        environment["MEGAFSDP_CUDA"] = "1"
    if compute_capability and not size.is_rehearsal:
        # One architecture, not three: a third of the time.
        environment["MEGAFSDP_CUDA_ARCHS"] = compute_capability.replace(".", "")
    command = [sys.executable, "setup.py", "--quiet"]
    command += size.either(["build_ext", "--inplace", "--parallel", "2"], ["--version"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    report.check("setup.py builds", done.returncode == 0, done.stderr[-500:])
