"""Errors that one rank finds and all ranks must raise, lest the others wait for ever."""

from __future__ import annotations

import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_gather_objects

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
