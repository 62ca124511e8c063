"""Raise an error of one rank on all ranks, which would otherwise wait for ever.

Work that may fail on one rank alone is run by :func:`attempt`; then the ranks exchange the outcomes
and raise alike. :func:`raise_together` exchanges only errors, :func:`agree` values too;
:func:`on_rank_zero` is for work that one rank does for all. Each exchange is one small collective,
called by all ranks: a save makes three and a load two, whatever the number of tensors. The caller
decides what to do about an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_gather_objects, broadcast_object, gather_objects
from megafsdp.errors import (
    MAX_RANKS,
    CheckpointError,
    ConfigError,
    DataError,
    NonFiniteError,
    RankError,
    listed,
)

T = TypeVar("T")
# A rank's value and None, or None and the text of its error.
Outcome = tuple[T | None, str | None]
# The classes that commands end with by one message, by the names that texts of errors begin with.
_OWN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (ConfigError, DataError, CheckpointError, NonFiniteError, RankError)
}


def rank_and_world_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without process groups."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run an action on this rank; return its value or its error, to be agreed on later."""
    # If it raised here, this rank would skip the following collective, in which the others wait.
    try:
        return action(), None
    except Exception as error:
        return None, error


def raise_together(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank if any rank has an error; one small collective, called by all ranks.

    Args:
        error: This rank's error, or None.
        group: Ranks that agree; None means all.

    Raises:
        Exception: ``error`` itself on the ranks that have one.
        RuntimeError: On the other ranks, quoting the first errors with their ranks. In place of it
            the class of the first of them, if that is one of ``megafsdp.errors``.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    failures = _failures(all_gather_objects((None, text), group))
    # Raise only after the collective, in which the ranks without an error wait for this rank.
    if error is not None:
        raise error
    if failures:
        kind = _OWN.get(failures[0][1].partition(":")[0], RuntimeError)
        raise kind(f"{len(failures)} other rank(s) raised:\n{_quoted(failures)}")


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
        outcomes: The outcomes of all ranks, in rank order.
        error: This rank's error, which becomes the cause of the raised one.

    Raises:
        CheckpointError: A rank has an error; quotes the first ones with their ranks.
    """
    failures = _failures(outcomes)
    if failures:
        is_one = len({text for _, text in failures}) == 1
        message = failures[0][1] if is_one else _quoted(failures)
        if len(failures) < len(outcomes):
            message += f" (raised on {len(failures)} of {len(outcomes)} ranks, first on rank "
            message += f"{failures[0][0]})"
        raise CheckpointError(message) from error
    return [v for v, _ in outcomes if v is not None]


def on_rank_zero(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run an action on rank 0 alone and return its small picklable value on all ranks.

    Args:
        action: The function to run on rank 0.
        group: A group of all ranks with another communicator; None for the default group.

    Raises:
        CheckpointError: The action failed; the same message on all ranks.
    """
    value, error = attempt(action) if rank_and_world_size()[0] == 0 else (None, None)
    value, text = broadcast_object(_outcome(value, error), group=group)
    if text is not None:
        raise CheckpointError(text) from error
    assert value is not None, "an action on rank 0 returns a value"
    return value


def _outcome(value: T | None, error: Exception | None) -> Outcome[T]:
    # Send errors as text: an exception of a user's class may not pickle or unpickle elsewhere.
    if error is None or isinstance(error, CheckpointError):
        return value, None if error is None else str(error)
    return value, f"{type(error).__name__}: {error}"


def _failures(outcomes: Sequence[Outcome[T]]) -> list[tuple[int, str]]:
    """Return the ranks that have an error, each with its text."""
    return [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]


def _quoted(failures: Sequence[tuple[int, str]]) -> str:
    lines = [f"rank {rank}: {text}" for rank, text in failures]
    return listed(lines, separator="\n", limit=MAX_RANKS)
