"""Pages as Chromium draws them: numbers are read back from what was drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megafsdp.training import config_from_dict
from megafsdp.training.dry_run.dry_run import DryRunReport, dry_run
from megafsdp.training.pictures.dry_run_page import write_dry_run
from megafsdp.training.pictures.run_report import write_report
from tests.training.pictures import chromium
from tests.training.pictures.chromium import NARROW, WIDE, Opened, opened
from tests.training.pictures.folders import step_row, train_twice, write_run
from tests.training.runs import rows, tiny

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(chromium.missing()), reason=chromium.missing()),
]

# The points that were drawn of a chart, with the values that their places on the screen stand for.
_DRAWN = """key => {
  const view = megafsdpPage.views[key], x = view.scale("x"), y = view.scale("y");
  const paths = [...document.querySelectorAll(`#chart-${key} .mark-symbol path`)];
  const items = paths.map(p => p.__data__).filter(item => item.datum && "value" in item.datum);
  return items.map(item => ({
    run: item.datum.run, step: item.datum.step, value: item.datum.value,
    x: x.invert(item.x), y: y.invert(item.y), fill: getComputedStyle(item._svg).fill,
  }));
}"""
# Where the point of a run and a step is on the screen.
_PLACE = """([run, step]) => {
  const paths = [...document.querySelectorAll("#chart-loss .mark-symbol path")];
  const found = paths.find(p => {
    const row = p.__data__.datum;
    return "value" in row && row.run === run && row.step === step;
  });
  const box = found.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
_AXIS_TITLES = """key => [...document.querySelectorAll(`#chart-${key} .role-axis-title text`)]
  .map(text => text.textContent)"""
_OVERFLOW = """() => {
  const width = document.documentElement.clientWidth;
  const wide = [...document.querySelectorAll(".card, .chart, .chart > svg, header, .bar, .tiles")]
    .filter(each => each.getBoundingClientRect().right > width + 1).length;
  const tables = [...document.querySelectorAll(".scroll")];
  const cut = tables.filter(each => each.scrollWidth > each.clientWidth).length;
  return [document.documentElement.scrollWidth - width, wide, cut];
}"""
# Left and right edges of the frames of two charts.
_EDGES = """keys => keys.map(key => {
  const box = document.querySelector(`#chart-${key} .background`).getBoundingClientRect();
  return [box.left, box.right];
})"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a running browser."""
    with chromium.running() as browser:
        yield browser


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of a run that was cut off and went on."""
    folder = train_twice(tmp_path_factory.mktemp("trained"))
    return write_report([folder])[0]


@pytest.fixture(scope="module")
def overlaid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the report of two runs of unlike length, one of which skipped a step."""
    folder = tmp_path_factory.mktemp("overlaid")
    events = [
        {"event": "started", "step": 4, "num_ranks": 2, "elapsed_s": 8.0},
        {"event": "skipped", "step": 5, "elapsed_s": 10.0},
        {"event": "saved", "step": 8, "elapsed_s": 16.5},
    ]
    first = write_run(
        folder / "long",
        [step_row(i, loss=None if i == 6 else 4.0 / i) for i in range(1, 13)],
        events=events,
        config=tiny(folder),
    )
    second = write_run(
        folder / "short",
        [step_row(i, loss=6.0 / i) for i in range(1, 6)],
        events=[{"event": "saved", "step": 4, "elapsed_s": 8.0}],
        config=tiny(folder, optimizer={"lr": 0.5}),
        tail='{"step": 6, "lo',
    )
    return write_report([first, second])[0]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[DryRunReport, Path]:
    """Return a dry run of 80 billion parameters on 1,024 ranks, and its page."""
    sections: dict[str, Any] = {
        "model": {"preset": "qwen3-next-80b-a3b"},
        "precision": {"param_dtype": "bf16"},
        "train": {"global_batch_size": 4096, "micro_batch_size": 1},
        "parallel": {"dp_outer": 4, "ep": 8},
        "run": {"device": "cuda"},
    }
    report = dry_run(config_from_dict(sections), 1024)
    path = tmp_path_factory.mktemp("large") / "page.html"
    assert write_dry_run(report, path) < 5e6
    return report, path


def _assert_quiet(found: Opened) -> None:
    assert found.messages == []
    assert found.requests == []


def test_charts_show_the_numbers_of_the_file(browser: Browser, trained: Path) -> None:
    """Each chart, each point: its value, and the value that its place stands for."""
    written = rows(trained.parent.parent)
    with opened(browser, trained) as found:
        keys = found.read("() => Object.keys(megafsdpPage.views)")
        assert {"loss", "validation_loss", "grad_norm", "lr", "tokens_per_s"} < set(keys)
        for key in keys:
            own = [row for row in written if row.get(key) is not None]
            drawn = found.read(_DRAWN, key)
            assert [(d["step"], d["value"]) for d in drawn] == [(r["step"], r[key]) for r in own]
            scale = 1e9 if key == "memory_nbytes" else 1.0
            for item, row in zip(drawn, own, strict=True):
                assert item["x"] == pytest.approx(row["step"], abs=1e-6)
                # Places on the screen are floats of the axis, whose longest value is about 1.
                assert item["y"] * scale == pytest.approx(row[key], rel=1e-6)
        marks = '#chart-loss path[aria-roledescription="point"], #chart-loss line'
        assert found.read("s => document.querySelectorAll(s).length", marks) >= len(written)
        _assert_quiet(found)


def test_the_switch_changes_the_axis(browser: Browser, trained: Path) -> None:
    """To tokens, to time and back, in all charts."""
    written = [row for row in rows(trained.parent.parent) if "loss" in row]
    with opened(browser, trained) as found:
        for axis, key, title in (
            ("tokens", "consumed_tokens", "tokens"),
            ("time", "elapsed_s", "time (s)"),
            ("step", "step", "step"),
        ):
            found.press("axis", axis)
            drawn = found.read(_DRAWN, "loss")
            places = [item["x"] for item in drawn]
            assert places == pytest.approx([row[key] for row in written], rel=1e-6)
            titles = found.read("() => Object.keys(megafsdpPage.views)")
            assert all(title in found.read(_AXIS_TITLES, chart) for chart in titles)
            pressed = found.read(
                "() => document.querySelector('[data-axis][aria-pressed=true]').dataset.axis"
            )
            assert pressed == axis
        _assert_quiet(found)


def test_a_logarithmic_axis_shows_the_same_values(browser: Browser, trained: Path) -> None:
    """Of loss and norm; the learning rate stays linear."""
    with opened(browser, trained) as found:
        linear = found.read(_DRAWN, "loss")
        found.press("scale", "log")
        assert found.read('() => megafsdpPage.views.loss.scale("y").type') == "log"
        assert found.read('() => megafsdpPage.views.lr.scale("y").type') == "linear"
        for before, after in zip(linear, found.read(_DRAWN, "loss"), strict=True):
            assert after["y"] == pytest.approx(before["y"], rel=1e-6)
        _assert_quiet(found)


def test_runs_lie_over_each_other(browser: Browser, overlaid: Path) -> None:
    """In colours of their own; one can be hidden; a loss that was not finite breaks the line."""
    with opened(browser, overlaid) as found:
        drawn = found.read(_DRAWN, "loss")
        fills = {run: {d["fill"] for d in drawn if d["run"] == run} for run in ("long", "short")}
        assert len(fills["long"]) == len(fills["short"]) == 1
        assert fills["long"] != fills["short"]
        assert [d["step"] for d in drawn if d["run"] == "long"] == [*range(1, 6), *range(7, 13)]
        lines = "() => [...document.querySelectorAll('#chart-loss .mark-line path')]"
        paths = found.read(lines + ".map(p => p.getAttribute('d'))")
        assert sorted(path.count("M") for path in paths) == [1, 2]
        marks = found.read('() => megafsdpPage.views.loss.data("marks").map(m => m.kind)')
        assert marks == ["resumed", "skipped", "saved", "saved"]
        places = found.read(
            "() => [...document.querySelectorAll('#chart-loss .mark-symbol path')]"
            ".map(p => p.__data__).filter(i => i.datum && i.datum.kind === 'saved')"
            ".map(i => [i.datum.run, i.y])"
        )
        # Below each other: both runs saved at the same step.
        assert dict(places)["long"] - dict(places)["short"] == pytest.approx(10)
        found.press("run", "short")
        assert {d["run"] for d in found.read(_DRAWN, "loss")} == {"long"}
        found.press("run", "short")
        assert {d["run"] for d in found.read(_DRAWN, "loss")} == {"long", "short"}
        text = found.page.inner_text("main")
        assert "optimizer.lr" in text
        assert "breaks off in its last line" in text
        _assert_quiet(found)


def test_the_pointer_shows_a_value(browser: Browser, overlaid: Path) -> None:
    """Run, value, step, tokens and time of the nearest point."""
    with opened(browser, overlaid) as found:
        found.page.mouse.move(*found.read(_PLACE, ["long", 4]))
        found.page.wait_for_selector("#vg-tooltip-element.visible")
        shown = found.page.inner_text("#vg-tooltip-element")
        cells = dict(line.split("\t") for line in shown.splitlines() if "\t" in line)
        assert cells == {
            "run": "long",
            "training loss": "1.0000",
            "step": "4",
            "tokens": "256",
            "time": "00:08",
        }
        _assert_quiet(found)


_COLOURS = """() => [getComputedStyle(document.body).backgroundColor,
  getComputedStyle(document.querySelector('#chart-loss .role-axis-label text')).fill,
  getComputedStyle(document.querySelector('#chart-loss .mark-line path')).stroke]"""


def test_light_and_dark_follow_the_reader_and_the_switch(browser: Browser, trained: Path) -> None:
    """Page, axes and lines change together, without drawing anew."""
    with opened(browser, trained, theme="light") as found:
        light = found.read(_COLOURS)
        found.page.click('button[data-theme="dark"]')
        dark = found.read(_COLOURS)
    assert light[0] == "rgb(255, 255, 255)"
    assert all(a != b for a, b in zip(light, dark, strict=True))
    with opened(browser, trained, theme="dark") as found:
        assert found.read(_COLOURS) == dark
        found.page.click('button[data-theme="light"]')
        assert found.read(_COLOURS) == light
        _assert_quiet(found)


@pytest.mark.parametrize("size", [NARROW, WIDE])
def test_nothing_is_wider_than_the_window(
    browser: Browser, overlaid: Path, large: tuple[DryRunReport, Path], size: tuple[int, int]
) -> None:
    """On a phone and on a desk; also after the window has changed."""
    for path in (overlaid, large[1]):
        with opened(browser, path, size=size) as found:
            assert found.read(_OVERFLOW) == [0, 0, 0]
            other = NARROW if size == WIDE else WIDE
            found.page.set_viewport_size({"width": other[0], "height": other[1]})
            found.page.wait_for_timeout(300)
            assert found.read(_OVERFLOW) == [0, 0, 0]
            _assert_quiet(found)


def test_paper_is_light_and_without_switches(browser: Browser, trained: Path) -> None:
    """Printed from a dark screen; every chart stays inside of the page."""
    with opened(browser, trained, theme="dark") as found:
        found.read("() => window.dispatchEvent(new Event('beforeprint'))")
        found.page.emulate_media(media="print")
        found.page.set_viewport_size({"width": 700, "height": 1000})
        assert found.read(_COLOURS)[0] == "rgb(255, 255, 255)"
        assert not found.page.is_visible('button[data-axis="step"]')
        assert found.page.is_visible("details pre")
        assert found.read(_OVERFLOW) == [0, 0, 0]
        assert found.page.pdf(format="A4").startswith(b"%PDF")
        found.read("() => window.dispatchEvent(new Event('afterprint'))")
        found.page.emulate_media(media="screen")
        assert found.read(_COLOURS)[0] != "rgb(255, 255, 255)"
        _assert_quiet(found)


@pytest.mark.parametrize(
    ("tail", "num_rows", "said"),
    [("", 0, "there is nothing to draw yet"), ('{"step": 2,', 1, "breaks off in its last line, 2")],
)
def test_empty_and_torn_files_make_a_page(
    browser: Browser, tmp_path: Path, tail: str, num_rows: int, said: str
) -> None:
    """It says what is missing and draws the rest without an error."""
    written = [step_row(i + 1) for i in range(num_rows)]
    folder = write_run(tmp_path / "run", written, events=None, tail=tail)
    if num_rows:
        # Of an older version, without times.
        old = {key: v for key, v in written[0].items() if key not in ("time", "elapsed_s")}
        (folder / "metrics.jsonl").write_text(json.dumps(old) + "\n" + tail)
    with opened(browser, write_report([folder])[0]) as found:
        assert said in found.page.inner_text("main")
        assert len(found.read("() => Object.keys(megafsdpPage.views)")) == 5 * num_rows
        if num_rows:
            found.press("axis", "time")
            assert "Nothing to draw over time" in found.page.inner_text("#chart-loss")
            found.press("axis", "step")
            assert len(found.read(_DRAWN, "loss")) == 1
        _assert_quiet(found)


_RECTANGLES = """key => [...document.querySelectorAll(`#chart-${key} .mark-rect path`)]
  .map(p => p.__data__).filter(item => item.datum && item.datum.tensor)
  .map(item => [item.datum.tensor, item.width * item.height, getComputedStyle(item._svg).fill])"""


def test_a_dry_run_is_drawn_to_scale(browser: Browser, large: tuple[DryRunReport, Path]) -> None:
    """Areas of tensors are their shares, padding is striped; memory peaks where the table says."""
    report, path = large
    groups = [
        (f"layout-{i}-{j}", group)
        for i, unit in enumerate(report.units)
        for j, group in enumerate(unit.groups)
    ]
    with opened(browser, path) as found:
        for key, group in groups:
            drawn = found.read(_RECTANGLES, key)
            size = found.read(
                "k => [megafsdpPage.views[k].signal('width'),"
                " megafsdpPage.views[k].signal('height')]",
                key,
            )
            whole = size[0] * size[1]
            for slot in group.layout.slots:
                area = sum(a for tensor, a, _ in drawn if tensor == slot.spec.name)
                share = slot.spec.numel / group.layout.gathered_numel
                # Vega rounds nothing, but draws no rectangle thinner than a quarter of a pixel.
                assert area / whole == pytest.approx(share, abs=1e-3)
            stripes = {fill for tensor, _, fill in drawn if tensor == "padding"}
            assert stripes == ({'url("#hatch")'} if group.layout.padding_numel else set())
        totals = found.read('() => megafsdpPage.views.memory.data("levels").map(l => l.total)')
        assert max(totals) == report.footprint.peak_total
        edges = found.read(_EDGES, ["memory", "timeline"])
        # One stands below the other, but for the width of a stroke.
        assert edges[0] == pytest.approx(edges[1], abs=1)
        lanes = found.read('() => megafsdpPage.views.timeline.data("bars").map(b => b.lane)')
        assert set(lanes) == {"gather", "compute", "reduce-scatter", "all-reduce"}
        assert "Fits in 80 GB: yes" in found.page.inner_text("main")
        _assert_quiet(found)
