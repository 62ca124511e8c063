"""What the first rank prints about a run as a whole."""

from __future__ import annotations

import errno
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafsdp.errors import ConfigError
from megafsdp.training.metrics.metrics import Meter, Position
from megafsdp.training.process.world import World
from megafsdp.training.report import Report
from megafsdp.training.resume import RunState
from megafsdp.training.step.train_step import StepResult
from tests.training.runs import MIXTURE, tiny

CPU = torch.device("cpu")


def _report(folder: Path, state: RunState | None = None) -> Report:
    """Return the report of a run on one rank."""
    meter = Meter(CPU, tokens_per_step=1, flops_per_token=1, num_devices=1)
    state = RunState() if state is None else state
    return Report(tiny(folder), World(0, 1, 0, 1, CPU), meter=meter, state=state)


@pytest.mark.parametrize(
    ("world", "launcher", "where"),
    [
        (World(0, 1, 0, 1, CPU), "", ""),
        (
            World(0, 8, 0, 8, CPU),
            "-m torch.distributed.run --standalone --nproc-per-node=8 ",
            "",
        ),
        (
            World(0, 16, 0, 8, CPU),
            "-m torch.distributed.run --nnodes=2 --nproc-per-node=8 ",
            " on every machine, its rendezvous options added,",
        ),
        (
            World(0, 2, 0, 1, CPU),
            "-m torch.distributed.run --nnodes=2 --nproc-per-node=1 ",
            " on every machine, its rendezvous options added,",
        ),
    ],
)
def test_last_line_names_the_command_for_these_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], world: World, launcher: str, where: str
) -> None:
    """It starts as many ranks on each machine as there were."""
    config = tiny(tmp_path)
    meter = Meter(CPU, tokens_per_step=1, flops_per_token=1, num_devices=world.size)
    report = Report(config, world, meter=meter, state=RunState())
    report.end(is_finished=False)
    report.close()
    printed = capsys.readouterr().out
    assert printed.startswith(f"stopped; resume{where} with: ")
    command = f"{launcher}-m megafsdp train --config {config.run_directory}/config.yaml\n"
    assert printed.partition(" with: ")[2].partition(" ")[2] == command


@pytest.mark.parametrize(
    ("model", "degrees", "said"),
    [
        ({}, {}, "99,000 parameters on 8 cpu rank(s), optim"),
        (
            {},
            {"tp": 2},
            "99,000 parameters on 8 cpu rank(s) (4 x 2 tensor-parallel), optim",
        ),
        (
            {},
            {"cp": 2, "tp": 2},
            "99,000 parameters on 8 cpu rank(s) (2 x 2 context-parallel x 2 tensor-parallel),"
            " optim",
        ),
        (
            MIXTURE,
            {"tp": 2, "ep": 4},
            "99,000 parameters (92,856 active) on 8 cpu rank(s) (4 x 2 tensor-parallel,"
            " 4 expert-parallel), optim",
        ),
    ],
)
def test_first_line_says_how_ranks_share_the_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: dict[str, Any],
    degrees: dict[str, int],
    said: str,
) -> None:
    """Data-parallel ranks, those that share each layer out, and what a token passes."""
    config = tiny(tmp_path, model=model, parallel=degrees)
    meter = Meter(CPU, tokens_per_step=1, flops_per_token=1, num_devices=8)
    report = Report(config, World(0, 8, 0, 8, CPU), meter=meter, state=RunState())
    report.start(99_000, 6)
    report.close()
    assert f"{said}_grads_params" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("length", "said"),
    [
        ({"steps": 8}, "resumed from step 8 of 8\n"),
        ({"steps": 5}, "of 8; train.steps 5 counts those before a resume too: nothing is left\n"),
        ({"steps": None, "samples": 9}, "of 8; train.samples 9 counts those before"),
    ],
)
def test_a_run_that_is_longer_than_asked_for_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: dict[str, Any], said: str
) -> None:
    """Who takes the length for that of the job alone sees why nothing is trained."""
    config = tiny(tmp_path, train=length)
    meter = Meter(CPU, tokens_per_step=1, flops_per_token=1, num_devices=1)
    state = RunState(step=8, consumed_samples=64)
    report = Report(config, World(0, 1, 0, 1, CPU), meter=meter, state=state)
    report.start(99_000, 8)
    report.close()
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl"])
def test_a_full_disk_names_the_folder_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """When a run resumes there: the files stay as they were, and no temporary ones are left."""
    config = tiny(tmp_path)
    config.run_directory.mkdir()
    path = config.run_directory / name
    path.write_text('{"step": 1}\n')
    write = Path.write_text

    def fail(file: Path, text: str, **keywords: Any) -> int:
        written = write(file, text[:3], **keywords)
        if file.name.startswith(name):
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        return written

    monkeypatch.setattr(Path, "write_text", fail)
    meter = Meter(CPU, tokens_per_step=1, flops_per_token=1, num_devices=1)
    message = rf"got OSError.*No space left.*run\.directory '{config.run_directory}'\. Make room"
    with pytest.raises(ConfigError, match=message):
        Report(config, World(0, 1, 0, 1, CPU), meter=meter, state=RunState(step=1))
    assert path.read_text() == '{"step": 1}\n'
    assert not list(config.run_directory.glob("*.tmp"))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_a_terminal_is_shown_fits_it_and_does_not_command_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of a step is as wide as the terminal and coloured; a sample is spelt out."""
    report = _report(tmp_path)
    monkeypatch.setenv("COLUMNS", "50")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for screen, is_terminal in ((_Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", screen)
        report.log_step(Position(1, 6, 12, 12, 0), StepResult(2.5, 1.0, False, ()), 1e-2)
        report.log_text("a\x1b[2J\nb")
        line, *sample = screen.getvalue().splitlines()
        assert ("\x1b[1mloss 2.5000\x1b[0m" in line) == is_terminal
        assert (len(re.sub(r"\x1b\[\d+m", "", line)) <= 50) == is_terminal
        assert "ms/step" in line
        assert sample == ["---- sample ----", "a\\x1b[2J", "b", "----------------"]
    report.close()


def test_lines_that_cannot_be_printed_are_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A closed stream does not end the run."""
    report = _report(tmp_path)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    for number in range(3):
        report.print_line(f"line {number}")
    report.close()
    (record,) = caplog.records
    assert "lines are lost: ValueError" in record.getMessage()


def test_the_rest_of_the_run_is_told_by_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The meter says how long the steps will take that are left."""
    left: list[int] = []
    read = Meter.read

    def noting(meter: Meter, steps_left: int) -> Any:
        left.append(steps_left)
        return read(meter, steps_left)

    monkeypatch.setattr(Meter, "read", noting)
    report = _report(tmp_path)
    report.log_step(Position(2, 6, 12, 12, 0), StepResult(2.5, 1.0, False, ()), 1e-2)
    report.close()
    assert left == [4]


def test_a_run_of_wandb_is_known_by_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints keep it, so that a resumed run goes on in the same one."""
    trackers = SimpleNamespace(wandb_id="abc", elapsed_s=0.0, close=lambda: None)
    monkeypatch.setattr("megafsdp.training.report.Trackers", lambda *unused, **rest: trackers)
    state = RunState()
    _report(tmp_path, state).close()
    assert state.wandb_id == "abc"
