"""Words that the project has dropped stay out of pages, docstrings and comments."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Phrases that read buffers and hooks as persons, and what stands in their place.
PHRASES = {
    r"faces": "sharded and unsharded parameters",
    r"(of )?nobody": "none, or who does it: no reader, no rank",
    r"lets? go( of)?": "releases, frees",
    r"(is|are) told(?! apart)": "is logged, is given, reads",
    r"is the business of": "is decided by",
}
# Names of earlier code: a page that has one describes code that is gone.
NAMES = [
    *[
        "guard_faces",
        "_make_faces",
        "notice_writes",
        "like_main_weight",
        "_let_go",
        "_observe_user",
    ],
    *["finish_encoding", "leave_outputs", "_is_at_outputs", "is_handed_over", "forget_sums"],
    *["leave_rest_out", "dividing_ranks", "StepInFlight", "WorkAhead", "call_off", "LateNumber"],
    *["GradLook"],
]
DROPPED = re.compile(rf"\b(?:{'|'.join([*PHRASES, *NAMES])})\b", re.IGNORECASE)
# Dated notes, which stay as they were written.
DIARIES = {ROOT / "docs" / "log.md", ROOT / "CHANGELOG.md"}
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("changelog.d/*.md")} - DIARIES
)
NATIVE = sorted(
    p for p in ROOT.glob("megafsdp/csrc/**/*") if p.suffix in {".cpp", ".cu", ".h", ".md"}
)
CODE = sorted(ROOT.glob("megafsdp/**/*.py"))


def _prose_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of the comments and strings of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def _dropped_in(text: str, first_line: int = 1) -> list[str]:
    # A phrase may go on in the next line, behind the sign of a comment.
    plain = re.sub(r"\n[ \t]*(?:#|//|\*)?[ \t]*", lambda m: "\n" + " " * (len(m[0]) - 1), text)
    found = re.finditer(DROPPED.pattern.replace(" ", r"\s+"), plain, re.IGNORECASE)
    return [f"{first_line + plain.count(chr(10), 0, m.start())}: {m[0]!r}" for m in found]


def test_dropped_words_stay_out_of_pages_and_native_code() -> None:
    """Each page of Markdown, diaries aside, and each native source."""
    assert len(PAGES) > 40 and len(NATIVE) > 10
    found = [
        f"{p.relative_to(ROOT)}:{hit}"
        for p in (*PAGES, *NATIVE)
        for hit in _dropped_in(p.read_text())
    ]
    assert found == []


def test_dropped_words_stay_out_of_docstrings_comments_and_messages() -> None:
    """All that a reader of the package sees beside its code."""
    assert len(CODE) > 100
    found = [
        f"{path.relative_to(ROOT)}:{hit}"
        for path in CODE
        for line, text in _prose_of(path.read_text())
        for hit in _dropped_in(text, line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "The two faces of a parameter.",
        "Nobody reads it.",
        "a buffer lets\n    go of its memory",
        "# the optimizer is\n# told of it",
        "what to free is the business of the unit",
        "call `notice_writes`",
    ],
)
def test_a_dropped_phrase_is_found(text: str) -> None:
    """In any case of letters and across lines."""
    assert len(_dropped_in(text)) == 1


def test_words_that_only_look_alike_are_left_alone() -> None:
    """A rule that finds too much would be switched off."""
    assert (
        _dropped_in(
            "what they told; outlets good; surfaces of a parameter; is untold; are told apart"
        )
        == []
    )
