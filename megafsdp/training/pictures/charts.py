"""Charts as Vega-Lite specifications: plain dicts, drawn by page.js in the browser.

Colours are names of CSS variables, so light, dark and print are a matter of page.css alone. Words
that begin with @ are filled in by page.js: what the horizontal axis shows, and whether the vertical
one is logarithmic. Data are kept beside a specification, as columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megafsdp.training.pictures.curves import RESUMED, Curve, Mark, Metric

Spec = dict[str, Any]
Columns = Mapping[str, Sequence[object]]

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
NUM_COLOURS = 8
_ROW = re.compile(r"\brow\b")
# Points of a curve that are drawn as dots; more would hide the line.
_MAX_DOTS = 40
# Rows of symbols above each other, one for each run.
_MAX_MARK_ROWS = 4
_MARK_SHAPES = {"saved": "triangle-up", "skipped": "cross"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture of a page.

    Attributes:
        key: Its name in the page.
        title: Heading above it.
        spec: The specification, whose data names are keys of ``data``.
        data: Columns by the names of data.
        caption: Text below it.
        is_wide: Whether it takes the whole width of the page.
        height: Height in pixels.
    """

    key: str
    title: str
    spec: Spec
    data: Mapping[str, Columns]
    caption: str = ""
    is_wide: bool = False
    height: int = 240

    def to_page(self) -> dict[str, object]:
        """Return what page.js reads."""
        base = {"$schema": _SCHEMA, "width": "container", "height": self.height}
        return {"key": self.key, "spec": base | self.spec, "data": self.data}


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line at a value that was predicted.

    Attributes:
        run: Name of the run.
        value: The value.
        text: What a reader sees.
    """

    run: str
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class CurveParts:
    """What a chart of curves shows.

    Attributes:
        curves: One a run.
        marks: What happened at steps.
        levels: Predictions.
        runs: Names of all runs of the page, in the order of their colours.
        shows_saves: Whether saves and skipped steps are drawn, too; resumes always are.
    """

    curves: Sequence[Curve]
    marks: Sequence[Mark]
    runs: Sequence[str]
    levels: Sequence[Level] = ()
    shows_saves: bool = False


def colour_scale(names: Sequence[str]) -> Spec:
    """Return a scale from names to the colours of the page, which repeat after eight."""
    colours = [f"var(--c{index % NUM_COLOURS + 1})" for index in range(len(names))]
    return {"domain": list(names), "range": colours}


def tooltip(values: Mapping[str, str]) -> Spec:
    """Return what is shown under the pointer: expressions of ``row`` by their titles."""
    # The areas that find the nearest point hold the row one level deeper, and Vega-Lite looks for
    # texts at the wrong level: an expression can look at both.
    items = ", ".join(
        f"'{title}': {re.sub(_ROW, '(datum.datum || datum)', text)}"
        for title, text in values.items()
    )
    return {"value": {"expr": f"{{{items}}}"}}


def curve_chart(
    metric: Metric, parts: CurveParts, *, caption: str = "", is_wide: bool = False
) -> Chart:
    """Return the chart of one metric over the axis that the page's switch selects."""
    y_title = metric.unit
    divided = f"datum.value / {metric.scale:g}" if metric.scale != 1 else "datum.value"
    colour = {"field": "run", "type": "nominal", "scale": colour_scale(parts.runs), "legend": None}
    x = _switched_axis()
    scale = {"type": "@y_scale" if metric.may_be_log else "linear", "zero": metric.is_from_zero}
    if metric.may_be_log:
        # A logarithmic axis has no 0, and its round numbers are far apart.
        scale |= {"zero": "@y_zero" if metric.is_from_zero else "@no", "nice": "@y_nice"}
    y = {
        "field": "shown",
        "type": "quantitative",
        "scale": scale,
        "title": y_title or None,
        # The format of small numbers writes 0 as 0.0e+0.
        "axis": {"labelExpr": f"datum.value ? format(datum.value, '{_axis_format(metric)}') : '0'"},
    }
    curve_layers = _curve_layers(metric, parts.curves, x, y, colour)
    marks = _shown_marks(parts)
    layers = [*_mark_layers(x, colour, marks, parts.runs), *curve_layers]
    data = {"curves": _curve_columns(parts.curves)}
    if marks:
        data["marks"] = _mark_columns(marks)
    if parts.levels:
        layers.insert(0, _level_layer(divided, y, colour))
        data["levels"] = {
            "run": [level.run for level in parts.levels],
            "value": [level.value for level in parts.levels],
            "text": [level.text for level in parts.levels],
        }
    return Chart(
        metric.key,
        metric.title,
        {"layer": layers, "resolve": {"scale": {"y": "shared"}}},
        data,
        caption=caption or metric.caption,
        is_wide=is_wide,
    )


def _switched_axis() -> Spec:
    return {
        "field": "@x",
        "type": "quantitative",
        "title": "@x_title",
        "scale": {"domain": "@x_domain", "nice": False, "padding": 8},
        "axis": {"labelExpr": "@x_label"},
    }


def _axis_format(metric: Metric) -> str:
    return {"lr": ".1e", "tokens_per_s": "~s", "loss_scale": "~s"}.get(metric.key, "~g")


def _curve_layers(
    metric: Metric, curves: Sequence[Curve], x: Spec, y: Spec, colour: Spec
) -> list[Spec]:
    """Return the line, and the points that show their values under the pointer."""
    is_sparse = all(len(curve.points) <= _MAX_DOTS for curve in curves)
    calculated = [
        {
            "calculate": f"datum.value == null ? null : datum.value / {metric.scale:g}",
            "as": "shown",
        },
        {"calculate": f"format(datum.shown, '{metric.format}')", "as": "text"},
    ]
    x_known: list[Spec] = [{"filter": "isValid(datum['@x'])"}]
    valid: list[Spec] = [{"filter": "isValid(datum.shown)"}]
    line = {
        "name": "line",
        "data": {"name": "curves"},
        "transform": calculated[:1] + x_known,
        "mark": {
            "type": "line",
            "invalid": "break-paths-show-path-domains",
            "strokeWidth": 1.8 if is_sparse else 1.2,
        },
        "encoding": {"x": x, "y": y, "color": colour, "order": {"field": "step"}},
    }
    hover = {
        "name": f"hover_{metric.key}",
        "select": {"type": "point", "on": "pointerover", "clear": "pointerout", "nearest": True},
    }
    is_hovered = {"param": hover["name"], "empty": False}
    points = {
        "name": "points",
        "data": {"name": "curves"},
        "transform": calculated + x_known + valid,
        "params": [hover],
        "mark": {"type": "point", "filled": True},
        "encoding": {
            "x": x,
            "y": y,
            "color": colour,
            "opacity": {"condition": is_hovered | {"value": 1}, "value": 0.9 * is_sparse},
            "size": {"condition": is_hovered | {"value": 90}, "value": 30},
            "tooltip": tooltip(
                {
                    "run": "row.run",
                    metric.title.lower(): "row.text",
                    "step": "format(row.step, ',')",
                    "tokens": "isValid(row.tokens) ? format(row.tokens, ',') : '-'",
                    "time": "isValid(row.clock) ? row.clock : '-'",
                }
            ),
        },
    }
    return [line, points]


def _mark_layers(x: Spec, colour: Spec, marks: Sequence[Mark], runs: Sequence[str]) -> list[Spec]:
    """Return a layer of lines for resumes and one of symbols for the rest, if there are any."""
    kinds = {mark.kind for mark in marks}
    # Runs often save at the same steps.
    row = f"indexof({json.dumps(list(runs))}, datum.run) % {_MAX_MARK_ROWS}"
    shown = tooltip({"run": "row.run", "event": "row.text"})
    known: list[Spec] = [{"filter": "isValid(datum['@x'])"}]
    resumed = {
        "name": "resumes",
        "data": {"name": "marks"},
        "transform": [{"filter": "datum.kind == 'resumed'"}, *known],
        "mark": {"type": "rule", "strokeDash": [5, 4], "strokeWidth": 1.5, "opacity": 0.75},
        "encoding": {"x": x, "color": colour, "tooltip": shown},
    }
    shapes = {"domain": list(_MARK_SHAPES), "range": list(_MARK_SHAPES.values())}
    at_bottom = {
        "name": "saves",
        "data": {"name": "marks"},
        "transform": [{"filter": "datum.kind != 'resumed'"}, *known],
        "mark": {"type": "point", "filled": True, "size": 55, "opacity": 0.9},
        "encoding": {
            "x": x,
            "y": {"value": {"expr": f"height - 6 - 10 * ({row})"}},
            "shape": {
                "field": "kind",
                "type": "nominal",
                "scale": shapes,
                "legend": None,
            },
            "color": {"condition": {"test": "datum.kind == 'skipped'", "value": "var(--bad)"}}
            | colour,
            "tooltip": shown,
        },
    }
    has_symbols = any(kind in _MARK_SHAPES for kind in kinds)
    return [resumed] * (RESUMED in kinds) + [at_bottom] * has_symbols


def _level_layer(divided: str, y: Spec, colour: Spec) -> Spec:
    return {
        "name": "levels",
        "data": {"name": "levels"},
        "transform": [{"calculate": divided, "as": "shown"}],
        "mark": {"type": "rule", "strokeDash": [2, 3], "strokeWidth": 2},
        "encoding": {
            "y": y,
            "color": colour,
            "tooltip": tooltip({"run": "row.run", "predicted": "row.text"}),
        },
    }


def _curve_columns(curves: Sequence[Curve]) -> Columns:
    rows = [(curve.run, point) for curve in curves for point in curve.points]
    return {
        "run": [run for run, _ in rows],
        "step": [point.step for _, point in rows],
        "tokens": [point.tokens for _, point in rows],
        "elapsed_s": [point.elapsed_s for _, point in rows],
        "value": [point.value for _, point in rows],
    }


def _shown_marks(parts: CurveParts) -> list[Mark]:
    shown = {curve.run for curve in parts.curves}
    return [
        mark
        for mark in parts.marks
        if mark.run in shown and (parts.shows_saves or mark.kind not in _MARK_SHAPES)
    ]


def _mark_columns(marks: Sequence[Mark]) -> Columns:
    return {
        "run": [mark.run for mark in marks],
        "kind": [mark.kind for mark in marks],
        "step": [mark.step for mark in marks],
        "tokens": [mark.tokens for mark in marks],
        "elapsed_s": [mark.elapsed_s for mark in marks],
        "text": [mark.text for mark in marks],
    }
