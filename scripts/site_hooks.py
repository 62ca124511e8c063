"""Hooks that mkdocs runs besides its plugins when it builds the documentation; see mkdocs.yml.

README.md becomes the first page, the configuration's sections become their reference, Markdown that
GitHub reads in its own way is made plain, and a page that would load anything from the network ends
the build.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from megafsdp.training.config.described import DescribedValue, sections, summary_of, values_of
from megafsdp.training.config.words import type_in_words

_ROOT = Path(__file__).parents[1]
_FIRST_PAGE = "index.md"
# The navigation beside the first page would list only that page.
_FIRST_PAGE_OPTIONS = "---\nhide: [navigation]\n---\n"
_CONFIGURATION_PAGE = "configuration.md"
_SECTIONS_MARK = "<!-- the sections -->\n"
# A role of Sphinx in a docstring, as mkdocstrings has rendered it.
_ROLE = re.compile(r":(?:class|func|meth|mod|attr|data):<code>~?")
_LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")
# What a browser fetches by itself; links that a reader follows are not part of it.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*\brel=[\"']?canonical)[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|(?:@import|url\()\s*[\"']?(?:https?:)?//[^)\s]*"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page, with its links as seen from the folder of the pages."""
    text = (_ROOT / "README.md").read_text(encoding="utf-8")
    text = _FIRST_PAGE_OPTIONS + text.replace("](docs/", "](")
    files.append(File.generated(config, _FIRST_PAGE, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Return a page as Python-Markdown reads it."""
    if page.file.src_path == _CONFIGURATION_PAGE:
        markdown = markdown.replace(_SECTIONS_MARK, configuration_reference())
    # README is a page of the site, one folder further down.
    markdown = re.sub(r"\]\(((?:\.\./)*)\.\./README\.md", rf"](\1{_FIRST_PAGE}", markdown)
    return separate_lists(markdown)


def on_page_content(page_html: str, **_: object) -> str:
    """Return the page without the names of Sphinx's roles from docstrings."""
    return _ROLE.sub("<code>", page_html)


def on_post_build(config: MkDocsConfig) -> None:
    """Check that no page loads anything from the network.

    Raises:
        PluginError: One does.
    """
    site = Path(config.site_dir)
    found = [
        f"{path.relative_to(site)}: {match[0]}"
        for pattern in ("*.html", "*.css")
        for path in sorted(site.rglob(pattern))
        for match in _FETCHED.finditer(path.read_text(encoding="utf-8"))
    ]
    if found:
        raise PluginError(f"pages load what is not theirs:\n{chr(10).join(found)}")


def separate_lists(markdown: str) -> str:
    """Put an empty line before each list that follows a paragraph at once, as GitHub allows."""
    lines: list[str] = []
    is_in_fence = is_in_list = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            is_in_fence = not is_in_fence
        if not is_in_fence:
            is_item = _LIST_ITEM.match(line) is not None
            if is_item and not is_in_list and lines and lines[-1].strip():
                lines.append("")
            # Later lines of an item may begin at the margin; an empty line ends the list.
            is_in_list = is_item or (is_in_list and bool(line.strip()))
        lines.append(line)
    return "\n".join([*lines, ""])


def configuration_reference() -> str:
    """Return the sections of the configuration as Markdown, a table each."""
    parts = []
    for name, section in sections().items():
        head = f"## {name}\n\n{summary_of(section)}\n\n| value | is | default | meaning |\n"
        rows = "".join(map(_row, values_of(name, section)))
        parts.append(f"{head}|---|---|---|---|\n{rows}")
    return "\n".join(parts)


def _row(value: DescribedValue) -> str:
    name = value.path.partition(".")[2]
    default = f"`{json.dumps(value.default)}`"
    return _cells([f"`{name}`", type_in_words(value.hint), default, _plain(value.description)])


def _plain(text: str) -> str:
    """Return a sentence of a docstring as Markdown: only what stands in backquotes is code."""
    parts = re.split(r"(``?[^`]+``?)", text)
    return "".join(
        part if part.startswith("`") else html.escape(part, quote=False).replace("*", "\\*")
        for part in parts
    )


def _cells(texts: Iterable[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |\n"
