"""Folders that one job writes to, where files cannot be locked as usual."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

from megafsdp.data import output_files
from megafsdp.data.output_files import locked_folder, replace_text
from megafsdp.errors import ConfigError


def test_a_lock_file_that_another_user_has_left_is_locked(tmp_path: Path) -> None:
    """It may be read and not written; the folder is writable all the same."""
    (tmp_path / "lock").write_text("process 1 on elsewhere")
    open_file = Path.open

    def opened(path: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if mode == "a+":
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return open_file(path, mode, **options)

    with (
        mock.patch.object(Path, "open", opened),
        locked_folder(tmp_path, "lock", where="here") as is_locked,
    ):
        assert is_locked
        with (
            pytest.raises(ConfigError, match="process 1 on elsewhere"),
            locked_folder(tmp_path, "lock", where="here"),
        ):
            pass


def test_errors_of_a_job_without_a_lock_are_its_own(tmp_path: Path) -> None:
    """They do not follow from that there are no locks, hours before."""
    no_locks = OSError(errno.ENOLCK, "no locks here")
    with (
        mock.patch.object(output_files, "lock_descriptor", side_effect=no_locks),
        pytest.raises(ValueError, match="of the job") as caught,
        locked_folder(tmp_path, "lock", where="here") as is_locked,
    ):
        assert not is_locked
        raise ValueError("of the job")
    assert caught.value.__context__ is None


def test_a_lock_names_the_job_that_has_it_alone(tmp_path: Path) -> None:
    """Nothing stays of a longer line that an earlier job has left."""
    lock = tmp_path / "lock"
    lock.write_text(f"process 1 on {'elsewhere' * 40}\n")
    with locked_folder(tmp_path, lock.name, where="here"):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"


def test_a_text_that_cannot_be_replaced_leaves_nothing_beside_it(tmp_path: Path) -> None:
    """Here a folder has its name."""
    (tmp_path / "text").mkdir()
    with pytest.raises(OSError, match="text"):
        replace_text(tmp_path / "text", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["text"]
