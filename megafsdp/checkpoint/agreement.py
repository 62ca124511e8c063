"""Agreement between ranks: errors of any rank are raised on all, so that none waits for ever.

Each function is one small collective, called by all ranks. A save makes three of these calls and a
load two, whatever the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megafsdp.buffer.collectives import all_gather_objects, broadcast_object
from megafsdp.errors import CheckpointError

T = TypeVar("T")

_MAX_QUOTED = 4


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
    outcomes = all_gather_objects((value, None if error is None else _describe(error)))
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


def on_rank_zero(action: Callable[[], T]) -> T:
    """Run something on rank 0 alone and return its small picklable value on all ranks.

    Raises:
        CheckpointError: It failed; the same message on all ranks.
    """
    value, error, text = None, None, None
    if rank_and_world_size()[0] == 0:
        value, error = attempt(action)
        text = None if error is None else _describe(error)
    value, text = broadcast_object((value, text))
    if text is not None:
        raise CheckpointError(text) from error
    assert value is not None, "an action on rank 0 returns a value"
    return value


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return f"{type(error).__name__}: {error}"
