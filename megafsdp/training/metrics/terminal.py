"""What a terminal takes: its width, its colours, and text without control characters."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

_SEPARATOR = "  "
# Escapes, bells and line ends that would move the cursor; line feeds and tabs are text.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Screen:
    """Where lines are shown.

    Attributes:
        width: Characters of a line; None for a file or a pipe, whose lines have any length.
        has_colours: Whether colours are wanted.
    """

    width: int | None = None
    has_colours: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Screen:
        """Look at a stream, such as ``sys.stdout``.

        Only terminals get colours, unless the variable NO_COLOR is set.
        """
        if not stream.isatty():
            return cls()
        has_colours = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(shutil.get_terminal_size().columns, has_colours)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line.

    Attributes:
        text: The part.
        weight: Parts of the least weight are left out first where the line is too long.
        colour: Escape sequence that begins its colour; empty for none.
    """

    text: str
    weight: int
    colour: str = ""

    @classmethod
    def bold(cls, text: str, weight: int) -> Part:
        """Return a part that stands out."""
        return cls(text, weight, _BOLD)

    @classmethod
    def red(cls, text: str, weight: int) -> Part:
        """Return a part that warns."""
        return cls(text, weight, _RED)


def fitted(parts: Sequence[Part], screen: Screen) -> str:
    """Join parts to a line that is no longer than the screen is wide.

    The first part always stays; if it alone is too long, it is cut.
    """
    kept = list(parts)
    while screen.width is not None and _length(kept) > screen.width and len(kept) > 1:
        # Among equal weights the later part goes first.
        del kept[min(range(1, len(kept)), key=lambda i: (kept[i].weight, -i))]
    texts = [part.text[: screen.width] for part in kept]
    if screen.has_colours:
        pairs = zip(texts, kept, strict=True)
        texts = [f"{p.colour}{text}{_PLAIN}" if p.colour else text for text, p in pairs]
    return _SEPARATOR.join(texts)


def escape_controls(text: str) -> str:
    r"""Escape control characters, as ``\x1b``; line feeds and tabs stay.

    What a model writes may be anything, and a terminal would obey it.
    """
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _length(parts: Sequence[Part]) -> int:
    return sum(len(part.text) for part in parts) + len(_SEPARATOR) * (len(parts) - 1)
