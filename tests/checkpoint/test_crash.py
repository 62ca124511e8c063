"""A save that ends at any instant leaves a loadable checkpoint; retention removes old ones only."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest

from megafsdp.checkpoint import async_save, latest_step, load, save
from megafsdp.checkpoint.format import save_root as on_disk
from tests.checkpoint.sharding import Toy, differences, fill, full_state

POINTS = [
    "prepared",
    "file opened",
    "records written",
    "file synced",
    "records gathered",
    "DCP metadata written",
    "manifest written",
    "temporary directory synced",
    "old directory moved away",
    "renamed",
    "root synced",
    "tracker written",
    "tracker replaced",
    "tracker synced",
    "retired directory renamed",
    "retired directory removed",
]


BACKGROUND_POINTS = [POINTS[0], "copies made", *POINTS[1:]]
CRASHES = [(point, False) for point in POINTS] + [(point, True) for point in BACKGROUND_POINTS]


def _save_steps(
    root: Path, steps: list[int], *, in_background: bool = False, **options: object
) -> None:
    model = Toy()
    for step in steps:
        fill(model, salt=step)
        if in_background:
            async_save(root, step=step, model=model, **options).result()
        else:
            save(root, step=step, model=model, **options)


def _retake_step_two(root: Path, *, in_background: bool) -> None:
    """Save step 2 over a directory that a run which went back left behind; retire step 0."""
    _save_steps(root, [2], keep_last=2, in_background=in_background)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a save root with steps 0, 1 and 2, of which 1 is the latest; to be copied."""
    root = tmp_path_factory.mktemp("prepared")
    _save_steps(root, [2, 0, 1])
    return root


@pytest.mark.parametrize("in_background", [False, True])
def test_the_listed_points_are_those_of_a_save(
    prepared: Path, tmp_path: Path, in_background: bool
) -> None:
    """The fault-injection test visits every point of the protocol, in order."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    seen: list[str] = []
    with mock.patch.object(on_disk, "reached", seen.append):
        _retake_step_two(tmp_path, in_background=in_background)
    assert seen == (BACKGROUND_POINTS if in_background else POINTS)
    # Of what was replaced and retired nothing stays.
    names = {"iter_0000001", "iter_0000002", on_disk.TRACKER_FILE}
    assert set(os.listdir(tmp_path)) == names


@pytest.mark.parametrize(("point", "in_background"), CRASHES)
def test_a_crash_at_any_point_leaves_a_loadable_checkpoint(
    prepared: Path, tmp_path: Path, point: str, in_background: bool
) -> None:
    """A process that ends at any point of a save leaves the old or the new step whole."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    _crash_at(point, tmp_path, in_background=in_background)
    is_published = BACKGROUND_POINTS.index(point) >= BACKGROUND_POINTS.index("tracker replaced")
    latest = latest_step(tmp_path)
    assert latest == (2 if is_published else 1)
    loaded, wanted = Toy(), Toy()
    fill(wanted, salt=latest)
    load(tmp_path, model=loaded)
    assert differences(full_state(wanted, None), full_state(loaded, None)) == []
    _save_steps(tmp_path, [3], keep_last=1)
    load(tmp_path, model=loaded)
    fill(wanted, salt=3)
    assert differences(full_state(wanted, None), full_state(loaded, None)) == []
    assert sorted(os.listdir(tmp_path)) == ["iter_0000003", on_disk.TRACKER_FILE]


def test_everything_is_durable_before_it_is_published(tmp_path: Path) -> None:
    """Each file and directory is flushed before the rename that makes it count, names after it."""
    flushed: set[int] = set()
    unflushed: dict[str, list[str]] = {}
    flush = os.fsync

    def recording(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        flush(descriptor)

    root = tmp_path / "runs" / "lm"

    def look(point: str) -> None:
        if point == "prepared":
            # The names of the folders that the save has made.
            paths = [tmp_path, root.parent]
        elif point == "temporary directory synced":
            (temporary,) = root.glob(".tmp-iter*")
            paths = [temporary, *temporary.iterdir()]
            assert len(paths) == 4
        elif point == "tracker written":
            paths = list(root.glob(".tmp-latest*"))
            assert len(paths) == 1
        elif point in ("renamed", "tracker replaced"):
            # What was flushed of the root before lacks the new name.
            flushed.discard(root.stat().st_ino)
            return
        elif point in ("root synced", "tracker synced"):
            paths = [root]
        else:
            return
        unflushed[point] = [p.name for p in paths if p.stat().st_ino not in flushed]

    with mock.patch.object(os, "fsync", recording), mock.patch.object(on_disk, "reached", look):
        save(root, step=1, model=Toy())
    points = ["prepared", "temporary directory synced", "root synced", "tracker written"]
    assert unflushed == {point: [] for point in [*points, "tracker synced"]}


def _crash_at(point: str, root: Path, *, in_background: bool) -> None:
    """Save step 2 in a forked process that ends, without clean-up, where it reaches a point."""
    with warnings.catch_warnings():
        # Python 3.12 warns of forks with threads; the child only writes files.
        warnings.simplefilter("ignore", DeprecationWarning)
        process_id = os.fork()
    if process_id == 0:
        try:
            on_disk.reached = lambda name: os._exit(17) if name == point else None
            _retake_step_two(root, in_background=in_background)
        finally:
            os._exit(1)
    _, status = os.waitpid(process_id, 0)
    assert os.waitstatus_to_exitcode(status) == 17


def test_retention_keeps_the_newest_and_the_milestones(tmp_path: Path) -> None:
    """``keep_last`` keeps the newest, ``keep_every`` the multiples; newer steps stay."""
    _save_steps(tmp_path, [9])
    _save_steps(tmp_path, [1, 2, 3, 4, 5, 6], keep_last=2, keep_every=3)
    assert on_disk.published_steps(tmp_path) == [3, 5, 6, 9]
    assert latest_step(tmp_path) == 6


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_that_cannot_look_for_old_checkpoints_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, in_background: bool
) -> None:
    """As a network file system may answer after the tracker was moved; the next save retires."""
    _save_steps(tmp_path, [1])
    with mock.patch.object(on_disk, "published_steps", side_effect=OSError("stale file handle")):
        _save_steps(tmp_path, [2], in_background=in_background, keep_last=1)
    assert "old checkpoints stay" in caplog.text and "stale file handle" in caplog.text
    assert latest_step(tmp_path) == 2
    assert on_disk.published_steps(tmp_path) == [1, 2]
    _save_steps(tmp_path, [3], keep_last=1)
    assert on_disk.published_steps(tmp_path) == [3]
