"""The report of one run or of several: curves over each other, what differs, texts, machines."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import config_from_dict
from megafsdp.training.dry_run.dry_run import dry_run
from megafsdp.training.metrics.events import Event
from megafsdp.training.metrics.metrics import clock
from megafsdp.training.metrics.tracker import EVALUATION_KEY
from megafsdp.training.pictures.charts import (
    NUM_COLOURS,
    Chart,
    CurveParts,
    Level,
    curve_chart,
)
from megafsdp.training.pictures.curves import (
    MAX_POINTS,
    METRICS,
    Curve,
    Mark,
    curves_of,
    marks_of,
)
from megafsdp.training.pictures.page import Page, chart_card, switch, table, write_page
from megafsdp.training.pictures.run_folder import RunFolder, read_runs

_LOGGER = logging.getLogger("megafsdp.training")
_GB = 1e9
_LOSS, _MEMORY = "loss", "memory_nbytes"
# Other names for the same run.
_NOT_COMPARED = ("run.directory", "run.name")
_ABSENT = "-"
_TIME_UNITS = ((2 * 86400, 86400, "days"), (2 * 3600, 3600, "h"), (300, 60, "min"), (0, 1, "s"))
# How each kind of mark looks and what it stands for.
_KEY_OF_MARKS = {
    "resumed": (
        '<svg width="16" height="14"><path d="M8 0V14" stroke="var(--soft)" stroke-width="1.5"'
        ' stroke-dasharray="4 3"/></svg>resumed'
    ),
    "saved": '<svg width="12" height="12"><path d="M6 1L11 11H1Z" fill="var(--soft)"/></svg>saved',
    "skipped": (
        '<svg width="12" height="12"><path d="M4 1h4v3h3v4H8v3H4V8H1V4h3Z" fill="var(--bad)"/>'
        "</svg>skipped step"
    ),
}


def write_report(directories: Sequence[str | Path], path: Path | None = None) -> tuple[Path, int]:
    """Write the report of runs as one HTML file; local.

    Args:
        directories: The folders of the runs.
        path: The file; None for report.html in the first folder.

    Returns:
        The file and its size in bytes.

    Raises:
        DataError: A folder is not that of a run.
        ConfigError: The plotting library is not installed, or the file cannot be written.
    """
    runs = read_runs(directories)
    path = runs[0].directory / "report.html" if path is None else path
    return path, write_page(report_page(runs), path)


def report_page(runs: Sequence[RunFolder]) -> Page:
    """Return the page of runs."""
    marks = [mark for run in runs for mark in marks_of(run)]
    levels, level_notes = _predicted_memory(runs)
    charts, thinned = _charts(runs, marks, levels)
    longest_s = max((row.get("elapsed_s") or 0.0 for run in runs for row in run.steps), default=0.0)
    _, unit_s, unit = next(item for item in _TIME_UNITS if longest_s >= item[0])
    key = _mark_key(marks)
    cards = "".join(chart_card(chart, below=key * (chart.key == _LOSS)) for chart in charts)
    sections = [
        _notes(runs),
        _summary(runs),
        f'<div class="grid">{cards}</div>' + _chart_notes(runs, thinned, level_notes),
        _differences(runs),
        _texts(runs),
        _machines(runs),
        _events(marks),
        _configurations(runs),
    ]
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return Page(title, _lead(runs), _switches(runs), sections, charts, unit_s, unit)


def _charts(
    runs: Sequence[RunFolder], marks: Sequence[Mark], levels: Sequence[Level]
) -> tuple[list[Chart], list[Curve]]:
    """Return the charts of all metrics that some run has, and the curves that were thinned."""
    charts, thinned = [], []
    names = [run.name for run in runs]
    found = [(metric, curves) for metric in METRICS if (curves := curves_of(runs, metric))]
    for metric, curves in found:
        is_memory = metric.key == _MEMORY
        parts = CurveParts(
            curves,
            marks,
            names,
            levels=[level for level in levels if is_memory],
            shows_saves=metric.key == _LOSS,
        )
        missing = [name for name in names if name not in {curve.run for curve in curves}]
        captions = [metric.caption] if metric.caption else []
        captions += [_memory_caption(runs, levels)] if is_memory else []
        captions += [f"Not recorded by {', '.join(missing)}."] if missing else []
        # A wide loss leaves an even number of charts for two columns.
        is_wide = metric.key == _LOSS and len(found) % 2 == 1
        charts.append(curve_chart(metric, parts, caption=" ".join(captions), is_wide=is_wide))
        thinned += [curve for curve in curves if curve.is_thinned]
    return charts, thinned


def _memory_caption(runs: Sequence[RunFolder], levels: Sequence[Level]) -> str:
    kinds = {run.last_start.get("machine", {}).get("device") for run in runs}
    parts = []
    if "cpu" in kinds:
        parts.append("On CPU the whole process, libraries included.")
    if "cuda" in kinds:
        parts.append("On a GPU the most that was allocated.")
    if levels:
        parts.append("Dotted: flat buffers at their peak as a dry run predicts, no activations.")
    return " ".join(parts)


def _mark_key(marks: Sequence[Mark]) -> str:
    kinds = {mark.kind for mark in marks}
    items = "".join(f"<li>{text}</li>" for kind, text in _KEY_OF_MARKS.items() if kind in kinds)
    return f'<ul class="key">{items}</ul>' if items else ""


def _predicted_memory(runs: Sequence[RunFolder]) -> tuple[list[Level], list[str]]:
    """Return a dry run's prediction of each run's memory, and the reasons where it has none."""
    levels, notes = [], []
    for run in runs:
        num_ranks = run.last_start.get("num_ranks")
        if not run.config or not isinstance(num_ranks, int):
            continue
        try:
            config = config_from_dict(run.config)
            # Predict for the run's device, which this machine need not have.
            device = run.last_start.get("machine", {}).get("device", config.run.device)
            config = replace(config, run=replace(config.run, device=device))
            nbytes = dry_run(config, num_ranks).footprint.peak_total
        except (ConfigError, NotImplementedError, RuntimeError) as error:
            _LOGGER.info("run '%s': no dry run of its memory: %s", run.directory, error)
            notes.append(f"No dry run of {run.name}: {error}")
            continue
        text = f"flat buffers at their peak: {nbytes / _GB:,.3f} GB"
        levels.append(Level(run.name, nbytes, text))
    return levels, notes


def _lead(runs: Sequence[RunFolder]) -> str:
    if len(runs) > 1:
        return f'<p class="lead">{html.escape(", ".join(run.name for run in runs))}</p>'
    (run,) = runs
    start, config = run.last_start, run.config
    # A run of a saved model names its folder, and also the preset that it did not take.
    model = _value(config, "model.from_hf") or _value(config, "model.preset")
    parts = [Path(str(model)).name] if model else []
    if isinstance(count := start.get("num_parameters"), int):
        active = start.get("num_active_parameters", count)
        parts.append(f"{count:,} parameters" + (f" ({active:,} active)" if active != count else ""))
    if "num_ranks" in start:
        device = start.get("machine", {}).get("device_name") or start["machine"].get("device")
        parts.append(f"{start['num_ranks']:,} rank(s) on {device}")
    if strategy := _value(config, "parallel.strategy"):
        parts.append(str(strategy))
    if dtype := _value(config, "precision.param_dtype"):
        parts.append(f"compute in {dtype}")
    return f'<p class="lead">{html.escape(", ".join(parts))}</p>'


def _switches(runs: Sequence[RunFolder]) -> str:
    legend = ""
    if len(runs) > 1:
        chips = "".join(
            f'<button type="button" class="run" data-run="{html.escape(run.name)}"'
            f' aria-pressed="true"><span class="swatch" style="background:'
            f'var(--c{index % NUM_COLOURS + 1})"></span>{html.escape(run.name)}</button>'
            for index, run in enumerate(runs)
        )
        legend = f'<fieldset class="legend">{chips}</fieldset>'
    axes = switch("axis", "over", ("step", "tokens", "time"))
    return legend + axes + switch("scale", "loss and norm", ("linear", "log"))


def _notes(runs: Sequence[RunFolder]) -> str:
    """Return what could not be read, on top of the page."""
    return "".join(
        f'<p class="note"><b>{html.escape(run.name)}</b>: {html.escape(note)}</p>'
        for run in runs
        for note in run.notes
    )


def _summary(runs: Sequence[RunFolder]) -> str:
    columns = [_summary_of(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{name}</dt><dd>{value} <small>{unit}</small></dd></div>"
            for name, (value, unit) in columns[0].items()
        )
        return f'<dl class="tiles">{tiles}</dl>'
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        found = [column.get(name, (_ABSENT, "")) for column in columns]
        units = {unit for value, unit in found if value != _ABSENT}
        if len(units) == 1 and (unit := units.pop()):
            # The unit stands beside the name, where a narrow window has room for it.
            rows.append([f"{name}, {unit}", *(value for value, _ in found)])
        else:
            rows.append([name, *(f"{value} {unit}".rstrip() for value, unit in found)])
    return table(["", *(run.name for run in runs)], rows, numbers=range(1, len(runs) + 1))


def _summary_of(run: RunFolder) -> dict[str, tuple[str, str]]:
    """Return the last values of a run and their units by their names."""
    last = run.steps[-1] if run.steps else {}
    evaluation = run.evaluations[-1] if run.evaluations else {}
    num_steps = run.last_start.get("num_steps")
    of = f"of {num_steps:,}" if isinstance(num_steps, int) else ""
    speeds = sorted(row["tokens_per_s"] for row in run.steps if row.get("tokens_per_s"))
    peak = max((row[_MEMORY] for row in run.steps if row.get(_MEMORY)), default=None)
    # The median: the first step, which compiles and allocates, does not count for more.
    speed = speeds[len(speeds) // 2] if speeds else None
    values: list[tuple[str, object, Callable[[Any], str], str]] = [
        ("step", last.get("step"), "{:,}".format, of),
        ("tokens", last.get("consumed_tokens"), "{:,}".format, ""),
        ("time", last.get("elapsed_s"), clock, ""),
        ("training loss", last.get("loss"), "{:.4f}".format, "nats a token"),
        ("validation loss", evaluation.get(EVALUATION_KEY), "{:.4f}".format, "nats a token"),
        ("validation", evaluation.get("bits_per_byte"), "{:.4f}".format, "bits a byte"),
        ("speed", speed, "{:,.0f}".format, "tokens a second"),
        ("MFU", last.get("mfu"), "{:.1%}".format, ""),
        ("memory", peak, lambda nbytes: f"{nbytes / _GB:,.2f}", "GB on rank 0"),
        ("skipped steps", last.get("num_skipped") or None, "{:,}".format, ""),
    ]
    return {name: (text(v), unit) for name, v, text, unit in values if v is not None}


def _chart_notes(runs: Sequence[RunFolder], thinned: Sequence[Curve], notes: Sequence[str]) -> str:
    lines = [*notes]
    if thinned:
        most = max(curve.num_rows for curve in thinned)
        lines.append(
            f"A chart has at most about {MAX_POINTS:,} points: of up to {most:,} rows the least"
            " and the largest of neighbouring values are drawn."
        )
    timeless = [run.name for run in runs if run.steps and "elapsed_s" not in run.steps[-1]]
    if timeless:
        lines.append(f"No times were recorded by {', '.join(timeless)}: not drawn over time.")
    return "".join(f'<p class="caption">{html.escape(t)}</p>' for t in lines)


def differing_settings(runs: Sequence[RunFolder]) -> list[tuple[str, list[object]]]:
    """Return the settings that are not the same in all runs, with the value of each run."""
    flat = [_flat(run.config) for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    found = []
    for name in names:
        values = [settings.get(name) for settings in flat]
        if name not in _NOT_COMPARED and any(value != values[0] for value in values):
            found.append((name, values))
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _value(config: Mapping[str, Any], name: str) -> object:
    return _flat(config).get(name)


def _differences(runs: Sequence[RunFolder]) -> str:
    if len(runs) == 1:
        return ""
    rows = [[name, *map(_spelt, values)] for name, values in differing_settings(runs)]
    if not rows:
        return "<h2>What differs</h2><p>No setting differs.</p>"
    return "<h2>What differs</h2>" + table(["setting", *(run.name for run in runs)], rows)


def _spelt(value: object) -> str:
    return _ABSENT if value is None else str(value)


def _texts(runs: Sequence[RunFolder]) -> str:
    parts = []
    for run in runs:
        # A finished run that is started again writes its text again.
        by_step = {event["step"]: str(event.get("text")) for event in run.events_of(Event.TEXT)}
        for step, text in by_step.items():
            name = f"{html.escape(run.name)}, " if len(runs) > 1 else ""
            parts.append(f"<h3>{name}step {step:,}</h3><pre>{html.escape(_printable(text))}</pre>")
    return "<h2>Text samples</h2>" + "".join(parts) if parts else ""


def _printable(text: str) -> str:
    """Return a text in which characters that a browser does not show are escaped."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def _machines(runs: Sequence[RunFolder]) -> str:
    columns = [_machine_of(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    if not names:
        return ""
    rows = [[name, *(column.get(name, _ABSENT) for column in columns)] for name in names]
    head = ["", *(run.name for run in runs)] if len(runs) > 1 else []
    return "<h2>Machine and versions</h2>" + table(head, rows)


def _machine_of(run: RunFolder) -> dict[str, str]:
    start = run.last_start
    machine, found = start.get("machine", {}), {}
    if "num_ranks" in start:
        found["ranks"] = f"{start['num_ranks']:,}, {start.get('ranks_a_machine')} a machine"
    if machine.get("device_name"):
        memory = (machine.get("device_memory_nbytes") or 0) / _GB
        found["GPU"] = f"{machine['num_devices']} x {machine['device_name']}, {memory:,.0f} GB"
    if machine:
        found["processor"] = f"{machine.get('processor')}, {machine.get('num_cores')} cores"
        if machine.get("memory_nbytes"):
            found["memory"] = f"{machine['memory_nbytes'] / _GB:,.0f} GB"
        found["system"] = str(machine.get("system"))
    return found | {name: str(value) for name, value in start.get("versions", {}).items()}


def _events(marks: Sequence[Mark]) -> str:
    if not marks:
        return ""
    rows = [[mark.run, f"{mark.step:,}", mark.text] for mark in marks]
    inner = table(["run", "step", "event"], rows, numbers=[1])
    what = f"Resumes, saves and skipped steps ({len(rows)})"
    return f"<details><summary>{what}</summary>{inner}</details>"


def _configurations(runs: Sequence[RunFolder]) -> str:
    parts = []
    for run in runs:
        if run.config:
            text = html.escape(yaml.safe_dump(dict(run.config), sort_keys=False, width=100))
            name = f" of {html.escape(run.name)}" if len(runs) > 1 else ""
            parts.append(
                f"<details><summary>Configuration{name}</summary><pre>{text}</pre></details>"
            )
    return "".join(parts)
