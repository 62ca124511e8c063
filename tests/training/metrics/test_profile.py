"""Recorded steps: which, of whom, in which files, and what is in them."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp.errors import ConfigError
from megafsdp.training import Config, train
from megafsdp.training.config.sections import ProfileOptions
from megafsdp.training.config.validate import validate
from megafsdp.training.metrics import profile
from megafsdp.training.metrics.profile import StepProfiler
from megafsdp.training.process.world import World
from tests.ranks import Ranks
from tests.training.runs import numbers_read_late, rows, tiny, write_corpus

CPU = torch.device("cpu")


def _events(path: Path) -> list[dict[str, Any]]:
    """Read a trace as Perfetto does."""
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def _steps(path: Path) -> list[int]:
    names = [event["name"] for event in _events(path) if event.get("ph") == "X"]
    return sorted(
        {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep")}
    )


def test_a_run_writes_a_trace_of_the_steps_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    """Of the ranks that are named, by the numbers of the run; losses stay what they were.

    Steps are queued before the last one's numbers are read, as on a GPU.
    """
    write_corpus(tmp_path)
    plain = tiny(tmp_path, run={"directory": str(tmp_path / "plain")})
    options = {"start": 3, "steps": 2, "ranks": [1]}
    config = tiny(tmp_path, logging={"profile": options, "interval_steps": 1})
    for each in (plain, config):
        ranks(2).run(_train_late, each)
    (path,) = (config.run_directory / "profile").iterdir()
    assert path.name == "steps_3-4_rank_1.trace.json.gz"
    assert _steps(path) == [3, 4]
    names = {event["name"] for event in _events(path)}
    assert any("reduce_scatter" in name for name in names), "our labels of collectives"
    losses = [
        [row["loss"] for row in map(json.loads, lines) if "loss" in row]
        for lines in (
            (folder / "metrics.jsonl").read_text().splitlines()
            for folder in (plain.run_directory, config.run_directory)
        )
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


def _train_late(config: Config) -> None:
    with numbers_read_late():
        train(config)


def test_the_first_step_and_those_up_to_the_end_are_written_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a step before, and though the run ends earlier; a resumed run records no more."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, logging={"profile": {"start": 1, "steps": 9}}, train={"steps": 2})
    train(config)
    folder = config.run_directory / "profile"
    (path,) = folder.iterdir()
    assert path.name == "steps_1-2_rank_0.trace.json.gz"
    assert _steps(path) == [1, 2]
    assert f"profiled steps 1 to 2: {path}" in capsys.readouterr().out
    path.unlink()
    train(tiny(tmp_path, logging={"profile": {"start": 1, "steps": 9}}, train={"steps": 3}))
    assert len(rows(tmp_path)) >= 3
    assert list(folder.iterdir()) == []


def test_steps_beyond_the_run_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by the first rank."""
    options = ProfileOptions(start=7)
    for rank in (0, 1):
        world = World(rank, 2, rank, 2, CPU)
        StepProfiler(options, tmp_path, world, next_step=1, last_step=6, print_line=print)
    assert caplog.text.count("Nothing is profiled: logging.profile.start is 7") == 1


def test_ranks_beyond_the_run_are_refused(tmp_path: Path) -> None:
    """Before it begins."""
    config = tiny(tmp_path, logging={"profile": {"ranks": [0, 2]}})
    validate(config, world_size=3)
    with pytest.raises(ConfigError, match=r"ranks below the 2 of the run, got \[0, 2\]"):
        validate(config, world_size=2)


def test_a_full_disk_loses_the_trace_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one warning."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, logging={"profile": {"start": 2, "steps": 1}}, train={"steps": 3})
    config.run_directory.mkdir()
    (config.run_directory / "profile").touch()
    with caplog.at_level(logging.WARNING, "megafsdp.training"):
        assert train(config).is_finished
    assert caplog.text.count("no profile: FileExistsError") == 1


def test_memory_is_recorded_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the step before the first until the last, in a file beside the trace; on stand-ins."""
    calls: list[str] = []
    monkeypatch.setattr(
        profile, "record_memory_history", lambda *, is_wanted: calls.append(f"record {is_wanted}")
    )
    monkeypatch.setattr(
        profile, "dump_memory_history", lambda path: calls.append(f"dump {Path(path).name}")
    )
    world = World(0, 1, 0, 1, torch.device("cuda"))
    options = ProfileOptions(start=3, steps=2)
    recorder = StepProfiler(options, tmp_path, world, next_step=1, last_step=9, print_line=print)
    edges = []
    for step in range(1, 10):
        recorder.before(step)
        torch.ones(2).add(1)
        calls.append(f"step {step}")
        if recorder.is_edge(step):
            edges.append(step)
        recorder.after(step)
    recorder.close()
    during = ["record True", "step 2", "step 3", "step 4", "dump steps_3-4_rank_0.memory.pickle"]
    after = ["record False", *(f"step {step}" for step in range(5, 10))]
    assert calls == ["step 1", *during, *after]
    assert edges == [1, 4]
    assert _steps(tmp_path / "profile" / "steps_3-4_rank_0.trace.json.gz") == [3, 4]


@pytest.mark.gpu
def test_a_run_on_cuda_writes_a_snapshot_of_its_memory(tmp_path: Path) -> None:
    """As memory_viz reads it: segments, and the history of allocations."""
    write_corpus(tmp_path)
    options = {"profile": {"start": 2, "steps": 2}}
    train(tiny(tmp_path, run={"device": "cuda"}, logging=options))
    (path,) = (tmp_path / "run" / "profile").glob("*.memory.pickle")
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])
    (trace,) = (tmp_path / "run" / "profile").glob("*.trace.json.gz")
    assert {event.get("cat") for event in _events(trace)} >= {"kernel", "cpu_op"}
