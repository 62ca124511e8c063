"""The background save of this process, if there is one: at most one, never forgotten.

Whoever is about to change or to replace what is being saved asks here first. A failure that nobody
has asked for is reported by the next save, and at the end of the process.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megafsdp.buffer.comm.agreement import attempt
from megafsdp.checkpoint.background.staging import Staging
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.errors import CheckpointError, expected
from megafsdp.fsdp.weight_sync import register_before_load

_log = logging.getLogger("megafsdp.checkpoint")


class PendingSave:
    """A save that goes on in the background; made by ``checkpoint.async_save``.

    Args:
        step: The step that is being saved.
        staging: Makes the copies.
        finish: Writes them; collective, so it is called with the error of a rank without copies.
    """

    def __init__(
        self, step: int, staging: Staging, finish: Callable[[Exception | None], Path]
    ) -> None:
        self.step = step
        self._staging = staging
        self._finish: Callable[[Exception | None], Path] | None = finish
        self._published: Path | None = None
        self._error: Exception | None = None
        self._is_observed = False
        self._load_hooks: list[RemovableHandle] = []
        self._caller = threading.get_ident()
        # Not a daemon: Python waits for it at the end of the process.
        self._thread = threading.Thread(target=self._run, name=f"megafsdp save of step {step}")

    def guard_loads(self, targets: Iterable[nn.Module | Optimizer]) -> None:
        """Have ``load_state_dict`` of modules and optimizers wait for the copies.

        Args:
            targets: Modules, one by one, and optimizers.
        """
        # A function of the module, not a lambda: the model must still be pickled.
        self._load_hooks = [t.register_load_state_dict_pre_hook(wait_until_staged) for t in targets]

    def unguard_loads(self) -> None:
        """Remove what :meth:`guard_loads` has registered; the save has ended."""
        # Another thread could come while the caller's walks the hooks of a load.
        if threading.get_ident() == self._caller:
            while self._load_hooks:
                self._load_hooks.pop().remove()

    def start(self) -> None:
        """Begin to copy, then to write."""
        self._thread.start()

    def wait_staged(self) -> None:
        """Wait until weights and states have been copied, so that they may change.

        Steps of any optimizer, ``load_state_dict`` of modules and optimizers, ``checkpoint.load``,
        ``import_hf`` and ``load_full_state_dict`` call it themselves. Whoever writes to a parameter
        in place right after ``async_save`` calls it before, and so does whoever has
        ``torch.distributed.checkpoint.load`` write into ``model.state_dict()``.
        """
        self._staging.wait()

    def done(self) -> bool:
        """Return whether the save has ended on this rank, well or not."""
        return not self._thread.is_alive()

    @property
    def published(self) -> Path | None:
        """Return the published directory once it is there; None before, and after a failure."""
        return self._published

    def result(self) -> Path:
        """Wait for the end and return the published directory; every rank may call it, or not.

        Raises:
            CheckpointError: The save failed; what was published before stays.
        """
        self._thread.join()
        self.unguard_loads()
        self._is_observed = True
        if self._error is not None:
            raise CheckpointError(
                f"The background save of step {self.step} failed: {self._error}"
            ) from self._error
        assert self._published is not None, "a save without error has published"
        return self._published

    def unobserved_error(self) -> Exception | None:
        """Return why the save failed, unless :meth:`result` has raised it; waits for the end."""
        self._thread.join()
        self.unguard_loads()
        return None if self._is_observed else self._error

    def disown(self) -> None:
        """Let nobody wait for it, in a forked process, where the thread does not go on."""
        self._staging.disown()
        self._finish = None
        self._is_observed = True
        self._error = CheckpointError(
            expected(
                "the process that began the save",
                "one forked from it",
                where=f"the background save of step {self.step}",
                hint="Ask for the result where async_save() was called",
            )
        )

    def _run(self) -> None:
        # Held by this frame alone: what is saved need not outlive the save.
        finish, self._finish = self._finish, None
        assert finish is not None, "a save runs once"
        try:
            _, error = attempt(self._staging.copy)
            if error is not None:
                self._staging.abandon()
            on_disk.reached("copies made")
            self._published = finish(error)
        except Exception as error:
            self._error = error
        finally:
            self._staging.abandon()


class _Process:
    """The background save of this process, and whether the process watches for one.

    Attributes:
        current: The save that was begun last; None before the first.
    """

    def __init__(self) -> None:
        self.current: PendingSave | None = None
        self._is_watching = False

    def watch(self) -> None:
        """Watch over steps, loads, forks, SIGTERM and the end of the process, from now on."""
        if not self._is_watching:
            self._is_watching = True
            os.register_at_fork(after_in_child=_forget_in_child)
            register_optimizer_step_pre_hook(_before_change)
            register_before_load(_before_change)
            atexit.register(_report_at_exit)
            _flush_on_sigterm()


_process = _Process()


def set_current(pending: PendingSave) -> None:
    """Make a save the one in flight; watches over steps, the end of the process and SIGTERM."""
    _process.watch()
    _process.current = pending


def _before_change(*unused: object) -> None:
    """Wait for the copies; remove the hooks of loads once the save has ended."""
    if _process.current is not None:
        _process.current.wait_staged()
        if _process.current.done():
            _process.current.unguard_loads()


def wait_until_staged(*unused: object) -> None:
    """Wait until nothing that is being saved lies in the model or the optimizer any more; local.

    Args:
        unused: What a hook is called with.
    """
    if _process.current is not None:
        _process.current.wait_staged()


def wait_for_end() -> None:
    """Wait for the background save, if there is one; its failure stays to be reported; local."""
    if _process.current is not None:
        _process.current.unobserved_error()


def surface_failure() -> None:
    """Wait for the background save, if there is one, and raise its failure, once; local.

    Raises:
        CheckpointError: It failed and nobody has been told.
    """
    if _process.current is not None and _process.current.unobserved_error() is not None:
        _process.current.result()


def require_idle(step: int) -> int:
    """Return the step if no save is in flight; for rank 0 to decide, which ends last.

    Raises:
        CheckpointError: A save is in flight.
    """
    if _process.current is not None and not _process.current.done():
        raise CheckpointError(
            expected(
                "no save in flight",
                f"the background save of step {_process.current.step}",
                where=f"async_save(step={step})",
                hint="Wait for it with .result(), or let this call wait: when_busy='wait'",
            )
        )
    return step


def _forget_in_child() -> None:
    """Forget the save in a forked process, such as a worker of a data loader."""
    if _process.current is not None:
        _process.current.disown()
        _process.current = None


def _report_at_exit() -> None:
    if _process.current is not None and (error := _process.current.unobserved_error()) is not None:
        _log.error("the background save of step %d failed: %s", _process.current.step, error)


def _flush_on_sigterm() -> None:
    """Let SIGTERM wait for the save, where nobody else handles the signal."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _finish_and_end)


def _finish_and_end(number: int, frame: FrameType | None) -> None:
    _report_at_exit()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
