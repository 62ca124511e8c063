"""Finding the native module, and doing without it."""

from __future__ import annotations

import pytest

from megafsdp import _native


def test_native_code_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEGAFSDP_NATIVE=0 hides the module, and the reason says so."""
    monkeypatch.setattr(_native, "_CSRC", pytest)
    monkeypatch.delenv("MEGAFSDP_NATIVE", raising=False)
    assert _native.native_module() is pytest
    assert _native.why_missing() == ""
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    assert _native.native_module() is None
    assert _native.why_missing() == "MEGAFSDP_NATIVE=0"


def test_insisting_without_a_build_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that cannot do without the module learns why it is missing and how to get it."""
    monkeypatch.setattr(_native, "_CSRC", None)
    monkeypatch.setattr(_native, "_WHY_MISSING", "No module named '_csrc'")
    with pytest.raises(RuntimeError, match=r"No module named.*compiler.*pip install"):
        _native.require_native_module()
