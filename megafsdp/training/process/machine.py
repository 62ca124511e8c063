"""What a run computes on: the machine of the first rank, and versions of what it runs with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

_VERSIONED = ("megafsdp", "torch", "numpy")
_CPU_NAMES = Path("/proc/cpuinfo")


def describe_machine(device: torch.device) -> dict[str, str | int | None]:
    """Return the devices, processor, memory and system of this machine, as plain values; local."""
    is_cuda = device.type == "cuda"
    found = torch.cuda.get_device_properties(device) if is_cuda else None
    return {
        "device": device.type,
        "device_name": None if found is None else found.name,
        "device_memory_nbytes": None if found is None else found.total_memory,
        "num_devices": torch.cuda.device_count() if is_cuda else None,
        "processor": _processor_name(),
        "num_cores": os.cpu_count(),
        "memory_nbytes": _memory_nbytes(),
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that compute, and of CUDA if there is one."""
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # A checkout on the path, which is not installed.
            found[package] = "not installed"
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def _processor_name() -> str:
    """Return the processor's name as Linux has it, or what Python knows."""
    if _CPU_NAMES.exists():
        for line in _CPU_NAMES.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_nbytes() -> int | None:
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
