"""Fixtures and marks of tests of native kernels; a folder's conftest.py imports its fixtures."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megafsdp._native import native_module

compiled = pytest.mark.skipif(native_module() is None, reason="native kernels are off or not built")


def _levels() -> list[str]:
    native = native_module()
    return list(native.simd_levels()) if native else []


@pytest.fixture(params=_levels() or [pytest.param("", marks=pytest.mark.skip("not compiled"))])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one instruction set for the length of a test."""
    monkeypatch.setenv("MEGAFSDP_SIMD", request.param)
    return request.param


def compile_emulation(source: Path, folder: Path) -> Path:
    """Compile an emulation of CUDA kernels for the host; return the library."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    library = folder / "emulation.so"
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-shared", "-fPIC"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True, timeout=300)
    return library
