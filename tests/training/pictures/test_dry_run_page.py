"""The page of a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megafsdp.device.memory import Category
from megafsdp.training import config_from_dict
from megafsdp.training.cli.main import main
from megafsdp.training.dry_run.dry_run import DryRunReport, dry_run
from megafsdp.training.pictures import page as page_module
from megafsdp.training.pictures.dry_run_page import dry_run_page, left_in
from megafsdp.training.pictures.page import Page
from tests.training.runs import MIXTURE, tiny


def _page(folder: Path, num_ranks: int = 4, **sections: Any) -> tuple[DryRunReport, Page]:
    report = dry_run(tiny(folder, **sections), num_ranks)
    return report, dry_run_page(report)


@pytest.mark.parametrize(
    ("capacity_gb", "nbytes", "fits", "said"),
    [
        (80, 68_000_000_000, True, "yes, with 12 GB left"),
        (80, 75_400_000_000, True, "yes, with 4.6 GB left"),
        (80, 80_000_000_000, True, "yes, with 0.0 GB left"),
        (80, 80_100_000_000, False, "no, 0.1 GB are missing"),
        (24, 100_000_000_000, False, "no, 76 GB are missing"),
    ],
)
def test_whether_it_fits_is_one_sentence(
    capacity_gb: float, nbytes: int, fits: bool, said: str
) -> None:
    """In units of 10**9 bytes, as memories are sold."""
    assert left_in(capacity_gb, nbytes) == (fits, said)


def test_memory_over_the_step_is_that_of_the_footprint(tmp_path: Path) -> None:
    """Stacked categories add up to the total, whose largest value is the peak."""
    report, page = _page(tmp_path, precision={"param_dtype": "bf16"})
    levels = page.charts[0].data["levels"]
    names = [c.value for c in Category if report.footprint.peak[c]]
    assert set(names) == set(levels) - {"start", "during", "total"}
    columns = [levels[name] for name in names]
    assert [sum(row) for row in zip(*columns, strict=True)] == levels["total"]
    assert max(levels["total"]) == report.footprint.peak_total
    assert levels["total"][-1] == sum(report.footprint.resting.values())
    for name, column in zip(names, columns, strict=True):
        assert max(column) == report.footprint.peak[Category(name)]
    verdict = left_in(80, report.footprint.peak_total)[1]
    assert f'Fits in 80 GB: <span class="yes">{verdict}</span>' in page.sections[0]


def test_every_distinct_group_has_its_layout(tmp_path: Path) -> None:
    """Covered to the last element, experts apart, with their padding."""
    report, page = _page(tmp_path, model=MIXTURE, parallel={"ep": 2})
    layouts = [chart for chart in page.charts if chart.key.startswith("layout")]
    groups = [group for unit in report.units for group in unit.groups]
    assert len(layouts) == len(groups) == 3
    for chart, group in zip(layouts, groups, strict=True):
        data = chart.data["rectangles"]
        keys = ("first_shard", "stop_shard", "start", "stop")
        covered = sum(
            (stop_shard - first_shard) * (stop - start)
            for first_shard, stop_shard, start, stop in zip(*(data[k] for k in keys), strict=True)
        )
        assert covered == group.layout.gathered_numel
        assert set(data["tensor"]) - {"padding"} == {s.spec.name for s in group.layout.slots}
    text = "".join(page.sections)
    assert "2 x decoder.layers.0, experts" in text
    assert "reduce_scatter over edp" in text


def test_bars_have_the_colour_of_their_kind_of_unit(tmp_path: Path) -> None:
    """Equal layers share one; the optimizer has its own."""
    report, page = _page(tmp_path)
    data = page.charts[1].data["bars"]
    colours = dict(zip(data["unit"], data["colour"], strict=True))
    assert colours["decoder.layers.1"] == "decoder.layers.0"
    assert colours["optimizer step"] == "optimizer step"
    assert {unit.name: unit.count for unit in report.units} == {
        "LanguageModel": 1,
        "decoder.layers.0": 2,
    }


def test_a_thousand_ranks_of_80_billion_parameters_make_a_small_page() -> None:
    """Less than 1 MB beside the library, however many ranks and microbatches."""
    sections: dict[str, Any] = {
        "model": {"preset": "qwen3-next-80b-a3b"},
        "precision": {"param_dtype": "bf16"},
        "train": {"global_batch_size": 3072, "micro_batch_size": 1},
        "parallel": {"dp_outer": 4, "ep": 8},
        "run": {"device": "cuda"},
    }
    page = dry_run_page(dry_run(config_from_dict(sections), 1024))
    size = sum(len(json.dumps(chart.to_page())) for chart in page.charts)
    assert size + sum(map(len, page.sections)) < 1e6
    assert "cut" in page.charts[1].data


def test_the_option_writes_a_file_beside_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output stays JSON for programs; a missing package is said before anything runs."""
    monkeypatch.setattr(page_module, "_render", lambda page: page.title)
    words = ["train", "--model.preset=qwen3-toy", "--dry-run=8", "--json", "--html"]
    path = tmp_path / "page.html"
    assert main([*words, str(path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_ranks"] == 8
    assert captured.err.startswith(f"wrote {path} (")
    assert path.read_text() == "qwen3-toy on 8 ranks"
    assert main(words) == 2
    assert "Expected the name of a file" in capsys.readouterr().err
    monkeypatch.setattr(page_module, "is_installed", lambda package: False)
    assert main([*words, str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "megafsdp[report]" in captured.err
