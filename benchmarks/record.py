"""Records: what was measured, on which machine, with which versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

import megafsdp

RECORDS = Path(__file__).parent / "records"
_ROOT = Path(__file__).parents[1]


class CheckError(Exception):
    """A case's two sides disagree, so that their figures mean nothing."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum of some figures."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def hardware() -> str:
    """Return a short name of the machine's compute: the GPU's, or ``cpu`` with its cores."""
    if torch.cuda.is_available():
        return re.sub(r"\W+", "-", torch.cuda.get_device_name()).strip("-").lower()
    return f"cpu-{os.cpu_count()}-cores"


def machine() -> dict[str, object]:
    """Describe the machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    memory_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "device": "GPU" if torch.cuda.is_available() else "CPU",
        "hardware": hardware(),
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory_nbytes / 2**30, 1),
    }


def versions() -> dict[str, object]:
    """Return the versions of Python, torch and this checkout; its commit is None without git."""
    commit = _git("rev-parse", "HEAD")
    status = None if commit is None else _git("status", "--porcelain")
    changed = [line for line in (status or "").splitlines() if "records/" not in line]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megafsdp": megafsdp.__version__,
        "commit": commit,
        "is_dirty": None if commit is None else bool(changed),
    }


def _git(*arguments: str) -> str | None:
    """Return what git prints; None if there is no git, or no repository."""
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return None if done.returncode else done.stdout.strip()


def write(case: str, results: dict[str, object], *, directory: Path = RECORDS) -> Path:
    """Write one record and return its path."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    record = {
        "case": case,
        "date": today,
        "machine": machine(),
        "versions": versions(),
        "results": results,
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{case}_{hardware()}_{today}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
