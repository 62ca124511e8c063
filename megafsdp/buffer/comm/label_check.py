"""``MEGAFSDP_DEBUG=1``: ranks compare what they are about to do before every collective.

A unit that only some ranks run makes the others wait in another collective, for ever or until sizes
clash. With the check every rank raises instead and the message names the unit. Each collective
costs a second, small one: for debugging only. This file makes and reads the labels;
``megafsdp.buffer.comm.collectives`` exchanges them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megafsdp.errors import expected

DEBUG_VARIABLE = "MEGAFSDP_DEBUG"
_WIDTH = 256
_MAX_QUOTED = 4


def is_enabled() -> bool:
    """Tell whether ranks compare labels."""
    return os.environ.get(DEBUG_VARIABLE) == "1"


def encode(kind: str, label: str, nbytes: int) -> torch.Tensor:
    """Return what a rank is about to do as ``(256,)`` uint8; the end of a long label counts."""
    text = f"{kind} of '{label}', {nbytes} bytes".encode()[-_WIDTH:]
    return torch.tensor(list(text.ljust(_WIDTH)), dtype=torch.uint8, device="cpu")


def require_same(labels: torch.Tensor, ranks: Sequence[int]) -> None:
    """Raise if ranks are about to do different things; all of them alike.

    Args:
        labels: ``(ranks, 256)`` uint8 on the CPU, as :func:`encode` makes them.
        ranks: The global rank of each.

    Raises:
        RuntimeError: The labels differ.
    """
    texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in labels]
    if len(set(texts)) == 1:
        return
    first: dict[str, int] = {}
    for rank, text in zip(ranks, texts, strict=True):
        first.setdefault(text, rank)
    quoted = [f"rank {rank}: {text}" for text, rank in first.items()][:_MAX_QUOTED]
    raise RuntimeError(
        expected(
            "the same collective on all ranks",
            "; ".join(quoted),
            where=f"a process group of ranks {list(ranks)[:8]}",
            mend="Run every unit on all ranks, in the same order; where a rank has no input for a "
            "unit, run it on any input and multiply the result by 0",
        )
    )
