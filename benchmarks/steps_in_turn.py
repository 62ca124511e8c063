"""Training steps of two sides in the same processes: their losses compared, then timed in turn.

Both sides run on the same ranks with equal weights, and step on the same batches in blocks of a few
steps that alternate. The first step of a block is dropped, and so are the first blocks. The figure
is the ratio of medians, ours over torch's; there is no figure unless the losses of the first steps
and the norms of their gradients agree.
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
from torch.distributed.tensor import DTensor

from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm.agreement import raise_together

SIDES = ("megafsdp", "torch")
# For losses in fp32, which the sides sum in different orders.
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
        optimizer: Steps its parameters.
        clip: Called with the model's parameters and the largest norm; returns the norm.
        context: Context of forward and backward.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[..., Tensor]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer that both sides have."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, fused=True)


def step(side: Side, tokens: Tensor) -> tuple[float, Tensor, Tensor]:
    """Run one step; return its milliseconds, its loss, and the norm of its gradients."""
    _synchronize()
    start = time.perf_counter()
    with side.context():
        loss = side.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    norm = side.clip(side.model.parameters(), _MAX_NORM)
    side.optimizer.step()
    side.optimizer.zero_grad()
    _synchronize()
    return 1e3 * (time.perf_counter() - start), loss.detach(), norm


def compare(
    sides: Mapping[str, Side],
    draw: Callable[[int], list[Tensor]],
    *,
    repeats: int,
    tolerance: float,
) -> dict[str, object]:
    """Check the sides, then time them; called by every rank.

    Args:
        sides: The sides by the names in ``SIDES``.
        draw: Returns a number of batches of tokens for this rank.
        repeats: Blocks of each side after warm-up.
        tolerance: Absolute for the losses, relative for the norms of gradients.

    Raises:
        CheckError: Losses or norms of the first steps differ; raised on all ranks alike.
    """
    losses, norms = [], []
    for tokens in draw(_CHECKED_STEPS):
        ours, theirs = (_numbers(*step(sides[name], tokens)[1:]) for name in SIDES)
        losses.append(abs(ours[0] - theirs[0]))
        norms.append(abs(ours[1] / theirs[1] - 1))
    error = None
    # Norms are compared because Adam and clipping hide a wrong factor on gradients from the losses.
    # A NaN counts as a difference, which max() might pass over.
    if not all(difference <= tolerance for difference in norms):
        error = CheckError(f"norms of gradients differ by {max(norms):.1e}, relatively")
    if not all(difference <= tolerance for difference in losses):
        error = CheckError(f"losses differ by {max(losses):.1e}, more than {tolerance:g}")
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
        "check": {"tolerance": tolerance, "loss": max(losses), "norm": max(norms)},
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


def _numbers(*scalars: Tensor) -> list[float]:
    return [float(s.full_tensor() if isinstance(s, DTensor) else s) for s in scalars]
