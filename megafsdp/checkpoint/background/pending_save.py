"""The background save of this process: at most one at a time, and never a silent failure.

:class:`PendingSave` is one save: a thread that copies what is saved, then writes and publishes it.
:class:`BackgroundSaves` is what the process remembers between saves; :data:`SAVES` is the only one.
Code that changes or replaces what is being saved waits for the copies. A failure that no call of
``result()`` has raised is raised by the next save, and logged at the end of the process.

What to save is decided in checkpoint/async_save.py.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from megafsdp.buffer.comm.agreement import agree, attempt
from megafsdp.checkpoint.background.staging import HostSlab, Staging
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.errors import CheckpointError
from megafsdp.fsdp.weight_sync import register_before_load
from megafsdp.mesh.torch_private import call_before_groups_end

_LOGGER = logging.getLogger("megafsdp.checkpoint")


class PendingSave:
    """A save that goes on in the background; made by ``checkpoint.async_save``.

    Args:
        step: The step that is being saved.
        staging: Makes the copies.
        finish: Writes the copies, or gets the error of a rank that has none; collective, so it
            is called on every rank.
    """

    def __init__(
        self, step: int, staging: Staging, finish: Callable[[Exception | None], Location]
    ) -> None:
        self.step = step
        self._staging = staging
        self._finish: Callable[[Exception | None], Location] | None = finish
        self._published: Location | None = None
        self._error: Exception | None = None
        self._is_observed = False
        self._hooks: list[RemovableHandle] = []
        self._caller = threading.get_ident()
        # Not a daemon: Python waits for it at the end of the process.
        self._thread = threading.Thread(target=self._run, name=f"megafsdp save of step {step}")

    def start(self, targets: Iterable[nn.Module | torch.optim.Optimizer]) -> None:
        """Begin to copy, then to write.

        Args:
            targets: Modules and optimizers whose ``load_state_dict`` waits for the copies.
        """
        # A module-level function, not a bound method: the model must stay picklable meanwhile.
        self._hooks = [
            target.register_load_state_dict_pre_hook(_wait_before_load) for target in targets
        ]
        self._thread.start()

    def wait_staged(self) -> None:
        """Wait until weights and states have been copied, so that they may change.

        Steps of any optimizer, ``load_state_dict`` of modules and optimizers, ``checkpoint.load``,
        ``import_hf`` and ``load_full_state_dict`` call it themselves. Call it before edits of
        parameters in place right after ``async_save``, and before
        ``torch.distributed.checkpoint.load`` writes into ``model.state_dict()``.
        """
        self.wait_for_copies()
        self._remove_hooks()

    def wait_for_copies(self) -> None:
        """Wait as :meth:`wait_staged` does, but do not remove hooks; for use inside such a hook."""
        self._staging.wait()

    def done(self) -> bool:
        """Return whether the save has ended on this rank, with success or not."""
        return not self._thread.is_alive()

    @property
    def published(self) -> Location | None:
        """Return the published directory; None before publication and after a failure."""
        return self._published

    def result(self) -> Location:
        """Wait for the end and return the published directory; local, so any rank may call it.

        Raises:
            CheckpointError: The save failed; what was published before stays.
        """
        self._join()
        self._is_observed = True
        if self._error is not None:
            raise CheckpointError(
                f"The background save of step {self.step} failed: {self._error}"
            ) from self._error
        assert self._published is not None, "a save without error has published"
        return self._published

    def unobserved_error(self) -> Exception | None:
        """Return why the save failed, unless :meth:`result` has raised it; waits for the end."""
        self._join()
        return None if self._is_observed else self._error

    def has_failed(self) -> bool:
        """Return whether the save failed; waits for the end."""
        self._join()
        return self._error is not None

    def detach_from_parent(self) -> None:
        """End every wait in a forked process, where the save's thread does not exist."""
        self._staging.detach_from_parent()
        self._remove_hooks()
        self._finish = None
        self._error = CheckpointError.expected(
            "the process that began the save",
            "one forked from it",
            where=f"the background save of step {self.step}",
            hint="Ask for the result where async_save() was called",
        )

    def _join(self) -> None:
        self._thread.join()
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        # Only in the thread that called async_save(), which trains: another thread could remove a
        # hook while load_state_dict() iterates over the hooks of the module.
        if threading.get_ident() == self._caller:
            hooks, self._hooks = self._hooks, []
            for hook in hooks:
                hook.remove()

    def _run(self) -> None:
        # Only this frame refers to it: the model is freed with the save, not with this object.
        finish, self._finish = self._finish, None
        assert finish is not None, "a save runs once"
        try:
            _, error = attempt(self._staging.copy)
            if error is not None:
                # Without copies there is nothing to wait for. The ranks still agree, below.
                self._staging.release()
            save_root.reached("copies made")
            self._published = finish(error)
        except Exception as error:
            self._error = error
        finally:
            self._staging.release()


class BackgroundSaves:
    """What a process remembers of its background saves.

    Attributes:
        slab: Host memory for the copies, used by one save after another.
    """

    def __init__(self) -> None:
        self.slab = HostSlab()
        self._last: PendingSave | None = None
        self._is_watching = False
        self._group: tuple[weakref.ref[dist.ProcessGroup], dist.ProcessGroup] | None = None

    def start(
        self, pending: PendingSave, targets: Iterable[nn.Module | torch.optim.Optimizer]
    ) -> None:
        """Start a save, and watch over steps, loads, the end of the process and signals.

        Args:
            pending: The save; the one before has ended.
            targets: Modules and optimizers whose ``load_state_dict`` waits for the copies.
        """
        if not self._is_watching:
            self._is_watching = True
            os.register_at_fork(after_in_child=self._forget_in_child)
            # For every optimizer of the process: which one will step is not known here.
            register_optimizer_step_pre_hook(self.wait_until_staged)
            register_before_load(self.wait_until_staged)
            atexit.register(self._report_at_exit)
            self._flush_on_signals()
        self._last = pending
        pending.start(targets)

    def group(self) -> dist.ProcessGroup | None:
        """Return a gloo group of all ranks for the thread; made once, collectively.

        In the default group the thread's collectives would mix with those of training.
        """
        if not dist.is_initialized():
            return None
        world = dist.group.WORLD
        assert world is not None, "initialized means there is a default group"
        # A program may destroy the default group and make another one.
        if self._group is None or self._group[0]() is not world:
            self._group = (weakref.ref(world), dist.new_group(backend="gloo"))
            call_before_groups_end(self.wait_for_end)
        return self._group[1]

    def wait_until_staged(self, *unused: object) -> None:
        """Wait until all that is being saved is copied out of model and optimizer; local.

        Args:
            unused: Arguments of the hook.
        """
        if self._last is not None:
            self._last.wait_staged()

    def wait_for_copies(self) -> None:
        """Wait as :meth:`wait_until_staged` does, but do not remove hooks; local."""
        if self._last is not None:
            self._last.wait_for_copies()

    def wait_for_end(self) -> None:
        """Wait for the save, if there is one; its failure stays to be reported; local."""
        if self._last is not None:
            self._last.unobserved_error()

    def raise_failure(self) -> None:
        """Wait for the save, if there is one, and raise its failure, once; called by all ranks.

        A save fails on all ranks. If it failed, this is collective: some ranks may have raised the
        failure from ``result()`` already.

        Raises:
            CheckpointError: It failed, and on some rank no call has raised the failure yet.
        """
        last = self._last
        if last is None or not last.has_failed():
            return
        is_unknown = any(agree(last.unobserved_error() is not None, None))
        # Every rank knows of it from here on: later saves need not ask again.
        self._last = None
        if is_unknown:
            last.result()

    def require_idle(self, step: int) -> int:
        """Return the step if no save is in flight; rank 0 decides, as its save ends last.

        Raises:
            CheckpointError: A save is in flight.
        """
        if self._last is not None and not self._last.done():
            raise CheckpointError.expected(
                "no save in flight",
                f"the background save of step {self._last.step}",
                where=f"async_save(step={step})",
                hint="Wait for it with .result(), or let this call wait: when_busy='wait'",
            )
        return step

    def _forget_in_child(self) -> None:
        """Forget the save in a forked process, such as a worker of a data loader."""
        if self._last is not None:
            self._last.detach_from_parent()
            self._last = None

    def _report_at_exit(self) -> None:
        if self._last is not None and (error := self._last.unobserved_error()) is not None:
            _LOGGER.error("the background save of step %d failed: %s", self._last.step, error)

    def _flush_on_signals(self) -> None:
        """Make SIGTERM and SIGHUP wait for the save, if the program does not handle the signal."""
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGHUP):
            if is_main and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._finish_and_end)

    def _finish_and_end(self, number: int, frame: FrameType | None) -> None:
        self._report_at_exit()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


SAVES = BackgroundSaves()


def _wait_before_load(*unused: object) -> None:
    SAVES.wait_for_copies()
