"""One pass of the compiled Adam beside torch's AdamW, on one flat buffer of a CPU or a GPU.

Three jobs: the bare update in fp32; all that a step does in mixed precision, from bf16 gradients
with a scale to a bf16 copy; and the same with zero gradients and subnormal first moments in one row
of twenty, as rare tokens and idle experts leave them. In the last two jobs our kernel also runs
with weights kept as bf16 and int16 remainders, whose bf16 half is the copy, and on a CPU out of
place. On a CPU DeepSpeed's CPUAdam and a loop in numba take part in all jobs, if they are
installed. Sides take turns in every repeat, each beginning with its threads asleep. The achieved
bandwidth is shown beside that of a probe that touches as much memory: on a CPU a pass over one
array in place, on a GPU a copy from one array to another.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.adam_rivals import Rival, Torch, installed
from benchmarks.record import CheckError, spread
from megafsdp._native import require_native_module, why_cuda_missing
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, adam_step
from megafsdp.optimizer.kernels.cuda import usable_module
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.kernels.reference import fp32_to_halves, halves_to_fp32

_HYPER = AdamHyper(1e-3, (0.9, 0.95), 1e-8, 0.1)
_GRAD_SCALE = 0.3
_WARM_UP_REPEATS = 2
_CHECKED_STEPS = 3
# Short calls are repeated more often than asked for, up to this factor: as long as the largest.
_MOST_TIMES_THE_REPEATS = 10
# OpenMP's threads spin for milliseconds after a call, on cores that the next side needs.
_SETTLING_S = 0.01
_QUEUEING_CYCLES = 2_000_000
_PROBE = "probe"
_APART = "out of place"
_IN_HALVES = "remainders"
_SUBNORMAL = "subnormal"
_JOBS = ("fp32", "bf16 to bf16", _SUBNORMAL)
# First moments of idle rows: in the job with subnormal numbers, and in the same job without.
_IDLE_MOMENT, _DENSE_MOMENT = 2.0**-130, 2.0**-10
_CHECKED_NUMEL = 1 << 20
# fp32 weights and moments read and written, and fp32 gradients read; or in place of these two bytes
# read of bf16 gradients and two written of a bf16 copy, which weights in halves do not need.
_BYTES_PER_ELEMENT = {_IN_HALVES: 26}
_USUAL_BYTES_PER_ELEMENT = 28
# fp32 values for an element: weight, two moments, and gradient with copy or gradient alone.
_TOUCHED_VALUES = 4
_PROBE_ARRAYS = {"cpu": 1, "cuda": 2}
# torch's foreach, and fused on a GPU, compute in another order: they differ by a few roundings of
# 2**-24 a step, relative to weights and steps.
_OTHER_ORDER_TOLERANCE = _CHECKED_STEPS * 2.0**-22


class Ours:
    """A flat buffer under the kernel; out of place, two of them, read and written in turn."""

    def __init__(
        self, weight: torch.Tensor, grad: torch.Tensor, has_copy: bool, *, is_apart: bool = False
    ) -> None:
        """Copy the weights; moments begin at zero."""
        self.grad_scale = _GRAD_SCALE if has_copy else 1.0
        copy_out = torch.zeros_like(weight, dtype=torch.bfloat16) if has_copy else None
        self.copy_out = copy_out
        states = [weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)]
        room = [torch.zeros_like(weight) for _ in states] if is_apart else states
        self.turns = [
            AdamBuffers(old[0], grad, *old[1:], None, copy_out, *(new if is_apart else ()))
            for old, new in ((states, room), (room, states))
        ]
        self.num_steps = 0

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights as of the last step."""
        return self.turns[self.num_steps % 2].weight

    @property
    def exp_avg(self) -> torch.Tensor:
        """Return the first moments as of the last step."""
        return self.turns[self.num_steps % 2].exp_avg

    def step(self) -> None:
        """Run one step."""
        buffers = self.turns[self.num_steps % 2]
        self.num_steps += 1
        adam_step(buffers, _HYPER, step=self.num_steps, grad_scale=self.grad_scale)


class InHalves:
    """A flat buffer under the kernel, its fp32 weights kept as bf16 values and int16 remainders.

    The bf16 values are the copy that compute reads. If two bf16 values are equally near a weight,
    they have the one further from zero.
    """

    copy_out = None

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor) -> None:
        """Take the weights apart; moments begin at zero."""
        high, remainder = fp32_to_halves(weight)
        exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        self.buffers = AdamBuffers(high, grad, exp_avg, exp_avg_sq, remainder)
        self.exp_avg = exp_avg
        self.num_steps = 0

    @property
    def weight(self) -> torch.Tensor:
        """Return the weights in fp32, joined."""
        assert self.buffers.remainder is not None, "the weights are in halves"
        return halves_to_fp32(self.buffers.weight, self.buffers.remainder)

    def step(self) -> None:
        """Run one step."""
        self.num_steps += 1
        adam_step(self.buffers, _HYPER, step=self.num_steps, grad_scale=_GRAD_SCALE)


Side = Ours | InHalves | Rival


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--numel", type=int, nargs="+", default=[1_000_000, 1 << 24, 100_000_000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="on a CPU")
    parser.add_argument("--repeats", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the sides against each other, then time every job, on a CPU at every thread count.

    Raises:
        CheckError: On a CPU our bits differ from those of torch's fused AdamW, or on a GPU its
            results are not near ours; no figure is given then.
        RuntimeError: The kernels are not compiled, or do not run on the device.
    """
    require_native_module()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and usable_module(device) is None:
        why = why_cuda_missing() or "the device, as logged"
        raise RuntimeError(f"Expected CUDA kernels that run on {device}, got none for {why}.")
    # torch's fused kernel rounds elements short of a vector differently, in each thread's part.
    with _threads(1):
        _check(min(max(options.numel) // 64 * 64, _CHECKED_NUMEL), device)
    results: dict[str, object] = {"device": device.type}
    for numel in options.numel:
        factor = min(max(options.numel) // numel, _MOST_TIMES_THE_REPEATS)
        repeats = options.repeats * factor
        if device.type == "cuda":
            results[f"{numel} elements"] = _measure(numel, repeats, device)
            continue
        for num_threads in options.threads:
            with _threads(num_threads):
                measured = _measure(numel, repeats, device)
            results[f"{numel} elements, threads {num_threads}"] = measured
    return results


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def _sides(job: str, numel: int, device: torch.device, *, source: str = "cpu") -> dict[str, Side]:
    """Return all sides of a job, with numbers drawn on the device ``source``."""
    generator = torch.Generator(source).manual_seed(0)
    weight, grad = (
        torch.randn(numel, generator=generator, device=source).to(device) for _ in range(2)
    )
    has_copy = job != "fp32"
    if job == _SUBNORMAL:
        _idle_rows(grad).zero_()
    if has_copy:
        grad = grad.bfloat16()
    scale = _GRAD_SCALE if has_copy else None
    sides: dict[str, Side] = {
        "megafsdp": Ours(weight, grad, has_copy),
        "fused": Torch(weight, grad, scale, _HYPER, is_fused=True),
        "foreach": Torch(weight, grad, scale, _HYPER, is_fused=False),
    }
    if has_copy:
        sides[_IN_HALVES] = InHalves(weight, grad)
    if device.type == "cpu":
        if has_copy:
            sides[_APART] = Ours(weight, grad, has_copy, is_apart=True)
        for name, rival in installed().items():
            sides[name] = rival(weight, grad, scale, _HYPER)
    return sides


def _idle_rows(values: torch.Tensor) -> torch.Tensor:
    """Return every twentieth row of 64 elements, without rows after the last whole twenty."""
    whole = values.numel() // (20 * 64) * (20 * 64)
    return values[:whole].view(-1, 20, 64)[:, 0]


def _check(numel: int, device: torch.device) -> None:
    for job in ("fp32", "bf16 to bf16"):
        sides = _sides(job, numel, torch.device("cpu"))
        there = _sides(job, numel, device) if device.type == "cuda" else {}
        ours, equal, near = sides["megafsdp"], _equal_sides(sides, there), _near_sides(sides, there)
        start = ours.weight.clone()
        for side in (ours, *equal.values(), *near.values()):
            for _ in range(_CHECKED_STEPS):
                side.step()
        if torch.equal(ours.weight, start):
            raise CheckError(f"{job}: no weight moved")
        if ours.copy_out is not None and not torch.equal(ours.copy_out, ours.weight.bfloat16()):
            raise CheckError(f"{job}: the copy is not the rounded weights")
        for name, side in equal.items():
            _check_weights(f"{job}: weights differ from those of {name}", ours, side, 0.0)
        tolerance = _OTHER_ORDER_TOLERANCE * start.abs().max().item()
        for name, side in near.items():
            _check_weights(f"{job}: weights differ from those of {name}", ours, side, tolerance)


def _equal_sides(sides: dict[str, Side], there: dict[str, Side]) -> dict[str, Side]:
    """Return the sides that must have our bits, by their names in messages.

    ``there`` has the sides on the GPU.
    """
    found = {
        "torch's fused AdamW": sides["fused"],
        "our step out of place": sides.get(_APART),
        "our step of weights in halves": sides.get(_IN_HALVES),
        "our kernel on the GPU": there.get("megafsdp"),
        "our kernel on the GPU of weights in halves": there.get(_IN_HALVES),
    }
    return {name: side for name, side in found.items() if side is not None}


def _near_sides(sides: dict[str, Side], there: dict[str, Side]) -> dict[str, Side]:
    """Return the sides that compute in another order, by their names in messages."""
    others = (name for name in sides if name not in ("megafsdp", "fused", _APART, _IN_HALVES))
    near = {f"{name}'s Adam": sides[name] for name in others}
    torchs = (name for name in ("fused", "foreach") if name in there)
    return near | {f"torch's {name} AdamW there": there[name] for name in torchs}


def _check_weights(failure: str, left: Side, right: Side, tolerance: float) -> None:
    pairs = [(left.weight, right.weight)]
    if tolerance == 0 and left.copy_out is not None and right.copy_out is not None:
        pairs.append((left.copy_out, right.copy_out))
    for mine, other in pairs:
        distance = (mine.float() - other.float().cpu()).abs().max().item()
        if not distance <= tolerance:
            raise CheckError(f"{failure} by {distance:.1e}")


def _measure(numel: int, repeats: int, device: torch.device) -> dict[str, object]:
    results = {}
    for job in _JOBS:
        times_ms, dense_ms = _times_ms(job, numel, repeats, device)
        results[job] = _summary(numel, times_ms, device)
        if dense_ms:
            results[job]["ratio_to_dense"] = {
                name: statistics.median(times_ms[name]) / statistics.median(times)
                for name, times in dense_ms.items()
                if name != _PROBE
            }
    return dict(results)


Times = dict[str, list[float]]


def _times_ms(job: str, numel: int, repeats: int, device: torch.device) -> tuple[Times, Times]:
    """Return the times of all sides of one job; its gigabytes of memory are freed on return.

    With subnormal moments, rounds alternate with rounds without them on the same memory, whose
    times are the second result; it is empty for other jobs.
    """
    num_arrays = _PROBE_ARRAYS[device.type]
    probed = torch.ones(num_arrays, _TOUCHED_VALUES * numel // num_arrays, device=device)
    sides = _sides(job, numel, device, source=device.type)
    calls: dict[str, Callable[[], object]] = {n: side.step for n, side in sides.items()}
    calls[_PROBE] = lambda: probed.mul_(1.0) if num_arrays == 1 else probed[1].copy_(probed[0])
    moments = (_IDLE_MOMENT, _DENSE_MOMENT) if job == _SUBNORMAL else (None,)
    found: list[Times] = [{name: [] for name in calls} for _ in moments]
    for repeat in range(_WARM_UP_REPEATS + repeats):
        for moment, times_ms in zip(moments, found, strict=True):
            for name, call in calls.items():
                if moment is not None and name != _PROBE:
                    _idle_rows(sides[name].exp_avg).fill_(moment)
                elapsed_ms = time_ms(call, device)
                if repeat >= _WARM_UP_REPEATS:
                    times_ms[name].append(elapsed_ms)
    return found[0], found[1] if len(found) > 1 else {}


def time_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of a call by the clock; on a GPU those of its kernels."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        # Work waits behind this until all of it is queued, so that the host's time does not count.
        torch.cuda._sleep(_QUEUEING_CYCLES)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    time.sleep(_SETTLING_S)
    start_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start_s)


def _summary(numel: int, times_ms: dict[str, list[float]], device: torch.device) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    nbytes = {name: _BYTES_PER_ELEMENT.get(name, _USUAL_BYTES_PER_ELEMENT) for name in times_ms}
    nbytes[_PROBE] = 2 * 4 * _TOUCHED_VALUES // _PROBE_ARRAYS[device.type]
    achieved = {name: nbytes[name] * numel / medians[name] / 1e6 for name in times_ms}
    probe = achieved.pop(_PROBE)
    ours = times_ms["megafsdp"]
    others = [name for name in achieved if name != "megafsdp"]
    rivals = [name for name in others if name not in (_APART, _IN_HALVES)]
    in_halves_ms = medians.get(_IN_HALVES)
    # The bandwidth is that of one pass; a side that makes several passes moves more than it says.
    return {
        "ms": {name: spread(times) for name, times in times_ms.items()},
        "ratio": {name: medians["megafsdp"] / medians[name] for name in others},
        "ratio_of_remainders": (
            {name: in_halves_ms / medians[name] for name in rivals} if in_halves_ms else {}
        ),
        "ratio_range": {
            name: [f(a / b for a, b in zip(ours, times_ms[name], strict=True)) for f in (min, max)]
            for name in others
        },
        "useful_gb_per_s": achieved,
        "probe_gb_per_s": probe,
        "share_of_probe": {name: value / probe for name, value in achieved.items()},
    }


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = [
        f"Adam on {str(results['device']).upper()}: ms, and ours over theirs, of fp32 weights and "
        "of weights in halves"
    ]
    for name, jobs in results.items():
        if not isinstance(jobs, dict):
            continue
        for job, case in jobs.items():
            in_halves = case["ratio_of_remainders"]
            others = ", ".join(
                f"{other} {case['ms'][other]['median']:.1f} ({ratio:.3f}"
                + (f", {in_halves[other]:.3f})" if other in in_halves else ")")
                for other, ratio in case["ratio"].items()
            )
            idle = case.get("ratio_to_dense", {}).get("megafsdp")
            lines.append(
                f"{name}, {job}: {case['ms']['megafsdp']['median']:.1f}; {others}; "
                f"{case['useful_gb_per_s']['megafsdp']:.1f} GB/s, "
                f"{case['share_of_probe']['megafsdp']:.0%} of the probe's "
                f"{case['probe_gb_per_s']:.1f}"
                + ("" if idle is None else f"; {idle:.2f} x the dense job")
            )
    return "\n".join(lines)
