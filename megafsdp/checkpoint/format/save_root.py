"""The save root: names, the tracker file, finding and retention; on a disk, atomic publication.

On a disk a checkpoint is written to a hidden temporary directory, made durable, renamed to
``iter_0000050`` in one step, and only then named in ``latest_checkpointed_iteration.txt``, itself
replaced in one step. A crash at any instant leaves the checkpoint that the tracker named before,
whole. This implies:

- Saving the step that the tracker names is refused: replacing it could not be atomic. Any other
  existing directory of the step (the run went back and reached the step again) is replaced.
- The next save removes what a crashed save left behind, and nothing else: exports under way have
  temporary directories too. One job at a time may save to a root.
- Retention looks only at steps up to the tracker's, and never removes the tracker's step.

A store has no renames; store_root.py writes to it. Reading and retention are the same for both.
Everything here runs on rank 0, except :func:`latest_step` and :func:`find`, which only read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megafsdp.checkpoint.format.manifest import (
    MANIFEST_FILE,
    TRACKER_FILE,
    Manifest,
    write_dcp_metadata,
    write_manifest,
)
from megafsdp.checkpoint.format.plain_values import whole_number
from megafsdp.checkpoint.storage.locations import L, Location, is_folder, joined, location_of
from megafsdp.checkpoint.storage.store_path import StorePath
from megafsdp.errors import CheckpointError

_LOGGER = logging.getLogger("megafsdp.checkpoint")

_TEMPORARY = re.compile(r"\.tmp-(.+)-[0-9a-f]{8}", re.DOTALL)
_STEP_DIRECTORY = re.compile(r"iter_(\d{7,})")


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint in the making, before it is published.

    Attributes:
        root: The save root.
        folder: Where the files go: a temporary directory, or in a store the folder of the step.
        step: Training step.
        suffix: Suffix of the names of record files; empty if the directory belongs to one attempt.
    """

    root: Location
    folder: Location
    step: int
    suffix: str = ""


def reached(point: str) -> None:
    """Mark a point of the save protocol; the fault-injection tests end the process at each."""


def step_directory(root: L, step: int) -> L:
    """Return the directory of a step's published checkpoint."""
    return joined(root, f"iter_{step:07d}")


def latest_step(directory: str | os.PathLike[str]) -> int | None:
    """Return the step that the tracker file names, or None if nothing was ever published.

    Without a tracker it is the newest published step, with a warning.

    Args:
        directory: The save root, a path or the URL of a store.

    Raises:
        CheckpointError: The tracker file does not hold a step, or the store does not answer.
    """
    root = location_of(directory)
    if (tracked := tracked_step(root)) is not None:
        return tracked
    if not (steps := published_steps(root)):
        return None
    # Copied without the tracker, or the first save was killed just before it wrote one. A job that
    # began anew would replace them one by one.
    _LOGGER.warning(
        "'%s' has checkpoints of steps %s and no '%s': the newest counts as the latest",
        *(root, steps, TRACKER_FILE),
    )
    return steps[-1]


def tracked_step(root: Location) -> int | None:
    """Return the step that the tracker file names; None without a tracker.

    Raises:
        CheckpointError: The tracker file does not hold a step, or the store does not answer.
    """
    path = root / TRACKER_FILE
    try:
        text = path.read_text(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not (text.isascii() and text.isdigit()):
        raise CheckpointError.expected(
            "one step number",
            repr(text[:40]),
            where=f"'{path}'",
            hint=f"Write the step to use, one of {published_steps(root)}",
        )
    return int(text)


def published_steps(root: Location) -> list[int]:
    """List the steps that have a published directory, in order."""
    if isinstance(root, StorePath):
        names = [name for name in root.list_names()[1] if _STEP_DIRECTORY.fullmatch(name)]
        names = [name for name in names if is_published(root / name)]
    else:
        names = [path.name for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    matches = map(_STEP_DIRECTORY.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match)


def is_published(folder: Location, *, marker: str = MANIFEST_FILE) -> bool:
    """Return whether the directory of a step holds a checkpoint.

    On a disk only a checkpoint has such a name; in a store only a checkpoint has a manifest.

    Args:
        folder: The directory.
        marker: Name of the file that is written last in a store.
    """
    return (folder / marker).is_file() if isinstance(folder, StorePath) else folder.is_dir()


def find(
    directory: str | os.PathLike[str], step: int | None, *, marker: str = MANIFEST_FILE
) -> Location:
    """Return the checkpoint to read.

    Args:
        directory: A save root, or one checkpoint's own directory.
        step: A published step; None means the tracker's.
        marker: Name of a file by which a checkpoint's own directory is known.

    Raises:
        CheckpointError: There is none.
    """
    root = location_of(directory)
    if step is None and (root / marker).is_file():
        return root
    wanted = latest_step(root) if step is None else step
    chosen = whole_number(wanted, 0)
    if chosen is None or not is_published(step_directory(root, chosen), marker=marker):
        raise CheckpointError.expected(
            f"a checkpoint of step {wanted}" if wanted is not None else f"a '{TRACKER_FILE}'",
            _steps_in_words(root),
            where=f"'{root}'",
            hint="Give the directory that was passed to save(), or an existing step",
        )
    return step_directory(root, chosen)


def _steps_in_words(root: Location) -> str:
    if is_folder(root):
        return f"published steps {published_steps(root)}"
    return "a file" if root.is_file() else "no such folder"


def prepare(root: Path, step: int) -> Path:
    """Remove what crashed saves left and make the temporary directory of a new save.

    Returns:
        The empty temporary directory.

    Raises:
        CheckpointError: The step is the published one already, or the root is a file.
    """
    if root.exists() and not root.is_dir():
        raise CheckpointError.expected(
            "a directory to save in",
            "a file",
            where=f"'{root}'",
            hint="Give another path, or remove the file",
        )
    require_not_latest(root, step)
    new = [folder for folder in (root, *root.parents) if not folder.exists()]
    root.mkdir(parents=True, exist_ok=True)
    for folder in new:
        sync_directory(folder.parent)
    remove_leftovers(root, is_of_saves)
    temporary = temporary_beside(step_directory(root, step))
    temporary.mkdir()
    reached("prepared")
    return temporary


def require_not_latest(root: Location, step: int) -> None:
    """Refuse to save the published step again, which could not be replaced atomically.

    Raises:
        CheckpointError: It is that step.
    """
    if tracked_step(root) == step and is_published(step_directory(root, step)):
        raise CheckpointError.expected(
            "a step that is not the latest published one",
            f"step {step}",
            where=f"'{root}'",
            hint=f"Skip this save, or delete '{root / TRACKER_FILE}' to have it replaced",
        )


def require_alone(draft: Draft, is_there: bool) -> None:
    """Refuse to publish a draft that another job has removed as the remains of a dead save.

    Args:
        draft: The begun checkpoint.
        is_there: Whether the directory or marker that says a draft is being written still exists.

    Raises:
        CheckpointError: It does not.
    """
    if not is_there:
        raise CheckpointError.expected(
            "one job that saves to a root",
            f"another one, which has removed what this one wrote of step {draft.step}",
            where=f"'{draft.root}'",
            hint="Give each job a save root of its own, and save again",
        )


def require_ahead(directory: str | os.PathLike[str], step: int, *, is_chosen: bool = True) -> None:
    """Refuse to convert to a step that replaces a checkpoint or makes an older step the latest.

    A training run may do both, after it went back.

    Args:
        directory: The save root.
        step: The step.
        is_chosen: The caller can publish as another step; False if it is the source's own.

    Raises:
        CheckpointError: The step is published, or the latest one is not below it.
    """
    root = location_of(directory)
    latest, steps = latest_step(root), published_steps(root)
    if step not in steps and (latest is None or step > latest):
        return
    free = max([*steps, -1 if latest is None else latest]) + 1
    raise CheckpointError.expected(
        "a step above the latest that is not published",
        f"step {step}, where {steps} are published and the latest is {latest}",
        where=f"'{root}'",
        hint=f"Give {f'--step {free} or above, or ' if is_chosen else ''}another save root",
    )


def write_descriptions(manifest: Manifest, temporary: Path) -> None:
    """Write ``.metadata`` and, last, the manifest, and wait until both are on the disk.

    Args:
        manifest: Contents of the checkpoint; ``.metadata`` is added to its ``files``.
        temporary: The directory, with the records in it.
    """
    described = write_dcp_metadata(manifest, temporary)
    sync_file(described)
    manifest.files[described.name] = described.stat().st_size
    reached("DCP metadata written")
    sync_file(write_manifest(manifest, temporary))
    reached("manifest written")


def publish(temporary: Path, root: Path, step: int) -> Path:
    """Make a fully written temporary directory the checkpoint of a step, and the latest one.

    Args:
        temporary: The directory of the checkpoint; every file in it is durable.
        root: The save root.
        step: The step.

    Returns:
        The published directory.

    Raises:
        OSError: A rename failed; the step keeps its earlier directory, if it had one.
    """
    final = step_directory(root, step)
    sync_directory(temporary)
    reached("temporary directory synced")
    replaced = temporary_beside(final) if final.exists() else None
    if replaced is not None:
        final.rename(replaced)
        reached("old directory moved away")
    try:
        temporary.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    reached("renamed")
    sync_directory(root)
    reached("root synced")
    tracker = temporary_beside(root / TRACKER_FILE)
    write_durably(tracker, f"{step}\n")
    reached("tracker written")
    tracker.replace(root / TRACKER_FILE)
    reached("tracker replaced")
    sync_directory(root)
    reached("tracker synced")
    if replaced is not None:
        remove(replaced)
    return final


def prune(
    root: L,
    *,
    keep_last: int | None,
    keep_every: int | None,
    retire: Callable[[L], bool],
) -> list[int]:
    """Remove checkpoints that the retention rules do not keep; ``retire`` warns if one cannot be.

    Args:
        root: The save root.
        keep_last: Number of newest checkpoints to keep; None keeps all.
        keep_every: Keep also the steps that are multiples of this.
        retire: Removes the directory of a step and returns whether it did.

    Returns:
        The removed steps.
    """
    if keep_last is None:
        return []
    latest = latest_step(root)
    if latest is None:
        return []
    steps = [step for step in published_steps(root) if step <= latest]
    staying = set(steps[-keep_last:])
    if keep_every is not None:
        staying.update(step for step in steps if step % keep_every == 0)
    leaving = [step for step in steps if step not in staying]
    return [step for step in leaving if retire(step_directory(root, step))]


def retire(path: Path) -> bool:
    """Remove the directory of a step, atomically for readers; return whether it could be moved."""
    # Renamed first, so that a crash cannot leave a half-removed directory that looks published.
    away = temporary_beside(path)
    try:
        path.rename(away)
    except OSError as error:
        _LOGGER.warning("'%s' stays, as it cannot be removed: %s", path, error)
        return False
    reached("retired directory renamed")
    remove(away)
    reached("retired directory removed")
    return True


def write_durably(path: Path, text: str) -> None:
    """Write a small text file and wait until it is on the disk."""
    path.write_text(text)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Wait until a written file is on the disk."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_beside(path: Path) -> Path:
    """Return a fresh hidden path in the same folder, to be written and then renamed to a path."""
    return path.with_name(temporary_name(path.name))


def temporary_name(name: str) -> str:
    """Return a fresh hidden name that contains the final name."""
    return f".tmp-{name}-{uuid.uuid4().hex[:8]}"


def named_by(temporary: str) -> str | None:
    """Return the name that :func:`temporary_name` was called with; None for any other name."""
    match = _TEMPORARY.fullmatch(temporary)
    return match[1] if match else None


@contextlib.contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Make a directory for intermediate files of a path, and remove it; one process at a time.

    Args:
        path: What will be written; scratch directories that a crash left are removed first.
    """
    remove_leftovers(path.parent, path.name.__eq__)
    scratch = temporary_beside(path)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        remove(scratch)


def remove_leftovers(folder: Path, is_own: Callable[[str], bool]) -> None:
    """Remove paths from :func:`temporary_beside` that a crash has left.

    Args:
        folder: Where to look.
        is_own: Takes the name of a final path; returns whether only this process may write it.
    """
    for path in list(folder.iterdir()):
        name = named_by(path.name)
        if name is not None and is_own(name):
            remove(path)


def is_of_saves(name: str) -> bool:
    """Return whether only saves write to this name in a save root."""
    return name == TRACKER_FILE or _STEP_DIRECTORY.fullmatch(name) is not None


def remove(path: Path) -> None:
    """Remove an unneeded file or directory; only warn if that fails.

    A network file system keeps a directory while a reader has a file in it open.
    """
    try:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        _LOGGER.warning("'%s' is not needed but cannot be removed: %s", path, error)
