"""Fixtures of the optimizer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native import compile_emulation, level

__all__ = ["emulation", "level"]


@pytest.fixture(scope="session")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the emulation of the CUDA kernels, for tests/optimizer/kernels/emulated_cuda.py."""
    source = Path(__file__).parent / "kernels" / "cuda_emulation.cpp"
    return compile_emulation(source, tmp_path_factory.mktemp("emulation"))
