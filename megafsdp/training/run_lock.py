"""One job at a time in a run's folders: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from megafsdp.buffer.collectives import broadcast_object
from megafsdp.errors import ConfigError, expected
from megafsdp.training.world import World

_LOGGER = logging.getLogger("megafsdp.training")

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def sole_job(folder: Path, world: World, *, checkpoints: Path | None = None) -> Iterator[None]:
    """Keep other jobs out of a run's folders; collective over all ranks on entry.

    The first rank makes the folders and holds the lock on a file in each. The system takes the lock
    back when that process ends, by whatever signal, so the file that stays means nothing. Where
    files cannot be locked the run goes on with a warning. Commands that only read take no lock.

    Args:
        folder: The run's.
        world: Its processes.
        checkpoints: The folder of its checkpoints, if it is set apart; whether it can be written to
            is asked when there is something to write.

    Raises:
        ConfigError: Another job holds a lock; on all ranks.
    """
    holder: tuple[str, str] | None = None
    with contextlib.ExitStack() as files:
        if world.is_first:
            holder = _hold(files, folder, "run.directory")
            # A process cannot lock one file twice.
            if holder is None and checkpoints and checkpoints.resolve() != folder.resolve():
                holder = _hold(files, checkpoints, "checkpoint.directory")
        holder = broadcast_object(holder)
        if holder is not None:
            name, found = holder
            raise ConfigError(
                expected(
                    "a folder in which no other job runs",
                    found,
                    where=f"the training configuration, {name}",
                    mend="Wait until that job has ended or end it, or choose another folder",
                )
            )
        yield


def _hold(files: contextlib.ExitStack, folder: Path, option: str) -> tuple[str, str] | None:
    """Hold a folder while a stack is open; return where and who, if another process does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opened for writing, as NFS asks of an exclusive lock.
        file = files.enter_context((folder / LOCK_FILE).open("a+", encoding="utf-8"))
        holder = _lock(file)
    except OSError as error:
        _LOGGER.warning(
            "'%s' cannot be locked, so another job started there would mix its files with this"
            " one's: %s: %s",
            folder,
            type(error).__name__,
            error,
        )
        return None
    return None if holder is None else (f"{option} '{folder}'", holder)


def _lock(file: TextIO) -> str | None:
    """Lock an open file; return who holds it already, if someone does.

    Raises:
        OSError: The file system has no locks, or the file cannot be written.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip() or "another process"
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return None
