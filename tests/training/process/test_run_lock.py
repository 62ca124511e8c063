"""Two jobs in one folder, and the ends of the first."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from megafsdp.errors import ConfigError
from megafsdp.training import train
from megafsdp.training.cli.main import main
from megafsdp.training.config.parse import to_yaml
from megafsdp.training.process.run_lock import LOCK_FILE, sole_job
from megafsdp.training.process.world import World
from tests.ranks import Ranks, RanksError
from tests.training.runs import rows, tiny, write_corpus

ALONE = World(0, 1, 0, 1, torch.device("cpu"))


def _hold(folder: Path, told: Connection) -> None:
    with sole_job(folder, ALONE):
        told.send("held")
        time.sleep(600)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_second_job_is_refused_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    """It leaves every file as it was; when the first has ended, the same command goes on."""
    write_corpus(tmp_path)
    ranks(2).run(train, tiny(tmp_path, train={"steps": 1}))
    config = tiny(tmp_path, train={"steps": 2})
    with sole_job(config.run_directory, ALONE):
        before = _contents(config.run_directory)
        with pytest.raises(RanksError) as failure:
            ranks(2).run(train, config)
        assert _contents(config.run_directory) == before
    assert set(failure.value.failures) == {0, 1}
    holder = f"process {os.getpid()} on "
    for text in failure.value.failures.values():
        assert f"ConfigError: Expected a folder in which no other job runs, got {holder}" in text
        assert str(config.run_directory) in text
    assert [summary.step for summary in ranks(2).run(train, config)] == [2, 2]
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2]


def test_jobs_that_share_a_folder_of_checkpoints_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Each would go on from the other's steps, whatever its own folder is."""
    write_corpus(tmp_path)
    shared = {"directory": str(tmp_path / "shared")}
    other = {"directory": str(tmp_path / "other")}
    config = tiny(tmp_path, checkpoint=shared, train={"steps": 1})
    first = tiny(tmp_path, run=other, checkpoint=shared)
    with (
        sole_job(first.run_directory, ALONE, checkpoints=first.checkpoint_directory),
        pytest.raises(RanksError) as failure,
    ):
        ranks(2).run(train, config)
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert f"checkpoint.directory '{config.checkpoint_directory}'" in text
    assert [summary.step for summary in ranks(2).run(train, config)] == [1, 1]


def test_checkpoints_in_the_folder_of_another_job_are_refused(tmp_path: Path) -> None:
    """That job locks its folder, not the one of its checkpoints."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    checkpoints = theirs / "checkpoints"
    with (
        sole_job(theirs, ALONE),
        pytest.raises(ConfigError, match="no other job runs"),
        sole_job(ours, ALONE, checkpoints=checkpoints),
    ):
        pass
    with (
        sole_job(ours, ALONE, checkpoints=checkpoints),
        pytest.raises(ConfigError, match="no other job runs"),
        sole_job(theirs, ALONE),
    ):
        pass
    with sole_job(theirs, ALONE, checkpoints=checkpoints):
        pass


def test_checkpoints_in_the_run_folder_itself_are_no_second_job(tmp_path: Path) -> None:
    """However the folder is written."""
    write_corpus(tmp_path)
    same = {"directory": str(tmp_path / "here" / ".." / "run")}
    (tmp_path / "here").mkdir()
    assert train(tiny(tmp_path, checkpoint=same, train={"steps": 1})).is_finished


@pytest.mark.parametrize("place", ["/proc/x", "a file", "a file/below"])
def test_a_folder_that_cannot_be_written_is_refused_on_every_rank(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    """Before anything is built; the message says which option names it."""
    (tmp_path / "a file").touch()
    config = tiny(tmp_path, run={"directory": str(tmp_path / place)})
    with pytest.raises(RanksError) as failure:
        ranks(2).run(train, config)
    assert set(failure.value.failures) == {0, 1}
    for text in failure.value.failures.values():
        assert "ConfigError: Expected a folder that can be written to, got " in text
        assert f"run.directory '{config.run_directory}'" in text


def test_checkpoints_that_cannot_be_locked_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run may read them from a folder in which it makes no file."""
    saved = tmp_path / "saved"
    (saved / LOCK_FILE).mkdir(parents=True)
    with sole_job(tmp_path / "run", ALONE, checkpoints=saved):
        assert str(saved) in caplog.text
    with (
        pytest.raises(ConfigError, match="a folder that can be written to"),
        sole_job(saved, ALONE),
    ):
        pass


def test_a_failed_run_unlocks_its_folder(tmp_path: Path) -> None:
    """A process that goes on after an error may train there again."""
    config = tiny(tmp_path)
    with pytest.raises(ValueError, match=r"train\.idx"):
        train(config)
    with sole_job(config.run_directory, ALONE):
        pass


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_killed_job_leaves_no_lock(tmp_path: Path) -> None:
    """Neither its end nor the file that it leaves keeps the next one out."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    job = context.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    job.start()
    assert ours.recv() == "held"
    with pytest.raises(ConfigError, match=f"process {job.pid} on"), sole_job(tmp_path, ALONE):
        pass
    job.kill()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    with sole_job(tmp_path, ALONE):
        assert (tmp_path / "run.lock").read_text().startswith(f"process {os.getpid()} on ")


def test_commands_that_read_need_no_lock(tmp_path: Path) -> None:
    """A running job's checkpoints may be looked at, and its cost asked for."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, train={"steps": 1})
    train(config)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    with sole_job(config.run_directory, ALONE):
        assert main(["ckpt", "inspect", str(config.checkpoint_directory)]) == 0
        assert main(["train", "--config", str(path), "--dry-run"]) == 0
        assert main(["train", "--config", str(path)]) == 2


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on, with one warning."""

    def flock(*unused: object) -> NoReturn:
        raise OSError(errno.ENOSYS, "Function not implemented")

    write_corpus(tmp_path)
    monkeypatch.setattr("fcntl.flock", flock)
    assert train(tiny(tmp_path, train={"steps": 1})).is_finished
    assert caplog.text.count("cannot be locked") == 1
