"""Save in the background: copy to host memory, then write and publish from another thread.

What runs where, on every rank::

    caller's thread   raise the failure of the previous save; list the state; 1 collective
                      (the temporary directory); on CUDA, queue the copies; return
    save's thread     on the CPU, copy; write the rank's file; 2 collectives over a gloo group
                      of its own (gather on rank 0, announce the published directory)

Optimizer steps and loads wait until the copies are made, and for nothing else. What is written and
the order of publication are in checkpoint/save.py; the thread is in background/pending_save.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from megafsdp.buffer.comm.agreement import attempt, on_rank_zero
from megafsdp.checkpoint.background.pending_save import SAVES, PendingSave
from megafsdp.checkpoint.background.staging import Staging
from megafsdp.checkpoint.save import (
    BegunSave,
    HasState,
    Retention,
    TrainingState,
    begin_save,
    finish_save,
)
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.errors import CheckpointError, expected


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

    Training may go on at once: the next optimizer step and any load wait until weights and states
    are copied to host memory (pinned where there is CUDA). The next save reuses that memory; see
    :func:`release_staging_memory`. Call :meth:`PendingSave.wait_staged` before edits in place, and
    before ``torch.distributed.checkpoint.load`` writes into ``model.state_dict()``.

    One save is in flight at a time. The process does not end before the save does: a normal exit
    waits for it, and so do SIGTERM and SIGHUP unless the program handles them itself. From torch
    2.13 on, ``destroy_process_group()`` waits too; before, call :meth:`PendingSave.result` first.

    Args:
        directory: As for :func:`megafsdp.checkpoint.save`, as are all arguments up to
            ``keep_every``.
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
        The save in flight. A failure that no call of ``result()`` has raised is raised by the next
        save, and logged at the end of the process.

    Raises:
        CheckpointError: The step is published already, a save is in flight (``"raise"``), or an
            earlier background save has failed; raised on all ranks.
        TypeError: The model is no module, or several optimizers are given.
        ValueError: An argument is out of range on rank 0 and on this rank. If it is out of range on
            other ranks only, ``result()`` raises.
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
        on_rank_zero(lambda: SAVES.require_idle(step))
    SAVES.raise_failure()
    state = TrainingState(model, optimizer, lr_scheduler, loss_scaler, extra)
    begun = begin_save(directory, step, state, Retention(keep_last, keep_every))
    group = SAVES.group()
    pending = PendingSave(step, _stage(begun), functools.partial(_finish, begun, group))
    SAVES.start(pending, [*model.modules(), *([] if optimizer is None else [optimizer])])
    return pending


def release_staging_memory() -> None:
    """Wait for the save in flight, if any, and give its host memory back to the system; local."""
    SAVES.wait_for_end()
    SAVES.slab.release()


def wait_for_saves() -> None:
    """Wait for the save in flight, if any; its failure is left to the next save; local."""
    SAVES.wait_for_end()


def _stage(begun: BegunSave) -> Staging:
    """Replace the tensors that this rank writes by host copies.

    A rank without memory for the copies keeps its error and goes on, as the others have begun to
    save already; its thread reports the error where all ranks gather.
    """
    staging, error = attempt(lambda: Staging([own.data for own in begun.tensors], SAVES.slab))
    if staging is None:
        begun.error = error
        begun.tensors.clear()
        return Staging([], SAVES.slab)
    for own, copy in zip(begun.tensors, staging.copies, strict=True):
        own.data = copy
    return staging


def _finish(begun: BegunSave, group: dist.ProcessGroup | None, error: Exception | None) -> Location:
    """Write the begun save, or report this rank's error; collective, in the thread."""
    begun.error = begun.error or error
    try:
        return finish_save(begun, group)
    except Exception as failure:
        if group is None or dist.is_initialized():
            raise
        raise CheckpointError.expected(
            "process groups that last until the save has ended",
            "groups that were destroyed before",
            where="checkpoint.async_save()",
            hint="Call result() of the save, or checkpoint.wait_for_saves(), before "
            "torch.distributed.destroy_process_group()",
        ) from failure
