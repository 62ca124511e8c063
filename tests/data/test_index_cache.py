"""The cache of built arrays: built once, read again, rebuilt when broken."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from megafsdp.data.index_cache import Arrays, cached_arrays, lengths_digest


class _Builder:
    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> Arrays:
        self.num_calls += 1
        return {"rows": np.arange(6).reshape(3, 2), "order": np.array([2, 0, 1], dtype=np.uint32)}


def _check(arrays: Arrays) -> None:
    expected = _Builder()()
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.dtype == expected[name].dtype
        assert np.array_equal(array, expected[name])


def test_second_call_reads_what_the_first_built(tmp_path: Path) -> None:
    """The same description is built once; another description is built again."""
    build = _Builder()
    for _ in range(3):
        _check(cached_arrays(tmp_path / "cache", {"seed": 1}, build))
    assert build.num_calls == 1
    cached_arrays(tmp_path / "cache", {"seed": 2}, build)
    assert build.num_calls == 2
    assert not list((tmp_path / "cache").glob(".*"))


def test_without_a_folder_every_call_builds() -> None:
    """None switches the cache off."""
    build = _Builder()
    _check(cached_arrays(None, {}, build))
    _check(cached_arrays(None, {}, build))
    assert build.num_calls == 2


@pytest.mark.parametrize("name", ["rows.npy", "description.json"])
def test_broken_entry_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A truncated file costs a warning and a build, then the entry is whole."""
    build = _Builder()
    cached_arrays(tmp_path, {}, build)
    (broken,) = tmp_path.rglob(name)
    broken.write_bytes(broken.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "megafsdp.data"):
        _check(cached_arrays(tmp_path, {}, build))
    assert "built again" in caplog.text
    _check(cached_arrays(tmp_path, {}, build))
    assert build.num_calls == 2


@pytest.mark.parametrize("name", ["rows.npy", "description.json"])
@pytest.mark.parametrize("is_there", [True, False])
def test_entry_that_a_power_loss_left_is_built_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, is_there: bool
) -> None:
    """A file of the entry is empty, or not there at all."""
    build = _Builder()
    cached_arrays(tmp_path, {}, build)
    (lost,) = tmp_path.rglob(name)
    lost.unlink()
    if is_there:
        lost.touch()
    with caplog.at_level(logging.WARNING, "megafsdp.data"):
        _check(cached_arrays(tmp_path, {}, build))
    assert "built again" in caplog.text
    _check(cached_arrays(tmp_path, {}, build))
    assert build.num_calls == 2


def test_folder_that_cannot_be_made_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The arrays are built and used without a cache."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING, "megafsdp.data"):
        _check(cached_arrays(tmp_path / "file" / "cache", {}, _Builder()))
    assert "is not cached" in caplog.text


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_other_users_may_read_an_entry(tmp_path: Path, umask: int) -> None:
    """A shared cache is built once: folder and files have the modes that the umask leaves."""
    before = os.umask(umask)
    try:
        cached_arrays(tmp_path / "cache", {}, _Builder())
    finally:
        os.umask(before)
    (entry,) = (tmp_path / "cache").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o777 & ~umask
    for path in entry.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_losing_the_race_to_publish_is_harmless(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When another process publishes first, both have right arrays and no rest is left."""

    def build() -> Arrays:
        cached_arrays(tmp_path, {}, _Builder())
        return _Builder()()

    _check(cached_arrays(tmp_path, {}, build))
    assert len(list(tmp_path.iterdir())) == 1
    assert not caplog.records


def test_an_entry_is_known_by_what_it_was_built_from(tmp_path: Path) -> None:
    """In any order of the facts; an entry that says otherwise is not taken."""
    build = _Builder()
    for description in ({"seed": 1, "epochs": 2}, {"epochs": 2, "seed": 1}):
        cached_arrays(tmp_path, description, build)
    assert build.num_calls == 1
    (path,) = tmp_path.rglob("description.json")
    path.write_text(path.read_text().replace('"seed": 1', '"seed": 3'))
    cached_arrays(tmp_path, {"seed": 1, "epochs": 2}, build)
    assert build.num_calls == 2


def test_files_are_on_the_disk_before_they_are_found(tmp_path: Path) -> None:
    """All of an entry's, each under the name that it keeps."""
    flushed: list[int] = []
    with mock.patch.object(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino)):
        cached_arrays(tmp_path, {}, _Builder())
    (entry,) = tmp_path.iterdir()
    assert sorted(flushed) == sorted(path.stat().st_ino for path in entry.iterdir())


def test_the_digest_of_lengths_is_that_of_their_values() -> None:
    """Also of every second number of an array."""
    lengths = np.arange(8, dtype=np.int32)
    assert lengths_digest(lengths[::2]) == lengths_digest(lengths[::2].copy())
    assert lengths_digest(lengths[::2]) != lengths_digest(lengths[1::2])
