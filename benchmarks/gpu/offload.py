"""Part 8: a step with the optimizer's half, or all of it, on the host, beside FSDP2's CPU offload.

The sides are those of the case ``offload``, one after another: together they would not fit. With
the whole optimizer on the host nothing is stepped before the norm is known, which would take a
second slab of weights and moments there.
"""

from __future__ import annotations

import gc
import statistics

import torch

from benchmarks import host_bandwidth
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from benchmarks.offload_cuda import FSDP2, LOSS_TOLERANCE, Shape, make_setting
from benchmarks.offload_sides import AHEAD, BASE, NORM_FIRST, Setting, Side, build_side
from benchmarks.record import spread
from megafsdp import HybridDeviceOptimizer
from megafsdp.device.host_copies import link_of
from megafsdp.device.host_threads import default_host_threads, torch_threads
from megafsdp.device.streams import device_handle

# The side with nothing offloaded first, as the exposed time is the difference from it; the slowest
# last.
_SIDES = ((BASE, 0.0), (AHEAD, 0.5), (NORM_FIRST, 1.0), (FSDP2, 1.0))
_WARM_UP_STEPS, _STEPS, _BLOCKS = 3, 5, 1
# FSDP2 takes seconds a step.
_FEW_STEPS = 2


def run(size: Size, report: Report) -> None:
    """Measure the host, then each side."""
    with one_rank(size) as device:
        num_threads = default_host_threads(device.type)
        report.figure("threads of the probes and of FSDP2's optimizer", num_threads)
        with torch_threads(num_threads):
            _measure_host(size, device, report)
        shape = size.either(Shape("qwen3-1.7b", 2, 4096), Shape("qwen3-toy", 1, 16))
        setting = make_setting(shape, device)
        wanted, base_ms = torch.zeros(()), 0.0
        for name, fraction in _SIDES:
            what = name if name in (BASE, FSDP2) else f"{fraction}, {name}"
            is_other = name == FSDP2
            # One thread, as under torchrun: ours takes its threads by itself.
            with torch_threads(num_threads if is_other else 1):
                side = setting.others[name]() if is_other else build_side(name, fraction, setting)
                median_ms = _measure_side(what, side, setting, report)
            losses = torch.stack(side.losses).float().cpu()
            if name == BASE:
                wanted, base_ms = losses, median_ms
            difference = (losses - wanted[: len(losses)]).abs().max().item()
            is_met = difference <= LOSS_TOLERANCE and bool(losses.unique().numel() > 1)
            report.check(f"{what}: losses", is_met, f"differ by {difference:.1e}")
            report.figure(f"{what}: losses", losses.tolist())
            exposed = (median_ms - base_ms) / base_ms
            report.figure(f"{what}: exposed, of a step", exposed)
            if name == AHEAD:
                report.mark(f"{what}: exposed", exposed, at_most=0.10)
            del side
            gc.collect()
            if device.type == "cuda":
                _return_memory()


def _measure_host(size: Size, device: torch.device, report: Report) -> None:
    """Report the host memory bandwidth of the kernel, alone and beside copies."""
    numel, repeats, gb_per_s = size.either((1 << 25, 9, 50.0), (1 << 16, 1, 1.0))
    link = link_of(device_handle(device.type))
    speeds = host_bandwidth.measure(
        numel, repeats, link=link, link_bytes_per_s=1e9 * gb_per_s, device=device
    )
    link.close()
    report.figure("host, GB/s", speeds)


def _measure_side(what: str, side: Side, setting: Setting, report: Report) -> float:
    """Train; return the median of a step's milliseconds."""
    is_other = what == FSDP2
    side.block(setting, 1 if is_other else _WARM_UP_STEPS)
    num_blocks, num_steps = (1, _FEW_STEPS) if is_other else (_BLOCKS, _STEPS)
    times_ms = [ms for _ in range(num_blocks) for ms in side.block(setting, num_steps)]
    report.figure(f"{what}: step ms", spread(times_ms))
    if isinstance(side.optimizer, HybridDeviceOptimizer):
        report.figure(f"{what}: threads of the host", side.optimizer.host_threads)
        report.figure(f"{what}: bytes on the host", side.optimizer.host_nbytes)
        report.figure(f"{what}: bytes pinned of these", side.optimizer.pinned_nbytes)
    if torch.cuda.is_available():
        report.figure(f"{what}: bytes pinned by torch", _pinned_nbytes())
        report.figure(f"{what}: peak bytes on the GPU", torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    return statistics.median(times_ms)


def _pinned_nbytes() -> dict[str, int]:
    """Return the bytes that torch's allocator of pinned memory holds and uses."""
    stats = torch.cuda.host_memory_stats()
    return {name: n for name, n in stats.items() if name.endswith("bytes.current")}


def _return_memory() -> None:
    """Return unused memory to the system; torch's pinned memory, used by FSDP2, would add up."""
    torch.cuda.empty_cache()
    empty = getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()
