"""One training step of megafsdp beside one of torch FSDP2: time, collectives and bytes.

The same model, batches, AdamW(fused=True) and clipping on both sides, in the same processes, in
blocks of a few steps that alternate, so that both meet the same load of the machine. The first step
of a block is dropped, and so are the first blocks. The figure is the ratio of medians, ours over
FSDP2's. Bytes are counted for one side at a time, with the other side freed. A further row is our
engine with our optimizer, FusedAdam, which clips within its step. With ``--recipe`` the sides are
those of quantized_step.py.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from benchmarks import host_time, quantized_step
from benchmarks.gpt_step import PHASES, Shape, Side, build, draw_batches, run_step
from benchmarks.launch import device_type, launch
from benchmarks.memory import peak_nbytes, resting_nbytes
from benchmarks.record import CheckError, spread
from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.quantize.recipes import RECIPE_NAMES

SIDES = ("megafsdp", "fsdp2")
WITH_FUSED_ADAM = "megafsdp_fused_adam"
_TIMED = (*SIDES, WITH_FUSED_ADAM)
_WARM_UP_BLOCKS = 2
_STEPS_A_BLOCK = 4
_CHECKED_STEPS = 5
_HOST_STEPS = 4
_LEAST_SCALE = 1e-6
# For gradients relative to the largest element of the tensor, and for losses. Two ranks on CPUs
# give equal gradients; but the norm that clips is summed in another order, and so are gradients of
# more ranks and atomic additions on GPUs: a few units in the last place of each dtype.
_TOLERANCES = {"fp32": 2e-5, "bf16": 1e-2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--ranks", type=int, default=0, help="0: two, or one on a single GPU")
    parser.add_argument("--repeats", type=int, default=20, help="blocks a side after warm-up")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--tolerance", type=float, help="of the check; default: by dtype")
    parser.add_argument(
        "--recipe",
        nargs="+",
        choices=RECIPE_NAMES,
        default=[],
        help="compare steps of quantized weights with those of bf16 instead",
    )


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run every shape in every dtype; return their results.

    Raises:
        Exception: The two sides disagree; no figure is given then.
    """
    num_ranks = options.ranks or (1 if torch.cuda.device_count() == 1 else 2)
    results: dict[str, object] = {"num_ranks": num_ranks, "device": device_type(num_ranks)}
    for layers, hidden in zip(options.layers, options.hidden, strict=True):
        # Recipes are compared with bf16, which they decode to.
        for dtype in ["bf16"] if options.recipe else options.dtypes:
            shape = Shape(
                layers, hidden, options.sequence, options.batch, options.vocabulary, dtype
            )
            tolerance = _TOLERANCES[dtype] if options.tolerance is None else options.tolerance
            of_recipes = partial(quantized_step.measure, recipes=tuple(options.recipe))
            measure = of_recipes if options.recipe else _measure
            measured = launch(measure, shape, options.repeats, tolerance, num_ranks=num_ranks)
            assert isinstance(measured, dict)
            results[f"{layers}x{hidden} {dtype}"] = {"shape": asdict(shape), **measured}
    return results


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = [f"{results['num_ranks']} ranks on {results['device']}, megafsdp / FSDP2"]
    for name, case in results.items():
        if isinstance(case, dict):
            is_of_recipes = "ratio_to_bf16" in case
            lines += (quantized_step.describe if is_of_recipes else _describe_case)(name, case)
    return "\n".join(lines)


def _describe_case(name: str, case: dict[str, Any]) -> list[str]:
    host, (low, high) = case["host"], case["ratio_range"]
    share = host["share_of_collective_time_not_waited_for"]
    phases = ", ".join(f"{phase} {_both(case['phases_ms'], phase)}" for phase in PHASES)
    return [
        f"{name}: {_both(case['step_ms'], 'median')} ms, ratio {case['ratio']:.3f} "
        f"({low:.3f} to {high:.3f} in {case['repeats']} blocks)",
        f"    with FusedAdam: {case['step_ms'][WITH_FUSED_ADAM]['median']:.1f} ms, ratio "
        f"{case['ratio_with_fused_adam']:.3f}, of it clipping and optimizer "
        f"{case['phases_ms'][WITH_FUSED_ADAM]['optimizer']:.1f} ms",
        f"    {phases}, first step {_both(case['first_step_ms'])}, "
        f"processor time {_both(case['processor_ms'], 'median')} ms",
        f"    peak {_both(case['bytes'], 'peak', unit=1e6)} MB, of which above rest "
        f"{_both(case['bytes'], 'peak_above_resting', unit=1e6)} MB",
        f"    hooks of megafsdp: {sum(host['hooks_ms_per_step'].values()):.1f} ms, of which "
        f"bookkeeping {host['bookkeeping_ms_per_unit']:.2f} ms a unit; "
        + ("" if share is None else f"{share:.0%} of collective time not waited for"),
    ]


def _both(values: dict[str, Any], key: str = "", *, unit: float = 1.0) -> str:
    """Return ``ours / FSDP2's`` of figures by side, or of one key of the figures by side."""
    figures = [values[side][key] if key else values[side] for side in SIDES]
    return " / ".join(f"{figure / unit:.1f}" for figure in figures)


def _build(shape: Shape, side: str) -> Side:
    engine = "fsdp2" if side == "fsdp2" else "megafsdp"
    return build(shape, engine, has_fused_adam=side == WITH_FUSED_ADAM)


def _check(shape: Shape, tolerance: float) -> dict[str, float]:
    """Compare gradients of a first step and losses of five; return the largest differences.

    Raises:
        CheckError: The sides differ by more than the tolerance; raised on all ranks alike.
    """
    sides = {name: _build(shape, name) for name in _TIMED}
    batches = draw_batches(shape, _CHECKED_STEPS)
    for side in sides.values():
        side.model(batches[0][:, :-1], batches[0][:, 1:]).backward()
    differences = {}
    pairs = zip(*(sides[side].model.named_parameters() for side in SIDES), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert isinstance(ours.grad, DTensor) and isinstance(theirs.grad, DTensor), name
        first, second = ours.grad.full_tensor(), theirs.grad.full_tensor()
        scale = second.abs().max().clamp(min=_LEAST_SCALE)
        differences[f"gradient of {name}"] = float((first - second).abs().max() / scale)
    for side in sides.values():
        side.optimizer.zero_grad()
    for number, batch in enumerate(batches, 1):
        losses = [run_step(side, batch)["loss"] for side in sides.values()]
        differences[f"loss of step {number}"] = max(losses) - min(losses)
    # A NaN is the worst difference, but max() would pass over it.
    worst = max(
        differences, key=lambda n: math.inf if math.isnan(differences[n]) else differences[n]
    )
    error = None
    if not differences[worst] <= tolerance:
        error = CheckError(f"{worst} differs by {differences[worst]:.1e}, more than {tolerance:g}")
    raise_together(error)
    return {
        "tolerance": tolerance,
        "gradient": max(d for name, d in differences.items() if name.startswith("gradient")),
        "loss": max(d for name, d in differences.items() if name.startswith("loss")),
    }


class _CountCollectives(TorchDispatchMode):
    """Count c10d operators and the bytes of their largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            leaves = tree_flatten((args, kwargs))[0]
            sizes = [t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.nbytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def _measure(shape: Shape, repeats: int, tolerance: float) -> dict[str, object]:
    """Check the sides, then measure time, bytes and host time; called by every rank."""
    check = _check(shape, tolerance)
    timed = _time_both(shape, repeats)
    nbytes = {name: _measure_bytes(shape, name) for name in SIDES}
    tokens = draw_batches(shape, 1)[0]

    def build() -> Callable[[], object]:
        side = _build(shape, SIDES[0])
        return lambda: run_step(side, tokens)

    host = host_time.measure(build, num_units=shape.layers + 1, num_steps=_HOST_STEPS)
    return {"check": check, **timed, "bytes": nbytes, "host": host}


def _time_both(shape: Shape, repeats: int) -> dict[str, object]:
    sides = {name: _build(shape, name) for name in _TIMED}
    batches = draw_batches(shape, _STEPS_A_BLOCK)
    first_step_ms = {name: run_step(sides[name], batches[0])["step"] for name in _TIMED}
    times: dict[str, list[dict[str, float]]] = {name: [] for name in _TIMED}
    block_ms: dict[str, list[float]] = {name: [] for name in _TIMED}
    for block in range(_WARM_UP_BLOCKS + repeats):
        for name in _TIMED if block % 2 else reversed(_TIMED):
            dist.barrier()
            steps = [run_step(sides[name], tokens) for tokens in batches][1:]
            if block >= _WARM_UP_BLOCKS:
                times[name] += steps
                block_ms[name].append(statistics.median(step["step"] for step in steps))
    theirs = block_ms["fsdp2"]
    ratios = [ours / other for ours, other in zip(block_ms["megafsdp"], theirs, strict=True)]
    step_ms = {name: spread([step["step"] for step in times[name]]) for name in _TIMED}
    return {
        "num_parameters": sum(p.numel() for p in sides[SIDES[0]].model.parameters()),
        "repeats": repeats,
        "step_ms": step_ms,
        "phases_ms": {
            name: {p: statistics.median(step[p] for step in times[name]) for p in PHASES}
            for name in _TIMED
        },
        "processor_ms": {
            name: spread([step["processor"] for step in times[name]]) for name in _TIMED
        },
        "first_step_ms": first_step_ms,
        "ratio": step_ms["megafsdp"]["median"] / step_ms["fsdp2"]["median"],
        "ratio_with_fused_adam": step_ms[WITH_FUSED_ADAM]["median"] / step_ms["fsdp2"]["median"],
        "ratio_range": [min(ratios), max(ratios)],
        "collectives": {name: _count_collectives(sides[name], batches[0]) for name in SIDES},
    }


def _count_collectives(side: Side, tokens: torch.Tensor) -> dict[str, dict[str, int]]:
    with _CountCollectives() as counted:
        run_step(side, tokens)
    return {"calls": dict(counted.calls), "nbytes": dict(counted.nbytes)}


def _measure_bytes(shape: Shape, name: str) -> dict[str, int]:
    """Return the bytes of one side at rest, and at the peak of a step, all that is alive."""
    tokens = draw_batches(shape, 1)[0]
    gc.collect()
    foreign = resting_nbytes()
    side = _build(shape, name)
    for _ in range(_STEPS_A_BLOCK):
        run_step(side, tokens)
    resting = resting_nbytes() - foreign
    above = peak_nbytes(lambda: run_step(side, tokens))
    return {"resting": resting, "peak_above_resting": above, "peak": resting + above}
