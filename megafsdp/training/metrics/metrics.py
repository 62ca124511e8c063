"""Measure the speed and memory of a run, and format its progress lines.

A :class:`Meter` times steps and nothing else: evaluations and checkpoints are left out of its
rates. Floating-point operations are those of the model's mathematics; the peak is the device's for
dense bf16, whatever dtype the run computes in.
"""

from __future__ import annotations

import datetime
import math
import re
import resource
import sys
import time
from dataclasses import dataclass

import torch

from megafsdp.training.metrics.terminal import Part, Screen, fitted
from megafsdp.training.step.train_step import StepResult

_GIB = 2**30
_FILE = Screen()
# Dense bf16 FLOP/s by words of the name that CUDA reports; the first match counts. None is for
# devices that share a word with another device, but not its peak.
_PEAK_FLOPS: tuple[tuple[str, float | None], ...] = (
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("GH200", 989e12),
    ("H200 NVL", 835e12),
    ("H200", 989e12),
    ("H20", 148e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("A100", 312e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L40", 181e12),
    ("L4", 121e12),
    ("4090 D", None),
    ("4090 Laptop", None),
    ("4090", 165e12),
    ("3090 Ti", None),
    ("3090", 71e12),
)


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 FLOP/s by its CUDA name; None for one that is not in the table."""
    # Whole words are compared (A100-SXM4 is two): otherwise RTX A1000 would match A100.
    words = f" {re.sub('[^A-Za-z0-9]+', ' ', device_name)} "
    return next((peak for part, peak in _PEAK_FLOPS if f" {part} " in words), None)


def peak_memory_nbytes(device: torch.device) -> int:
    """Return the most memory this process has held: allocated on the GPU, or resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class Rates:
    """Speed since the last reading, and what follows from it.

    Attributes:
        step_s: Mean time of a step.
        tokens_per_s: Tokens of all ranks.
        tflops: TFLOP/s of one device.
        mfu: Share of the device's peak; None on CPU and on GPUs that are not in the table.
        memory_nbytes: Peak memory of this rank.
        eta_s: Time left for the steps to come, evaluations and checkpoints aside.
    """

    step_s: float
    tokens_per_s: float
    tflops: float
    mfu: float | None
    memory_nbytes: int
    eta_s: float


class Meter:
    """Time the steps of a run.

    Args:
        device: What the run computes on.
        tokens_per_step: Tokens of a global batch.
        flops_per_token: Operations of forward and backward for one token.
        num_devices: Ranks that share the work.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        tokens_per_step: int,
        flops_per_token: float,
        num_devices: int,
    ) -> None:
        self._device = device
        self._tokens_per_step = tokens_per_step
        self._flops_per_step = flops_per_token * tokens_per_step / num_devices
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name) if name else None
        self._started_s = 0.0
        self._elapsed_s = 0.0
        self._num_steps = 0

    def start_step(self) -> None:
        """Begin to time a step; no other one is in the device's queue."""
        self._started_s = time.perf_counter()

    def end_step(self) -> None:
        """Stop timing a step whose loss was read, so the device is done with it; time the next."""
        now_s = time.perf_counter()
        self._elapsed_s += now_s - self._started_s
        self._started_s = now_s
        self._num_steps += 1

    def read(self, num_steps_left: int) -> Rates:
        """Return the rates of the steps since the last call, and start over."""
        step_s = self._elapsed_s / max(self._num_steps, 1)
        self._elapsed_s, self._num_steps = 0.0, 0
        flops = self._flops_per_step / step_s if step_s else 0.0
        return Rates(
            step_s=step_s,
            tokens_per_s=self._tokens_per_step / step_s if step_s else 0.0,
            tflops=flops / 1e12,
            mfu=None if self._peak is None else flops / self._peak,
            memory_nbytes=peak_memory_nbytes(self._device),
            eta_s=step_s * num_steps_left,
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands.

    Attributes:
        step: Steps taken.
        num_steps: Steps of the whole run.
        consumed_samples: Samples trained on.
        global_batch_size: Samples of a step.
        num_skipped: Steps skipped since the run began.
    """

    step: int
    num_steps: int
    consumed_samples: int
    global_batch_size: int
    num_skipped: int


def progress_line(
    position: Position,
    result: StepResult,
    lr: float,
    rates: Rates,
    screen: Screen = _FILE,
) -> str:
    """Return one line on a step, in our form; a narrow screen leaves out what counts least."""
    width, loads = len(str(position.num_steps)), result.statistics
    parts = [
        Part(f"step {position.step:>{width}}/{position.num_steps}", 99),
        Part(f"{100 * position.step / position.num_steps:5.1f}%", 3),
        Part.bold(f"loss {result.loss:.4f}", 90),
        Part(f"grad norm {result.grad_norm:.3f}", 60),
        Part(f"lr {lr:.2e}", 50),
        *([] if result.loss_scale is None else [Part(f"loss scale {result.loss_scale:g}", 20)]),
        *([] if loads.max_load is None else [Part(f"max load {loads.max_load:.2f}", 30)]),
        *([] if loads.aux_loss is None else [Part(f"aux loss {loads.aux_loss:.4f}", 2)]),
        Part(f"{1000 * rates.step_s:,.0f} ms/step", 70),
        Part(f"{rates.tokens_per_s:,.0f} tokens/s", 55),
        Part(f"{rates.tflops:.3g} TFLOP/s", 1),
        *([] if rates.mfu is None else [Part(f"MFU {100 * rates.mfu:.1f}%", 40)]),
        Part(f"memory {rates.memory_nbytes / _GIB:.2f} GiB", 10),
        Part(f"ETA {clock(rates.eta_s)}", 45),
        *([Part.red("SKIPPED", 80)] if result.is_skipped else []),
    ]
    return fitted(parts, screen)


def megatron_line(position: Position, result: StepResult, lr: float, rates: Rates) -> str:
    """Return one line on a step as Megatron-LM words it, for scripts that read its logs."""
    now = datetime.datetime.now().isoformat(sep=" ", timespec="microseconds")
    num_zeros = result.statistics.num_zeros
    parts = [
        f" [{now}] iteration {position.step:8d}/{position.num_steps:8d}",
        f"consumed samples: {position.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {rates.step_s * 1000:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {rates.tflops:.1f}",
        f"learning rate: {lr:.6E}",
        f"global batch size: {position.global_batch_size:5d}",
        f"lm loss: {result.loss:.6E}",
        f"loss scale: {result.loss_scale or 1.0:.1f}",
        f"grad norm: {result.grad_norm:.3f}",
        *([] if num_zeros is None else [f"num zeros: {num_zeros}"]),
        f"number of skipped iterations: {position.num_skipped:3d}",
        f"number of nan iterations: {int(not math.isfinite(result.loss)):3d} |",
    ]
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, with hours before them if there are some."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
