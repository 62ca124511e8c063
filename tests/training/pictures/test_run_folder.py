"""What is read of a run's folder, and what is said where it cannot be read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megafsdp.errors import DataError
from megafsdp.training.metrics.events import Event
from megafsdp.training.pictures.run_folder import read_runs
from megafsdp.training.pictures.run_report import write_report
from tests.training.pictures.folders import step_row, write_run
from tests.training.runs import tiny


def test_rows_events_and_configuration_are_as_written(tmp_path: Path) -> None:
    """Evaluations stand apart from steps; a whole folder has no notes."""
    rows = [step_row(1), {"step": 1, "validation_loss": 2.0}, step_row(2)]
    events = [
        {"event": "started", "step": 0, "num_ranks": 2},
        {"event": "saved", "step": 2},
        {"event": "started", "step": 2, "num_ranks": 4},
    ]
    config = tiny(tmp_path)
    (run,) = read_runs([write_run(tmp_path / "run", rows, events=events, config=config)])
    assert (run.steps, run.evaluations) == ([rows[0], rows[2]], [rows[1]])
    assert (run.events_of(Event.SAVED), run.last_start) == ([events[1]], events[2])
    assert run.config == config.to_dict()
    assert (run.name, run.notes) == ("run", [])


@pytest.mark.parametrize(
    ("is_made", "found"), [(True, "got a folder without it"), (False, "got no such folder")]
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, is_made: bool, found: str) -> None:
    """The message names the folder and the file that is missing."""
    folder = tmp_path / "elsewhere"
    if is_made:
        folder.mkdir()
    with pytest.raises(DataError, match=r"metrics\.jsonl") as caught:
        read_runs([folder])
    assert found in str(caught.value)
    assert f"'{folder}'" in str(caught.value)


@pytest.mark.parametrize(
    ("tail", "said"),
    [
        ('{"step": 3, "lo', "metrics.jsonl breaks off in its last line, 3"),
        ('{"step": 3, "lo\n{"step": 3, "loss": 1.0}\n', "lines that are not whole, 3:"),
        ('{"step": 1e999}\n{"step": "2"}\n', "lines that are not whole, 3, 4:"),
        ("7\n[1]\nnull\n{}\n\x00\n", "not whole, 3, 4, 5, 6, 7:"),
        ("7\n[1]\nnull\n{}\n\x00\n\x01\n\x02\n", "not whole, 3, 4, 5, 6, 7 and 2 more"),
    ],
)
def test_a_torn_file_is_read_as_far_as_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tail: str, said: str
) -> None:
    """Whole rows count, the others are named in the log and in the notes."""
    folder = write_run(
        tmp_path / "run", [step_row(1), step_row(2)], config=tiny(tmp_path), tail=tail
    )
    with caplog.at_level(logging.WARNING, logger="megafsdp.training"):
        (run,) = read_runs([folder])
    assert [row["step"] for row in run.steps][:2] == [1, 2]
    assert len(run.steps) == 2 + ('"loss": 1.0' in tail)
    (note,) = run.notes
    assert said in note
    assert said in caplog.text


def test_an_event_without_its_kind_is_left_out(tmp_path: Path) -> None:
    """A line of a step alone is none."""
    events = [{"step": 1}, {"event": "saved", "step": 2}]
    folder = write_run(tmp_path / "run", [step_row(1)], events=events, config=tiny(tmp_path))
    (run,) = read_runs([folder])
    assert run.events == [events[1]]
    assert run.notes == ["events.jsonl has lines that are not whole, 1: drawn is what can be read."]


def test_values_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    """The row stays and is drawn: other programs may write text, and a damaged digit is inf."""
    tail = '{"step": 3, "loss": "1.0", "elapsed_s": 1e999, "lr": true, "tokens_per_s": 2}\n'
    folder = write_run(tmp_path / "run", [step_row(1)], config=tiny(tmp_path), tail=tail)
    (run,) = read_runs([folder])
    wanted = {"step": 3, "loss": None, "elapsed_s": None, "lr": None, "tokens_per_s": 2}
    assert (run.steps[1], run.notes[1:]) == (wanted, [])
    write_report([folder], tmp_path / "report.html")


def test_an_empty_file_has_nothing_to_draw(tmp_path: Path) -> None:
    """A run that has just begun, or whose disk was full."""
    (run,) = read_runs([write_run(tmp_path / "run", [], config=tiny(tmp_path))])
    assert run.steps == []
    assert run.notes == ["metrics.jsonl has no row of a step: there is nothing to draw yet."]


def test_missing_and_unreadable_files_beside_are_named(tmp_path: Path) -> None:
    """A run of an older version, and one whose configuration was overwritten."""
    older = write_run(tmp_path / "older", [step_row(1)], events=None)
    broken = write_run(tmp_path / "broken", [step_row(1)])
    (broken / "config.yaml").write_text("a: [1")
    first, second = read_runs([older, broken])
    assert [note.partition(" ")[0] for note in first.notes] == ["There", "config.yaml"]
    assert first.events == [] and first.last_start == {}
    assert second.notes[0].startswith("config.yaml cannot be read")
    (broken / "config.yaml").write_text("just text")
    assert read_runs([broken])[0].notes == ["config.yaml is no configuration."]


def test_names_are_as_short_as_they_differ(tmp_path: Path) -> None:
    """Runs of equal folder names are told apart by what holds them; the same folder counts once."""
    paths = [write_run(tmp_path / p, [step_row(1)]) for p in ("a/run", "b/run", "b/other")]
    assert [run.name for run in read_runs(paths)] == ["a/run", "b/run", "b/other"]
    assert [run.name for run in read_runs(paths[1:])] == ["run", "other"]
    assert [run.name for run in read_runs([paths[0], paths[0]])] == ["run"]
