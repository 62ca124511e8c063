"""Training steps of two sides in the same processes: their losses compared, then timed in turns.

Both sides stand on the same ranks with equal weights, and step on the same batches in blocks of a
few steps that alternate. The first step of a block is dropped, and so are the first blocks. The
figure is the ratio of medians, ours over torch's; there is none unless the losses of the first
steps agree.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm.agreement import raise_together

SIDES = ("megafsdp", "torch")
# Of losses in fp32, whose sums the sides make in another order.
TOLERANCE = 1e-5
_WARM_UP_BLOCKS = 2
_STEPS_A_BLOCK = 4
_CHECKED_STEPS = 5
_MAX_NORM = 1.0


@dataclass
class Side:
    """One engine with its model and optimizer.

    Attributes:
        model: Called with tokens and labels.
        optimizer: Of its parameters.
        clip: Called with the model's parameters and the largest norm.
        context: Of forward and backward.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[..., object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer that both sides have."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, fused=True)


def step(side: Side, tokens: Tensor) -> tuple[float, float]:
    """Run one step; return its milliseconds and its loss."""
    _synchronize()
    start = time.perf_counter()
    with side.context():
        loss = side.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    side.clip(side.model.parameters(), _MAX_NORM)
    side.optimizer.step()
    side.optimizer.zero_grad()
    _synchronize()
    elapsed_ms = 1e3 * (time.perf_counter() - start)
    return elapsed_ms, float(_local(loss.detach()))


def compare(
    sides: Mapping[str, Side],
    draw: Callable[[int], list[Tensor]],
    *,
    repeats: int,
    tolerance: float,
) -> dict[str, object]:
    """Check the sides, then time them; called by every rank.

    Args:
        sides: By the names in ``SIDES``.
        draw: Returns as many batches of tokens, of this rank.
        repeats: Blocks of each side after warm-up.
        tolerance: Of the losses.

    Raises:
        CheckError: The losses of the first steps differ; raised on all ranks alike.
    """
    worst = 0.0
    for tokens in draw(_CHECKED_STEPS):
        first, second = (step(sides[name], tokens)[1] for name in SIDES)
        # Written so that a NaN is no agreement.
        worst = worst if abs(first - second) <= worst else abs(first - second)
    error = None
    if not worst <= tolerance:
        error = CheckError(f"losses differ by {worst:.1e}, more than {tolerance:g}")
    raise_together(error)
    batches = draw(_STEPS_A_BLOCK)
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    block_ms: dict[str, list[float]] = {name: [] for name in SIDES}
    for block in range(_WARM_UP_BLOCKS + repeats):
        for name in SIDES if block % 2 else reversed(SIDES):
            dist.barrier()
            steps = [step(sides[name], tokens)[0] for tokens in batches][1:]
            if block >= _WARM_UP_BLOCKS:
                times[name] += steps
                block_ms[name].append(statistics.median(steps))
    step_ms = {name: spread(times[name]) for name in SIDES}
    ratios = [a / b for a, b in zip(*(block_ms[name] for name in SIDES), strict=True)]
    return {
        "check": {"tolerance": tolerance, "loss": worst},
        "repeats": repeats,
        "step_ms": step_ms,
        "ratio": step_ms[SIDES[0]]["median"] / step_ms[SIDES[1]]["median"],
        "ratio_range": [min(ratios), max(ratios)],
    }


def describe(name: str, case: dict[str, Any]) -> str:
    """Return what :func:`compare` found as a line for people; the case names its device too."""
    ours, theirs = (case["step_ms"][side]["median"] for side in SIDES)
    low, high = case["ratio_range"]
    return (
        f"{name} on {case['device']}: {ours:.1f} / {theirs:.1f} ms, ratio {case['ratio']:.3f} "
        f"({low:.3f} to {high:.3f} in {case['repeats']} blocks), losses within "
        f"{case['check']['loss']:.1e}"
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _local(loss: Tensor) -> Tensor:
    return loss.to_local() if hasattr(loss, "to_local") else loss
