"""Fixtures of the tests of quantization."""

from __future__ import annotations

import pytest

from megafsdp._native import native_module


def _levels() -> list[str]:
    native = native_module()
    return list(native.simd_levels()) if native else []


@pytest.fixture(params=_levels() or [pytest.param("", marks=pytest.mark.skip("not compiled"))])
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one instruction set for the length of a test."""
    monkeypatch.setenv("MEGAFSDP_SIMD", request.param)
    return request.param
