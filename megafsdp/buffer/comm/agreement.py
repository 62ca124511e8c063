"""Errors that one rank finds and all ranks must raise, lest the others wait for ever.

Agreement between ranks: errors of any rank are raised on all, so that none waits for ever.

Each function but :func:`attempt` and :func:`values_of` is one small collective, called by all
ranks. A save makes three of these calls and a load two, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_gather_objects, broadcast_object, gather_objects
from megafsdp.errors import CheckpointError

_MAX_QUOTED = 4


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank has an error; one small collective, called by all ranks.

    Args:
        error: This rank's error, or None.
        group: Ranks that agree; None means all.

    Raises:
        Exception: ``error`` itself on the ranks that have one.
        RuntimeError: On the others, quoting the first errors with their ranks.
    """
    mine = None if error is None else f"{type(error).__name__}: {error}"
    failures = [(r, m) for r, m in enumerate(all_gather_objects(mine, group)) if m is not None]
    if error is not None:
        raise error
    if failures:
        quoted = "\n".join(f"rank {rank}: {message}" for rank, message in failures[:_MAX_QUOTED])
        raise RuntimeError(f"{len(failures)} other rank(s) raised:\n{quoted}")


T = TypeVar("T")
# A rank's value, or None with what went wrong there.
Outcome = tuple[T | None, str | None]


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without process groups."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run something on this rank; return its value or its error, to be agreed on later."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def agree(value: T | None, error: Exception | None) -> list[T]:
    """Exchange small values, or raise on every rank if any rank has an error.

    Args:
        value: This rank's picklable value; not None unless there is an error.
        error: This rank's error.

    Returns:
        Every rank's value, in rank order.

    Raises:
        CheckpointError: The same message on all ranks, quoting the first errors with their ranks.
    """
    return values_of(all_gather_objects(_outcome(value, error)), error)


def gather_on_rank_zero(
    value: T | None, error: Exception | None, group: dist.ProcessGroup | None = None
) -> list[Outcome[T]] | None:
    """Send each rank's picklable value, or its error, to rank 0.

    Returns:
        Every rank's outcome in rank order, for :func:`values_of`; None on the other ranks.
    """
    return gather_objects(_outcome(value, error), group)


def values_of(outcomes: Sequence[Outcome[T]], error: Exception | None = None) -> list[T]:
    """Return every rank's value; local.

    Args:
        outcomes: What the ranks have sent, in rank order.
        error: This rank's error, which becomes the cause.

    Raises:
        CheckpointError: A rank has an error; quotes the first ones with their ranks.
    """
    failures = [(r, text) for r, (_, text) in enumerate(outcomes) if text is not None]
    if failures:
        if len({text for _, text in failures}) == 1:
            message = failures[0][1]
        else:
            message = "\n".join(f"rank {rank}: {text}" for rank, text in failures[:_MAX_QUOTED])
        if len(failures) < len(outcomes):
            message += f" (raised on {len(failures)} of {len(outcomes)} ranks, first on rank "
            message += f"{failures[0][0]})"
        raise CheckpointError(message) from error
    return [v for v, _ in outcomes if v is not None]


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run something on rank 0 alone and return its small picklable value on all ranks.

    Args:
        action: Runs on rank 0.
        group: All ranks, over another communicator than the default one.

    Raises:
        CheckpointError: It failed; the same message on all ranks.
    """
    value, error, text = None, None, None
    if rank_and_world_size()[0] == 0:
        value, error = attempt(action)
        text = None if error is None else _describe(error)
    value, text = broadcast_object((value, text), group=group)
    if text is not None:
        raise CheckpointError(text) from error
    assert value is not None, "an action on rank 0 returns a value"
    return value


def _outcome(value: T | None, error: Exception | None) -> Outcome[T]:
    return value, None if error is None else _describe(error)


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
