"""One job at a time in a run's folder: a lock that ends with the process that holds it."""

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
def sole_job(folder: Path, world: World) -> Iterator[None]:
    """Keep other jobs out of a run's folder; collective over all ranks on entry.

    The first rank makes the folder and holds the lock on a file in it. The system takes the lock
    back when that process ends, by whatever signal, so the file that stays means nothing. Where
    files cannot be locked the run goes on with a warning. Commands that only read take no lock.

    Args:
        folder: The run's.
        world: Its processes.

    Raises:
        ConfigError: Another job holds the lock; on all ranks.
    """
    file: TextIO | None = None
    holder = None
    if world.is_first:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Opened for writing, as NFS asks of an exclusive lock.
            file = (folder / LOCK_FILE).open("a+", encoding="utf-8")
            holder = _lock(file)
        except OSError as error:
            _LOGGER.warning(
                "'%s' cannot be locked, so another job started there would mix its files with this"
                " one's: %s: %s",
                folder,
                type(error).__name__,
                error,
            )
    with file or contextlib.nullcontext():
        holder = broadcast_object(holder)
        if holder is not None:
            raise ConfigError(
                expected(
                    "a folder in which no other job runs",
                    holder,
                    where=f"the training configuration, run.directory '{folder}'",
                    mend="Wait until that job has ended or end it, or choose another run.directory",
                )
            )
        yield


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
