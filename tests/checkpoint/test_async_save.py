"""A background save stores the state of its call, and its failure is never silent."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.optimizer import _global_optimizer_pre_hooks

from megafsdp import load_full_state_dict
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.checkpoint import (
    PendingSave,
    async_save,
    export_hf,
    import_hf,
    latest_step,
    load,
    release_staging_memory,
    save,
    wait_for_saves,
)
from megafsdp.checkpoint.background import staging
from megafsdp.checkpoint.background.pending_save import SAVES, BackgroundSaves
from megafsdp.checkpoint.background.staging import HostSlab, Staging
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.errors import CheckpointError
from megafsdp.fsdp import fully_shard
from tests.checkpoint.sharding import Toy, differences, fill, full_state
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


class _Held:
    """Hold a point of the save protocol until it is released."""

    def __init__(self, point: str) -> None:
        self._point, self._gate = point, threading.Event()

    def __call__(self, point: str) -> None:
        if point == self._point:
            assert self._gate.wait(60)

    def release(self) -> None:
        self._gate.set()


def _model(salt: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 6))
    model.scale = nn.Parameter(torch.ones(()))
    fill(model, salt)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_while_training(root: Path) -> list[str]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    _train(model, optimizer, 2)
    wanted = full_state(model, optimizer)
    hold = _Held("file opened")
    with mock.patch.object(on_disk, "reached", hold):
        pending = async_save(root, step=2, model=model, optimizer=optimizer, extra={"at": 2})
        _train(model, optimizer, 3)
        assert not pending.done() and latest_step(root) is None
        hold.release()
        assert pending.result() == root / "iter_0000002"
    changed = full_state(model, optimizer)
    assert len(differences(wanted, changed)) > 4
    fresh = _model(salt=1)
    other = torch.optim.AdamW(fresh.parameters(), lr=0.1, fused=True)
    assert load(root, model=fresh, optimizer=other) == {"at": 2}
    return differences(wanted, full_state(fresh, other))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_goes_on_and_the_earlier_state_is_stored(
    ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    """Steps with collectives run while the writer is held; the stored tensors are those before."""
    assert ranks(world_size).run(_save_while_training, tmp_path) == [[]] * world_size


def test_a_background_save_writes_what_a_save_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of both are equal, byte by byte; the call may be in inference mode."""
    # Large records are zip archives whose entries bear the time.
    monkeypatch.setattr(time, "localtime", lambda *seconds: time.gmtime(1e9))
    model = Toy(width=512)
    fill(model)
    save(tmp_path / "a", step=1, model=model)
    with torch.inference_mode():
        async_save(tmp_path / "b", step=1, model=model).result()
    name = "iter_0000001/__0_0.distcp"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("change", ["step", "load model", "load optimizer", "load"])
def test_who_changes_the_state_waits_for_the_copies(tmp_path: Path, change: str) -> None:
    """Nothing overwrites weights or states before they are copied; then it goes on."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save(tmp_path, step=0, model=model, optimizer=optimizer)
    states = model.state_dict(), optimizer.state_dict()
    actions = {
        "step": optimizer.step,
        "load model": lambda: model.load_state_dict(states[0]),
        "load optimizer": lambda: optimizer.load_state_dict(states[1]),
        "load": lambda: load(tmp_path, step=0, model=model),
    }
    gate = threading.Event()
    copy = Staging.copy

    def held(staging: Staging) -> None:
        assert gate.wait(60)
        copy(staging)

    with mock.patch.object(Staging, "copy", held):
        pending = async_save(tmp_path, step=1, model=model, optimizer=optimizer)
        worker = threading.Thread(target=actions[change])
        worker.start()
        worker.join(0.2)
        assert worker.is_alive()
        gate.set()
        worker.join(60)
    assert not worker.is_alive()
    pending.result()


def _load_meanwhile(kind: str, root: Path) -> list[str]:
    """Return how the stored state differs from that of the call of ``async_save``."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wanted = full_state(model, None)
    config = {"model_type": "toy"}
    export_hf(_model(salt=1), root / "hub", config=config, dtype=None)
    zeros = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    whole = {name: torch.zeros(value.shape) for name, value in zeros.items()}
    part = {name.removeprefix("2."): v for name, v in zeros.items() if name.startswith("2.")}

    def set_by_torch(names: Iterable[str]) -> None:
        options = StateDictOptions(full_state_dict=True, strict=False)
        set_model_state_dict(model, {name: whole[name] for name in names}, options=options)

    def load_with_torch() -> None:
        pending.wait_staged()
        dcp.load({"model": model.state_dict()}, checkpoint_id=str(root / "torch"))

    loads: dict[str, Callable[[], object]] = {
        "whole": lambda: load_full_state_dict(model, whole),
        "hub": lambda: import_hf(model, root / "hub", config=config),
        "unit": lambda: model.get_submodule("2").load_state_dict(part),
        "torch": load_with_torch,
        "setter": lambda: set_by_torch(name for name in whole if name != "scale"),
        "setter of a scalar": lambda: set_by_torch(["scale"]),
    }
    dcp.save({"model": zeros}, checkpoint_id=str(root / "torch"))
    copy = Staging.copy

    def late(staging: Staging) -> None:
        time.sleep(0.3)
        copy(staging)

    with mock.patch.object(Staging, "copy", late):
        pending = async_save(root / "saved", step=1, model=model, optimizer=optimizer)
        loads[kind]()
        pending.result()
    assert differences(wanted, full_state(model, None))
    load(root / "saved", model=model)
    return differences(wanted, full_state(model, None))


@pytest.mark.parametrize("kind", ["whole", "hub", "unit", "torch", "setter", "setter of a scalar"])
def test_loads_right_after_the_call_do_not_reach_the_file(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """Ours, and torch's setters, wait for late copies; before other loads the caller does."""
    assert ranks(2).run(_load_meanwhile, kind, tmp_path) == [[]] * 2


def test_a_part_of_a_plain_model_waits_and_the_model_is_still_pickled(tmp_path: Path) -> None:
    """Each module waits by itself, and what makes it wait goes with a copy of the model."""
    model = Toy()
    gate = threading.Event()
    copy = Staging.copy

    def held(staging: Staging) -> None:
        assert gate.wait(60)
        copy(staging)

    part = next(model.children())
    with mock.patch.object(Staging, "copy", held):
        pending = async_save(tmp_path, step=1, model=model)
        worker = threading.Thread(target=part.load_state_dict, args=(part.state_dict(),))
        worker.start()
        worker.join(0.2)
        assert worker.is_alive()
        gate.set()
        worker.join(60)
    # No hook is removed while a load goes through a module's hooks.
    own = model.register_load_state_dict_pre_hook(lambda *unused: None)
    model.load_state_dict(model.state_dict())
    own.remove()
    pending.result()
    twin = pickle.loads(pickle.dumps(model))
    assert twin.load_state_dict(model.state_dict()).missing_keys == []


@pytest.mark.parametrize("end", ["result", "step", "wait", "failure"])
def test_no_hook_stays_on_what_was_saved(tmp_path: Path, end: str) -> None:
    """Model and optimizer have their own hooks alone after the result, the next step or a wait."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def num_hooks() -> int:
        per_module = (len(module._load_state_dict_pre_hooks) for module in model.modules())
        return sum(per_module) + len(optimizer._optimizer_load_state_dict_pre_hooks)

    def broken(point: str) -> None:
        if point == "file opened" and end == "failure":
            raise OSError("no space left")

    model.register_load_state_dict_pre_hook(lambda *unused: None)
    with mock.patch.object(on_disk, "reached", broken):
        pending = async_save(tmp_path, step=1, model=model, optimizer=optimizer)
        assert (before := num_hooks()) > 3
        if end == "result":
            # The training thread may be going through the hooks meanwhile.
            other = threading.Thread(target=pending.result)
            other.start()
            other.join()
            assert num_hooks() == before
        if end == "failure":
            with pytest.raises(CheckpointError, match="no space left"):
                pending.result()
        else:
            {"result": pending.result, "step": optimizer.step, "wait": wait_for_saves}[end]()
        assert num_hooks() == 1
        wait_for_saves()


def test_a_forward_may_change_buffers_before_they_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No forward waits for the copies: stored are the statistics of the call."""
    model, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    gate, copy = threading.Event(), Staging.copy

    def late(staging: Staging) -> None:
        assert gate.wait(60)
        copy(staging)

    monkeypatch.setattr(Staging, "copy", late)
    pending = async_save(tmp_path, step=1, model=model)
    model(torch.randn(4, 3))
    gate.set()
    pending.result()
    load(tmp_path, model=other)
    assert model.num_batches_tracked == 1
    assert other.num_batches_tracked == 0 and not other.running_mean.any()


def test_the_working_directory_may_change_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative save root is that of the call."""
    monkeypatch.chdir(tmp_path)
    hold = _Held("file opened")
    with mock.patch.object(on_disk, "reached", hold):
        pending = async_save("saved", step=1, model=Toy())
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        hold.release()
        assert pending.result() == tmp_path / "saved" / "iter_0000001"
    assert latest_step(tmp_path / "saved") == 1


def _use_in_child(
    pending: PendingSave, model: nn.Module, optimizer: torch.optim.Optimizer, root: Path
) -> int:
    """Do what would wait for the copies; return what a worker should exit with."""
    pending.wait_staged()
    model.load_state_dict(model.state_dict())
    optimizer.step()
    async_save(root, step=2, model=model).result()
    with pytest.raises(CheckpointError, match="one forked from it"):
        pending.result()
    return 0


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_forked_meanwhile_waits_for_nothing(tmp_path: Path) -> None:
    """The thread that copies is the parent's; the child may change its own weights, and save."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gate = threading.Event()
    copy = Staging.copy

    def held(staging: Staging) -> None:
        assert os.getpid() != parent or gate.wait(60)
        copy(staging)

    parent = os.getpid()
    with mock.patch.object(Staging, "copy", held):
        pending = async_save(tmp_path / "parent", step=1, model=model, optimizer=optimizer)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = _use_in_child(pending, model, optimizer, tmp_path / "child")
            finally:
                os._exit(code)
        deadline = time.monotonic() + 20
        ended, status = 0, 0
        while not ended and time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        gate.set()
        pending.result()
    assert (ended, status) == (child, 0)
    assert (latest_step(tmp_path / "parent"), latest_step(tmp_path / "child")) == (1, 2)


def _collector_beside_a_save(root: Path) -> tuple[list[bool], bool]:
    """Return whether the collector could run while rank 0 waits, and whether it stays as chosen."""
    late, seen = threading.Event(), []
    waits = dist.get_rank() == 0

    def reached(point: str) -> None:
        if point == "records written" and not waits:
            assert late.wait(60)
        if point == "manifest written":
            gc.disable()

    model = _model()
    with mock.patch.object(on_disk, "reached", reached):
        pending = async_save(root, step=1, model=model)
        for _ in range(20):
            time.sleep(0.01)
            seen.append(gc.isenabled() and gc.get_threshold()[0] > 0)
        # Rank 0 has stopped looking before rank 1 goes on.
        dist.barrier()
        late.set()
        pending.result()
    stays_off = not gc.isenabled() or not waits
    gc.enable()
    threshold = gc.get_threshold()

    def choose(point: str) -> None:
        if point == "manifest written":
            gc.set_threshold(123)

    with mock.patch.object(on_disk, "reached", choose):
        save(root, step=2, model=model)
    stays_chosen = gc.get_threshold()[0] == 123 or not waits
    gc.set_threshold(*threshold)
    return seen, stays_off and stays_chosen and threshold[0] > 0


def test_the_collector_is_the_callers(ranks: Ranks, tmp_path: Path) -> None:
    """It runs while a background save waits for a slow rank, and is as it was set meanwhile."""
    assert ranks(2).run(_collector_beside_a_save, tmp_path) == [([True] * 20, True)] * 2


def test_a_step_does_not_wait_for_the_writing(tmp_path: Path) -> None:
    """With the copies made, the model is free while the file is still being written."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hold = _Held("file opened")
    with mock.patch.object(on_disk, "reached", hold):
        pending = async_save(tmp_path, step=1, model=model, optimizer=optimizer)
        optimizer.step()
        assert not pending.done()
        hold.release()
        pending.result()


def _hooks_of_loads(root: Path) -> list[int]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer, 1)

    def count() -> int:
        hooked = sum(len(module._load_state_dict_pre_hooks) for module in model.modules())
        return hooked + len(optimizer._optimizer_load_state_dict_pre_hooks)

    counts = [count()]
    pending = async_save(root, step=1, model=model, optimizer=optimizer)
    counts.append(count())
    pending.result()
    counts.append(count())
    async_save(root, step=2, model=model, optimizer=optimizer)
    SAVES.wait_for_end()
    counts.append(count())
    pending = async_save(root, step=3, model=model, optimizer=optimizer)
    while not pending.done():
        time.sleep(0.01)
    _train(model, optimizer, 1)
    return [*counts, count()]


def test_no_hooks_of_loads_are_left_after_a_save(ranks: Ranks, tmp_path: Path) -> None:
    """They wait for the copies, and go with the result, or with the next step after the save."""
    for before, saving, *after in ranks(2).run(_hooks_of_loads, tmp_path):
        assert saving > before and set(after) == {before}


def _second_save(root: Path) -> tuple[str, int | None]:
    model = _model()
    hold = _Held("file opened")
    with mock.patch.object(on_disk, "reached", hold):
        first = async_save(root, step=1, model=model)
        try:
            async_save(root, step=2, model=model, when_busy="raise")
            message = ""
        except CheckpointError as error:
            message = str(error)
        hold.release()
        second = async_save(root, step=3, model=model)
        assert first.done()
        save(root, step=4, model=model)
        assert second.done()
    return message, latest_step(root)


def test_a_second_save_waits_or_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """One save is in flight; ``raise`` names it on all ranks, otherwise the next one waits."""
    for message, latest in ranks(2).run(_second_save, tmp_path):
        assert "background save of step 1" in message and latest == 4
    assert on_disk.published_steps(tmp_path) == [1, 3, 4]


def _busy_on_rank_zero(root: Path) -> str:
    model = _model()
    gate, release = threading.Event(), Staging.release

    def late(staging: Staging) -> None:
        if dist.get_rank() == 0:
            assert gate.wait(60)
        release(staging)

    with mock.patch.object(Staging, "release", late):
        first = async_save(root, step=1, model=model)
        if dist.get_rank() == 1:
            first.result()
        message = _refusal(lambda: async_save(root, step=2, model=model, when_busy="raise"))
        gate.set()
        first.result()
    # One that has ended everywhere is not.
    async_save(root, step=2, model=model, when_busy="raise").result()
    return message


def test_a_save_that_has_ended_on_some_ranks_is_in_flight(ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 decides for all: a rank that went on alone would wait for the others forever."""
    for message in ranks(2).run(_busy_on_rank_zero, tmp_path):
        assert "background save of step 1" in message


def _refusal(action: Callable[[], object]) -> str:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return ""


def _fail(root: Path, observers: tuple[int, ...]) -> list[str]:
    model = _model()
    save(root, step=1, model=model)

    def broken(point: str) -> None:
        if point == "file opened" and dist.get_rank() == 1:
            raise OSError("no space left")

    with mock.patch.object(on_disk, "reached", broken):
        pending = async_save(root, step=2, model=model)
        observed = [_refusal(pending.result)] if dist.get_rank() in observers else []
        wait_for_saves()
        assert pending.done()
    messages = [*observed, _refusal(lambda: save(root, step=3, model=model))]
    with record_collectives() as record:
        save(root, step=4, model=model)
    # Ranks that all know of the failure ask no more.
    assert not record.calls["all_gather_objects"]
    load(root, step=1, model=model)
    return messages


@pytest.mark.parametrize("observers", [(), (0,), (1,), (0, 1)])
def test_a_failure_is_raised_on_all_ranks(
    ranks: Ranks, tmp_path: Path, observers: tuple[int, ...]
) -> None:
    """By ``result()``, and by the next save unless all have asked; what was published stays."""
    are_all = len(observers) == 2
    for rank, messages in enumerate(ranks(2).run(_fail, tmp_path, observers)):
        assert [bool(m) for m in messages] == [True] * (rank in observers) + [not are_all]
        raised = filter(None, messages)
        assert all("step 2 failed" in m and "no space left. In" in m for m in raised)
        assert all("stays. (raised on 1" in m for m in messages if m)
    assert on_disk.published_steps(tmp_path) == ([1, 3, 4] if are_all else [1, 4])
    assert list(tmp_path.glob(".tmp*")) == []


def _fail_to_stage(root: Path, where: str) -> str:
    model = _model()
    save(root, step=1, model=model)

    def full(*args: object, **options: object) -> None:
        if args[1:] != (0,):
            raise MemoryError("no host memory")

    target = (HostSlab, "_reserve") if where == "memory" else (Staging, "copy")
    hold = _Held("copies made")
    with contextlib.ExitStack() as stack:
        if torch.distributed.get_rank() == 1:
            stack.enter_context(mock.patch.object(*target, full))
            stack.enter_context(mock.patch.object(on_disk, "reached", hold))
        pending = async_save(root, step=2, model=model)
        # The rank that failed has nothing to wait for.
        model.load_state_dict(model.state_dict())
        hold.release()
        if where == "copy":
            wait_for_saves()
    try:
        pending.result()
        message = ""
    except CheckpointError as error:
        message = str(error)
    assert latest_step(root) == 1
    async_save(root, step=3, model=model).result()
    return message


@pytest.mark.parametrize("where", ["memory", "copy"])
def test_a_rank_without_copies_fails_the_save_on_all(
    ranks: Ranks, tmp_path: Path, where: str
) -> None:
    """No rank is left waiting, nothing is published, and the next save works."""
    for message in ranks(2).run(_fail_to_stage, tmp_path, where):
        assert "step 2 failed" in message and "no host memory" in message and "rank 1" in message
    assert on_disk.published_steps(tmp_path) == [1, 3]
    assert list(tmp_path.glob(".tmp*")) == []


# Imports, then forks a program for each line that it reads: a mode. Prints how each ended.
_PROGRAMS = """
import os, signal, sys, time, torch
from megafsdp import checkpoint
from megafsdp.checkpoint.format import save_root
def reached(point):
    if point == "file opened":
        print("writing", os.getpid(), flush=True)
        time.sleep(0.5)
        if mode == "fail":
            raise OSError("no space left")
save_root.reached = reached
for mode in iter(sys.stdin.readline, ""):
    mode = mode.strip()
    program = os.fork()
    if program == 0:
        break
    print("ended", os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]), flush=True)
else:
    sys.exit()
if mode == "handle":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
checkpoint.async_save(os.path.join(sys.argv[1], mode), step=7, model=torch.nn.Linear(3, 3))
if mode in ("sleep", "handle"):
    # In pieces: a signal that arrives just before a sleep is noticed after it.
    for _ in range(600):
        time.sleep(0.1)
"""


def test_the_end_of_a_process_waits_for_the_save(tmp_path: Path) -> None:
    """A program that just ends has published, as one ended by SIGTERM; a failed save is told."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAMS, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as programs:
        assert programs.stdin is not None and programs.stdout is not None

        def start(mode: str) -> int:
            print(mode, file=programs.stdin, flush=True)
            said, process_id = programs.stdout.readline().split()
            assert said == "writing"
            return int(process_id)

        start("end")
        assert programs.stdout.readline() == "ended 0\n"
        assert latest_step(tmp_path / "end") == 7
        # The second one has a handler of its own, which stays.
        for mode, code in (("sleep", -signal.SIGTERM), ("handle", 5)):
            process_id = start(mode)
            os.kill(process_id, signal.SIGTERM)
            begin_s = time.monotonic()
            assert programs.stdout.readline() == f"ended {code}\n"
            assert time.monotonic() - begin_s < 40
            assert latest_step(tmp_path / mode) == 7
        start("fail")
        _, stderr = programs.communicate(timeout=60)
    assert latest_step(tmp_path / "fail") is None
    assert "background save of step 7 failed" in stderr and "no space left" in stderr


# Imports, then forks two ranks, which end in the way of many programs.
_RANKS = """
import os, sys, time, torch
import torch.distributed as dist
from megafsdp import checkpoint
from megafsdp.checkpoint.format import save_root
root = sys.argv[1]
rank = int(os.fork() == 0)
save_root.reached = lambda point: time.sleep(point == "file opened")
dist.init_process_group("gloo", init_method=f"file://{root}/ranks", rank=rank, world_size=2)
checkpoint.async_save(f"{root}/saved", step=7, model=torch.nn.Linear(3, 3))
if sys.argv[2] == "older":
    # Versions of torch that call nothing before groups end.
    dist.distributed_c10d._world.comms.clear()
dist.destroy_process_group()
if not rank:
    os.wait()
"""


def _end_with_a_save(folder: Path, torch_version: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", _RANKS, folder, torch_version]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(not hasattr(distributed_c10d._world, "comms"), reason="torch before 2.13")
def test_the_end_of_the_process_groups_waits_for_the_save(tmp_path: Path) -> None:
    """As the last lines of many programs are: a save, and the end of the groups."""
    ended = _end_with_a_save(tmp_path, "installed")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert latest_step(tmp_path / "saved") == 7


def test_a_save_whose_groups_were_destroyed_says_what_to_call(tmp_path: Path) -> None:
    """With a torch that cannot wait for the save; torch's own error is the bare group."""
    ended = _end_with_a_save(tmp_path, "older")
    message = "step 7 failed: .*result.* of the save, .*before torch.distributed.destroy_process"
    assert len(re.findall(message, ended.stderr)) == 2, ended.stderr
    assert latest_step(tmp_path / "saved") is None


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    """The message says what is allowed."""
    with pytest.raises(ValueError, match="when_busy"):
        async_save(tmp_path, step=1, model=Toy(), when_busy="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="step"):
        async_save(tmp_path, step=-1, model=Toy())


def test_staging_memory_is_used_again() -> None:
    """A slab grows when it must, keeps dtypes, shapes and values, and can be given back."""
    slab, kept = HostSlab(), list[int]()
    tensors = [torch.randn(3, 5), torch.arange(7), torch.tensor(2.5), torch.ones(0, 4)]
    first = Staging(tensors, slab)
    first.copy()
    assert all(torch.equal(a, b) for a, b in zip(tensors, first.copies, strict=True))
    address, nbytes = first.copies[0].data_ptr(), slab.nbytes
    second = Staging(tensors[:2], slab)
    assert second.copies[0].data_ptr() == address and slab.nbytes == nbytes
    # What it had goes first: the two together may be more than the host has.
    with mock.patch.object(staging, "host_bytes", wraps=staging.host_bytes) as allocate:
        allocate.side_effect = lambda *_, **__: kept.append(slab.nbytes) or mock.DEFAULT
        Staging([torch.empty(nbytes, dtype=torch.uint8), tensors[0]], slab).copy()
    assert slab.nbytes > nbytes and kept == [0]
    slab.release()
    assert slab.nbytes == 0


def test_released_memory_is_taken_again(tmp_path: Path) -> None:
    """Giving the memory back waits for the save, and the next save works."""
    pending: PendingSave = async_save(tmp_path, step=1, model=Toy())
    release_staging_memory()
    assert pending.done()
    num_hooks = len(_global_optimizer_pre_hooks)
    async_save(tmp_path, step=2, model=Toy()).result()
    # One hook of the process serves all saves.
    assert len(_global_optimizer_pre_hooks) == num_hooks > 0


def test_signals_are_handled_from_the_main_thread_alone() -> None:
    """Python refuses it to others, from which a save may begin too."""
    saves = BackgroundSaves()
    with (
        mock.patch.object(signal, "getsignal", return_value=signal.SIG_DFL),
        mock.patch.object(signal, "signal") as handle,
    ):
        saves._flush_on_signals()
        handled = [call.args[0] for call in handle.call_args_list]
        worker = threading.Thread(target=saves._flush_on_signals)
        worker.start()
        worker.join()
        assert handle.call_count == len(handled)
    assert handled == [signal.SIGTERM, signal.SIGHUP]


def test_nothing_outlives_the_save(tmp_path: Path) -> None:
    """Model, optimizer and staging memory are freed at once, while the save is remembered."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pending = async_save(tmp_path, step=1, model=model, optimizer=optimizer)
    copies = [weakref.ref(copy) for copy in pending._staging.copies]
    pending.result()
    assert copies and all(copy() is None for copy in copies)
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model, optimizer
    gc.collect()
    assert all(parameter() is None for parameter in parameters)
    assert pending.published is not None
