"""Jobs that lose a worker or a machine, or hang, and go on: the end is that of an unbroken run."""

from __future__ import annotations

import functools
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafsdp.errors import RankError
from megafsdp.training import Config, train
from megafsdp.training.cli.main import main
from megafsdp.training.step.train_step import StepResult
from tests.end_to_end.launchers import (
    Launch,
    ended,
    free_port,
    kill_node,
    leave_process_group,
    until,
    workers,
)
from tests.ranks import Ranks, RanksError
from tests.training.runs import stored_tensors, tiny, write_corpus

NUM_STEPS = 12


def _config(folder: Path, name: str, **sections: dict[str, Any]) -> Config:
    return tiny(
        folder,
        run={"directory": str(folder / name), **sections.pop("run", {})},
        model={"num_layers": 1},
        train={"steps": NUM_STEPS, "micro_batch_size": 2, **sections.pop("train", {})},
        checkpoint={"interval_steps": 3, "keep_last": 2},
        evaluation={"interval_steps": None, "batches": 1},
        **sections,
    )


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, the last one written where steps were taken twice."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


def _train(config: Config) -> None:
    train(config)


def _assert_equal(ours: Config, theirs: Config) -> None:
    """Compare losses, main weights and optimizer states of two runs, bit for bit."""
    num_steps = theirs.train.steps
    assert num_steps is not None
    assert _losses(ours.run_directory) == _losses(theirs.run_directory)
    assert len(_losses(ours.run_directory)) == num_steps
    found = stored_tensors(ours.checkpoint_directory, num_steps)
    wanted = stored_tensors(theirs.checkpoint_directory, num_steps)
    assert found.keys() == wanted.keys()
    assert any(name.startswith("optimizer.state.") for name in found)
    for name in found:
        assert torch.equal(found[name], wanted[name]), name


# Of ranks from which launchers are forked, and which run nothing else: from torch 2.15 on, no
# backward runs in a fork of a process that has compiled.
_OWN_POOL = "cpu:gloo"


def _step(folder: Path) -> int:
    """Return the last step that a run has written, 0 before the first."""
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def _failing_once(config: Config, faults: dict[int, str]) -> None:
    """Train; at the named steps rank 1 hangs or dies, the first time that it comes there."""

    def fail(step: int, result: StepResult) -> None:
        mark = config.run_directory / f"failed-{step}"
        if step not in faults or dist.get_rank() != 1 or mark.exists():
            return
        mark.touch()
        if faults[step] == "hang":
            _sleep_long()
        os.kill(os.getpid(), signal.SIGKILL)

    train(config, on_step=fail)


def _sleep_long() -> None:
    time.sleep(600)


def _launched(launch: Launch) -> int:
    leave_process_group()
    return ended(launch.start())


@pytest.fixture(scope="module")
def unbroken(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Return a run of two ranks that nothing interrupted; its folder's parent has the corpus."""
    folder = tmp_path_factory.mktemp("unbroken")
    write_corpus(folder)
    config = _config(folder, "whole")
    ranks(2).run(_train, config)
    return config


def test_a_hung_and_a_killed_worker_change_nothing(
    ranks: Ranks, tmp_path: Path, unbroken: Config
) -> None:
    """The hang ends with the collective, the rank and its place; both restarts go on."""
    broken = _config(unbroken.run_directory.parent, "hung", run={"timeout_s": 2})
    log = tmp_path / "log"
    worker = functools.partial(_failing_once, broken, {4: "hang", 8: "kill"})
    (code,) = ranks(1, _OWN_POOL).run(_launched, Launch(worker, log, max_restarts=2))
    output = log.read_text()
    assert code == 0, output
    _assert_equal(broken, unbroken)
    assert output.count("RankError: Expected ranks 0, 1 to reach") == 2, "once from each rank"
    found = re.search(
        r"to reach (\w+) of '([^']+)' within 2 s, got all but rank 1\. In collective \d+ of these"
        r" ranks, while rank 1 is at end_to_end/test_restarts.py:\d+ in _sleep_long",
        output,
    )
    assert found is not None, output


def _machine_that_returns(launch: Launch, folder: Path) -> tuple[int, int]:
    """Start two launchers, kill the second and its worker at a step, and start it again."""
    leave_process_group()
    first, second = launch.start(), launch.start(is_host=False)
    until(lambda: _step(folder) >= 5, "five steps")
    kill_node(second)
    second = launch.start(is_host=False)
    return ended(first), ended(second)


def test_a_killed_machine_that_returns_changes_nothing(
    ranks: Ranks, tmp_path: Path, unbroken: Config
) -> None:
    """The launcher that stays counts one restart and the new one none; their workers still meet."""
    broken = _config(unbroken.run_directory.parent, "machine")
    log = tmp_path / "log"
    worker = functools.partial(_train, broken)
    launch = Launch(worker, log, num_ranks=1, num_nodes=2, max_restarts=2, port=free_port())
    (codes,) = ranks(1, _OWN_POOL).run(_machine_that_returns, launch, broken.run_directory)
    output = log.read_text()
    assert codes == (0, 0), output
    assert "resumed from step" in output
    _assert_equal(broken, unbroken)


def _fail_by_name(folder: Path) -> None:
    os.chdir(folder)
    sys.exit(main(["train", "--optimizer.rate=1"]))


def test_one_message_is_the_root_cause(ranks: Ranks, tmp_path: Path) -> None:
    """What torchrun prints last is our message, in place of a call stack or of nothing."""
    log = tmp_path / "log"
    launch = Launch(functools.partial(_fail_by_name, tmp_path), log)
    (code,) = ranks(1, _OWN_POOL).run(_launched, launch)
    assert code == 1
    cause = log.read_text().partition("Root Cause")[2]
    assert "traceback : ConfigError: Expected a known name, got" in cause
    assert "Traceback (most recent call last)" not in cause


def _contents(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder of checkpoints."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _alone(config: Config, port: int) -> str:
    """Start the first of two ranks alone; return the error."""
    leave_process_group()
    launched = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        for name, value in launched.items():
            patch.setenv(name, str(value))
        with pytest.raises(RankError) as error:
            train(config)
    return str(error.value)


def test_restarts_that_cannot_go_on_leave_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that never joins, and a number of machines that does not divide the batch.

    Each is one error that says what to do, and the run's own number of ranks goes on afterwards.
    """
    write_corpus(tmp_path)
    short = _config(tmp_path, "run", train={"steps": 3}, run={"timeout_s": 1})
    ranks(2).run(_train, short)
    before = _contents(short.checkpoint_directory)
    assert before
    longer = _config(tmp_path, "run", run={"timeout_s": 1})
    (message,) = ranks(1).run(_alone, longer, free_port())
    assert message.startswith("Expected 2 ranks to meet within 1 s, got no sign of rank 1. In")
    assert "start as many ranks as WORLD_SIZE says, or raise run.timeout_s" in message
    with pytest.raises(RanksError) as failure:
        ranks(5).run(_train, longer)
    assert set(failure.value.failures) == set(range(5))
    wanted = "ConfigError: Expected a multiple of the 5 data-parallel ranks"
    assert all(wanted in text for text in failure.value.failures.values())
    assert all("train.global_batch_size. Use 15" in t for t in failure.value.failures.values())
    assert _contents(short.checkpoint_directory) == before
    ranks(2).run(_train, longer)
    assert sorted(_losses(longer.run_directory)) == list(range(1, NUM_STEPS + 1))


def _kills(launch: Launch, folder: Path, num_kills: int) -> tuple[int, list[int]]:
    """Kill one worker after another; return the launcher's code, and the step at each kill.

    Every second moment is a random time after the start of the workers, so that some have not met,
    and every other one a random number of steps.
    """
    leave_process_group()
    launcher, source, killed = launch.start(), random.Random(0), set[int]()
    steps = []
    for number in range(num_kills):
        until(lambda: set(workers(launcher)) - killed, "new workers")
        if number % 2:
            goal = _step(folder) + source.randint(1, 20)
            until(lambda goal=goal: _step(folder) >= goal, f"step {goal}")
        time.sleep(source.uniform(0.0, 0.4 / (1 + 9 * (number % 2))))
        # Started anew in between, if the last kill came late.
        alive = [process_id for process_id in workers(launcher) if process_id not in killed]
        if alive:
            killed.update(alive)
            os.kill(source.choice(alive), signal.SIGKILL)
            steps.append(_step(folder))
    return ended(launcher), steps


@pytest.mark.matrix("restarts")
def test_thirty_kills_at_random_moments_change_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """Losses, weights and states are, bit for bit, those of a run that nothing interrupts."""
    num_kills, steps = 30, {"steps": 500}
    write_corpus(tmp_path)
    whole, broken = (_config(tmp_path, name, train=steps) for name in ("whole", "run"))
    ranks(2).run(_train, whole, timeout_s=300)
    log = tmp_path / "log"
    launch = Launch(functools.partial(_train, broken), log, max_restarts=num_kills + 10)
    ((code, killed_at),) = ranks(1, _OWN_POOL).run(
        _kills, launch, broken.run_directory, num_kills, timeout_s=500
    )
    assert code == 0, log.read_text()[-4000:]
    assert len(killed_at) == num_kills
    assert len(set(killed_at)) > num_kills / 3, "training came between the kills"
    _assert_equal(broken, whole)
