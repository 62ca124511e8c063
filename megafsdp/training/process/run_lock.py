"""One job at a time in a run's folders: a lock of the operating system that ends with its process.

Commands that only read take no lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megafsdp.buffer.comm.collectives import broadcast_object
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.data.output_files import locked_folder, warn_unlocked
from megafsdp.errors import ConfigError
from megafsdp.training.process.world import World

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
                where = "the training configuration"
                run = f"{where}, run.directory '{folder}'"
                files.enter_context(locked_folder(folder, LOCK_FILE, where=run))
                if checkpoints is not None and not isinstance(checkpoints, Path):
                    warn_unlocked(checkpoints, NotImplementedError("object stores have no locks"))
                # A process cannot lock one file twice.
                elif checkpoints and (locked := _locked_for(checkpoints)) != folder.resolve():
                    where += f", checkpoint.directory '{checkpoints}'"
                    files.enter_context(
                        locked_folder(locked, LOCK_FILE, where=where, must_be_writable=False)
                    )
            except ConfigError as error:
                refusal = str(error)
        refusal = broadcast_object(refusal)
        if refusal is not None:
            raise ConfigError(refusal)
        yield


def _locked_for(checkpoints: Path) -> Path:
    """Return the folder whose lock keeps other jobs out of a folder of checkpoints."""
    folder = checkpoints.resolve()
    # A run with its checkpoints at their usual place locks only its own folder.
    is_of_run = folder.name == "checkpoints" and (folder.parent / LOCK_FILE).is_file()
    return folder.parent if is_of_run else folder
