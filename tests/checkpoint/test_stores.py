"""Saves to an object store: what a disk promises, without renames, whatever fails in between."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from unittest import mock
from uuid import uuid4

import pytest
import torch
from torch import nn

from megafsdp.checkpoint import StorePath, async_save, latest_step, load, save
from megafsdp.checkpoint.background.pending_save import SAVES
from megafsdp.checkpoint.format import save_root, store_root
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.storage import store_files
from megafsdp.checkpoint.tools.summary import inspect
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.errors import CheckpointError
from tests.checkpoint.faulty_store import EXIT_CODE, Fault, FaultyStore
from tests.checkpoint.sharding import (
    Toy,
    differences,
    fill,
    full_state,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.ranks import RankPool, RanksError

Ranks = Callable[[int], RankPool]

# In the order of a save of step 2 that retires step 1.
POINTS = [
    "prepared",
    "file opened",
    "records written",
    "file synced",
    "records gathered",
    "DCP metadata written",
    "manifest written",
    "tracker written",
    "marker removed",
    "retired directory marked",
    "retired manifest removed",
    "retired directory removed",
]


@pytest.fixture
def store(tmp_path: Path) -> FaultyStore:
    """Return an empty store."""
    return FaultyStore(tmp_path / "store")


def _filled(step: int) -> Toy:
    model = Toy()
    fill(model, salt=step)
    return model


def _save_steps(root: str, steps: list[int], **options: object) -> None:
    for step in steps:
        save(root, step=step, model=_filled(step), **options)


def _require_whole(store: FaultyStore, step: int) -> None:
    """Check that a step loads, bit by bit, and that no folder with a manifest is unsound."""
    loaded = Toy()
    load(store.root, step=step, model=loaded)
    wanted = full_state(_filled(step), None)
    assert differences(wanted, full_state(loaded, None)) == []
    for published in save_root.published_steps(StorePath(store.root)):
        assert verify(store.root, published).is_sound, published


def _save_trained(root: str, in_background: bool) -> dict[str, torch.Tensor]:
    model = shard(_filled(7), whole_mesh())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    given = {"step": 7, "model": model, "optimizer": optimizer, "extra": {"consumed": 7}}
    published = async_save(root, **given).result() if in_background else save(root, **given)
    assert published == StorePath(f"{root}/iter_0000007")
    return full_state(model, optimizer)


def _load_and_save(root: str, step: int) -> dict[str, torch.Tensor]:
    model = shard(Toy(), whole_mesh(), padding_rows=5)
    optimizer = make_optimizer("adamw", model)
    assert load(root, model=model, optimizer=optimizer) == {"consumed": 7}
    save(root, step=step, model=model, optimizer=optimizer, extra={"consumed": 7}, keep_last=1)
    return full_state(model, optimizer)


@pytest.mark.parametrize("in_background", [False, True])
def test_any_number_of_ranks_loads_what_any_other_saved(
    ranks: Ranks, store: FaultyStore, in_background: bool
) -> None:
    """From 2 ranks over 1 to 3 through a store, weights and states come back bit by bit."""
    saved, *_ = ranks(2).run(_save_trained, store.root, in_background)
    for num_ranks, step in ((1, 8), (3, 9)):
        for loaded in ranks(num_ranks).run(_load_and_save, store.root, step):
            assert differences(saved, loaded) == []
    folders = {name.partition("/")[0] for name in store.names()}
    assert folders == {"iter_0000009", "latest_checkpointed_iteration.txt"}
    assert verify(store.root).is_sound
    assert inspect(store.root).world_size == 3


def test_a_store_has_the_bytes_of_a_disk(store: FaultyStore, tmp_path: Path) -> None:
    """Only the names of the files of records differ."""
    model = _filled(1)
    # By name Python 3.10 finds the function, not its module.
    with mock.patch.object(import_module(save.__module__), "rng_state", dict):
        on_disk = save(tmp_path / "disk", step=1, model=model)
        save(store.root, step=1, model=model)
    (name,) = (name for name in store.names() if name.endswith(".distcp"))
    assert (store.objects / "run" / name).read_bytes() == (on_disk / "__0_0.distcp").read_bytes()


def _load_same_cuts(root: str) -> None:
    with mock.patch.object(store_files, "_LEAST_NBYTES", 1):
        load(root, model=shard(Toy(), whole_mesh()))


def test_a_rank_reads_the_ranges_that_it_needs(ranks: Ranks, store: FaultyStore) -> None:
    """The records of its own rows, and a share of the verification; never a whole file."""
    ranks(2).run(_save_trained, store.root, False)
    manifest = read_manifest(StorePath(store.root) / "iter_0000007")
    store.plan()
    ranks(2).run(_load_same_cuts, store.root)
    found = sum(nbytes for path, _, nbytes in store.requests("read") if path.endswith(".distcp"))
    keys = [key for key in manifest.tensors if key.startswith("model.")]
    # Each record is verified by one rank and read by the one whose rows it has, the buffer, which
    # is the only replica, by both; what was verified right before is not fetched again.
    wanted = 2 * sum(record.nbytes for record in manifest.records(keys))
    wanted += sum(record.nbytes for record in manifest.records(["model.count"]))
    wanted += 2 * manifest.objects["extra"].nbytes
    assert found == wanted
    assert wanted < sum(manifest.files.values()) / 2


def test_the_memory_of_fsspec_is_a_store() -> None:
    """Any file system of fsspec is, be it with or without renames of its own."""
    root = f"memory://{uuid4().hex}/run"
    for step in (1, 2, 3):
        save(root, step=step, model=_filled(step), keep_last=2)
    loaded = Toy()
    load(root, model=loaded)
    assert differences(full_state(_filled(3), None), full_state(loaded, None)) == []
    assert save_root.published_steps(StorePath(root)) == [2, 3]
    assert verify(root, 2).is_sound


def test_small_neighbours_come_with_one_request(store: FaultyStore) -> None:
    """A request takes 4 MiB at least, so records of a few bytes do not cost a request each."""
    _save_steps(store.root, [1])
    store.plan()
    load(store.root, model=Toy())
    assert len([entry for entry in store.requests("read") if ".distcp" in entry[0]]) == 2


def test_a_save_makes_few_requests(store: FaultyStore) -> None:
    """As many as docs/object-stores.md says, and of retention as many as steps go or stay."""
    _save_steps(store.root, [1, 2, 3])

    def requests(step: int, keep_last: int | None) -> dict[str, int]:
        store.plan()
        _save_steps(store.root, [step], keep_last=keep_last)
        return {verb: len(store.requests(verb)) for verb in ("write", "remove", "list", "read")}

    assert requests(4, None) == {"write": 5, "remove": 1, "list": 2, "read": 1}
    sizes = len(store.requests("info"))
    assert sizes == 8
    # Of 5 steps one goes; objects are removed one by one here, of a step 3 and the marker.
    assert requests(5, 4) == {"write": 6, "remove": 5, "list": 4, "read": 2}
    assert len(store.requests("info")) == sizes + 5 + 1


def test_uploads_and_reads_take_no_memory_for_a_whole_file(store: FaultyStore) -> None:
    """Parts have a bounded size, and long reads go by ranges."""
    model = nn.Linear(1024, 256, bias=False)
    small = {"_PART_NBYTES": 1 << 16, "_WRITE_NBYTES": 1 << 14, "_RANGE_NBYTES": 1 << 15}
    with mock.patch.multiple(store_files, **small):
        save(store.root, step=1, model=model)
        written = [n for path, _, n in store.requests("write") if path.endswith(".distcp")]
        assert len(written) > 15
        assert max(written) <= (1 << 16) + (1 << 14)
        loaded = nn.Linear(1024, 256, bias=False)
        load(store.root, model=loaded)
    assert torch.equal(model.weight, loaded.weight)
    read = [n for path, _, n in store.requests("read") if path.endswith(".distcp")]
    assert len(read) > 60
    assert max(read) == 1 << 15


def test_an_upload_that_breaks_off_leaves_nothing(store: FaultyStore) -> None:
    """Neither what was sent, nor an object of it when the file is forgotten."""
    _save_steps(store.root, [1])
    before = store.names()
    small = {"_PART_NBYTES": 1 << 16, "_WRITE_NBYTES": 1 << 14}
    for after in (1, 3):
        store.plan(Fault("write", "broken", "__0_0", after=after, count=1))
        with (
            mock.patch.multiple(store_files, **small),
            pytest.raises(CheckpointError, match="connection reset"),
        ):
            save(store.root, step=2, model=nn.Linear(1024, 256, bias=False))
        gc.collect()
        assert store.names() == before
        assert not list(store.base.glob("parts-*"))


# Verb, kind, part of the path, requests before: what goes wrong, and whether step 2 is there after.
FAULTS = [
    (Fault("info", "denied"), False),
    (Fault("info", "broken", "__1_0"), False),
    (Fault("read", "denied", "latest_checkpointed"), False),
    (Fault("read", "broken", "latest_checkpointed", count=1), False),
    (Fault("list", "denied"), False),
    (Fault("list", "broken", after=1), True),
    (Fault("write", "denied", ".tmp-iter"), False),
    (Fault("write", "full", "__0_0"), False),
    (Fault("write", "denied", "__1_0"), False),
    (Fault("write", "broken", "__0_0"), False),
    (Fault("write", "torn", "__0_0"), False),
    (Fault("write", "torn", "__1_0"), False),
    (Fault("write", "cut", "__1_0"), False),
    (Fault("write", "full", ".metadata"), False),
    (Fault("write", "torn", ".metadata"), False),
    (Fault("write", "cut", ".metadata"), False),
    (Fault("write", "denied", "manifest.json"), False),
    (Fault("write", "full", "manifest.json"), False),
    (Fault("write", "torn", "manifest.json"), False),
    (Fault("write", "cut", "manifest.json"), False),
    (Fault("write", "denied", "latest_checkpointed"), False),
    (Fault("write", "full", "latest_checkpointed"), False),
    (Fault("remove", "denied"), True),
    (Fault("remove", "broken", "iter_0000001"), True),
]


def _try_to_save(root: str, in_background: bool) -> str:
    model = shard(_filled(2), whole_mesh())
    try:
        if in_background:
            async_save(root, step=2, model=model, keep_last=1).result()
        else:
            save(root, step=2, model=model, keep_last=1)
    except CheckpointError as error:
        return str(error).removeprefix("The background save of step 2 failed: ")
    finally:
        SAVES.wait_for_end()
    return ""


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    ("fault", "is_published"), FAULTS, ids=lambda v: str(getattr(v, "kind", v))
)
def test_a_fault_loses_no_checkpoint(
    ranks: Ranks, store: FaultyStore, fault: Fault, is_published: bool, in_background: bool
) -> None:
    """Every rank has one error, or none; what was published stays, and the next save cleans up."""
    _save_steps(store.root, [1])
    store.plan(fault)
    errors = ranks(2).run(_try_to_save, store.root, in_background)
    assert errors[0] == errors[1]
    store.plan()
    if is_published:
        assert errors == ["", ""]
    else:
        assert errors[0].startswith("Expected a")
        assert "faulty://" in errors[0]
    latest = latest_step(store.root)
    assert latest == (2 if is_published else 1)
    _require_whole(store, latest)
    _save_steps(store.root, [3], keep_last=1)
    _require_whole(store, 3)
    folders = {name.partition("/")[0] for name in store.names()}
    assert folders == {"iter_0000003", "latest_checkpointed_iteration.txt"}


KILLS = [("write", after) for after in range(5)] + [("remove", 0), ("remove", 1), ("remove", 2)]
KILLS += [("list", 0), ("list", 1), ("list", 2), ("info", 0), ("info", 4)]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(("verb", "after"), KILLS)
def test_a_killed_writer_leaves_a_loadable_checkpoint(
    store: FaultyStore, verb: str, after: int, in_background: bool
) -> None:
    """A process that ends in the middle of a request leaves the old step or the new one."""
    _save_steps(store.root, [1])
    store.plan(Fault(verb, "killed", after=after))
    _die_saving(store, in_background=in_background)
    store.plan()
    _require_recovery(store)


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_between_requests_leaves_a_loadable_checkpoint(
    store: FaultyStore, point: str
) -> None:
    """The same between any two acts of a save."""
    _save_steps(store.root, [1])
    _die_saving(store, point=point)
    is_published = POINTS.index(point) >= POINTS.index("tracker written")
    assert latest_step(store.root) == (2 if is_published else 1)
    _require_recovery(store)


def test_the_listed_points_are_those_of_a_save(store: FaultyStore) -> None:
    """The test of crashes visits every point of the protocol, in order."""
    seen: list[str] = []
    _save_steps(store.root, [1])
    with (
        mock.patch.object(save_root, "reached", seen.append),
        mock.patch.object(store_root, "reached", seen.append),
    ):
        _save_steps(store.root, [2], keep_last=1)
    assert seen == POINTS


def _die_saving(store: FaultyStore, *, point: str = "", in_background: bool = False) -> None:
    """Save step 2 and retire step 1 in a forked process that ends, without clean-up, on the way."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads; the child only writes files.
        warnings.simplefilter("ignore", DeprecationWarning)
        process_id = os.fork()
    if process_id == 0:
        try:
            end = lambda name: os._exit(EXIT_CODE) if name == point else None  # noqa: E731
            save_root.reached = store_root.reached = end
            if in_background:
                async_save(store.root, step=2, model=_filled(2), keep_last=1).result()
            else:
                _save_steps(store.root, [2], keep_last=1)
        finally:
            os._exit(1)
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_CODE


def _require_recovery(store: FaultyStore) -> None:
    latest = latest_step(store.root)
    assert latest in (1, 2)
    _require_whole(store, latest)
    _save_steps(store.root, [3], keep_last=1)
    _require_whole(store, 3)
    folders = {name.partition("/")[0] for name in store.names()}
    assert folders == {"iter_0000003", "latest_checkpointed_iteration.txt"}
    assert len(store.names()) == 4


def test_a_listing_that_lags_loses_nothing(store: FaultyStore) -> None:
    """Saves, loads and retention rely on no listing; what it hid is removed once it shows."""
    _save_steps(store.root, [1])
    store.freeze_listings()
    for step in (2, 3, 4):
        _save_steps(store.root, [step], keep_last=1)
        assert latest_step(store.root) == step
        _require_whole(store, step)
    # It shows step 1 alone, the newest of what it shows.
    assert {name.partition("/")[0] for name in store.names()} > {f"iter_000000{n}" for n in (1, 4)}
    store.thaw_listings()
    _save_steps(store.root, [5], keep_last=2)
    folders = {name.partition("/")[0] for name in store.names()}
    assert folders == {"iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"}


def test_a_listing_that_shows_what_is_gone_is_no_error(store: FaultyStore) -> None:
    """Removed folders and markers that are still listed are passed over."""
    _save_steps(store.root, [1, 2])
    store.freeze_listings()
    for step in (3, 4):
        _save_steps(store.root, [step], keep_last=1)
    assert latest_step(store.root) == 4
    assert save_root.published_steps(StorePath(store.root)) == [2]
    store.thaw_listings()
    _require_whole(store, 4)


def test_a_folder_without_manifest_is_no_checkpoint(store: FaultyStore) -> None:
    """Not for loads, tools, the list of steps, or as the latest one."""
    _save_steps(store.root, [1, 2])
    (store.objects / "run/iter_0000002/manifest.json").unlink()
    for step in (None, 2):
        with pytest.raises(CheckpointError, match=r"step 2, got published steps \[1\]"):
            load(store.root, step=step, model=Toy())
    with pytest.raises(CheckpointError, match=r"got published steps \[1\]"):
        inspect(store.root)
    # The step that the tracker names can be saved again, since it is not there.
    _save_steps(store.root, [2])
    _require_whole(store, 2)


def test_a_step_is_replaced_where_a_run_goes_back(store: FaultyStore) -> None:
    """Only the new attempt's files stay; the latest step itself is refused."""
    _save_steps(store.root, [1, 2])
    (store.objects / "run/latest_checkpointed_iteration.txt").write_text("1\n")
    with pytest.raises(CheckpointError, match="a step that is not the latest published one"):
        _save_steps(store.root, [1])
    before = store.names()
    save(store.root, step=2, model=_filled(2))
    assert len(store.names()) == len(before)
    assert len(store.names() - before) == 1
    _require_whole(store, 2)


def test_a_crash_while_a_step_is_replaced_leaves_the_latest(store: FaultyStore) -> None:
    """The old attempt loses its manifest before its descriptions are written over."""
    _save_steps(store.root, [1, 2])
    (store.objects / "run/latest_checkpointed_iteration.txt").write_text("1\n")
    _die_saving(store, point="old manifest removed")
    assert latest_step(store.root) == 1
    assert save_root.published_steps(StorePath(store.root)) == [1]
    _require_recovery(store)


def test_a_late_upload_of_a_dead_job_replaces_nothing(store: FaultyStore) -> None:
    """Files of records are named anew in each attempt."""
    _save_steps(store.root, [1])
    for name in ("__0_0-00000000.distcp", "__0_0.distcp"):
        (store.objects / "run/iter_0000001" / name).write_bytes(b"late")
    load(store.root, model=Toy())
    assert {finding.problem for finding in verify(store.root).findings} == {"not in the manifest"}


@pytest.mark.parametrize(
    ("point", "is_on_disk"),
    [
        ("records written", False),
        ("records gathered", False),
        ("DCP metadata written", False),
        ("records written", True),
        ("records gathered", True),
    ],
)
def test_a_second_job_does_not_have_a_save_publish_what_it_removed(
    store: FaultyStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    is_on_disk: bool,
) -> None:
    """The first job's save fails, and says why; the second job's checkpoint is the latest."""
    root = str(tmp_path / "disk") if is_on_disk else store.root
    _save_steps(root, [1, 2])

    def save_beside(reached: str) -> None:
        if reached == point:
            # Only once, not in the second job's own save.
            monkeypatch.undo()
            _save_steps(root, [4])

    for module in (save_root, store_root):
        monkeypatch.setattr(module, "reached", save_beside)
    with pytest.raises(CheckpointError, match="one job that saves to a root"):
        _save_steps(root, [3], keep_last=1)
    assert latest_step(root) == 4
    load(root, model=Toy())
    load(root, model=Toy(), step=2)


def test_a_save_that_fails_leaves_a_second_jobs_save_of_its_step(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that a second job has published of the same step, in the same folder."""
    _save_steps(store.root, [1])

    def save_beside(reached: str) -> None:
        if reached == "records gathered":
            monkeypatch.undo()
            _save_steps(store.root, [3])

    monkeypatch.setattr(save_root, "reached", save_beside)
    with pytest.raises(CheckpointError, match="one job that saves to a root"):
        save(store.root, step=3, model=_filled(5))
    assert latest_step(store.root) == 3
    _require_whole(store, 3)


def test_a_save_that_fails_leaves_what_a_second_job_writes_of_its_step(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records without a manifest as yet, in the same folder."""
    _save_steps(store.root, [1])
    is_written, may_end = threading.Event(), threading.Event()
    second = threading.Thread(target=lambda: save(store.root, step=3, model=_filled(3)))

    def in_turns(reached: str) -> None:
        if reached != "records gathered":
            return
        if threading.current_thread() is not second:
            second.start()
            assert is_written.wait(60)
        else:
            is_written.set()
            assert may_end.wait(60)

    monkeypatch.setattr(save_root, "reached", in_turns)
    with pytest.raises(CheckpointError, match="one job that saves to a root"):
        save(store.root, step=3, model=_filled(5))
    may_end.set()
    second.join(60)
    assert latest_step(store.root) == 3
    _require_whole(store, 3)


def test_errors_while_reading_name_the_url_on_all_ranks(ranks: Ranks, store: FaultyStore) -> None:
    """A store that fails in the middle of a load: one message, and no model touched."""
    _save_steps(store.root, [1])
    for fault, hint in (
        (Fault("info", "denied"), "Give this user the rights to list, read"),
        (Fault("read", "denied", ".distcp"), "Give this user the rights to list, read"),
        (Fault("read", "broken", "manifest.json"), "Try again when the store answers"),
        (Fault("read", "broken", ".distcp", after=1), "Try again when the store answers"),
    ):
        store.plan(fault)
        with pytest.raises(RanksError) as failure:
            ranks(2).run(_load_same_cuts, store.root)
        assert set(failure.value.failures) == {0, 1}
        for text in failure.value.failures.values():
            assert "CheckpointError: Expected a store that" in text
            assert "In 'faulty://" in text
            assert hint in text
    store.plan()
    _require_whole(store, 1)
