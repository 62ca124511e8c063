"""Save in the background: copy to host memory, then write and publish from another thread.

The call returns once it is known what to save. Steps of optimizers wait until the copies are made,
and for nothing else. The thread's collectives go over a process group of their own, on the CPU.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.agreement import attempt, on_rank_zero
from megafsdp.checkpoint.background import pending_save as in_flight
from megafsdp.checkpoint.background.pending_save import PendingSave
from megafsdp.checkpoint.background.staging import HostSlab, Staging
from megafsdp.checkpoint.save import BegunSave, HasState, begin_save, finish_save
from megafsdp.errors import expected

_slab = HostSlab()
# The group of background collectives for each default group, which a program may make anew.
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]
_groups = weakref.WeakKeyDictionary()


def async_save(
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: HasState | None = None,
    loss_scaler: HasState | None = None,
    extra: Mapping[str, object] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    when_busy: Literal["wait", "raise"] = "wait",
) -> PendingSave:
    """Begin to save a training state and return; collective over all ranks.

    Training may go on at once: the next step of an optimizer, and loads, wait until weights and
    states are copied to host memory (pinned where there is CUDA), which is kept for the next save;
    see :func:`release_staging_memory`. Before ``torch.distributed.checkpoint.load`` writes into
    ``model.state_dict()``, as before edits in place, call :meth:`PendingSave.wait_staged`.

    One save is in flight at a time. The process does not end before the save has: a normal exit
    waits for it, and so does SIGTERM unless the program handles that itself. Do not destroy the
    process groups before :meth:`PendingSave.result` has returned.

    Args:
        directory: As for :func:`megafsdp.checkpoint.save`, like all that follow.
        step: Training step.
        model: The model.
        optimizer: Its optimizer.
        lr_scheduler: Stored by its state dict, as it is now.
        loss_scaler: Likewise.
        extra: The caller's values, as they are now.
        keep_last: Retention, applied after publication.
        keep_every: Retention.
        when_busy: What to do while another save is in flight: wait for its end, or raise.

    Returns:
        The save in flight. A failure that nobody asks for with ``result()`` is raised by the next
        save and logged at the end of the process.

    Raises:
        CheckpointError: The step is published already, a save is in flight (``"raise"``), or an
            earlier background save has failed; raised on all ranks.
        ValueError: An argument is out of range; no rank has communicated yet.
    """
    if when_busy not in ("wait", "raise"):
        raise ValueError(
            expected(
                "when_busy to be 'wait' or 'raise'",
                repr(when_busy),
                where="checkpoint.async_save()",
                hint="Leave it out to wait",
            )
        )
    if when_busy == "raise":
        on_rank_zero(lambda: in_flight.require_idle(step))
    in_flight.surface_failure()
    begun = begin_save(
        directory,
        step=step,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        loss_scaler=loss_scaler,
        extra=extra,
        keep_last=keep_last,
        keep_every=keep_every,
    )
    group = _background_group()
    staging = _stage(begun)
    pending = PendingSave(step, staging, functools.partial(_finish, begun, group))
    in_flight.set_current(pending)
    pending.guard_loads([*model.modules(), *([] if optimizer is None else [optimizer])])
    pending.start()
    return pending


def release_staging_memory() -> None:
    """Wait for the save in flight, if any, and give its host memory back; local."""
    in_flight.wait_for_end()
    _slab.release()


def _stage(begun: BegunSave) -> Staging:
    """Put host copies in the place of what this rank writes.

    A rank without memory for them goes on with its error: the others have agreed to save, and hear
    of it where the thread gathers.
    """
    staging, error = attempt(lambda: Staging([own.data for own in begun.tensors], _slab))
    if staging is None:
        begun.error = error
        begun.tensors.clear()
        return Staging([], _slab)
    for own, copy in zip(begun.tensors, staging.copies, strict=True):
        own.data = copy
    return staging


def _finish(begun: BegunSave, group: dist.ProcessGroup | None, error: Exception | None) -> Path:
    """Write what was begun, unless this rank has no copies; collective, in the thread."""
    begun.error = begun.error or error
    return finish_save(begun, group)


def _background_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for the background thread; made once, collectively."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    assert world is not None, "initialized means there is a default group"
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return _groups[world]
