"""The bar of the tools: on a terminal, where it is wanted."""

from __future__ import annotations

import io
import sys

import pytest

from megafsdp.checkpoint.tools.progress import bytes_bar


class _Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, is_wanted: bool
) -> None:
    """It counts bytes; nothing is written to a file, or if none is wanted."""
    stream = _Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with bytes_bar("verify", 2_000_000, is_wanted=is_wanted) as bar:
        bar.update(2_000_000)
    drawn = stream.getvalue()
    assert ("2.00M/2.00M" in drawn) == (is_terminal and is_wanted)
    assert bool(drawn) == (is_terminal and is_wanted)
