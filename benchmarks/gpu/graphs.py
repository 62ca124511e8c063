"""Part 10: a step of the capturable Adam in a CUDA graph, and traces of whole steps.

Without CUDA the step runs without a graph.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.adam import time_ms
from benchmarks.gpu import train_step
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from megafsdp import FusedAdam

_REPLAYS, _WARM_UP_STEPS = 20, 2
_HYPER = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 1e-2}
# For weights of size 1 that step by 1e-3; pow() may round differently on a device than on a host.
_TOLERANCE = 1e-6
# The largest trace to keep: files are copied back from the GPU machine.
_MAX_TRACE_NBYTES = 16 << 20


def run(size: Size, report: Report) -> None:
    """Compare the captured step with the fused kernel, then trace both engines."""
    _compare_capture(size, report)
    case = train_step.Case(
        size.either("qwen3-0.6b", "qwen3-toy"), size.either(2, 1), size.either(4096, 16)
    )
    with one_rank(size) as device:
        for name, num_steps in ((train_step.OURS, 3), (train_step.FSDP2, 1)):
            side = train_step.build(name, case, device)
            for _ in range(_WARM_UP_STEPS):
                side.step()
            path = size.out / f"trace_{name}.json.gz"
            nbytes = _trace(side.step, num_steps, device, path)
            report.figure(f"trace of {name}, bytes", nbytes)
            report.check(f"trace of {name}", 0 < nbytes < _MAX_TRACE_NBYTES, nbytes)
            if nbytes >= _MAX_TRACE_NBYTES:
                path.unlink()
            del side
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _compare_capture(size: Size, report: Report) -> None:
    device = torch.device(size.device_type)
    start = torch.randn(size.either(1 << 26, 1 << 10), device=device)
    grad = torch.randn_like(start)
    weights, steps = [], []
    # Optimizers are kept: a graph writes to its states, whose memory would otherwise be reused.
    optimizers = []
    for capturable in (True, False):
        weight = nn.Parameter(start.clone())
        weight.grad = grad.clone()
        optimizer = FusedAdam([weight], capturable=capturable, **_HYPER)
        # The first step makes the states; a graph may not capture it.
        optimizer.step()
        optimizers.append(optimizer)
        weights.append(weight)
        steps.append(_capture(optimizer.step, device) if capturable else optimizer.step)
    times_ms: list[list[float]] = [[], []]
    for _ in range(_REPLAYS):
        for step, times in zip(steps, times_ms, strict=True):
            times.append(time_ms(step, device))
    medians = [statistics.median(times) for times in times_ms]
    report.figure("captured step ms", medians[0])
    report.figure("fused step ms", medians[1])
    difference = (weights[0] - weights[1]).abs().max().item()
    is_met = difference <= _TOLERANCE and not torch.equal(weights[0].detach(), start)
    report.check("weights of captured and fused steps", is_met, f"differ by {difference:.1e}")


def _capture(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a replay of a step; the step itself without CUDA."""
    if device.type != "cuda":
        return step
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _trace(step: Callable[[], None], num_steps: int, device: torch.device, path: Path) -> int:
    """Write a trace of some steps; return its bytes."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        for _ in range(num_steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))
    return path.stat().st_size
