"""What pages of the guide name is there: values of the configuration, public names, variables."""

from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path

import pytest

from megafsdp.training.config.described import sections, values_of
from tests.docs.test_pages import PAGES
from tests.test_public import IMPORT_PATHS, PROMISED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDE = [*PAGES, "tutorial.md", "configuration.md"]
API = sorted((DOCS / "api").glob("*.md"))
# What fsdp and optimizer export, megafsdp exports too.
_ROOMS = ("checkpoint", "data", "megatron", "models", "parallel", "quantize", "training")


def _quoted(page: str) -> list[str]:
    """Return what stands in backquotes outside of blocks."""
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@functools.cache
def _values() -> frozenset[str]:
    return frozenset(v.path for name, cls in sections().items() for v in values_of(name, cls))


@pytest.mark.parametrize("page", GUIDE)
def test_values_of_the_configuration_exist(page: str) -> None:
    """A name of a section with a point behind it is a value, unless it is a function of ours."""
    is_section = re.compile(rf"(?:--)?((?:{'|'.join(sections())})\.(?!py\b)\w+)(?: .*)?")
    found = [m[1] for text in _quoted(page) if (m := is_section.fullmatch(text))]
    missing = {path for path in found if path not in _values()}
    assert {path for path in missing if not path.startswith("checkpoint.")} == set()
    public = IMPORT_PATHS["megafsdp.checkpoint"]
    assert {path for path in missing if path.partition(".")[2] not in public} == set()


@pytest.mark.parametrize("page", GUIDE)
def test_public_names_exist(page: str) -> None:
    """What is written as megafsdp.name is what a package exports to users."""
    for text in _quoted(page):
        found = re.match(r"(megafsdp(?:\.\w+)+)", text)
        if found is not None and found[1] not in IMPORT_PATHS:
            module, _, name = found[1].rpartition(".")
            assert name in importlib.import_module(module).__all__, text


def test_variables_exist() -> None:
    """Each variable of the environment that a page names is read by the package or its set-up."""
    named = {
        name for page in GUIDE for name in re.findall(r"MEGAFSDP_\w+", (DOCS / page).read_text())
    }
    sources = [*ROOT.glob("megafsdp/**/*.py"), *ROOT.glob("megafsdp/csrc/**/*"), ROOT / "setup.py"]
    text = "".join(path.read_text() for path in sources if path.is_file())
    assert len(named) > 3
    assert {name for name in named if f'"{name}"' not in text} == set()


def test_messages_exist() -> None:
    """What the page of troubles quotes of a message stands in the code, word for word."""
    quoted = [
        text.removeprefix("Expected ")
        for text in _quoted("troubleshooting.md")
        if text.startswith("Expected ")
    ]
    text = "".join(path.read_text() for path in ROOT.glob("megafsdp/**/*.py"))
    assert len(quoted) > 4
    assert [part for each in quoted for part in each.split("...") if part.strip() not in text] == []


def test_the_reference_has_every_public_name() -> None:
    """Each once; and what it has can be imported."""
    listed = [
        name for page in API for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(listed) == len(set(listed))
    for path in listed:
        module, _, name = path.rpartition(".")
        if not module.startswith("megafsdp.integrations"):
            assert hasattr(importlib.import_module(module), name), path
    # The package itself is on the page of checkpoints by its names.
    names = {f"megafsdp.{name}" for name in PROMISED if name != "checkpoint"}
    for room in _ROOMS:
        names |= {f"megafsdp.{room}.{name}" for name in _exported(room)}
    assert names - set(listed) == set()


def _exported(room: str) -> list[str]:
    exported: list[str] = importlib.import_module(f"megafsdp.{room}").__all__
    return [name for name in exported if (room, name) != ("checkpoint", "inspect")]
