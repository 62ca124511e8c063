"""Write a run's metrics to ``metrics.jsonl``, and to W&B, TensorBoard and others if configured.

Only the first rank has trackers. A row is a flat dict of numbers with its ``step``. Anything that
is not a number goes to the log of events.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megafsdp.errors import ConfigError, expected
from megafsdp.training.config.sections import METRICS_FILE, Config, require
from megafsdp.training.metrics.events import EVENTS_FILE, Event, EventLog
from megafsdp.training.metrics.json_lines import JsonLines
from megafsdp.training.process.doctor import is_installed

if TYPE_CHECKING:
    import wandb

_LOGGER = logging.getLogger("megafsdp.training")

EVALUATION_KEY = "validation_loss"

Row = Mapping[str, float | int | None]


@runtime_checkable
class Tracker(Protocol):
    """A destination of rows.

    Name your own in ``logging.trackers``. It is made on the first rank as
    ``Class(config, last_step=step)``, with the run's ``Config`` and the step that it resumes from,
    0 for a new run: rows up to that step were logged before, later ones are logged again.
    """

    def log(self, row: Row) -> None:
        """Write one row."""

    def close(self) -> None:
        """Write out what is buffered."""


class JsonlTracker:
    """Append rows to a file of JSON lines; each is flushed when ``log`` returns.

    Args:
        path: The file; its folder is there.
        last_step: Rows of later steps are removed: the run resumes after this step and writes them
            anew. An evaluation of this very step replaces the one in the file. 0 starts a new file.

    Attributes:
        elapsed_s: Seconds that the run took up to the last row that was there; 0 without one.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._lines = JsonLines(path, last_step=last_step)
        self._last_step = last_step
        times_s = [row.get("elapsed_s") for row in self._lines.rows()]
        self.elapsed_s = max((t for t in times_s if isinstance(t, int | float)), default=0.0)

    def log(self, row: Row) -> None:
        """Write one line; numbers that JSON cannot spell become null."""
        spelt = {
            name: None if isinstance(v, float) and not math.isfinite(v) else v
            for name, v in row.items()
        }
        if self._is_last_evaluation(row):
            self._lines.remove(self._is_last_evaluation)
        self._lines.append(spelt)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _is_last_evaluation(self, row: Row) -> bool:
        return EVALUATION_KEY in row and row["step"] == self._last_step


class WandbTracker:
    """Send rows to Weights & Biases; offline unless a key or a mode is set in the environment.

    Charts are over the metric ``step`` of the rows. A run that resumes from an earlier step
    continues in W&B, where steps that are taken again appear twice.

    Args:
        config: The run.
        run_id: Identity of the run to continue; None starts one.

    Raises:
        ConfigError: W&B does not take the run.
    """

    def __init__(self, config: Config, *, run_id: str | None) -> None:
        import wandb

        is_configured = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
        try:
            self._run: wandb.Run = wandb.init(
                project=config.logging.wandb_project,
                name=config.run_name,
                dir=str(config.run_directory),
                config=config.to_dict(),
                id=run_id or secrets.token_hex(4),
                resume="allow" if is_configured else None,
                mode=None if is_configured else "offline",
            )
        # A server that is away, a wrong key, a mode that there is not: many classes.
        except Exception as error:
            what, found = "a run in Weights & Biases", f"{type(error).__name__}: {error}"
            where = "the training configuration, logging.wandb"
            hint = "Set WANDB_MODE=offline and upload later, or set logging.wandb to false"
            raise ConfigError(expected(what, found, where=where, hint=hint)) from error
        # W&B's own step only grows: a run that resumes from an earlier step would lose rows.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def run_id(self) -> str:
        """Return the run's identity, which checkpoints save."""
        return self._run.id

    def log(self, row: Row) -> None:
        """Log one row at its step."""
        self._run.log(dict(row))

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TensorBoardTracker:
    """Write rows as scalars of TensorBoard.

    Args:
        directory: Folder of the event files.
        last_step: Events of later steps are hidden: the run writes them anew.
    """

    def __init__(self, directory: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(directory), purge_step=last_step + 1)

    def log(self, row: Row) -> None:
        """Write each number of a row at its step."""
        for name, value in row.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, int(row["step"] or 0))

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.close()


class Trackers:
    """All trackers of a run as one.

    Once open, a tracker that fails (a full disk, a server that is away) loses rows and never ends
    the run.

    Args:
        config: The run; its folder is there.
        last_step: Step that the run resumes from.
        wandb_id: Identity of the run in W&B, from a checkpoint.

    Attributes:
        wandb_id: Identity of the run in W&B; None without it.
        elapsed_s: Seconds that the run's earlier jobs took, up to their last row.
    """

    def __init__(self, config: Config, *, last_step: int, wandb_id: str | None) -> None:
        folder = config.run_directory
        self.wandb_id = wandb_id
        # Made first: these may fail, and the others open files.
        own = [_made(spec, config, last_step) for spec in config.logging.trackers]
        jsonl = JsonlTracker(folder / METRICS_FILE, last_step=last_step)
        self.elapsed_s = jsonl.elapsed_s
        self._trackers: list[Tracker] = [jsonl, *own]
        self._failed: list[Tracker | EventLog] = []
        with contextlib.ExitStack() as opened:
            opened.callback(jsonl.close)
            self._events = EventLog(folder / EVENTS_FILE, last_step=last_step)
            opened.callback(self._events.close)
            if config.logging.tensorboard:
                to_board = TensorBoardTracker(folder / "tensorboard", last_step=last_step)
                opened.callback(to_board.close)
                self._trackers.append(to_board)
            if config.logging.wandb:
                to_wandb = WandbTracker(config, run_id=wandb_id)
                self.wandb_id = to_wandb.run_id
                self._trackers.append(to_wandb)
            # Open files are closed here only if a later tracker cannot be made.
            opened.pop_all()

    def log(self, row: Row) -> None:
        """Log a row in every tracker, also when one of them fails and loses the row."""
        for tracker in self._trackers:
            self._attempt(tracker, functools.partial(tracker.log, row))

    def log_event(self, event: Event, values: Mapping[str, object]) -> None:
        """Log an event; one that cannot be written is lost."""
        self._attempt(self._events, functools.partial(self._events.log, event, values))

    def close(self) -> None:
        """Close every tracker, also when one fails."""
        everything: list[Tracker | EventLog] = [*self._trackers, self._events]
        for tracker in everything:
            self._attempt(tracker, tracker.close)

    def _attempt(self, tracker: Tracker | EventLog, action: Callable[[], None]) -> None:
        """Run an action of a tracker; warn of its first failure.

        No row is worth the run: an error here would end this rank alone, without a checkpoint,
        while the other ranks wait for it.
        """
        try:
            action()
        except Exception as error:
            if tracker not in self._failed:
                self._failed.append(tracker)
                _LOGGER.warning(
                    "%s lacks rows, from this moment on as long as it fails: %s: %s",
                    type(tracker).__name__,
                    type(error).__name__,
                    error,
                )


def check_trackers(config: Config) -> None:
    """Check that the packages and classes of the configured trackers are there; local.

    Raises:
        ConfigError: One is missing.
    """
    for spec in config.logging.trackers:
        _class_of(spec)
    wanted = {"wandb": config.logging.wandb, "tensorboard": config.logging.tensorboard}
    for package, is_wanted in wanted.items():
        require(
            not is_wanted or is_installed(package),
            f"logging.{package}",
            f"the package {package}",
            "no such package",
            f"Run `pip install 'megafsdp[{package}]'`, or set logging.{package} to false",
        )


def _class_of(spec: str) -> Callable[..., object]:
    """Import the class of a tracker of the user's own.

    Raises:
        ConfigError: There is no class of this name.
    """
    module, _, name = spec.partition(":")
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    # Importing runs the user's code.
    except Exception as error:
        raise _refused(spec, "the name of a class as module:Class", error) from error
    if not callable(found):
        raise _refused(spec, "a class", f"{found!r}")
    return found


def _made(spec: str, config: Config, last_step: int) -> Tracker:
    """Make a tracker of the user's own."""
    try:
        tracker = _class_of(spec)(config, last_step=last_step)
    except ConfigError:
        raise
    except Exception as error:
        what = "a class that is called with (config, last_step=...)"
        raise _refused(spec, what, error) from error
    if not isinstance(tracker, Tracker):
        raise _refused(spec, "a class with the methods log and close", f"{type(tracker).__name__}")
    return tracker


def _refused(spec: str, what: str, got: Exception | str) -> ConfigError:
    found = got if isinstance(got, str) else f"{type(got).__name__}: {got}"
    return ConfigError(
        expected(
            what,
            found,
            where=f"the training configuration, logging.trackers '{spec}'",
            hint="Write it like megafsdp.training.Tracker says, in a module on PYTHONPATH",
        )
    )
