"""Folders that one job at a time writes to, and text files that are replaced at once.

A lock is the operating system's and ends with its process, also when that is killed, so a file that
is left behind means nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from filelock import lock_descriptor

from megafsdp.errors import ConfigError, expected

_LOGGER = logging.getLogger("megafsdp.data")


@contextlib.contextmanager
def locked_folder(
    folder: Path, lock_file: str, *, where: str, must_be_writable: bool = True
) -> Iterator[bool]:
    """Make a folder and keep other jobs out of it; local.

    Args:
        folder: The folder.
        lock_file: Name of the file in it that is locked.
        where: The option that names the folder, for errors.
        must_be_writable: Whether a folder that cannot be written to is an error, not a warning.

    Yields:
        Whether it is locked. Where files cannot be locked the job goes on with a warning.

    Raises:
        ConfigError: Another job, or this one, has locked it; or it cannot be written to.
    """
    failure: OSError | None = None
    is_ours = False
    with contextlib.ExitStack() as files:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = files.enter_context(_open_lock(folder / lock_file))
        except OSError as error:
            if must_be_writable:
                what, found = "a folder that can be written to", f"{type(error).__name__}: {error}"
                hint = "Make it a folder that this user may write to, or name another"
                raise ConfigError(expected(what, found, where=where, hint=hint)) from error
            failure = error
        else:
            try:
                is_ours = lock_descriptor(file.fileno(), blocking=False)
            except OSError as error:
                failure = error
        # Not within except: errors of the job would be chained to this one.
        if failure is not None:
            warn_unlocked(folder, failure)
            yield False
            return
        if not is_ours:
            file.seek(0)
            what, holder = "a folder in which no other job runs", file.read().strip()
            hint = "Wait until that job has ended or end it, or choose another folder"
            raise ConfigError(expected(what, holder or "another process", where=where, hint=hint))
        # If the disk is full, the next job is refused all the same, without the name of this one.
        # Not through the file's buffer, which would be flushed again when the file is closed.
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield True


def _open_lock(path: Path) -> TextIO:
    try:
        # Opened for writing, as NFS requires for an exclusive lock.
        return path.open("a+", encoding="utf-8")
    except PermissionError:
        # A file of another user; a local file system can lock what can only be read.
        return path.open(encoding="utf-8")


def warn_unlocked(folder: object, error: Exception) -> None:
    """Warn that a folder cannot be locked, and what may follow."""
    _LOGGER.warning(
        "'%s' cannot be locked, so another job started there would mix its files with this"
        " one's: %s: %s",
        folder,
        type(error).__name__,
        error,
    )


def replace_text(path: Path, text: str) -> None:
    """Replace a text file at once; if this fails, the older one stays and nothing else is left.

    Raises:
        OSError: It cannot be written.
    """
    # The process id is not enough: containers that share a disk may have the same ids.
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
