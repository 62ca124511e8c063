"""How a process finds its place and opens the process group."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.errors import ConfigError, RankError
from megafsdp.training.process.hang_watch import MAX_NAMING_S
from megafsdp.training.process.world import World, find_world, process_group
from tests.end_to_end.launchers import free_port
from tests.ranks import Ranks

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what a launcher would have set."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_plain_process_is_a_world_of_one() -> None:
    """Without a launcher there is one rank, and its group serves collectives."""
    world = find_world("cpu")
    assert (world.rank, world.size, world.device) == (0, 1, torch.device("cpu"))
    with process_group(world, timeout_s=10):
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


def test_group_is_closed_after_an_error() -> None:
    """A failed run leaves the process able to start another."""
    with pytest.raises(KeyError), process_group(find_world("cpu"), timeout_s=10):
        raise KeyError
    assert not dist.is_initialized()


def test_launcher_decides_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun sets is read."""
    for name, value in zip(_VARIABLES, ("5", "8", "1", "4"), strict=True):
        monkeypatch.setenv(name, value)
    assert find_world("cpu") == World(5, 8, 1, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "4"}, "RANK beside WORLD_SIZE, got WORLD_SIZE 4 alone.*torchrun.*unset"),
        ({"RANK": "0"}, "WORLD_SIZE beside RANK, got RANK 0 alone"),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "whole number.*got 'abc'.*RANK"),
        ({"WORLD_SIZE": ""}, "whole number.*got ''.*WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK below WORLD_SIZE, got 2 of 2"),
        ({"LOCAL_RANK": "x"}, "whole number.*got 'x'.*LOCAL_RANK"),
    ],
)
def test_environment_that_names_no_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    """No process would train on a share of the data, or a traceback would name no variable."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        find_world("cpu")


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_ranks_without_a_place_to_meet_are_refused(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """The variable that a launcher would have set is named."""
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", **meeting}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with (
        pytest.raises(ConfigError, match=f"{missing} beside RANK, got none.*torchrun"),
        process_group(find_world("cpu"), timeout_s=10),
    ):
        pass


def test_world_of_one_needs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers set it for plain processes too."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert find_world("cpu").size == 1


def test_more_ranks_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message counts both."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"each of the 2 ranks.*got 1 GPUs"):
        find_world("cuda")


def _inside_open_group() -> tuple[int, int, bool]:
    world = find_world("cpu")
    with process_group(world, timeout_s=10):
        pass
    return world.rank, world.size, dist.is_initialized()


def test_open_group_is_used_and_left_open(ranks: Ranks) -> None:
    """A caller's own group stays the caller's."""
    assert ranks(2).run(_inside_open_group) == [(0, 2, True), (1, 2, True)]


@pytest.mark.parametrize(("omp", "threads"), [(None, 1), ("3", 7)])
def test_ranks_that_share_cores_have_one_thread(
    monkeypatch: pytest.MonkeyPatch, omp: str | None, threads: int
) -> None:
    """Unless the user has decided with OMP_NUM_THREADS."""
    wanted: list[int] = [7]
    monkeypatch.setattr(torch, "set_num_threads", wanted.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    with process_group(World(0, 1, 0, 2, torch.device("cpu")), timeout_s=10):
        assert wanted[-1] == threads


@pytest.mark.parametrize("is_launched", [True, False])
def test_collectives_of_gpus_go_before_other_kernels(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    """The world's NCCL group, which a mesh of one axis uses, has a stream of high priority.

    Its own limit is later than that of the watch for hangs.
    """
    given: dict[str, object] = {}
    options = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **kwargs: given.update(kwargs))
    if is_launched:
        for name, value in (("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
            monkeypatch.setenv(name, value)
    world = World(0, 1, 0, 1, torch.device("cuda", 0))
    # Nothing was opened that could be closed.
    with contextlib.suppress(ValueError, AssertionError), process_group(world, timeout_s=10):
        pass
    timeout = datetime.timedelta(seconds=10 + MAX_NAMING_S)
    wanted = SimpleNamespace(is_high_priority_stream=True, _timeout=timeout)
    assert given["pg_options"] == wanted and given["timeout"] == timeout


def _other_rank_dies(port: int) -> str:
    """Open the group of two launched ranks, of which the second is killed; return the error."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    # The pool's own rank stays.
    if rank == 1 and (child := os.fork()):
        os.waitpid(child, 0)
        return ""
    world = World(rank, 2, 0, 1, torch.device("cpu"))
    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in launched.items():
            patch.setenv(name, str(value))
        with pytest.raises(RankError) as error, process_group(world, timeout_s=30):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            all_reduce(torch.ones(1), label="the loss")
    return str(error.value)


def test_end_of_another_rank_is_named(ranks: Ranks) -> None:
    """In place of a library's words: what it waited for, and that the cause is elsewhere."""
    message, _ = ranks(2).run(_other_rank_dies, free_port())
    assert message.startswith("Expected all ranks to go on, got the end of one (")
    assert "In all_reduce of 'the loss'. Look for the first error" in message
