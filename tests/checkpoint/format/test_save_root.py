"""The save root: the tracker file, finding checkpoints, retention arithmetic."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.checkpoint import StorePath, load, save
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.publication import saves_to
from megafsdp.errors import CheckpointError


def _root_with(root: Path, steps: list[int], latest: int) -> Path:
    for step in steps:
        on_disk.step_directory(root, step).mkdir(parents=True)
    (root / on_disk.TRACKER_FILE).write_text(f"{latest}\n")
    return root


def test_a_root_without_tracker_has_no_latest_step(tmp_path: Path) -> None:
    """Nothing, or something that is no directory, was never saved to."""
    assert on_disk.latest_step(tmp_path) is None
    on_disk.require_ahead(tmp_path, 0)
    assert on_disk.latest_step(tmp_path / "missing") is None
    (tmp_path / "file").write_text("")
    assert on_disk.latest_step(tmp_path / "file") is None


def test_without_a_tracker_the_newest_step_is_the_latest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All readers agree on it, so that no loop begins anew over checkpoints; it can be replaced."""
    model = torch.nn.Linear(2, 2)
    for root in (tmp_path / "disk", StorePath("memory://without-tracker")):
        for step in (3, 12):
            save(root, step=step, model=model)
        tracker = root / on_disk.TRACKER_FILE
        tracker.unlink() if isinstance(tracker, Path) else root.remove([on_disk.TRACKER_FILE])
        assert on_disk.latest_step(root) == 12
        assert f"'{root}' has checkpoints of steps [3, 12] and no" in caplog.text
        assert on_disk.find(root, None) == on_disk.step_directory(root, 12)
        assert load(root, model=model) == {}
        with pytest.raises(CheckpointError, match="the latest is 12"):
            on_disk.require_ahead(root, 4)
        save(root, step=12, model=model)


@pytest.mark.parametrize(
    "text", ["", "release", "-1", "\N{SUPERSCRIPT TWO}", "1 2", "\udcff\udcfe9"]
)
def test_a_tracker_without_a_step_is_an_error(tmp_path: Path, text: str) -> None:
    """A tracker that holds no number is not taken for "nothing saved"."""
    _root_with(tmp_path, [4], 4)
    (tmp_path / on_disk.TRACKER_FILE).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(CheckpointError, match=r"one of \[4\]"):
        on_disk.latest_step(tmp_path)


def test_steps_are_found_by_number(tmp_path: Path) -> None:
    """Directories are listed in order of steps, beyond seven digits too, and nothing else is."""
    _root_with(tmp_path, [12345678, 3, 20], 20)
    (tmp_path / "iter_3").mkdir()
    (tmp_path / ".tmp-iter_0000005-x").mkdir()
    (tmp_path / "iter_0000006").write_text("a file")
    assert on_disk.published_steps(tmp_path) == [3, 20, 12345678]
    assert on_disk.find(tmp_path, None).name == "iter_0000020"
    assert on_disk.find(tmp_path, 12345678).name == "iter_12345678"


def test_what_is_no_folder_is_said(tmp_path: Path) -> None:
    """A name that was mistyped, on a disk and in a store, and a file."""
    (tmp_path / "file").touch()
    for place, found in (
        (tmp_path / "none", "no such folder"),
        ("memory://none", "no such folder"),
        (tmp_path / "file", "a file"),
        (tmp_path, r"published steps \[\]"),
    ):
        for step in (None, 3):
            with pytest.raises(CheckpointError, match=f"got {found}. In "):
                on_disk.find(place, step)


def test_a_missing_checkpoint_lists_those_there_are(tmp_path: Path) -> None:
    """A tracker whose directory is gone says what can be loaded instead."""
    _root_with(tmp_path, [3], 7)
    with pytest.raises(CheckpointError, match=r"step 7, got published steps \[3\]"):
        on_disk.find(tmp_path, None)
    # It is still the latest for a conversion, which must go beyond it.
    with pytest.raises(CheckpointError, match="Give --step 8 or above"):
        on_disk.require_ahead(tmp_path, 7)


def test_a_step_is_not_looked_for_in_the_directory_of_another(tmp_path: Path) -> None:
    """Of a checkpoint's own directory another step is not that checkpoint."""
    own = save(tmp_path, step=3, model=torch.nn.Linear(2, 2))
    assert on_disk.find(own, None) == own
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 4, got published steps \[\]"):
        on_disk.find(own, 4)


def test_the_latest_step_can_be_saved_again_where_its_directory_is_gone(tmp_path: Path) -> None:
    """As where a user has removed it; while it is there, it cannot."""
    _root_with(tmp_path, [3], 3)
    with pytest.raises(CheckpointError, match="got step 3"):
        on_disk.prepare(tmp_path, 3)
    on_disk.step_directory(tmp_path, 3).rmdir()
    assert on_disk.prepare(tmp_path, 3).is_dir()


def test_the_tracker_goes_before_the_checkpoints(tmp_path: Path) -> None:
    """A removal that ends in between leaves no tracker that names a removed checkpoint."""
    _root_with(tmp_path, [1, 2], 2)
    latest: list[int | None] = []
    remove = on_disk.retire

    def seen(path: Path) -> bool:
        latest.append(on_disk.tracked_step(tmp_path))
        return remove(path)

    with mock.patch.object(on_disk, "retire", seen):
        saves_to(tmp_path).clear()
    assert latest == [None, None] and list(tmp_path.iterdir()) == []


@given(st.text(min_size=1))
def test_a_temporary_name_says_what_it_will_become(name: str) -> None:
    """Whatever the name: a user may export to any path."""
    assert on_disk.named_by(on_disk.temporary_name(name)) == name


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """The next save removes temporary files and directories; the user's own files stay."""
    _root_with(tmp_path, [3], 3)
    half = on_disk.temporary_beside(on_disk.step_directory(tmp_path, 5))
    half.mkdir()
    (half / "__0_0.distcp").write_text("half")
    on_disk.temporary_beside(tmp_path / on_disk.TRACKER_FILE).write_text("5")
    kept = {"metrics.jsonl", ".tmp-llama-0a1b2c3d", ".tmp-iter_0000005-of-mine", ".tmp-mine"}
    for name in kept:
        (tmp_path / name).write_text("{}")
    temporary = on_disk.prepare(tmp_path, 6)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"iter_0000003", on_disk.TRACKER_FILE, temporary.name, *kept}
    on_disk.remove(temporary)
    assert not temporary.exists()


def test_a_scratch_directory_goes_with_its_writer(tmp_path: Path) -> None:
    """Be it done, failed or killed; those of other paths belong to others."""
    left, other = (on_disk.temporary_beside(tmp_path / name) for name in ("a.pt", "b.pt"))
    left.mkdir()
    other.mkdir()
    with pytest.raises(OSError, match="full"), on_disk.scratch_beside(tmp_path / "a.pt") as own:
        assert set(tmp_path.iterdir()) == {own, other}
        raise OSError("the disk is full")
    assert list(tmp_path.iterdir()) == [other]


def test_a_directory_is_closed_after_it_was_synced(tmp_path: Path) -> None:
    """The lowest free descriptor is the next one."""
    before = os.open(tmp_path, os.O_RDONLY)
    os.close(before)
    on_disk.sync_directory(tmp_path)
    after = os.open(tmp_path, os.O_RDONLY)
    os.close(after)
    assert after == before


@pytest.mark.parametrize("fault", ["rename", "rmtree"])
def test_a_directory_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """As when a reader of an old checkpoint keeps it on a network file system: a warning."""
    save(tmp_path, step=1, model=torch.nn.Linear(2, 2))
    rename = Path.rename

    def kept(path: Path, target: Path | None = None) -> Path:
        if target is None or path.name == "iter_0000001":
            raise OSError(39, "Directory not empty")
        return rename(path, target)

    where = (Path, "rename") if fault == "rename" else (shutil, "rmtree")
    with mock.patch.object(*where, kept):
        save(tmp_path, step=2, model=torch.nn.Linear(2, 2), keep_last=1)
    assert "cannot be removed: [Errno 39] Directory not empty" in caplog.text
    assert on_disk.latest_step(tmp_path) == 2
    assert on_disk.published_steps(tmp_path) == ([1, 2] if fault == "rename" else [2])
    with mock.patch.object(*where, kept):
        assert saves_to(tmp_path).prune(keep_last=1, keep_every=None) == []
        save(tmp_path, step=3, model=torch.nn.Linear(2, 2))
    save(tmp_path, step=4, model=torch.nn.Linear(2, 2), keep_last=1)
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000004", on_disk.TRACKER_FILE}


@given(
    steps=st.sets(st.integers(0, 30), min_size=1),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
    choice=st.randoms(use_true_random=False),
)
def test_retention_removes_old_steps_only(
    tmp_path_factory: pytest.TempPathFactory,
    steps: set[int],
    keep_last: int | None,
    keep_every: int | None,
    choice: object,
) -> None:
    """What is kept: the latest, later ones, the newest few before, the multiples; all by None."""
    latest = choice.choice(sorted(steps))  # type: ignore[attr-defined]
    root = _root_with(tmp_path_factory.mktemp("root"), sorted(steps), latest)
    removed = on_disk.prune(root, keep_last=keep_last, keep_every=keep_every, retire=on_disk.retire)
    kept = set(on_disk.published_steps(root))
    assert kept == steps - set(removed)
    assert {step for step in steps if step >= latest} <= kept
    if keep_last is None:
        assert not removed
        return
    newest = sorted(step for step in steps if step <= latest)[-keep_last:]
    milestones = {s for s in steps if keep_every is not None and s % keep_every == 0}
    assert kept == {s for s in steps if s > latest} | set(newest) | milestones
    assert not list(root.glob(".tmp-*")), json.dumps(sorted(kept))
