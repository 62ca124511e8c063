"""The offload case on a simulated device: how fast it is, and what is measured at each speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import megafsdp
from benchmarks import host_bandwidth
from benchmarks.offload_sides import (
    Options,
    Setting,
    build_sides,
    check,
    summarize,
    time_blocks,
    warm_up,
)
from benchmarks.record import CheckError
from benchmarks.simulated_device import (
    SimulatedDevice,
    Times,
    build_model,
    keep_freed_memory,
    model_input,
)
from megafsdp.device.host_copies import ThreadLink

# Bytes that a step with bf16 gradients and copies moves in host memory, the link's part included.
_HOST_BYTES_PER_ELEMENT = 32
_WARM_UP_STEPS = 8
_PROBE_NUMEL, _PROBE_REPEATS = 1 << 24, 25
_NEVER_CLIPS = 1e9
_CHECKED_STEPS, _CHECKED_LAYERS, _CHECKED_HIDDEN, _CLIPS = 5, 3, 64, 0.1
_POLICY = megafsdp.MixedPrecisionPolicy(
    torch.bfloat16, main_grads_dtype=torch.bfloat16, cast_forward_inputs=False
)


@dataclass(frozen=True)
class Shape:
    """What is simulated.

    Attributes:
        layers: Number of layers, each a unit.
        hidden: Hidden size; a layer has 12 hidden**2 elements.
        room: How many times the host's work fits in the time of all layers at the size free.
        link_bytes_per_s: Speed of the link, each way.
    """

    layers: int
    hidden: int
    room: float
    link_bytes_per_s: float


def measure(shape: Shape, options: Options) -> dict[str, object]:
    """Check the sides, then measure memory and steps; called by the only rank.

    Raises:
        CheckError: Losses or weights of some side differ from those with nothing offloaded.
    """
    keep_freed_memory()
    _check_clipped(options.fractions)
    link = ThreadLink(shape.link_bytes_per_s)
    layers = build_model(shape.layers, shape.hidden, SimulatedDevice(), Times(0.0, 0.0))
    numel = sum(p.numel() for p in layers.parameters())
    gb_per_s = host_bandwidth.measure(
        min(numel, _PROBE_NUMEL),
        _PROBE_REPEATS,
        link=link,
        link_bytes_per_s=shape.link_bytes_per_s,
        device=torch.device("cpu"),
    )
    link.close()
    need_s = _HOST_BYTES_PER_ELEMENT * numel / (1e9 * gb_per_s["probe"]["alone"])
    rooms = {"free": shape.room, "tight": shape.room / 2}
    times = {size: _times(room * need_s, shape.layers) for size, room in rooms.items()}
    rows: dict[str, dict[str, Any]] = {size: {} for size in times}
    for fraction in options.fractions:
        run = _Fraction(fraction, shape)
        for size, row in run.measure(times, options, gb_per_s).items():
            rows[size][f"{fraction:g}"] = row
    return {
        "is_simulated": True,
        "device": "CPU",
        "link_gb_per_s": shape.link_bytes_per_s / 1e9,
        "num_threads": torch.get_num_threads(),
        "num_parameters": numel,
        "layers": shape.layers,
        "host_need_ms": 1e3 * need_s,
        "gb_per_s": gb_per_s,
        "sizes": {
            size: {
                "room": rooms[size],
                "layers_ms": {
                    "forward": 1e3 * shape.layers * times[size].forward_s,
                    "backward": 1e3 * shape.layers * times[size].backward_s,
                },
                "fractions": rows[size],
            }
            for size in times
        },
    }


def _times(step_s: float, num_layers: int) -> Times:
    """Divide a step among layers; a backward takes twice as long as a forward."""
    return Times(step_s / (3 * num_layers), 2 * step_s / (3 * num_layers))


def make_setting(
    num_layers: int,
    hidden: int,
    link_bytes_per_s: float | None,
    times: Times,
    *,
    max_grad_norm: float,
) -> Setting:
    """Return a simulated device; ``times`` of its layers may be changed between steps."""
    device = SimulatedDevice()

    def build() -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
        model = build_model(num_layers, hidden, device, times)
        for module in [*model, model]:
            megafsdp.fully_shard(module, mp_policy=_POLICY)
        return model, lambda step: model(model_input(step)).sum()

    return Setting(
        build,
        lambda: ThreadLink(link_bytes_per_s, device_time=device.time_when_done),
        max_grad_norm,
        synchronize=device.synchronize,
        idle_ms=lambda: 1e3 * device.idle_s,
    )


def _check_clipped(fractions: Sequence[float]) -> None:
    """Compare all sides on a small model whose gradients are clipped in every step."""
    for fraction in fractions:
        setting = make_setting(
            _CHECKED_LAYERS, _CHECKED_HIDDEN, None, Times(1e-4, 2e-4), max_grad_norm=_CLIPS
        )
        sides = build_sides(fraction, setting)
        for side in sides.values():
            side.block(setting, _CHECKED_STEPS)
        check(sides, f"clipped, fraction {fraction:g}")
        norms = {name: float(side.optimizer.grad_norm or 0.0) for name, side in sides.items()}
        if not min(norms.values()) > _CLIPS:
            raise CheckError(f"nothing is clipped at norms of {norms}")


class _Fraction:
    """The sides of one fraction."""

    def __init__(self, fraction: float, shape: Shape) -> None:
        self._what = f"fraction {fraction:g}"
        self._link_gb_per_s = shape.link_bytes_per_s / 1e9
        self._times = Times(0.0, 0.0)
        self._setting = make_setting(
            shape.layers,
            shape.hidden,
            shape.link_bytes_per_s,
            self._times,
            max_grad_norm=_NEVER_CLIPS,
        )
        self._sides = build_sides(fraction, self._setting)

    def measure(
        self, times: dict[str, Times], options: Options, gb_per_s: dict[str, dict[str, float]]
    ) -> dict[str, dict[str, Any]]:
        """Return the records of all sides at every size, once all steps are checked."""
        warm_up(self._sides, self._setting, _WARM_UP_STEPS)
        rows = {}
        for size, own in times.items():
            self._times.forward_s, self._times.backward_s = own.forward_s, own.backward_s
            timed = time_blocks(self._sides, self._setting, options)
            rows[size] = summarize(
                self._sides, timed, gb_per_s=gb_per_s, link_gb_per_s=self._link_gb_per_s
            )
        for name, is_equal in check(self._sides, self._what).items():
            for row in rows.values():
                row[name]["are_losses_equal"] = is_equal
        return rows
