"""Put a page together: one HTML file with its charts, styles and the plotting library inside.

The library is Vega-Lite with Vega and Vega-Embed, as one bundle of about 0.9 MB from the package
vl-convert-python. Nothing is loaded when the page is opened.
"""

from __future__ import annotations

import datetime
import html
import importlib.resources
import json
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafsdp.errors import ConfigError, expected
from megafsdp.training.pictures.charts import Chart
from megafsdp.training.process.doctor import is_installed
from megafsdp.training.process.machine import versions

_PACKAGE = "megafsdp.training.pictures"
_SNIPPET = "window.vegaEmbed = vegaEmbed;"
# The first follows the reader's system.
_THEMES = ("auto", "light", "dark")


@dataclass(frozen=True, slots=True)
class Page:
    """What a page shows.

    Attributes:
        title: Heading and title of the window.
        lead: HTML below the heading.
        switches: HTML of the bar that stays in view, besides the theme's.
        sections: HTML of the page, in order; :func:`chart_card` places a chart.
        charts: All charts that the sections place.
        time_unit_s: Seconds in a unit of the time axis.
        time_unit: Its name.
    """

    title: str
    lead: str
    switches: str
    sections: Sequence[str]
    charts: Sequence[Chart]
    time_unit_s: float = 1.0
    time_unit: str = "s"


def require_library() -> None:
    """Check that the plotting library is installed.

    Raises:
        ConfigError: It is not.
    """
    if not is_installed("vl_convert"):
        raise ConfigError(
            expected(
                "the package vl-convert-python",
                "no such package",
                where="pictures of runs",
                hint="Run `pip install 'megafsdp[report]'`",
            )
        )


def write_page(page: Page, path: Path) -> int:
    """Write a page; return its size in bytes.

    Raises:
        ConfigError: The plotting library is not installed, or the file cannot be written.
    """
    require_library()
    content = _render(page).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            expected(
                "a file that can be written",
                f"{type(error).__name__}: {error}",
                where=f"'{path}'",
                hint="Name another file",
            )
        ) from error
    return len(content)


def _render(page: Page) -> str:
    import vl_convert

    bundle = vl_convert.javascript_bundle(_SNIPPET)
    data = {
        "charts": [chart.to_page() for chart in page.charts],
        "time_unit": page.time_unit,
        "time_unit_s": page.time_unit_s,
    }
    return string.Template(_resource("page.html")).substitute(
        title=html.escape(page.title),
        lead=page.lead,
        switches=page.switches + switch("theme", "theme", _THEMES, css_class="last"),
        sections="".join(page.sections),
        now=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        version=html.escape(versions()["megafsdp"]),
        styles=_resource("page.css"),
        data=_json(data),
        # No text of the library may end its script element.
        library=bundle.replace("</script", "<\\/script"),
        script=_resource("page.js"),
    )


def _resource(name: str) -> str:
    return importlib.resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def _json(data: object) -> str:
    """Return JSON that may stand in a script: no text in it can end the element."""
    # NaN is not JSON, so the page could not read it.
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def switch(name: str, title: str, choices: Sequence[str], *, css_class: str = "") -> str:
    """Return a group of buttons, of which the first is pressed; page.js acts on them."""
    buttons = "".join(
        f'<button type="button" data-{name}="{choice}"'
        f' aria-pressed="{str(not index).lower()}">{choice}</button>'
        for index, choice in enumerate(choices)
    )
    return f'<fieldset class="{css_class}"><legend>{title}</legend>{buttons}</fieldset>'


def chart_card(chart: Chart, *, heading: str = "", below: str = "") -> str:
    """Return the place of a chart, with heading and caption."""
    caption = f'<p class="caption">{html.escape(chart.caption)}</p>' if chart.caption else ""
    wide = " wide" if chart.is_wide else ""
    title = html.escape(heading or chart.title)
    return (
        f'<section class="card{wide}"><h3>{title}</h3>'
        f'<div class="chart" id="chart-{chart.key}" role="img" aria-label="{title}"></div>'
        f"{caption}{below}</section>\n"
    )


def table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()
) -> str:
    """Return a table of texts; the first column names the rows.

    Args:
        head: Titles of the columns.
        rows: Texts.
        numbers: Columns that are aligned to the right.
    """

    def cell(tag: str, index: int, text: str) -> str:
        css_class = ' class="number"' if index in numbers else ""
        return f"<{tag}{css_class}>{html.escape(text)}</{tag}>"

    titles = "".join(cell("th", index, text) for index, text in enumerate(head))
    lines = "".join(
        "<tr>"
        + "".join(cell("th" if i == 0 else "td", i, text) for i, text in enumerate(row))
        + "</tr>"
        for row in rows
    )
    top = f"<thead><tr>{titles}</tr></thead>" if any(head) else ""
    return f'<div class="scroll"><table>{top}<tbody>{lines}</tbody></table></div>\n'
