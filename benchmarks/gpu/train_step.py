"""Part 5: a training step of Qwen3 beside torch FSDP2 with AdamW(fused=True) and clipping.

One rank: no collective runs, so this is the cost of the engine and of the optimizer. If both sides
fit in the GPU's memory, their blocks of steps alternate; otherwise one follows the other.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

import megafsdp
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from benchmarks.record import spread
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer
from megafsdp.models.flops import flops_per_token

OURS, FSDP2 = "megafsdp", "fsdp2"
_SIDES = (OURS, FSDP2)
_MAX_NORM = 1.0
_HYPER: dict[str, Any] = {"lr": 1e-4, "eps": 1e-5, "weight_decay": 1e-2}
_CHECKED_STEPS, _STEPS_A_BLOCK, _BLOCKS = 3, 3, 3
# For a loss near 12 in bf16; backward's sums change from run to run.
_LOSS_TOLERANCE = 2e-2
# Dense bf16 operations a second, by a part of the GPU's name.
_PEAKS = {"H100 80GB HBM3": 989e12, "H200": 989e12}


@dataclass(frozen=True)
class Case:
    """What is trained: rows of ``sequence`` tokens of a preset's model.

    Attributes:
        preset: Name of the model.
        batch: Rows.
        sequence: Tokens of a row.
        is_compiled: Whether each layer is compiled.
        alternates: Whether both sides are in memory at once.
        has_user_buffers: Whether our side gathers into memory that is registered with NCCL.
    """

    preset: str
    batch: int
    sequence: int
    is_compiled: bool = False
    alternates: bool = False
    has_user_buffers: bool = False

    @property
    def name(self) -> str:
        """Return its name in reports."""
        memory = ", user buffers" if self.has_user_buffers else ""
        return f"{self.preset}, {'compiled' if self.is_compiled else 'eager'}{memory}"


# The most important first: if the part is cut off, the finished ones are reported.
_FULL = (
    Case("qwen3-0.6b", 2, 4096, alternates=True),
    Case("qwen3-1.7b", 2, 4096, is_compiled=True),
    Case("qwen3-1.7b", 2, 4096),
    Case("qwen3-0.6b", 2, 4096, is_compiled=True, alternates=True),
    Case("qwen3-0.6b", 2, 4096, alternates=True, has_user_buffers=True),
)
_TINY = (
    Case("qwen3-toy", 1, 16, alternates=True),
    Case("qwen3-toy", 1, 16, is_compiled=True),
)


@dataclass
class Side:
    """One engine with its model, optimizer and batches; ``losses`` grows by each step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[[], object]
    tokens: torch.Tensor
    losses: list[torch.Tensor]

    def step(self) -> None:
        """Train one step; returns before the device is done."""
        loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


def run(size: Size, report: Report) -> None:
    """Measure every case."""
    with one_rank(size) as device:
        _open_libraries(device)
        for case in size.either(_FULL, _TINY):
            _measure(case, device, report)


def _open_libraries(device: torch.device) -> None:
    """Let products allocate their workspaces, which would otherwise count for the first side.

    The thread of backward has a workspace of its own.
    """
    matrix = torch.ones(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    nn.functional.linear(matrix @ matrix, matrix, matrix[0]).sum().backward()


def build(side: str, case: Case, device: torch.device) -> Side:
    """Return a side in its initial state; both have equal weights."""
    config = presets[case.preset]
    with device:
        model: nn.Module = build_model(config, seed=0)
    layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
    if case.is_compiled:
        for layer in layers:
            # The C++ that inductor makes for a CPU takes a minute to compile.
            layer.compile(backend="inductor" if device.type == "cuda" else "aot_eager")
    generator = torch.Generator().manual_seed(1)
    shape = (case.batch, case.sequence + 1)
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator).to(device)
    optimizer: torch.optim.Optimizer
    if side == OURS:
        options: dict[str, Any] = {
            "mp_policy": megafsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
            "nccl_user_buffers": case.has_user_buffers,
        }
        for layer in layers:
            # FSDP2's default; ours would keep the last layer for backward.
            megafsdp.fully_shard(layer, reshard_after_forward=True, **options)
        megafsdp.fully_shard(model, **options)
        optimizer = megafsdp.FusedAdam(model.parameters(), max_grad_norm=_MAX_NORM, **_HYPER)
        return Side(model, optimizer, lambda: None, tokens, [])
    torch_policy = TorchMixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in [*layers, model]:
        torch_fully_shard(module, mp_policy=torch_policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **_HYPER)
    parameters = list(model.parameters())
    return Side(
        model,
        optimizer,
        lambda: nn.utils.clip_grad_norm_(parameters, _MAX_NORM),
        tokens,
        [],
    )


def _measure(case: Case, device: torch.device, report: Report) -> None:
    found: dict[str, dict[str, Any]] = {}
    losses: dict[str, torch.Tensor] = {}
    for names in [_SIDES] if case.alternates else [(name,) for name in _SIDES]:
        sides = {name: _start(name, case, device, found) for name in names}
        times_ms: dict[str, list[float]] = {name: [] for name in names}
        for block in range(1 + _BLOCKS):
            for name in names if block % 2 else reversed(names):
                elapsed_ms = _block_ms(sides[name], device)
                # The first block warms up.
                if block:
                    times_ms[name].append(elapsed_ms)
        for name, side in sides.items():
            found[name] |= {"step_ms": spread(times_ms[name])}
            found[name] |= _rates(case, times_ms[name], device) | _look_inside(side, device)
            losses[name] = torch.stack(side.losses[:_CHECKED_STEPS]).float().cpu()
            report.figure(case.name, found)
        # The compiler keeps compiled code alive, and with it the layers.
        del sides, side
        torch.compiler.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    difference = (losses[OURS] - losses[FSDP2]).abs().max().item()
    has_moved = bool(losses[OURS][0] != losses[OURS][-1])
    is_met = difference <= _LOSS_TOLERANCE and has_moved
    report.check(f"{case.name}: losses", is_met, f"differ by {difference:.1e}")
    medians = [found[name]["step_ms"]["median"] for name in _SIDES]
    report.figure(f"{case.name}: ratio", medians[0] / medians[1])
    report.mark(f"{case.name}: over FSDP2", medians[0] / medians[1], at_most=1.0)
    if device.type == "cuda":
        # Requested bytes: torch's allocator gives out up to 1 MiB more if it cannot split a block.
        peaks = [found[name]["peak_requested_nbytes"] for name in _SIDES]
        report.mark(f"{case.name}: peak over FSDP2's", peaks[0] / peaks[1], at_most=1.0)
    mfu = found[OURS]["mfu"]
    if mfu is not None and case.is_compiled and case.preset == "qwen3-1.7b":
        report.mark(f"{case.name}: MFU", mfu, at_least=0.40)


def _start(name: str, case: Case, device: torch.device, found: dict[str, dict[str, Any]]) -> Side:
    """Build a side and train the steps that are checked; note its bytes."""
    before = _reset_peak(device)
    begin_s = time.perf_counter()
    side = build(name, case, device)
    for _ in range(_CHECKED_STEPS):
        side.step()
    _synchronize(device)
    found[name] = _peak_nbytes(device, before)
    found[name]["first_steps_s"] = time.perf_counter() - begin_s
    return side


def _block_ms(side: Side, device: torch.device) -> float:
    """Return the milliseconds of a step, measured over a block of steps without waits between."""
    gc.collect()
    _synchronize(device)
    begin_s = time.perf_counter()
    for _ in range(_STEPS_A_BLOCK):
        side.step()
    _synchronize(device)
    return 1e3 * (time.perf_counter() - begin_s) / _STEPS_A_BLOCK


def _rates(case: Case, times_ms: list[float], device: torch.device) -> dict[str, float | None]:
    tokens_per_s = 1e3 * case.batch * case.sequence / statistics.median(times_ms)
    flops = tokens_per_s * flops_per_token(presets[case.preset], case.sequence)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    peak = next((peak for part, peak in _PEAKS.items() if part in name), None)
    return {"tokens_per_s": tokens_per_s, "mfu": None if peak is None else flops / peak}


def _look_inside(side: Side, device: torch.device) -> dict[str, Any]:
    """Return how much a step launched, how long the GPU idled, and how often the host waited."""
    spans = kernel_spans(side.step, device)
    return {
        "launches": len(spans),
        "idle_share": idle_share(spans),
        "synchronizations": _count_waits(side.step, device),
    }


def kernel_spans(call: Callable[[], None], device: torch.device) -> list[tuple[int, int]]:
    """Return when each kernel and copy of a call began and ended, in nanoseconds; none on a CPU."""
    # Without CPU events, a profile of thousands of kernels takes only milliseconds.
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        call()
        _synchronize(device)
    events = profiler.profiler.kineto_results.events()
    return [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA
    ]


def idle_share(spans: list[tuple[int, int]]) -> float | None:
    """Return the share of the time between the first and the last span that is in no span."""
    if not spans:
        return None
    begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
    busy, at = 0, begin
    for start, stop in sorted(spans):
        busy += max(0, stop - max(start, at))
        at = max(at, stop)
    return 1.0 - busy / max(1, end - begin)


def _count_waits(call: Callable[[], None], device: torch.device) -> int | None:
    """Return how often the host waited for the device, as torch's own debug mode counts."""
    if device.type != "cuda":
        call()
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        call()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> dict[str, int]:
    """Return the requested and the allocated bytes; peaks count from here on."""
    if device.type != "cuda":
        return {}
    torch.cuda.reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    return {kind: stats[f"{kind}_bytes.all.current"] for kind in ("requested", "allocated")}


def _peak_nbytes(device: torch.device, before: dict[str, int]) -> dict[str, int]:
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats()
    peaks = {
        f"peak_{kind}_nbytes": stats[f"{kind}_bytes.all.peak"] - nbytes
        for kind, nbytes in before.items()
    }
    return peaks | {"peak_reserved_nbytes": torch.cuda.max_memory_reserved()}
