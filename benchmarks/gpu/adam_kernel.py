"""Part 2: the Adam kernel beside torch's fused AdamW and a copy, and what slows it.

Sizes, formats and rows of zeros are those of ``benchmarks/adam.py``, which checks bits first. This
part adds bf16 states, kept subnormal numbers, tables of many segments, and sums of squares.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks import adam
from benchmarks.gpu.part import Report, Size
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel, AdamSegment
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.kernels.reference import fp32_to_halves
from megafsdp.optimizer.kernels.square_sum import device_sum_of_squares

_HYPER = AdamHyper(1e-3, (0.9, 0.95), 1e-8, 0.1)
_WARM_UP_REPEATS, _REPEATS = 2, 7
# A launch takes up to 80 segments.
_SEGMENTS = (1, 80, 81, 700)
# Bytes of an element that a step reads and writes.
LAYOUTS = {"fp32": 28, "bf16 to bf16": 28, "remainders": 26, "bf16 states": 20}


def run(size: Size, report: Report) -> None:
    """Run the case, then this part's additions."""
    numels = size.either([1 << 20, 1 << 24, 1 << 27], [1 << 10])
    options = argparse.Namespace(
        device=size.device_type, numel=numels, threads=[1], repeats=size.either(9, 1)
    )
    results: dict[str, Any] = adam.run(options)
    report.figure("beside torch", results)
    print(adam.describe(results))
    device = torch.device(size.device_type)
    largest = next(v for name, v in results.items() if name.startswith(f"{numels[-1]} elements"))
    for job in ("fp32", "bf16 to bf16"):
        report.mark(f"{job}, of a copy", largest[job]["share_of_probe"]["megafsdp"], at_least=0.85)
        report.mark(f"{job}, over torch's fused", largest[job]["ratio"]["fused"], at_most=1.0)
    speeds: dict[str, float] = {}
    for layout, nbytes in LAYOUTS.items():
        for flushes in (True, False):
            buffers = make_buffers(layout, numels[-1], device)
            step = _step_of(buffers, flushes=flushes)
            name = layout if flushes else f"{layout}, subnormal numbers kept"
            speeds[name] = nbytes * numels[-1] / _median_ms(step, device) / 1e6
            report.figure("GB/s of the largest", speeds)
    _measure_segments(size.either(1 << 24, 1 << 12), report, device)
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.ones(numels[-1], dtype=dtype, device=device)
        ms = _median_ms(lambda v=values: device_sum_of_squares(v), device)
        report.figure(f"sum of squares of {dtype}, GB/s", values.nbytes / ms / 1e6)


def make_buffers(layout: str, numel: int, device: torch.device) -> AdamBuffers:
    """Return the buffers of a first step, in one of :data:`LAYOUTS`."""
    weight = torch.randn(numel, device=device)
    grad = torch.randn(numel, device=device)
    states = [torch.zeros_like(weight) for _ in range(2)]
    if layout != "fp32":
        grad = grad.bfloat16()
    if layout == "remainders":
        high, remainder = fp32_to_halves(weight)
        return AdamBuffers(high, grad, *states, remainder)
    if layout == "bf16 states":
        states = [state.bfloat16() for state in states]
    copy_out = None if layout == "fp32" else torch.empty_like(grad)
    return AdamBuffers(weight, grad, *states, copy_out=copy_out)


def _step_of(
    buffers: AdamBuffers, *, flushes: bool = True, segments: list[AdamSegment] | None = None
) -> Callable[[], None]:
    kernel = AdamKernel(buffers.weight.device, flush_denormals=flushes)
    return lambda: kernel(buffers, segments or _HYPER, step=3)


def _measure_segments(numel: int, report: Report, device: torch.device) -> None:
    """Report milliseconds by the number of segments; every second one has no weight decay."""
    buffers = make_buffers("bf16 to bf16", numel, device)
    times_ms = {}
    for num in _SEGMENTS:
        ends = [numel * i // num for i in range(num + 1)]
        segments = [
            AdamSegment(start, stop, replace(_HYPER, weight_decay=0.1 * (i % 2)))
            for i, (start, stop) in enumerate(itertools.pairwise(ends))
        ]
        times_ms[str(num)] = _median_ms(_step_of(buffers, segments=segments), device)
    report.figure("ms by segments", times_ms)


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    times_ms = [adam.time_ms(call, device) for _ in range(_WARM_UP_REPEATS + _REPEATS)]
    return statistics.median(times_ms[_WARM_UP_REPEATS:])
