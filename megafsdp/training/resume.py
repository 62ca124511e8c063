"""What a run keeps in its checkpoints beside weights and optimizer, and how it goes on from them.

A position is a number of consumed samples, so any number of ranks can go on: the same global
batches follow. Where configuration and checkpoint disagree the configuration wins, and the log says
so.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import torch
from torch import nn

from megafsdp import checkpoint
from megafsdp.buffer.collectives import broadcast_object
from megafsdp.checkpoint.agreement import on_rank_zero
from megafsdp.errors import CheckpointError, ConfigError, expected
from megafsdp.optimizer.scaler import LossScaler
from megafsdp.training.config import Config
from megafsdp.training.lr import LearningRate
from megafsdp.training.optimizers import apply_hyperparameters
from megafsdp.training.parse import differences

_LOGGER = logging.getLogger("megafsdp.training")


@dataclass(slots=True)
class RunState:
    """Where a run stands; changes at every step, alike on all ranks.

    Attributes:
        step: Steps taken, skipped ones included.
        consumed_samples: Samples of these steps.
        evaluated_step: Step of the last evaluation; -1 before the first.
        num_skipped: Steps skipped since the run began.
        num_skips_in_a_row: Steps skipped since the last one that was taken, but for overflows that
            a smaller loss scale may mend.
        skipped_samples: Samples of skipped steps, which the learning rate does not count.
        wandb_id: Identity of the run in W&B; None without it.
    """

    step: int = 0
    consumed_samples: int = 0
    evaluated_step: int = -1
    num_skipped: int = 0
    num_skips_in_a_row: int = 0
    skipped_samples: int = 0
    wandb_id: str | None = None


@dataclass(frozen=True, slots=True)
class Restorable:
    """The objects that a checkpoint fills."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loss_scaler: LossScaler | None = None


def save(
    config: Config,
    state: RunState,
    targets: Restorable,
    *,
    order: Mapping[str, object],
    in_background: bool,
) -> checkpoint.PendingSave | None:
    """Save a checkpoint of the run, or begin to; collective over all ranks.

    Args:
        config: The run.
        state: Where it stands.
        targets: What to store.
        order: What decides the order of samples.
        in_background: Return before it is written.

    Returns:
        The save in flight, if it goes on in the background.

    Raises:
        CheckpointError: It could not be written, or a save before it; on all ranks.
    """
    begun = (checkpoint.async_save if in_background else checkpoint.save)(
        config.checkpoint_directory,
        step=state.step,
        model=targets.model,
        optimizer=targets.optimizer,
        lr_scheduler=targets.learning_rate,
        loss_scaler=targets.loss_scaler,
        extra={
            "run": asdict(state),
            "config": config.to_dict(),
            "order": dict(order),
        },
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
    )
    return begun if isinstance(begun, checkpoint.PendingSave) else None


def require_writable(config: Config) -> None:
    """Make the folder of checkpoints and check that files can be made there; collective.

    Raises:
        CheckpointError: The first rank cannot; on all ranks.
    """
    folder = config.checkpoint_directory

    def write() -> bool:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Of the names that the next save removes, should this process end in between.
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-") as probe:
                probe.write(b"0")
        except OSError as error:
            raise CheckpointError(
                expected(
                    "a folder that checkpoints can be written to",
                    f"{type(error).__name__}: {error}",
                    where=f"checkpoint.directory, '{folder}'",
                    mend="Make it a folder that this user may write to, or name another",
                )
            ) from error
        return True

    on_rank_zero(write)


def restore(config: Config, targets: Restorable, *, order: Mapping[str, object]) -> RunState:
    """Load the latest checkpoint, if there is one; collective over all ranks.

    Args:
        config: The run.
        targets: What to fill.
        order: What decides the order of samples, to be compared with the checkpoint's.

    Returns:
        Where the run stands: at its beginning without a checkpoint.

    Raises:
        ConfigError: There are checkpoints, and the configuration says not to resume.
        CheckpointError: The checkpoint is damaged or of another model; nothing was changed.
    """
    # The first rank decides: others may not see yet what it sees on a shared file system.
    step = broadcast_object(checkpoint.latest_step(config.checkpoint_directory))
    if step is None:
        return RunState()
    if not config.checkpoint.resume:
        raise ConfigError(
            expected(
                "no checkpoint, as checkpoint.resume is false",
                f"one of step {step}",
                where=f"'{config.checkpoint_directory}'",
                mend="Choose another run.directory, remove the checkpoints, or resume",
            )
        )
    extra = checkpoint.load(
        config.checkpoint_directory,
        step=step,
        model=targets.model,
        optimizer=targets.optimizer,
        lr_scheduler=targets.learning_rate,
        loss_scaler=targets.loss_scaler,
        # A run that goes on in fp16 from another dtype begins with the first scale.
        allow_missing=["loss_scaler"],
    )
    apply_hyperparameters(targets.optimizer, targets.model, config.optimizer, config.muon)
    _report_differences(config, order, extra)
    stored = extra.get("run")
    if not isinstance(stored, Mapping):
        raise ConfigError(
            expected(
                "a checkpoint of a training run",
                f"one with {sorted(extra)} beside the weights",
                where=f"'{config.checkpoint_directory}', step {step}",
                mend="Choose another run.directory",
            )
        )
    return RunState(**{f.name: stored[f.name] for f in fields(RunState) if f.name in stored})


def _report_differences(
    config: Config, order: Mapping[str, object], extra: Mapping[str, object]
) -> None:
    stored, stored_order = extra.get("config"), extra.get("order")
    if isinstance(stored, Mapping):
        for line in differences(stored, config.to_dict()):
            _LOGGER.info("differs from the checkpoint: %s", line)
    if isinstance(stored_order, Mapping) and (changed := differences(stored_order, order)):
        _LOGGER.warning(
            "The order of samples is not the checkpoint's: some will be seen again, some not at "
            "all (%s). To train longer in one order, set data.num_samples to the longest run from "
            "the start.",
            "; ".join(changed),
        )
