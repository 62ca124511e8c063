"""The page of runs: what it says, and what of it is a file."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from megafsdp.errors import ConfigError
from megafsdp.training import config_from_dict
from megafsdp.training.cli.main import main
from megafsdp.training.dry_run.dry_run import dry_run
from megafsdp.training.pictures import page as page_module
from megafsdp.training.pictures.charts import Chart
from megafsdp.training.pictures.page import Page
from megafsdp.training.pictures.run_folder import read_runs
from megafsdp.training.pictures.run_report import differing_settings, report_page
from tests.training.pictures.folders import step_row, train_twice, write_run
from tests.training.runs import rows, tiny


def _text(page: Page) -> str:
    return page.lead + page.switches + "".join(page.sections)


def _chart(page: Page, key: str) -> Chart:
    (chart,) = (chart for chart in page.charts if chart.key == key)
    return chart


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that was cut off and went on."""
    return train_twice(tmp_path_factory.mktemp("trained"))


def test_a_trained_runs_charts_have_its_rows(trained: Path) -> None:
    """Every chart, each value; the run was evaluated, saved and resumed."""
    page = report_page(read_runs([trained]))
    written = rows(trained.parent)
    keys = [chart.key for chart in page.charts]
    assert {"loss", "validation_loss", "grad_norm", "lr", "tokens_per_s"} < set(keys)
    assert {"memory_nbytes", "expert_max_load"} < set(keys)
    for chart in page.charts:
        own = [row for row in written if chart.key in row]
        data = chart.data["curves"]
        assert data["value"] == [row[chart.key] for row in own]
        for column, key in (("step", "step"), ("tokens", "consumed_tokens")):
            assert data[column] == [row[key] for row in own]
        assert data["elapsed_s"] == [row["elapsed_s"] for row in own]
        assert set(data["run"]) == {"run"}
    marks = _chart(page, "loss").data["marks"]
    found = list(zip(marks["kind"], marks["step"], strict=True))
    assert found == [("saved", 2), ("resumed", 2), ("saved", 4), ("saved", 6)]
    assert _chart(page, "lr").data["marks"]["kind"] == ["resumed"]
    assert "<h2>Text samples</h2><h3>step 6</h3><pre>ab" in _text(page)
    assert "torch</th>" in _text(page)
    assert 'class="note"' not in _text(page)


def test_memory_stands_beside_what_a_dry_run_says(trained: Path) -> None:
    """For as many ranks as trained, in bytes."""
    (run,) = read_runs([trained])
    levels = _chart(report_page([run]), "memory_nbytes").data["levels"]
    assert levels["value"] == [dry_run(config_from_dict(run.config), 1).footprint.peak_total]


def test_a_dry_run_that_is_refused_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Parameters on the host are not estimated; the memory is drawn without the line."""
    config = tiny(tmp_path, parallel={"offload_parameters": True})
    start = {"event": "started", "step": 0, "num_ranks": 2, "machine": {"device": "cpu"}}
    folder = write_run(tmp_path / "run", [step_row(1)], events=[start], config=config)
    with caplog.at_level(logging.INFO, logger="megafsdp.training"):
        page = report_page(read_runs([folder]))
    assert "levels" not in _chart(page, "memory_nbytes").data
    assert "No dry run of run: Expected all parameters on the device" in _text(page)
    assert "no dry run of its memory" in caplog.text


def test_the_lead_names_the_model(tmp_path: Path) -> None:
    """Its preset, or the folder of the saved model that the run began with, names of no paths."""
    said = []
    for name, model in (("own", {}), ("begun", {"from_hf": str(tmp_path / "a<b"), "preset": "x"})):
        config = tiny(tmp_path, model=model)
        (run,) = read_runs([write_run(tmp_path / name, [step_row(1)], config=config)])
        said.append(report_page([run]).lead.partition(",")[0])
    assert said == ['<p class="lead">qwen3-toy', '<p class="lead">a&lt;b']


def _two(folder: Path) -> list[Path]:
    first, second = tiny(folder), tiny(folder, optimizer={"lr": 0.5}, model={"num_layers": 3})
    return [
        write_run(folder / "one", [step_row(1), step_row(2)], config=first),
        write_run(folder / "two", [step_row(1, expert_max_load=2.0)], config=second),
    ]


def test_runs_are_overlaid_and_their_settings_compared(tmp_path: Path) -> None:
    """The settings that differ, with both values; a metric of one run is named as such."""
    runs = read_runs(_two(tmp_path))
    page = report_page(runs)
    assert page.title == "2 runs"
    assert differing_settings(runs) == [("model.num_layers", [2, 3]), ("optimizer.lr", [1e-2, 0.5])]
    assert "<tr><th>optimizer.lr</th><td>0.01</td><td>0.5</td></tr>" in _text(page)
    assert _chart(page, "loss").data["curves"]["run"] == ["one", "one", "two"]
    assert "Not recorded by one." in _chart(page, "expert_max_load").caption
    for name in ("one", "two"):
        assert f'data-run="{name}"' in page.switches
    same = report_page(read_runs([tmp_path / "one", _copy(tmp_path / "one")]))
    assert "No setting differs." in _text(same)


def test_figures_of_runs_stand_beside_each_other(tmp_path: Path) -> None:
    """A unit that they share stands in the name of the row, another beside each value."""
    folders = []
    for name, length, values in (("a", 10, {"num_skipped": 1}), ("b", 20, {"loss": 1.5})):
        start = {"event": "started", "step": 0, "num_ranks": 1, "num_steps": length}
        row = step_row(2) | values
        folders.append(write_run(tmp_path / name, [row], events=[start]))
    text = _text(report_page(read_runs(folders)))
    table = text[text.index("<table>") : text.index("</table>")]
    found = [re.findall(r"<t[hd][^>]*>([^<]*)</t", row) for row in table.split("<tr>")[1:]]
    assert found[0] == ["", "a", "b"]
    assert ["step", "2 of 10", "2 of 20"] in found
    assert ["training loss, nats a token", f"{step_row(2)['loss']:.4f}", "1.5000"] in found
    assert ["skipped steps", "1", "-"] in found


def _copy(folder: Path) -> Path:
    other = folder.with_name("copy")
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    return other


@pytest.mark.parametrize(("rows_", "tail"), [([], ""), ([step_row(1)], '{"step": 2,')])
def test_what_could_not_be_read_stands_on_the_page(
    tmp_path: Path, rows_: list[dict[str, Any]], tail: str
) -> None:
    """A page is made of whatever is there."""
    page = report_page(read_runs([write_run(tmp_path / "run", rows_, tail=tail)]))
    assert bool(page.charts) == bool(rows_)
    said = "breaks off in its last line" if tail else "there is nothing to draw yet"
    assert re.search(f'class="note"><b>run</b>: [^<]*{said}', _text(page))


def test_texts_cannot_end_their_element(tmp_path: Path) -> None:
    """A model may write markup and control characters; both are shown as text."""
    text = {"event": "text", "step": 2, "text": "a</pre><script>x\x1b[31m\n\u202e"}
    again = text | {"text": "b" + str(text["text"])}
    folder = write_run(tmp_path / "run", [step_row(2)], events=[text, again])
    shown = _text(report_page(read_runs([folder])))
    # The later text of the same step counts.
    assert "<pre>ba&lt;/pre&gt;&lt;script&gt;x\\x1b[31m\n\\u202e</pre>" in shown
    assert "<script>" not in shown


def test_names_cannot_end_the_data_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders may be called anything: two of one name are told apart by what holds them."""
    # Bundling takes two seconds.
    monkeypatch.setattr("vl_convert.javascript_bundle", lambda snippet: snippet)
    folders = [tmp_path / holder / "script>x" for holder in ("<", "other")]
    written = [write_run(folder, [step_row(1)]) for folder in folders]
    assert main(["report", *map(str, written), "-o", str(tmp_path / "page.html")]) == 0
    content = (tmp_path / "page.html").read_text()
    assert content.count("</script>") == 3
    data = re.search(r'id="page-data">(.*?)</script>', content)
    assert data is not None
    assert "</script>x" in json.loads(data[1])["charts"][0]["data"]["curves"]["run"]


@pytest.mark.parametrize(
    ("last_s", "unit"), [(90, "s"), (2000, "min"), (10_000, "h"), (400_000, "days")]
)
def test_time_is_counted_in_a_unit_that_fits(tmp_path: Path, last_s: float, unit: str) -> None:
    """From seconds to days."""
    folder = write_run(tmp_path / "run", [step_row(1), step_row(2, elapsed_s=last_s)])
    assert report_page(read_runs([folder])).time_unit == unit


def test_the_command_writes_one_file_that_needs_no_other(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under 5 MB, the library inside, with no address that a browser would load."""
    output = tmp_path / "new" / "report.html"
    assert main(["report", str(trained), "-o", str(output)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {output} (")
    content = output.read_text()
    assert len(content.encode()) < 5e6
    # The library has such words in its own text.
    outside = re.sub(r"(<script[^>]*>).*?</script>", r"\1", content, flags=re.DOTALL)
    assert not re.search(r"<(script|img|iframe|link)[^>]*(src|href)=.(?!data:)", outside)
    assert "@import" not in outside and "url(http" not in outside
    assert outside.count("<script") == 3
    data = re.search(r'id="page-data">(.*?)</script>', content)
    assert data is not None
    charts = json.loads(data[1])["charts"]
    assert charts[0]["key"] == "loss"
    assert content.count("vegaEmbed") >= 2


def test_the_default_file_lies_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the first run."""
    monkeypatch.setattr(page_module, "_render", lambda page: page.title)
    folders = _two(tmp_path)
    assert main(["report", *map(str, folders)]) == 0
    assert (folders[0] / "report.html").read_text() == "2 runs"


def test_refusals_end_as_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is no run, a file that cannot be written, and a missing package."""
    assert main(["report", str(tmp_path)]) == 1
    assert "DataError: Expected the folder of a run" in capsys.readouterr().err
    folder = write_run(tmp_path / "run", [step_row(1)])
    monkeypatch.setattr(page_module, "_render", lambda page: page.title)
    assert main(["report", str(folder), "-o", str(tmp_path)]) == 2
    assert "Expected a file that can be written" in capsys.readouterr().err
    monkeypatch.setattr(page_module, "is_installed", lambda package: False)
    assert main(["report", str(folder)]) == 2
    assert "pip install 'megafsdp[report]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="vl-convert-python"):
        page_module.require_library()
