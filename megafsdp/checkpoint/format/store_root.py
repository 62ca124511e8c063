"""Saves to an object store: without renames, the manifest, written last, makes a checkpoint.

The objects in a store, and the order in which a save of step 50 writes them::

    run/.tmp-iter_0000050-1a2b3c4d       1  empty: a folder is being written or removed
    run/iter_0000050/
        __0_0-1a2b3c4d.distcp            2  by every rank, part by part
        .metadata                        3  by rank 0, once all ranks have answered
        manifest.json                    4  from here on the checkpoint exists
    run/latest_checkpointed_iteration.txt  5  from here on it is the latest one

Then the marker is removed. No reader takes a folder without manifest for a checkpoint. A crash at
any instant leaves the checkpoint that the tracker named before, whole, and a marker by which the
next save finds and removes the rest. This implies, beside the rules of save_root.py:

- The names of a rank's files end differently in each attempt, so an upload that a dead job
  completes late cannot replace a file of a checkpoint.
- A removal starts with the manifest. Everything in a step's folder without a manifest is waste,
  even the files of another program: give each program a root of its own.
- Readers rely on single objects, which stores return as they were last written. Listings, which
  may lag, only decide what is removed, and never remove a folder that has a manifest.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from megafsdp.checkpoint.format.manifest import (
    DCP_METADATA_FILE,
    MANIFEST_FILE,
    TRACKER_FILE,
    Manifest,
    read_manifest,
    write_dcp_metadata,
    write_manifest,
)
from megafsdp.checkpoint.format.save_root import (
    Draft,
    is_of_saves,
    is_published,
    latest_step,
    named_by,
    prune,
    published_steps,
    reached,
    require_alone,
    require_not_latest,
    step_directory,
    temporary_name,
)
from megafsdp.checkpoint.storage.store_path import StorePath
from megafsdp.errors import CheckpointError

_LOGGER = logging.getLogger("megafsdp.checkpoint")


@dataclass(frozen=True, slots=True)
class StoreSaves:
    """Saves to a folder of a store.

    Attributes:
        root: The save root.
    """

    root: StorePath

    def prepare(self, step: int) -> Draft:
        """Remove what dead saves have left, and mark the folder of the step as being written."""
        require_not_latest(self.root, step)
        self._remove_leftovers()
        folder = step_directory(self.root, step)
        marker = temporary_name(folder.name)
        (self.root / marker).write_bytes(b"")
        reached("prepared")
        return Draft(self.root, folder, step, suffix=marker[-9:])

    def describe(self, manifest: Manifest, draft: Draft) -> None:
        """Write ``.metadata``, then the manifest, which publishes the folder."""
        folder = _in_store(draft)
        if is_published(folder):
            # The run went back and reached the step again. The old manifest would not fit the new
            # .metadata.
            self._require_alone(draft)
            folder.remove([MANIFEST_FILE])
            reached("old manifest removed")
        described = write_dcp_metadata(manifest, folder)
        nbytes = described.nbytes()
        assert nbytes is not None, "closing the file has looked for it"
        manifest.files[described.name] = nbytes
        reached("DCP metadata written")
        # Checked last: a manifest whose files are gone would become the latest checkpoint, and
        # retention would remove others for it.
        self._require_alone(draft)
        write_manifest(manifest, folder)
        reached("manifest written")

    def _require_alone(self, draft: Draft) -> None:
        require_alone(draft, (self.root / _marker_of(draft)).is_file())

    def publish(self, draft: Draft) -> StorePath:
        """Name the step in the tracker, then remove the folder's older files and the marker."""
        folder = _in_store(draft)
        (self.root / TRACKER_FILE).write_text(f"{draft.step}\n")
        reached("tracker written")
        kept = (MANIFEST_FILE, DCP_METADATA_FILE)
        try:
            names = [name for name in folder.list_names()[0] if name not in kept]
            folder.remove([name for name in names if draft.suffix not in name])
            self.root.remove([_marker_of(draft)])
        except CheckpointError as error:
            _LOGGER.warning("'%s' may have files that are not needed: %s", folder, error)
        reached("marker removed")
        return folder

    def discard(self, draft: Draft) -> None:
        """Remove the files of an attempt, except those that an existing manifest lists."""
        folder = _in_store(draft)
        try:
            names = folder.list_names()[0]
            own = [name for name in names if draft.suffix in name]
            if _has_whole_manifest(folder):
                # The manifest of this attempt, whose tracker failed, or of the one to be replaced.
                kept = read_manifest(folder).files
                names = [name for name in own if name not in kept]
            elif not (self.root / _marker_of(draft)).is_file():
                # A second job took this one for dead: the other files may be what it writes.
                names = own
            folder.remove(names)
            self.root.remove([_marker_of(draft)])
        except CheckpointError as error:
            _LOGGER.warning("what a failed save wrote stays until the next one: %s", error)

    def prune(self, *, keep_last: int | None, keep_every: int | None) -> list[int]:
        """Remove the manifests of old folders, then the folders; warn if that fails."""
        try:
            return prune(self.root, keep_last=keep_last, keep_every=keep_every, retire=self._retire)
        except CheckpointError as error:
            _LOGGER.warning("old checkpoints stay in '%s': %s", self.root, error)
            return []

    def clear(self) -> None:
        """Remove the tracker, then the manifest of each folder and its other files."""
        self.root.remove([TRACKER_FILE])
        for step in published_steps(self.root):
            self._retire(step_directory(self.root, step))

    def _retire(self, folder: StorePath) -> bool:
        marker = temporary_name(folder.name)
        try:
            (self.root / marker).write_bytes(b"")
            reached("retired directory marked")
            folder.remove([MANIFEST_FILE])
            reached("retired manifest removed")
            folder.remove(folder.list_names()[0])
            reached("retired directory removed")
            self.root.remove([marker])
        except CheckpointError as error:
            _LOGGER.warning("'%s' stays, as it cannot be removed: %s", folder, error)
            return False
        return True

    def _remove_leftovers(self) -> None:
        """Remove the folders that are marked and have no manifest, and all markers."""
        names = self.root.list_names()[0]
        markers = [name for name in names if is_of_saves(named_by(name) or "")]
        latest = latest_step(self.root) if markers else None
        for marker in markers:
            folder = self.root / str(named_by(marker))
            is_latest = latest is not None and folder == step_directory(self.root, latest)
            try:
                if not is_latest and not _has_whole_manifest(folder):
                    folder.remove(folder.list_names()[0])
                self.root.remove([marker])
            except CheckpointError as error:
                _LOGGER.warning("'%s' is not needed but cannot be removed: %s", folder, error)


def _in_store(draft: Draft) -> StorePath:
    assert isinstance(draft.folder, StorePath), "the draft of a store"
    return draft.folder


def _has_whole_manifest(folder: StorePath) -> bool:
    """Return whether a folder has a manifest that was written to its end.

    Raises:
        CheckpointError: The store does not answer.
    """
    try:
        return (folder / MANIFEST_FILE).read_bytes().endswith(b"}\n")
    except FileNotFoundError:
        return False


def _marker_of(draft: Draft) -> str:
    return f".tmp-{draft.folder.name}{draft.suffix}"
