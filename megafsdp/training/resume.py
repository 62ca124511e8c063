"""Save a run in checkpoints, with its position and configuration, and resume it from them.

A position is a number of consumed samples, so any number of ranks can resume: the same global
batches follow. Where configuration and checkpoint differ, the configuration wins and the log
lists the differences. The format of checkpoints is in ``megafsdp.checkpoint``; when to save is
decided in ``megafsdp.training.loop``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafsdp import checkpoint
from megafsdp.buffer.comm.agreement import on_rank_zero
from megafsdp.checkpoint.format.manifest import MANIFEST_FILE, TRACKER_FILE
from megafsdp.checkpoint.format.save_root import temporary_name
from megafsdp.checkpoint.state.canonical import GROUPS_KEY
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.data.blend import shares_of
from megafsdp.errors import CheckpointError, ConfigError, expected
from megafsdp.optimizer.loss_scaler import LossScaler
from megafsdp.training.config.parse import differences
from megafsdp.training.config.sections import Config
from megafsdp.training.step.lr import LearningRate
from megafsdp.training.step.optimizers import apply_hyperparameters

_LOGGER = logging.getLogger("megafsdp.training")
# Sections that decide which tensors a checkpoint has.
_DECIDE_TENSORS = ("model", "precision", "optimizer", "muon")
# Kinds of optimizers that can load each other's states share a value.
_STATES_OF = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "muon": "muon"}


@dataclass(slots=True)
class RunState:
    """The position and counters of a run; they change at every step, alike on all ranks.

    Attributes:
        step: Steps taken, skipped ones included.
        consumed_samples: Samples of these steps.
        consumed_tokens: Tokens of these samples, whatever their length was.
        evaluated_step: Step of the last evaluation; -1 before the first.
        num_skipped: Steps skipped since the run began.
        num_skips_in_a_row: Steps skipped since the last one that was taken, without overflows that
            a smaller loss scale may avoid.
        skipped_samples: Samples of skipped steps, which the learning rate does not count.
        wandb_id: Identity of the run in W&B; None without it.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    evaluated_step: int = -1
    num_skipped: int = 0
    num_skips_in_a_row: int = 0
    skipped_samples: int = 0
    wandb_id: str | None = None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a checkpoint stores about its run.

    Attributes:
        step: Step of the checkpoint.
        state: Position and counters; the resumed run changes them.
        config: Configuration of the run as plain values; empty if it is not known.
        order: What decided the order of samples; empty if it is not known.
        has_groups: Whether the checkpoint has the optimizer's parameter groups.
    """

    step: int
    state: RunState
    config: Mapping[str, Any]
    order: Mapping[str, Any]
    has_groups: bool


@dataclass(frozen=True, slots=True)
class Restorable:
    """The objects that a checkpoint fills."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    loss_scaler: LossScaler | None = None


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """What a save costs.

    Attributes:
        stall_s: How long the training waits for it.
        save_s: Time from its begin to its publication. The publication of a background save is
            noticed after a step, or when the run waits for it.
    """

    stall_s: float = 0.0
    save_s: float = 0.0


class Saver:
    """Save checkpoints of a run, at most one at a time in the background.

    Args:
        config: The run.
        state: Where it stands; it changes with every step.
        targets: What to store.
        order: What decides the order of samples.
        on_saved: Called with a step and the times of its save when the checkpoint is published.
    """

    def __init__(
        self,
        config: Config,
        state: RunState,
        targets: Restorable,
        *,
        order: Mapping[str, object],
        on_saved: Callable[[int, SaveTimes], None],
    ) -> None:
        self._config = config
        self._state = state
        self._targets = targets
        self._order = order
        self._on_saved = on_saved
        self._saved_step = state.step
        self._pending: checkpoint.PendingSave | None = None
        self._begun_s, self._stall_s = 0.0, 0.0

    def save(self) -> None:
        """Save the state, or begin to, unless it is saved already; collective over all ranks.

        Raises:
            CheckpointError: This save or the one before it failed; on all ranks.
        """
        if self._state.step != self._saved_step:
            self.wait()
            self._begin(in_background=self._config.checkpoint.in_background)

    def save_before_error(self) -> str:
        """Save the state before an error ends the run; return a sentence on how that went.

        Collective over all ranks. A save that fails is part of the sentence.
        """
        step = self._state.step
        try:
            self.wait()
            if step != self._saved_step:
                self._begin(in_background=False)
        except CheckpointError as failure:
            # The run ends with the error that came first.
            return f"A save failed as well: {failure}"
        if not step:
            return "No step came before it."
        return f"Step {step}, the one before, is saved in '{self._config.checkpoint_directory}'."

    def poll(self) -> None:
        """Report a background save that is complete; a failure is raised when all ranks wait."""
        if self._pending is not None and self._pending.published is not None:
            self.wait()

    def wait(self) -> None:
        """Wait for the background save, if there is one; collective over all ranks.

        Raises:
            CheckpointError: It failed; on all ranks. The present state is saved first: it may be
                many steps further, and the cause may be gone.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            waited_from_s = time.perf_counter()
            try:
                pending.result()
            except CheckpointError:
                self._begin(in_background=False)
                raise
            self._stall_s += time.perf_counter() - waited_from_s
            self._report()

    def _report(self) -> None:
        save_s = time.perf_counter() - self._begun_s
        self._on_saved(self._saved_step, SaveTimes(self._stall_s, save_s))

    def _begin(self, *, in_background: bool) -> None:
        config, targets = self._config, self._targets
        self._begun_s = time.perf_counter()
        begun = (checkpoint.async_save if in_background else checkpoint.save)(
            config.checkpoint_directory,
            step=self._state.step,
            model=targets.model,
            optimizer=targets.optimizer,
            lr_scheduler=targets.learning_rate,
            loss_scaler=targets.loss_scaler,
            extra={
                "run": asdict(self._state),
                "config": config.to_dict(),
                "order": dict(self._order),
            },
            keep_last=config.checkpoint.keep_last,
            keep_every=config.checkpoint.keep_every,
        )
        self._saved_step = self._state.step
        self._stall_s = time.perf_counter() - self._begun_s
        if isinstance(begun, checkpoint.PendingSave):
            self._pending = begun
        else:
            self._report()


def require_writable(config: Config) -> None:
    """Make the folder of checkpoints and check that files can be made there; collective.

    Raises:
        CheckpointError: The first rank cannot make them; on all ranks.
    """
    folder = config.checkpoint_directory

    def write() -> bool:
        try:
            # A name that the next save removes, should this process end before it does.
            name = temporary_name(TRACKER_FILE)
            if isinstance(folder, Path):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(b"0")
                (folder / name).unlink()
            else:
                (folder / name).write_bytes(b"0")
                folder.remove([name])
        except OSError as error:
            raise CheckpointError.expected(
                "a folder that checkpoints can be written to",
                f"{type(error).__name__}: {error}",
                where=f"checkpoint.directory, '{folder}'",
                hint="Make it a folder that this user may write to, or name another",
            ) from error
        return True

    on_rank_zero(write)


def find_stored(config: Config) -> StoredRun | None:
    """Read what the latest checkpoint stores about its run; collective over all ranks.

    Args:
        config: The run.

    Returns:
        What a resumed run needs before it builds anything; None if there is no checkpoint.

    Raises:
        ConfigError: There are checkpoints and checkpoint.resume is false, or the latest was not
            saved by a training run; or there is none, but one of its folders is that of a run's
            checkpoints, of one checkpoint, or of another run.
        CheckpointError: The latest checkpoint cannot be read.
    """
    folder = config.checkpoint_directory
    # The first rank decides: others may not see yet what it sees on a shared file system.
    (found,) = on_rank_zero(lambda: (_read_latest(folder),))
    if found is None:
        (refusal,) = on_rank_zero(lambda: (_misplaced(config),))
        if refusal is not None:
            raise ConfigError(refusal)
        return None
    step, extra, has_groups = found
    if not config.checkpoint.resume:
        raise ConfigError(
            expected(
                "no checkpoint, as checkpoint.resume is false",
                f"one of step {step}",
                where=f"'{folder}'",
                hint="Choose another run.directory, remove the checkpoints, or resume",
            )
        )
    state = extra.get("run")
    if not isinstance(state, Mapping):
        raise ConfigError(
            expected(
                "a checkpoint of a training run",
                f"one with {sorted(extra)} beside the weights",
                where=f"'{folder}', step {step}",
                hint="Choose another run.directory; to start a run from these weights, write them "
                "with 'megafsdp ckpt export-hf' and give that folder as --model.from_hf",
            )
        )
    stored_config = _mapping(extra.get("config"))
    restored = RunState(**{f.name: state[f.name] for f in fields(RunState) if f.name in state})
    if "consumed_tokens" not in state:
        # Checkpoints of older versions only count samples.
        length = _mapping(stored_config.get("data")).get("sequence_length", 0)
        restored.consumed_tokens = restored.consumed_samples * length
    return StoredRun(
        step=step,
        state=restored,
        config=stored_config,
        order=_mapping(extra.get("order")),
        has_groups=has_groups,
    )


def _read_latest(folder: Location) -> tuple[int, dict[str, object], bool] | None:
    """Return the latest step, the run's values in it, and whether it has parameter groups."""
    step = checkpoint.latest_step(folder)
    if step is None:
        return None
    with CheckpointReader(folder, step) as reader:
        extra = reader.object("extra")
        assert isinstance(extra, dict), "save() stores a dict"
        return step, extra, GROUPS_KEY in reader.manifest.objects


def _misplaced(config: Config) -> str | None:
    """Return why a new run must not begin: a folder has checkpoints where it does not look."""
    run, own = config.run_directory, config.checkpoint_directory
    # The option, its folder, and where checkpoints may lie instead.
    for option, folder, root in (
        ("run.directory", run, run),
        ("checkpoint.directory", own, own / "checkpoints"),
    ):
        step = checkpoint.latest_step(root)
        found = f"checkpoints in '{root}', the latest of step {step}"
        if (folder / MANIFEST_FILE).is_file():
            found, root = "one checkpoint", folder.parent
        elif step is None:
            continue
        return expected(
            "a new folder or that of a run",
            found,
            where=f"{option}, '{folder}'",
            hint=f"Name another; to go on with a run's give --checkpoint.directory {root}; to "
            "start from weights give a saved model as --model.from_hf, which 'megafsdp ckpt "
            "export-hf' writes",
        )
    return None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def restore(
    config: Config, targets: Restorable, stored: StoredRun, *, order: Mapping[str, object]
) -> None:
    """Load the checkpoint that :func:`find_stored` has found; collective over all ranks.

    Args:
        config: The run.
        targets: What to fill.
        stored: The checkpoint.
        order: What decides the order of samples, to be compared with the checkpoint's.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model; nothing was changed.
    """
    checkpoint.load(
        config.checkpoint_directory,
        step=stored.step,
        model=targets.model,
        optimizer=targets.optimizer,
        lr_scheduler=targets.learning_rate,
        loss_scaler=targets.loss_scaler,
        # States belong to parameters, whichever groups these are in.
        ignore=[GROUPS_KEY] if _is_grouped_anew(config, stored) else [],
        # A run that changes to fp16 begins with the initial loss scale.
        allow_missing=["loss_scaler"],
        hint=_mismatch_hint(config, stored),
    )
    apply_hyperparameters(targets.optimizer, targets.model, config.optimizer, config.muon)
    _report_differences(config, order, stored)


def _mismatch_hint(config: Config, stored: StoredRun) -> str:
    """Return what a user can do where the checkpoint does not fit the configuration."""
    changed = [
        line
        for line in differences(stored.config, config.to_dict())
        if stored.config and line.partition(".")[0] in _DECIDE_TENSORS
    ]
    what = ", ".join(changed) or f"one of {', '.join(_DECIDE_TENSORS)}"
    return (
        f"Set back what makes other tensors than the checkpoint's ({what}), or begin anew in"
        " another run.directory, and another checkpoint.directory if that is set"
    )


def _is_grouped_anew(config: Config, stored: StoredRun) -> bool:
    """Return whether the states fit, and only the grouping of parameters differs.

    If the kind of optimizer or the set of parameters that Muon steps changes, the states do not
    fit; the load then refuses them by the groups' options.
    """
    before, after = stored.config.get("optimizer"), config.to_dict()["optimizer"]
    if not isinstance(before, Mapping) or not stored.has_groups:
        return False
    if _STATES_OF.get(before.get("kind", "")) != _STATES_OF[config.optimizer.kind]:
        return False
    matrices = _mapping(stored.config.get("muon")).get("adamw")
    if config.optimizer.kind == "muon" and matrices != config.muon.adamw:
        return False
    return _grouping(before) != _grouping(after)


def _grouping(section: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what decides which parameters share a group; the first pattern that fits counts."""
    multipliers = list(_mapping(section.get("lr_multipliers")).items())
    return bool(section.get("weight_decay")), section.get("decay_vectors"), multipliers


def _in_shares(order: Mapping[str, object]) -> dict[str, object]:
    """Return an order with its weights divided by their sum."""
    weights = order.get("weights")
    # Checkpoints of older versions may have no weights.
    shares = shares_of(weights).tolist() if isinstance(weights, list) else None
    return {**order, "weights": shares}


def _report_differences(config: Config, order: Mapping[str, object], stored: StoredRun) -> None:
    if stored.config:
        for line in differences(stored.config, config.to_dict()):
            _LOGGER.info("differs from the checkpoint: %s", line)
    # Checkpoints of older versions record less of the order.
    known = {name: value for name, value in order.items() if name in stored.order}
    if stored.order and (changed := differences(_in_shares(stored.order), _in_shares(known))):
        _LOGGER.warning(
            "The order of samples is not the checkpoint's: some will be seen again, some not at "
            "all (%s). To train longer in one order, set data.num_samples to the longest run from "
            "the start.",
            "; ".join(changed),
        )
