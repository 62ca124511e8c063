"""Host time of an optimizer's step over a sharded model of a thousand small parameters.

The tensors are tiny, so a step's time is the cost of Python, dispatch and DTensors. FusedAdam on
our parameters is timed beside torch.optim.AdamW on the same DTensors, on FSDP2's, on
``local_parameters()``, and on as many plain unsharded tensors; AdamW is fused everywhere, and on
the DTensors also in its default form, which on a CPU runs operator by operator. Every side runs its
own forward and backward, on equal models, and only ``optimizer.step()`` is timed. Sides take turns,
and all must end with equal weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from benchmarks.launch import launch
from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm.agreement import raise_together

_FUSED_ADAM = "FusedAdam"
_FUSED, _DEFAULT = "AdamW(fused=True) on megafsdp", "AdamW() on megafsdp"
_FUSED_FSDP2, _DEFAULT_FSDP2 = "AdamW(fused=True) on FSDP2", "AdamW() on FSDP2"
_LOCAL = "AdamW(fused=True) on local_parameters()"
_PLAIN = "AdamW(fused=True), not sharded"
SIDES = (_FUSED_ADAM, _FUSED, _DEFAULT, _FUSED_FSDP2, _DEFAULT_FSDP2, _LOCAL, _PLAIN)
_COLUMNS = 8
_HYPER: dict[str, Any] = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 1e-2}
_WARM_UP_STEPS = 3
# For weights of size 1: sides that round in another order differ by a few units in the last place.
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Shape:
    """What is stepped: layers, each a unit, their numbers of parameters and of elements."""

    layers: int
    parameters: int
    numel: int


@dataclass
class Side:
    """One way to step a model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=20, help="of each layer")
    parser.add_argument("--numel", type=int, default=64, help="elements of each parameter")
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each side")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Time the sides; return their results.

    Raises:
        Exception: The sides end with different weights.
    """
    shape = Shape(options.layers, options.parameters, options.numel)
    measured = launch(_measure, shape, options.repeats, num_ranks=options.ranks)
    assert isinstance(measured, dict)
    return {"num_ranks": options.ranks, **vars(shape), **measured}


def describe(results: dict[str, Any]) -> str:
    """Return the results as lines for people."""
    num_parameters = results["layers"] * results["parameters"]
    lines = [
        f"{num_parameters} parameters of {results['numel']} elements on {results['num_ranks']} "
        f"ranks; ms a step"
    ]
    for name, times in results["step_ms"].items():
        lines.append(
            f"    {name}: {times['median']:.2f} ({times['min']:.2f} to {times['max']:.2f}), "
            f"{results['ratio_to_fused_adam'][name]:.1f} x FusedAdam"
        )
    return "\n".join(lines)


class _Layer(nn.Module):
    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rows = shape.numel // _COLUMNS
        self.weights = nn.ParameterList(
            torch.randn(rows, _COLUMNS, generator=generator) for _ in range(shape.parameters)
        )
        numel = shape.parameters * rows * _COLUMNS
        self.slopes = torch.randn(numel, generator=generator)

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        flat = torch.cat([weight.view(-1) for weight in self.weights])
        return total + torch.dot(flat.sin(), self.slopes)


def _build(name: str, shape: Shape) -> Side:
    model = nn.Sequential(*(_Layer(shape, seed) for seed in range(shape.layers)))
    if name != _PLAIN:
        for module in [*model, model]:
            (torch_fully_shard if name.endswith("FSDP2") else megafsdp.fully_shard)(module)
    if name == _FUSED_ADAM:
        return Side(model, megafsdp.FusedAdam(model.parameters(), **_HYPER))
    parameters: Iterable[nn.Parameter] = model.parameters()
    if name == _LOCAL:
        parameters = megafsdp.local_parameters(model)
    is_fused = name not in (_DEFAULT, _DEFAULT_FSDP2)
    return Side(model, torch.optim.AdamW(parameters, fused=is_fused or None, **_HYPER))


def _step(side: Side) -> float:
    """Run one training step; return the milliseconds of the optimizer's step."""
    side.model(torch.zeros(())).backward()
    start = time.perf_counter()
    side.optimizer.step()
    stop = time.perf_counter()
    side.optimizer.zero_grad()
    return 1e3 * (stop - start)


def _measure(shape: Shape, repeats: int) -> dict[str, object]:
    """Time all sides; called by every rank."""
    sides = {name: _build(name, shape) for name in SIDES}
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    for repeat in range(_WARM_UP_STEPS + repeats):
        for name, side in sides.items():
            elapsed = _step(side)
            if repeat >= _WARM_UP_STEPS:
                times[name].append(elapsed)
    worst = check(sides)
    step_ms = {name: spread(values) for name, values in times.items()}
    median = step_ms[_FUSED_ADAM]["median"]
    ratios = {name: values["median"] / median for name, values in step_ms.items()}
    return {"step_ms": step_ms, "ratio_to_fused_adam": ratios, "largest_difference": worst}


def check(sides: dict[str, Side]) -> float:
    """Return the largest difference of weights between FusedAdam and any other side.

    Raises:
        CheckError: It is too large; raised on all ranks alike.
    """
    weights = {
        name: [_whole(parameter) for parameter in side.model.parameters()]
        for name, side in sides.items()
    }
    worst = max(
        float((ours - theirs).detach().abs().max())
        for others in weights.values()
        for ours, theirs in zip(weights[_FUSED_ADAM], others, strict=True)
    )
    error = None
    if not worst <= _TOLERANCE:
        error = CheckError(f"weights differ by {worst:.1e}, more than {_TOLERANCE:g}")
    raise_together(error)
    return worst


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
