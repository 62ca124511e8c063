"""How a save becomes a checkpoint atomically: on a disk by a rename, in a store by its manifest.

This is the only place that tells the two apart. Writers ask :func:`saves_to` and do the same for
both: prepare, write files, describe, publish, prune, and discard after a failure.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import TRACKER_FILE, Manifest
from megafsdp.checkpoint.format.save_root import Draft
from megafsdp.checkpoint.format.store_root import StoreSaves
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.storage.store_path import StorePath

_LOGGER = logging.getLogger("megafsdp.checkpoint")


class Saves(Protocol):
    """Saves to one root; every method runs on rank 0."""

    def prepare(self, step: int) -> Draft:
        """Remove what dead saves have left, then begin a checkpoint.

        Raises:
            CheckpointError: The step is the published one already, or the root is no directory.
        """

    def describe(self, manifest: Manifest, draft: Draft) -> None:
        """Write ``.metadata`` and, last, the manifest, durably.

        Args:
            manifest: Contents of the checkpoint; ``.metadata`` is added to its ``files``.
            draft: The begun checkpoint, with all records in it.

        Raises:
            CheckpointError: Another job has removed the draft.
        """

    def publish(self, draft: Draft) -> Location:
        """Make a described draft the latest checkpoint and return its directory."""

    def discard(self, draft: Draft) -> None:
        """Remove what was written of a draft, unless it was published; warn if that fails."""

    def prune(self, *, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Remove the checkpoints that :func:`save_root.prune` chooses, and return their steps."""

    def clear(self) -> None:
        """Remove all checkpoints; warn of those that cannot be removed.

        The tracker goes first, so that it never names a checkpoint that is removed.
        """


@dataclass(frozen=True, slots=True)
class DiskSaves:
    """Saves to a directory of a file system, published by one rename.

    Attributes:
        root: The save root.
    """

    root: Path

    def prepare(self, step: int) -> Draft:
        """Make the temporary directory."""
        return Draft(self.root, save_root.prepare(self.root, step), step)

    def describe(self, manifest: Manifest, draft: Draft) -> None:
        """Write both files and wait until they are on the disk."""
        save_root.require_alone(draft, _on_disk(draft).is_dir())
        save_root.write_descriptions(manifest, _on_disk(draft))

    def publish(self, draft: Draft) -> Location:
        """Rename the directory, then move the tracker."""
        return save_root.publish(_on_disk(draft), self.root, draft.step)

    def discard(self, draft: Draft) -> None:
        """Remove the temporary directory, if it is not yet renamed."""
        if _on_disk(draft).exists():
            save_root.remove(_on_disk(draft))

    def prune(self, *, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Rename old directories away, then remove them; warn of what stays."""
        try:
            return save_root.prune(
                self.root, keep_last=keep_last, keep_every=keep_every, retire=save_root.retire
            )
        except OSError as error:
            # The save is published: a failure of the cleanup must not fail it.
            _LOGGER.warning("old checkpoints stay in '%s': %s", self.root, error)
            return []

    def clear(self) -> None:
        """Remove the tracker, then rename each directory away and remove it."""
        (self.root / TRACKER_FILE).unlink(missing_ok=True)
        for step in save_root.published_steps(self.root):
            save_root.retire(save_root.step_directory(self.root, step))


def saves_to(root: Location) -> Saves:
    """Return how saves to a root are made."""
    return StoreSaves(root) if isinstance(root, StorePath) else DiskSaves(root)


def _on_disk(draft: Draft) -> Path:
    assert isinstance(draft.folder, Path), "the draft of a disk"
    return draft.folder
