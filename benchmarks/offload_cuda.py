"""The offload case on a CUDA device: a GPT of a preset, its real link, and torch FSDP2 beside it.

FSDP2's CPUOffloadPolicy keeps all weights on the host, whatever the fraction; its optimizer is
torch.optim.AdamW(fused=True) there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from benchmarks import host_bandwidth
from benchmarks.offload_sides import (
    HYPER,
    Options,
    Setting,
    Side,
    build_sides,
    check,
    summarize,
    time_blocks,
    warm_up,
)
from megafsdp.device.host_copies import CopyLink, link_of
from megafsdp.device.host_memory import HostArena
from megafsdp.device.host_threads import share_of_cores
from megafsdp.device.streams import device_handle
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer

FSDP2 = "FSDP2 with CPUOffloadPolicy"
_NUM_BATCHES = 4
_WARM_UP_STEPS = 8
_NEVER_CLIPS = 1e9
_PROBE_NUMEL, _PROBE_REPEATS = 1 << 25, 25
_LINK_NBYTES, _LINK_REPEATS = 1 << 28, 5
# For a loss near 10: the order of sums in attention and embeddings changes from run to run.
LOSS_TOLERANCE = 1e-2


@dataclass(frozen=True)
class Shape:
    """What is trained: rows of a preset's model, ``sequence`` tokens each, 0 for its longest."""

    preset: str
    batch: int
    sequence: int = 0


def measure(shape: Shape, options: Options) -> dict[str, object]:
    """Measure link and memory, then steps; called by the only rank.

    Raises:
        CheckError: Losses of some side differ from those with nothing offloaded.
    """
    # Probes and FSDP2's optimizer use torch's threads; the launcher leaves a rank only one. Our
    # optimizer takes this number by itself.
    torch.set_num_threads(share_of_cores())
    device = torch.device("cuda", torch.cuda.current_device())
    link = link_of(device_handle("cuda"))
    link_gb_per_s = _measure_link(link, device)
    gb_per_s = host_bandwidth.measure(
        _PROBE_NUMEL,
        _PROBE_REPEATS,
        link=link,
        link_bytes_per_s=1e9 * link_gb_per_s,
        device=device,
    )
    link.close()
    setting = make_setting(shape, device)
    rows: dict[str, dict[str, Any]] = {}
    num_parameters = 0
    for fraction in options.fractions:
        sides = build_sides(fraction, setting)
        warm_up(sides, setting, _WARM_UP_STEPS)
        timed = time_blocks(sides, setting, options)
        row = summarize(sides, timed, gb_per_s=gb_per_s, link_gb_per_s=link_gb_per_s)
        what = f"fraction {fraction:g}"
        for name, is_equal in check(sides, what, loss_tolerance=LOSS_TOLERANCE).items():
            row[name]["are_losses_equal"] = is_equal
        rows[f"{fraction:g}"] = row
        num_parameters = sum(p.numel() for p in next(iter(sides.values())).model.parameters())
        del sides
        torch.cuda.empty_cache()
    return {
        "is_simulated": False,
        "device": torch.cuda.get_device_name(device),
        "link_gb_per_s": link_gb_per_s,
        "num_threads": torch.get_num_threads(),
        "num_parameters": num_parameters,
        "gb_per_s": gb_per_s,
        "sizes": {shape.preset: {"layers_ms": None, "batch": shape.batch, "fractions": rows}},
    }


def _measure_link(link: CopyLink, device: torch.device) -> float:
    """Return gigabytes a second from the device to pinned memory."""
    there = torch.zeros(_LINK_NBYTES, dtype=torch.uint8, device=device)
    here = HostArena(_LINK_NBYTES, is_pinned=True).take(_LINK_NBYTES, torch.uint8)
    best_s = float("inf")
    for _ in range(_LINK_REPEATS):
        torch.cuda.synchronize(device)
        begin_s = time.perf_counter()
        link.to_host([(here, there)]).wait()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return _LINK_NBYTES / best_s / 1e9


def make_setting(shape: Shape, device: torch.device) -> Setting:
    """Return a GPT on a device, with FSDP2 among the sides."""
    handle = device_handle(device.type)
    config = presets[shape.preset]
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, (shape.sequence or config.max_sequence_length) + 1)
    batches = [
        torch.randint(0, config.vocab_size, size, generator=generator).to(device)
        for _ in range(_NUM_BATCHES)
    ]

    def loss_of(model: nn.Module) -> Callable[[int], torch.Tensor]:
        def loss(step: int) -> torch.Tensor:
            tokens = batches[step % _NUM_BATCHES]
            return model(tokens[:, :-1], tokens[:, 1:])

        return loss

    def new_model() -> tuple[nn.Module, list[nn.Module]]:
        with device:
            model = build_model(config, seed=0)
        layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
        return model, [*layers, model]

    def build() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
        model, units = new_model()
        policy = megafsdp.MixedPrecisionPolicy(torch.bfloat16, main_grads_dtype=torch.bfloat16)
        for module in units:
            megafsdp.fully_shard(module, mp_policy=policy)
        return model, loss_of(model)

    def build_fsdp2() -> Side:
        model, units = new_model()
        policy = TorchMixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
        offload = CPUOffloadPolicy(pin_memory=handle.is_asynchronous)
        for module in units:
            torch_fully_shard(module, mp_policy=policy, offload_policy=offload)
        return Side(model, loss_of(model), _TorchOnHost(model))

    def synchronize() -> None:
        # Wait for the compute only: the streams of copies run on into the next step.
        event = handle.record_event()
        if event is not None:
            event.synchronize()

    return Setting(
        build,
        lambda: link_of(handle),
        _NEVER_CLIPS,
        synchronize=synchronize,
        others={FSDP2: build_fsdp2},
    )


class _TorchOnHost:
    """AdamW over parameters of FSDP2 on the host, clipping as the other sides do."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._adam = torch.optim.AdamW(self._parameters, fused=True, **HYPER)
        self.grad_norm: torch.Tensor | None = None

    @torch.no_grad()
    def step(self) -> None:
        # The only rank has all of every gradient.
        grads = [p.grad.to_local() for p in self._parameters if isinstance(p.grad, DTensor)]
        self.grad_norm = nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (_NEVER_CLIPS / (self.grad_norm + 1e-6)).clamp(max=1.0))
        self._adam.step()

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def synchronize(self) -> None:
        """Return at once: a step ends with its own work."""
