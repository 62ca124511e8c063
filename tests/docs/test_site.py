"""What is done to pages when the documentation site is built; .ci/run builds the whole of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from megafsdp.training.config.described import sections, values_of

pytest.importorskip("mkdocs", reason="docs: mkdocs is not installed; it needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """Return scripts/site_hooks.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "scripts" / "site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_configuration_has_every_value(hooks: ModuleType) -> None:
    """A row each, under the heading of its section, with type and default."""
    page = SimpleNamespace(file=SimpleNamespace(src_path="configuration.md"))
    text = hooks.on_page_markdown((ROOT / "docs" / "configuration.md").read_text(), page)
    for name, section in sections().items():
        part = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        rows = [line for line in part.splitlines() if line.startswith("| `")]
        values = list(values_of(name, section))
        assert [row.split("`")[1] for row in rows] == [v.path.partition(".")[2] for v in values]
        # No bar within a cell: each row has four.
        assert all(row.replace("\\|", "").count("|") == 5 for row in rows)
    assert "| `prefetch` | a whole number of at least 0 | `1` | Units gathered ahead" in text


def test_lists_stand_apart_from_paragraphs(hooks: ModuleType) -> None:
    """As GitHub reads them; neither further lines of an item nor code are changed."""
    text = "One:\n- a\n  more\n- b\n\n```\nx\n- y\n```\n"
    assert hooks.separate_lists(text) == "One:\n\n- a\n  more\n- b\n\n```\nx\n- y\n```\n"


def test_links_to_the_readme_lead_to_the_first_page(hooks: ModuleType) -> None:
    """From pages of any folder, with their anchor."""
    page = SimpleNamespace(file=SimpleNamespace(src_path="results.md"))
    change = hooks.on_page_markdown
    assert change("[a](../README.md#results)", page) == "[a](index.md#results)\n"
    assert change("[a](../../README.md)", page) == "[a](../index.md)\n"


@pytest.mark.parametrize(
    "source",
    [
        '<script src="https://unpkg.com/x"></script>',
        "<link rel=stylesheet href=//fonts.example/css>",
        '<img alt="x" src="http://a/b.png">',
        "<style>@import 'https://a/b.css';</style>",
    ],
)
def test_a_page_that_loads_from_the_network_ends_the_build(
    hooks: ModuleType, source: str, tmp_path: Path
) -> None:
    """Links that a reader follows do not."""
    page = tmp_path / "page.html"
    page.write_text('<a href="https://pytorch.org">torch</a><img src="own.png">')
    hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))
    page.write_text(source)
    with pytest.raises(Exception, match=r"page\.html"):
        hooks.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def test_roles_of_sphinx_are_not_shown(hooks: ModuleType) -> None:
    """What they refer to is."""
    assert hooks.on_page_content("a :class:<code>Unit</code>") == "a <code>Unit</code>"
