"""What is a terminal, what fits, and what a model may write to it."""

from __future__ import annotations

import io

import pytest

from megafsdp.training.metrics.terminal import Part, Screen, escape_controls, fitted


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("variables", "has_colours"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_has_a_width_and_colours(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], has_colours: bool
) -> None:
    """NO_COLOR wants none, whatever its value; empty it counts as not set."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables | {"COLUMNS": "93"}).items():
        monkeypatch.setenv(name, value)
    assert Screen.of(_Terminal()) == Screen(93, has_colours)
    assert Screen.of(io.StringIO()) == Screen(None, False)


def test_parts_of_the_least_weight_go_first() -> None:
    """Of equal ones the later; a line that fits exactly is whole."""
    parts = [Part("first", 0), Part("aa", 1), Part("bb", 1), Part("cc", 2)]
    whole = "first  aa  bb  cc"
    for width, line in (
        (None, whole),
        (len(whole), whole),
        (len(whole) - 1, "first  aa  cc"),
        (12, "first  cc"),
        (8, "first"),
        (3, "fir"),
    ):
        assert fitted(parts, Screen(width)) == line


def test_control_characters_are_spelt() -> None:
    """All but line feeds and tabs, so that no text moves the cursor or sets a title."""
    hostile = "a\x1b]0;title\x07\x1b[2Jb\rc\x08\x7f\x9b1m\x85"
    spelt = "a\\x1b]0;title\\x07\\x1b[2Jb\\x0dc\\x08\\x7f\\x9b1m\\x85"
    assert escape_controls(hostile) == spelt
    plain = "tab\tand line\nÄ 世界 🙂 \\x1b"
    assert escape_controls(plain) == plain
    everything = escape_controls("".join(map(chr, range(0x3000))))
    controls = {chr(code) for code in (*range(32), *range(127, 160))}
    assert controls & set(everything) == {"\n", "\t"}
