"""One job at a time in a run's folders: a lock of the operating system that ends with its process.

Commands that only read take no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from filelock import lock_descriptor

from megafsdp.buffer.comm.collectives import broadcast_object
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.errors import ConfigError, expected
from megafsdp.training.process.world import World

_LOGGER = logging.getLogger("megafsdp.training")

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def sole_job(folder: Path, world: World, *, checkpoints: Location | None = None) -> Iterator[None]:
    """Keep other jobs out of a run's folders; collective over all ranks on entry.

    The first rank makes the folders and locks a file in each. The lock ends with that process, also
    when it is killed, so a file that is left behind means nothing. Where files cannot be locked the
    run goes on with a warning.

    Args:
        folder: The run's.
        world: Its processes.
        checkpoints: The folder of its checkpoints, if it is set apart; whether it can be written to
            is checked before the first step. In an object store nothing can be locked.

    Raises:
        ConfigError: Another job holds a lock, or the run's folder cannot be written to; on all
            ranks.
    """
    refusal: str | None = None
    with contextlib.ExitStack() as files:
        if world.is_first:
            try:
                _lock(files, folder, "run.directory")
                if checkpoints is not None and not isinstance(checkpoints, Path):
                    _warn(checkpoints, NotImplementedError("object stores have no locks"))
                # A process cannot lock one file twice.
                elif checkpoints and checkpoints.resolve() != folder.resolve():
                    _lock(files, checkpoints, "checkpoint.directory")
            except ConfigError as error:
                refusal = str(error)
        refusal = broadcast_object(refusal)
        if refusal is not None:
            raise ConfigError(refusal)
        yield


def _lock(files: contextlib.ExitStack, folder: Path, option: str) -> None:
    """Lock a folder until a stack is closed."""
    where = f"the training configuration, {option} '{folder}'"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opened for writing, as NFS asks of an exclusive lock.
        file = files.enter_context((folder / LOCK_FILE).open("a+", encoding="utf-8"))
    except OSError as error:
        if option != "run.directory":
            _warn(folder, error)
            return
        what, found = "a folder that can be written to", f"{type(error).__name__}: {error}"
        hint = "Make it a folder that this user may write to, or name another"
        raise ConfigError(expected(what, found, where=where, hint=hint)) from error
    try:
        is_ours = lock_descriptor(file.fileno(), blocking=False)
        if is_ours:
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            file.flush()
    except OSError as error:
        _warn(folder, error)
        return
    if not is_ours:
        file.seek(0)
        what, holder = "a folder in which no other job runs", file.read().strip()
        hint = "Wait until that job has ended or end it, or choose another folder"
        raise ConfigError(expected(what, holder or "another process", where=where, hint=hint))


def _warn(folder: Location, error: Exception) -> None:
    _LOGGER.warning(
        "'%s' cannot be locked, so another job started there would mix its files with this"
        " one's: %s: %s",
        folder,
        type(error).__name__,
        error,
    )
