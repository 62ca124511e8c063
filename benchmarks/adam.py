"""One pass of the compiled Adam beside torch's AdamW, on one flat buffer of a CPU.

Three jobs: the bare update in fp32; all that a step does in mixed precision, from bf16 gradients
with a scale to a bf16 copy; and the bare update with zero gradients and subnormal first moments, as
rare tokens and idle experts leave them. Sides take turns in every repeat. Achieved bytes a second
stand beside those of a pass that only reads and writes one array in place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.record import CheckError, spread
from megafsdp._native import require_native_module
from megafsdp.optimizer.hyper import AdamHyper
from megafsdp.optimizer.kernels import AdamBuffers, adam_step

_HYPER = AdamHyper(1e-3, (0.9, 0.95), 1e-8, 0.1)
_GRAD_SCALE = 0.3
_WARM_UP_REPEATS = 2
_CHECKED_STEPS = 3
_PROBE = "probe"
# fp32 weights and moments read and written, gradients read; both halves of bf16 where those are.
_BYTES_PER_ELEMENT = {"fp32": 28, "bf16 to bf16": 28, "subnormal": 28, _PROBE: 8}
# foreach divides in another order: a few roundings of 2**-24 a step, relative to weights and steps.
_FOREACH_TOLERANCE = _CHECKED_STEPS * 2.0**-22


class Ours:
    """A flat buffer under the kernel."""

    def __init__(self, weight: torch.Tensor, grad: torch.Tensor, has_copy: bool) -> None:
        """Copy the weights; moments begin at zero."""
        self.grad_scale = _GRAD_SCALE if has_copy else 1.0
        copy_out = torch.zeros_like(weight, dtype=torch.bfloat16) if has_copy else None
        self.weight = weight.clone()
        self.exp_avg, exp_avg_sq = torch.zeros_like(weight), torch.zeros_like(weight)
        self.copy_out = copy_out
        self.buffers = AdamBuffers(self.weight, grad, self.exp_avg, exp_avg_sq, copy_out=copy_out)
        self.num_steps = 0

    def step(self) -> None:
        """Run one step."""
        self.num_steps += 1
        adam_step(self.buffers, _HYPER, step=self.num_steps, grad_scale=self.grad_scale)


class Torch:
    """A flat parameter under torch.optim.AdamW, with the passes around it that a job needs."""

    def __init__(
        self, weight: torch.Tensor, grad: torch.Tensor, has_copy: bool, *, is_fused: bool
    ) -> None:
        """Copy the weights; moments begin at zero, with a step that changes no weight."""
        parameter = torch.nn.Parameter(weight.clone())
        self.weight = parameter.detach()
        self.narrow_grad = grad if has_copy else None
        self.copy_out = torch.zeros_like(weight, dtype=torch.bfloat16) if has_copy else None
        self.optimizer = torch.optim.AdamW(
            [parameter],
            lr=_HYPER.lr,
            betas=_HYPER.betas,
            eps=_HYPER.eps,
            weight_decay=_HYPER.weight_decay,
            fused=is_fused,
            foreach=not is_fused,
        )
        parameter.grad = torch.zeros_like(weight)
        self.optimizer.step()
        state = self.optimizer.state[parameter]
        state["step"].zero_()
        self.weight.copy_(weight)
        self.exp_avg = state["exp_avg"]
        self.grad = parameter.grad
        self.grad.copy_(grad)

    def step(self) -> None:
        """Run one step."""
        if self.narrow_grad is not None:
            self.grad.copy_(self.narrow_grad)
            self.grad.mul_(_GRAD_SCALE)
        self.optimizer.step()
        if self.copy_out is not None:
            self.copy_out.copy_(self.weight)


Side = Ours | Torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--numel", type=int, default=1 << 24)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the sides against each other, then time every job at every number of threads.

    Raises:
        CheckError: Our bits are not those of torch's fused AdamW; no figure is given then.
        RuntimeError: The kernels are not compiled.
    """
    require_native_module()
    usual_threads = torch.get_num_threads()
    # torch's fused kernel rounds elements short of a vector differently, in each thread's part.
    _check(options.numel // 64 * 64)
    results: dict[str, object] = {"numel": options.numel}
    try:
        for num_threads in options.threads:
            torch.set_num_threads(num_threads)
            results[f"threads {num_threads}"] = _measure(options.numel, options.repeats)
    finally:
        torch.set_num_threads(usual_threads)
    return results


def _sides(job: str, numel: int) -> dict[str, Side]:
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(numel, generator=generator) for _ in range(2))
    has_copy = job == "bf16 to bf16"
    if has_copy:
        grad = grad.bfloat16()
    elif job == "subnormal":
        grad.zero_()
    return {
        "megafsdp": Ours(weight, grad, has_copy),
        "fused": Torch(weight, grad, has_copy, is_fused=True),
        "foreach": Torch(weight, grad, has_copy, is_fused=False),
    }


def _check(numel: int) -> None:
    usual_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for job in ("fp32", "bf16 to bf16"):
        sides = _sides(job, min(numel, 1 << 20))
        start = sides["megafsdp"].weight.clone()
        for side in sides.values():
            for _ in range(_CHECKED_STEPS):
                side.step()
        ours, fused, foreach = sides.values()
        if torch.equal(ours.weight, start):
            raise CheckError(f"{job}: no weight moved")
        if not torch.equal(ours.weight, fused.weight):
            raise CheckError(f"{job}: weights differ from those of torch's fused AdamW")
        if ours.copy_out is not None and not torch.equal(ours.copy_out, ours.weight.bfloat16()):
            raise CheckError(f"{job}: the copy is not the rounded weights")
        distance = (ours.weight - foreach.weight).abs().max().item()
        if not distance <= _FOREACH_TOLERANCE * start.abs().max().item():
            raise CheckError(f"{job}: weights differ from torch's foreach AdamW by {distance:.1e}")
    torch.set_num_threads(usual_threads)


def _measure(numel: int, repeats: int) -> dict[str, object]:
    array = torch.ones(numel)
    results: dict[str, object] = {}
    for job in ("fp32", "bf16 to bf16", "subnormal"):
        sides = _sides(job, numel)
        calls: dict[str, Callable[[], object]] = {n: side.step for n, side in sides.items()}
        calls[_PROBE] = lambda: array.mul_(1.0)
        times_ms: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(_WARM_UP_REPEATS + repeats):
            for name, call in calls.items():
                if job == "subnormal" and name != _PROBE:
                    sides[name].exp_avg.fill_(2.0**-130)
                start_s = time.perf_counter()
                call()
                if repeat >= _WARM_UP_REPEATS:
                    times_ms[name].append(1e3 * (time.perf_counter() - start_s))
        results[job] = _summary(job, numel, times_ms)
    return results


def _summary(job: str, numel: int, times_ms: dict[str, list[float]]) -> dict[str, Any]:
    def gigabytes_a_second(name: str, kind: str) -> float:
        return _BYTES_PER_ELEMENT[kind] * numel / statistics.median(times_ms[name]) / 1e6

    ours = times_ms["megafsdp"]
    probe = gigabytes_a_second(_PROBE, _PROBE)
    achieved = {name: gigabytes_a_second(name, job) for name in times_ms if name != _PROBE}
    # Bytes a second are those of one pass; a side that makes several moves more than they say.
    return {
        "ms": {name: spread(times) for name, times in times_ms.items()},
        "ratio": {
            name: statistics.median(ours) / statistics.median(times_ms[name])
            for name in ("fused", "foreach")
        },
        "ratio_range": {
            name: [f(a / b for a, b in zip(ours, times_ms[name], strict=True)) for f in (min, max)]
            for name in ("fused", "foreach")
        },
        "useful_gb_per_s": achieved,
        "probe_gb_per_s": probe,
        "share_of_probe": {name: value / probe for name, value in achieved.items()},
    }


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = [f"{results['numel']} elements on CPU, megafsdp / torch fused / torch foreach"]
    for threads, jobs in results.items():
        if not isinstance(jobs, dict):
            continue
        for job, case in jobs.items():
            times = " / ".join(
                f"{case['ms'][name]['median']:.1f}" for name in ("megafsdp", "fused", "foreach")
            )
            low, high = case["ratio_range"]["fused"]
            lines.append(
                f"{threads}, {job}: {times} ms, ratio to fused {case['ratio']['fused']:.3f} "
                f"({low:.3f} to {high:.3f}), to foreach {case['ratio']['foreach']:.3f}; "
                f"{case['useful_gb_per_s']['megafsdp']:.1f} GB/s, "
                f"probe {case['probe_gb_per_s']:.1f}"
            )
    return "\n".join(lines)
