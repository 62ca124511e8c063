"""The page of a dry run: does it fit, memory and units over one step, layouts of flat buffers."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path

from megafsdp.device.memory import Category
from megafsdp.fsdp.estimate.meta_engine import PlannedGroup
from megafsdp.fsdp.estimate.step_recorder import OPTIMIZER_STEP
from megafsdp.training.dry_run.dry_run import DistinctUnit, DryRunReport
from megafsdp.training.pictures.charts import Chart, Columns, Spec, tooltip
from megafsdp.training.pictures.layout_picture import PADDING, Rectangle, rectangles_of
from megafsdp.training.pictures.page import Page, chart_card, table, write_page
from megafsdp.training.pictures.step_picture import COMPUTE, LANES, StepPicture, step_picture

_GB = 1e9
# Memory of GPUs as sold, in units of 10**9 bytes; the page's first line is about the typical one.
_CAPACITIES_GB = (24, 40, 48, 80, 96, 141, 192, 288)
_TYPICAL_GB = 80
_NUM_COLOURS = 12
# Most names listed below a layout; the pointer shows the rest.
_MAX_KEYS = 24
# Bars have names if there are at most this many computations.
_MAX_NAMED_BARS = 14
# From bottom to top: lasting bytes below those that come and go.
_CATEGORY_COLOURS = {
    Category.MAIN_WEIGHT: "t1",
    Category.OPTIMIZER_STATE: "t5",
    Category.COMPUTE_WEIGHT: "t10",
    Category.UNSHARDED: "t2",
    Category.MAIN_GRAD: "t3",
    Category.PARTIAL_GRAD: "t6",
}
# Pixels beside both charts of a step, so that they align: room for the longest label, which is cut
# in wider fonts, and for a tick.
_LANE_NAMES = {"labelLimit": 84, "minExtent": 94, "maxExtent": 94}


def write_dry_run(report: DryRunReport, path: Path) -> int:
    """Write the page of a dry run; return its size in bytes.

    Raises:
        ConfigError: The plotting library is not installed, or the file cannot be written.
    """
    return write_page(dry_run_page(report), path)


def dry_run_page(report: DryRunReport) -> Page:
    """Return the page of a dry run."""
    picture = step_picture(report.footprint.moments)
    memory, timeline = memory_chart(picture), timeline_chart(picture, report.units)
    layouts = list(_layout_cards(report))
    first, second = report.head_lines()
    sections = [
        _verdict(report),
        '<div class="grid">',
        chart_card(memory, below=_memory_key(picture)),
        chart_card(timeline, below=_key([*_unit_colours(report.units).items()])),
        "</div><h2>Layout of the flat buffers</h2>",
        "<p>A row is one shard, a column one element of it; rows of tensors are never cut. "
        "Stripes are padding.</p>",
        f'<div class="grid">{"".join(card for _, card in layouts)}</div>',
        f'<div class="grid">{_memory_table(report)}{_traffic_table(report)}</div>',
        '<p class="caption">GB are 10<sup>9</sup> bytes. Not counted:'
        f" {html.escape(report.left_out)}.</p>",
    ]
    charts = [memory, timeline, *(chart for chart, _ in layouts)]
    lead = f'<p class="lead">{html.escape(first)}</p><p class="lead">{html.escape(second)}</p>'
    title = f"{report.config.model.name} on {report.num_ranks:,} ranks"
    return Page(title, lead, "", sections, charts)


def left_in(capacity_gb: float, nbytes: int) -> tuple[bool, str]:
    """Return whether bytes fit in a memory, and a sentence on that."""
    left_gb = capacity_gb - nbytes / _GB
    digits = 0 if abs(left_gb) >= 10 else 1
    if left_gb >= 0:
        return True, f"yes, with {left_gb:,.{digits}f} GB left"
    return False, f"no, {-left_gb:,.{digits}f} GB are missing"


def _verdict(report: DryRunReport) -> str:
    nbytes = report.footprint.peak_total
    fits, said = left_in(_TYPICAL_GB, nbytes)
    rows = [[f"{size} GB", left_in(size, nbytes)[1]] for size in _CAPACITIES_GB]
    return (
        f'<p class="verdict">Fits in {_TYPICAL_GB} GB: '
        f'<span class="{"yes" if fits else "no"}">{said}</span></p>'
        f"<p>At their peak the flat buffers of a rank take {_size(nbytes)}. What is left is for"
        " activations and buffers of the backend, which a dry run does not count.</p>"
        f"<details><summary>Other memories</summary>{table(['memory', 'fits'], rows)}</details>"
    )


def memory_chart(picture: StepPicture) -> Chart:
    """Return memory over the step, stacked by category."""
    categories = _present(picture)
    names = [category.value for category in categories]
    starts = [level.start for level in picture.levels]
    order = list(Category)
    columns: dict[str, Sequence[object]] = {
        "start": [*starts, picture.length],
        "during": [*(level.during for level in picture.levels), "end of the step"],
    }
    last = picture.levels[-1].live if picture.levels else ()
    for category in categories:
        index = order.index(category)
        live = [level.live[index] for level in picture.levels]
        columns[category.value] = [*live, *last[index : index + 1]]
    scale, unit = _scale(max(map(sum, (level.live for level in picture.levels)), default=0))
    columns["total"] = [*(sum(level.live) for level in picture.levels), sum(last)]
    colours = [f"var(--{_CATEGORY_COLOURS[category]})" for category in categories]
    x = _step_axis(picture)
    area = {
        "name": "areas",
        "data": {"name": "levels"},
        "transform": [
            {"fold": names, "as": ["category", "nbytes"]},
            {"calculate": f"datum.nbytes / {scale:g}", "as": "shown"},
            {"calculate": f"indexof({names}, datum.category)", "as": "place"},
        ],
        "mark": {"type": "area", "interpolate": "step-after"},
        "encoding": {
            "x": x,
            "y": {
                "field": "shown",
                "type": "quantitative",
                "title": None,
                "stack": "zero",
                "axis": _LANE_NAMES | {"labelExpr": f"datum.label + ' {unit}'"},
            },
            "color": {
                "field": "category",
                "type": "nominal",
                "scale": {"domain": names, "range": colours},
                "legend": None,
            },
            "order": {"field": "place", "type": "quantitative"},
        },
    }
    texts = {"during": "row.during"}
    texts |= {name: f"format(row['{name}'] / {scale:g}, ',.3f') + ' {unit}'" for name in names}
    texts["together"] = f"format(row.total / {scale:g}, ',.3f') + ' {unit}'"
    layers = [area, _hover_point(x, texts, scale), *_cut_layer(picture)]
    data = {"levels": columns} | _cut_data(picture)
    caption = "Flat buffers of one rank. Forwards are one wide, backwards two: there are no times."
    spec = {"layer": layers}
    return Chart("memory", "Memory over one step", spec, data, caption, is_wide=True, height=280)


def _present(picture: StepPicture) -> list[Category]:
    """Return the categories that have bytes at some time, as they are stacked."""
    columns = zip(*(level.live for level in picture.levels), strict=True)
    found = {c for c, live in zip(Category, columns, strict=False) if any(live)}
    return [category for category in _CATEGORY_COLOURS if category in found]


def _hover_point(x: Spec, texts: dict[str, str], scale: float) -> Spec:
    """Return a layer that shows all categories at the place of the pointer."""
    hover = {
        "name": "at",
        "select": {
            "type": "point",
            "on": "pointerover",
            "clear": "pointerout",
            "nearest": True,
            "encodings": ["x"],
        },
    }
    return {
        "name": "hover",
        "data": {"name": "levels"},
        "params": [hover],
        # A point beyond the edge would make this chart narrower than the one below.
        "mark": {"type": "point", "filled": True, "color": "var(--ink)", "size": 40, "clip": True},
        "transform": [{"calculate": f"datum.total / {scale:g}", "as": "shown"}],
        "encoding": {
            "x": x,
            "y": {"field": "shown", "type": "quantitative"},
            "opacity": {"condition": {"param": "at", "empty": False, "value": 1}, "value": 0},
            "tooltip": tooltip(texts),
        },
    }


def _step_axis(picture: StepPicture) -> Spec:
    return {
        "field": "start",
        "type": "quantitative",
        "title": "one step: forwards, backwards, optimizer",
        "scale": {"domain": [0, picture.length], "nice": False},
        "axis": {"labels": False, "ticks": False, "grid": False},
    }


def _cut_layer(picture: StepPicture) -> list[Spec]:
    """Return a line where microbatches are left out, if any are."""
    if picture.skipped_at is None:
        return []
    return [
        {
            "name": "cut",
            "data": {"name": "cut"},
            "mark": {"type": "rule", "strokeDash": [4, 4], "strokeWidth": 2},
            "encoding": {
                "x": {"field": "start", "type": "quantitative"},
                "tooltip": tooltip({"here": "row.text"}),
            },
        }
    ]


def _cut_data(picture: StepPicture) -> dict[str, Columns]:
    if picture.skipped_at is None:
        return {}
    text = "microbatches between the first and the last, which are like the first"
    return {"cut": {"start": [picture.skipped_at], "text": [text]}}


def timeline_chart(picture: StepPicture, units: Sequence[DistinctUnit]) -> Chart:
    """Return lanes of what is gathered, computed and reduced, a bar for each unit."""
    kinds = _unit_colours(units)
    kind_of = {member: unit.name for unit in units for member in unit.members}
    bars = sorted(picture.bars, key=lambda bar: (LANES.index(bar.lane), bar.start))
    lanes = [lane for lane in LANES if any(bar.lane == lane for bar in bars)]
    data: dict[str, Columns] = {
        "bars": {
            "lane": [bar.lane for bar in bars],
            "kind": [bar.kind.replace("_", "-") for bar in bars],
            "unit": [bar.unit for bar in bars],
            "colour": [kind_of.get(bar.unit, OPTIMIZER_STEP) for bar in bars],
            "start": [round(bar.start, 3) for bar in bars],
            "stop": [round(bar.stop, 3) for bar in bars],
        }
    }
    y = {
        "field": "lane",
        "type": "nominal",
        "sort": lanes,
        "title": None,
        "axis": {"grid": False} | _LANE_NAMES,
        "scale": {"paddingInner": 0.25, "paddingOuter": 0.15},
    }
    has_names = sum(bar.lane == COMPUTE for bar in bars) <= _MAX_NAMED_BARS
    bar = {
        "name": "bars",
        "data": {"name": "bars"},
        "mark": {
            "type": "bar",
            "stroke": "var(--card)",
            # Edges would hide the hundreds of bars of a large model.
            "strokeWidth": 0.8 if has_names else 0.15,
        },
        "encoding": {
            "x": _step_axis(picture),
            "x2": {"field": "stop"},
            "y": y,
            "color": {
                "field": "colour",
                "type": "nominal",
                "scale": {"domain": list(kinds), "range": list(kinds.values())},
                "legend": None,
            },
            "opacity": {
                "condition": {"test": "datum.kind == 'forward'", "value": 0.62},
                "value": 1,
            },
            "tooltip": tooltip({"unit": "row.unit", "does": "row.kind"}),
        },
    }
    layers = [bar]
    if has_names:
        layers.append(_bar_names(y))
    data |= _cut_data(picture)
    caption = (
        "A gather stands beside what is computed while it is under way, a reduction beside the next"
        " backward. Forwards are fainter than backwards. The order is the engine's, widths are no"
        " times."
    )
    spec = {"layer": [*layers, *_cut_layer(picture)]}
    height = 44 * len(lanes) + 10
    return Chart(
        "timeline", "Units over one step", spec, data, caption, is_wide=True, height=height
    )


def _bar_names(y: Spec) -> Spec:
    return {
        "name": "names",
        "data": {"name": "bars"},
        "transform": [
            {"filter": f"datum.lane == '{COMPUTE}'"},
            {"calculate": "(datum.start + datum.stop) / 2", "as": "middle"},
            {"calculate": "peek(split(datum.unit, '.'))", "as": "short"},
        ],
        "mark": {"type": "text", "fontSize": 10, "limit": 56},
        "encoding": {
            "color": {
                "condition": {"test": "datum.kind == 'forward'", "value": "var(--ink)"},
                "value": "var(--paper)",
            },
            "x": {"field": "middle", "type": "quantitative"},
            "y": y,
            "text": {"field": "short"},
        },
    }


def _unit_colours(units: Sequence[DistinctUnit]) -> dict[str, str]:
    """Return a colour for each kind of unit and for the optimizer's step."""
    names = [*(unit.name for unit in units), OPTIMIZER_STEP]
    return {name: f"var(--t{i % _NUM_COLOURS + 1})" for i, name in enumerate(names)}


def _layout_cards(report: DryRunReport) -> Iterator[tuple[Chart, str]]:
    """Yield the chart of each distinct group and the card around it."""
    for number, unit in enumerate(report.units):
        for index, group in enumerate(unit.groups):
            chart = layout_chart(f"layout-{number}-{index}", group)
            times = f"{unit.count:,} x " if unit.count > 1 else ""
            heading = f"{times}{unit.name}" + (", experts" if group.is_expert else "")
            tensors = dict.fromkeys(slot.spec.name for slot in group.layout.slots)
            keys = [(name, _tensor_colour(i)) for i, name in enumerate(tensors)]
            yield chart, chart_card(chart, heading=heading, below=_key(keys, has_padding=True))


def layout_chart(key: str, group: PlannedGroup) -> Chart:
    """Return the layout of a group: shards by elements, a colour for each tensor."""
    layout = group.layout
    rectangles = rectangles_of(layout)
    names = list(dict.fromkeys(slot.spec.name for slot in layout.slots))
    colours = [_tensor_colour(index) for index in range(len(names))]
    parts = [sub.local_offset for sub in layout.sub_buffers[1:]]
    what = "shard" if group.is_sharded else "replica"
    rect = {
        "name": "rectangles",
        "data": {"name": "rectangles"},
        "mark": {"type": "rect", "stroke": "var(--card)", "strokeWidth": 0.5},
        "encoding": {
            "x": {
                "field": "start",
                "type": "quantitative",
                "title": f"element of a {what}",
                "scale": {"domain": [0, layout.shard_numel], "nice": False},
                "axis": {"labelExpr": "format(datum.value, '~s')", "grid": False},
            },
            "x2": {"field": "stop"},
            "y": {
                "field": "first_shard",
                "type": "quantitative",
                "title": what,
                "scale": {"domain": [0, layout.num_shards], "reverse": True, "nice": False},
                "axis": {"grid": False, "tickMinStep": 1, "labelExpr": "format(datum.value, ',')"},
            },
            "y2": {"field": "stop_shard"},
            "color": {
                "field": "tensor",
                "type": "nominal",
                "scale": {"domain": [*names, PADDING], "range": [*colours, "url(#hatch)"]},
                "legend": None,
            },
            "tooltip": tooltip(
                {
                    "tensor": "row.tensor",
                    "shape": "row.shape",
                    "elements": "format(row.numel, ',')",
                    "shards": "row.shards",
                    "of each": "format(row.stop - row.start, ',')",
                }
            ),
        },
    }
    data: dict[str, Columns] = {"rectangles": _rectangle_columns(rectangles)}
    layers: list[Spec] = [rect]
    if parts:
        data["cuts"] = {"start": parts}
        layers.append(
            {
                "name": "cuts",
                "data": {"name": "cuts"},
                "mark": {"type": "rule", "color": "var(--ink)", "strokeWidth": 1.5},
                "encoding": {"x": {"field": "start", "type": "quantitative"}},
            }
        )
    height = min(300, max(70, 26 * layout.num_shards))
    return Chart(key, key, {"layer": layers}, data, _layout_caption(group), height=height)


def _layout_caption(group: PlannedGroup) -> str:
    layout = group.layout
    share = 100 * layout.padding_numel / max(layout.gathered_numel - layout.padding_numel, 1)
    parts = len(layout.sub_buffers)
    cut = f" in {parts} sub-buffers (lines)" if parts > 1 else ""
    dtype = str(group.dtypes.compute).removeprefix("torch.")
    where = " Main weights and states are on the host." if group.is_offloaded else ""
    return (
        f"{len(layout.slots):,} tensors in {dtype}, {layout.num_shards:,} shards of"
        f" {layout.shard_numel:,} elements{cut}; padding {share:.2f}\u00a0%.{where}"
    )


def _rectangle_columns(rectangles: Sequence[Rectangle]) -> Columns:
    return {
        "tensor": [r.tensor for r in rectangles],
        "shape": [r.shape for r in rectangles],
        "numel": [r.numel for r in rectangles],
        "first_shard": [r.first_shard for r in rectangles],
        "stop_shard": [r.stop_shard for r in rectangles],
        "start": [r.start for r in rectangles],
        "stop": [r.stop for r in rectangles],
        "shards": [_range_text(r.first_shard, r.stop_shard) for r in rectangles],
    }


def _range_text(first: int, stop: int) -> str:
    return f"{first:,}" if stop == first + 1 else f"{first:,} to {stop - 1:,}"


def _tensor_colour(index: int) -> str:
    return f"var(--t{index % _NUM_COLOURS + 1})"


def _key(items: Sequence[tuple[str, str]], *, has_padding: bool = False) -> str:
    """Return a legend: a swatch and a name for each of the first items."""
    lines = [
        f'<li><span class="swatch" style="background:{colour}"></span>{html.escape(name)}</li>'
        for name, colour in items[:_MAX_KEYS]
    ]
    if has_padding:
        box = '<svg width="12" height="12"><rect width="12" height="12" fill="url(#hatch)"/></svg>'
        lines.append(f"<li>{box}padding</li>")
    if len(items) > _MAX_KEYS:
        lines.append(f"<li>and {len(items) - _MAX_KEYS} more</li>")
    return f'<ul class="key">{"".join(lines)}</ul>'


def _memory_key(picture: StepPicture) -> str:
    return _key([(c.value, f"var(--{_CATEGORY_COLOURS[c]})") for c in _present(picture)])


def _memory_table(report: DryRunReport) -> str:
    resting, peak = report.footprint.resting, report.footprint.peak
    rows = [(c.value, resting[c], peak[c]) for c in Category if resting[c] or peak[c]]
    rows.append(("together", sum(resting.values()), report.footprint.peak_total))
    if report.host.total:
        rows.append(("on the host, at most", report.host.total, report.host.total))
    cells = [[name, _size(at_rest), _size(top)] for name, at_rest, top in rows]
    head = ["category", "between steps", "peak"]
    return f"<section><h2>Memory of a rank</h2>{table(head, cells, numbers=[1, 2])}</section>"


def _traffic_table(report: DryRunReport) -> str:
    rows = [
        [f"{kind} over {axis}", f"{item.calls:,}", _size(item.nbytes)]
        for (axis, kind), item in report.footprint.traffic.items()
    ]
    if not rows:
        return ""
    head = ["collective", "calls", "full size"]
    return f"<section><h2>Collectives of a step</h2>{table(head, rows, numbers=[1, 2])}</section>"


def _scale(nbytes: int) -> tuple[float, str]:
    """Return the largest unit of bytes that is not above a number, and its name."""
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    return next(((scale, unit) for scale, unit in units if nbytes >= scale), (1.0, "B"))


def _size(nbytes: int) -> str:
    scale, unit = _scale(nbytes)
    return f"{nbytes / scale:,.2f} {unit}" if scale > 1 else f"{nbytes} {unit}"
