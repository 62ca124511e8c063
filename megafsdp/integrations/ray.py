"""Ray Train: checkpoints of a training function that shards, in the run's own storage.

The function runs on every worker, in a process group that ``TorchTrainer`` makes, so
``fully_shard_model`` needs nothing more. All workers write one checkpoint, each its rows, into the
``storage_path`` that they share, and Ray gets its path: nothing is copied. Any number of
workers can resume from it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import train
from ray.train import Checkpoint, CheckpointUploadMode
from torch import nn
from torch.optim import Optimizer

from megafsdp.checkpoint.format.save_root import latest_step, step_directory
from megafsdp.checkpoint.load import load
from megafsdp.checkpoint.save import HasState, save
from megafsdp.errors import CheckpointError
from megafsdp.integrations.refusals import check_settings

FOLDER = "megafsdp"


def report(
    metrics: Mapping[str, Any],
    *,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: HasState | None = None,
) -> None:
    """Save a checkpoint and report it with metrics; called by all workers alike.

    A step that is saved already, by workers that died before they reported it, is not saved again.

    Args:
        metrics: Plain values, of which Ray keeps the first worker's.
        step: The training step.
        model: As for :func:`megafsdp.checkpoint.save`; so are the rest.
        optimizer: The optimizer.
        lr_scheduler: The scheduler.

    Raises:
        NotImplementedError: The run's storage is not a file system that workers share.
        CheckpointError: A worker could not write.
    """
    root = _storage() / FOLDER
    try:
        saved = save(root, step=step, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)
    except CheckpointError:
        # A worker may have died after the save, before the report, and the run reached it again.
        if latest_step(root) != step:
            raise
        saved = step_directory(root, step)
    # Ray refers to folders below the run's own, by their names there.
    train.report(
        dict(metrics) | {"step": step},
        checkpoint=Checkpoint.from_directory(saved),
        checkpoint_dir_name=os.fspath(Path(saved).relative_to(_storage())),
        checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
    )


def resume(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: HasState | None = None,
) -> int:
    """Load the latest checkpoint that was reported; called by all workers alike.

    Returns:
        Its step; 0 if the run has none yet.

    Raises:
        CheckpointError: It is damaged, or not of this model.
    """
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return 0
    load(checkpoint.path, model=model, optimizer=optimizer, lr_scheduler=lr_scheduler)
    return int(Path(checkpoint.path).name.removeprefix("iter_"))


def _storage() -> Path:
    """Return the run's folder in the storage that the workers share.

    Raises:
        NotImplementedError: The storage is an object store.
    """
    storage = train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    check_settings({"file system of storage_path": kind}, "RunConfig of the trainer")
    return Path(storage.experiment_fs_path)
