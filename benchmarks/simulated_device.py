"""A model on a simulated device: compute is time that passes, weights and gradients are real.

Without a GPU, work that runs beside one can still be measured if the device leaves the cores alone.
As on a GPU, compute is queued: a layer's forward and backward advance the device's clock by a given
time and return, and the calling thread goes ahead. It waits where it would wait for a GPU, and
copies over the link begin when the device has reached the point where they were issued. Other work
of a device (packing, casts and its part of an optimizer) runs in the calling thread and does not
move the clock; it shows only if the device meanwhile runs out of work. Losses come from the first
and last elements of every parameter by real arithmetic; gradients are prepared noise, except for
the same elements. This file knows nothing of optimizers.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_END_NUMEL = 16
_NOISE_SCALE = 1e-3
# Constants of malloc.h; a larger threshold is refused.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -1, -3, 1 << 25


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next allocation, as a device's allocator does.

    Otherwise every gathered weight would be paged in anew. Only glibc has the setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class SimulatedDevice:
    """The clock of a device, ahead of which the calling thread queues compute.

    Attributes:
        idle_s: How long so far the device has had nothing to do between its first computation and
            the next :meth:`synchronize`, because the calling thread was late.
    """

    def __init__(self) -> None:
        self.idle_s = 0.0
        self._ready_s = 0.0
        self._is_fed = False

    def compute(self, seconds: float) -> None:
        """Queue a computation of a number of seconds; returns at once."""
        self._ready_s = max(self._ready_s, self._note_idleness()) + seconds
        self._is_fed = True

    def _note_idleness(self) -> float:
        now_s = time.perf_counter()
        if self._is_fed:
            self.idle_s += max(0.0, now_s - self._ready_s)
        return now_s

    def time_when_done(self) -> float:
        """Return when all that is queued will be done, in seconds of ``time.perf_counter``."""
        return self._ready_s

    def synchronize(self) -> None:
        """Return when all that is queued is done."""
        time.sleep(max(0.0, self._ready_s - self._note_idleness()))
        self._is_fed = False


@dataclass
class Times:
    """Seconds that a layer takes; may be changed between steps."""

    forward_s: float
    backward_s: float


class Layer(nn.Module):
    """The parameters of a transformer layer, matrices and vectors, under simulated compute.

    Args:
        hidden: Hidden size.
        device: The device that computes.
        times: How long it takes.
        seed: Seed of the weights and the noise.
    """

    def __init__(self, hidden: int, device: SimulatedDevice, times: Times, *, seed: int) -> None:
        super().__init__()
        self.device, self.times = device, times
        generator = torch.Generator().manual_seed(seed)
        matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden)]
        shapes: list[tuple[int, ...]] = []
        for rows, columns in [*matrices, (hidden, 4 * hidden)]:
            shapes += [(rows, columns), (rows,)]
        # Two norms.
        shapes += [(hidden,)] * 4
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=generator) * hidden**-0.5 for shape in shapes
        )
        self.noise = [torch.randn(shape, generator=generator) for shape in shapes]
        self.noise = [_NOISE_SCALE * tensor.bfloat16() for tensor in self.noise]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``(32,)`` fp32 activations that depend on every parameter."""
        return _SimulatedLayer.apply(x, self, *self.weights)


class _SimulatedLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer, *weights: torch.Tensor) -> torch.Tensor:
        layer.device.compute(layer.times.forward_s)
        total = torch.stack([_ends(weight) for weight in weights]).float().sum(dim=0)
        ctx.layer = layer
        ctx.save_for_backward(x, total)
        return torch.sin((1 + total) * x + total)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, total = ctx.saved_tensors
        layer = ctx.layer
        layer.device.compute(layer.times.backward_s)
        inner = torch.cos((1 + total) * x + total) * grad
        for noise in layer.noise:
            flat = noise.view(-1)
            flat[:_END_NUMEL] = (inner * (1 + x))[:_END_NUMEL]
            flat[-_END_NUMEL:] = (inner * (1 + x))[_END_NUMEL:]
        # Aliases, which autograd takes without a copy; it would copy tensors that others hold.
        return inner * (1 + total), None, *(noise.detach() for noise in layer.noise)


def _ends(weight: torch.Tensor) -> torch.Tensor:
    flat = weight.detach().reshape(-1)
    return torch.cat([flat[:_END_NUMEL], flat[-_END_NUMEL:]])


def build_model(
    num_layers: int, hidden: int, device: SimulatedDevice, times: Times
) -> nn.Sequential:
    """Return layers with the same weights every time; the caller shards them."""
    return nn.Sequential(*(Layer(hidden, device, times, seed=i) for i in range(num_layers)))


def model_input(step: int) -> torch.Tensor:
    """Return the input of a step, ``(32,)`` fp32."""
    return torch.randn(2 * _END_NUMEL, generator=torch.Generator().manual_seed(step))
