"""The sides of the offload case: what each trains with, their turns, and figures from their times.

Used for simulated and real devices alike; a :class:`Setting` says what differs.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

import megafsdp
from benchmarks.host_bandwidth import KERNEL_BYTES_PER_ELEMENT
from benchmarks.per_parameter_hybrid import PerParameterHybrid
from benchmarks.record import CheckError, spread
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.host_copies import CopyLink
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.fsdp.runtime.unit import unit_of

BASE, RIVAL_BASE = "nothing offloaded", "one optimizer a parameter, nothing offloaded"
NORM_FIRST, AHEAD = "norm first", "ahead of the norm"
RIVAL = "one optimizer a parameter"
SIDES = (BASE, NORM_FIRST, AHEAD, RIVAL_BASE, RIVAL)
_BASE_OF = {NORM_FIRST: BASE, AHEAD: BASE, RIVAL: RIVAL_BASE}
# At a learning rate of 1e-3, rounding makes the losses of wide models part within ten steps.
HYPER: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
# Gradients and weights cross the link in bf16; a weight has two fp32 states.
_LINK_BYTES_PER_ELEMENT = 2
_STATE_BYTES_PER_ELEMENT = 8
# Smaller times are noise on a loaded machine, and a ratio to them would say nothing.
_LEAST_EXPOSED_MS = 0.1


class Stepped(Protocol):
    """What the sides need from an optimizer."""

    grad_norm: torch.Tensor | None

    def step(self) -> object:
        """Step all parameters."""

    def zero_grad(self) -> None:
        """Clear gradients."""

    def synchronize(self) -> None:
        """Wait for work that runs beside the caller."""


@dataclass(frozen=True)
class Options:
    """How much is measured.

    Attributes:
        fractions: What is offloaded, one table row each.
        repeats: Blocks of each side that count.
        steps: Steps of a block, the first of which does not count.
    """

    fractions: tuple[float, ...]
    repeats: int
    steps: int


@dataclass(frozen=True)
class Setting:
    """What a model computes on.

    Attributes:
        build: Returns the sharded model and the loss of a step by number.
        link: Makes the link of one side; the side closes it.
        max_grad_norm: The norm that clips.
        synchronize: Waits for the device's compute.
        idle_ms: Returns how long a simulated device has had nothing to do within steps so far.
        others: Further sides by name, each a function that builds one; with them :func:`check`
            needs a ``loss_tolerance``.
    """

    build: Callable[[], tuple[nn.Module, Callable[[int], torch.Tensor]]]
    link: Callable[[], CopyLink]
    max_grad_norm: float
    synchronize: Callable[[], None] = lambda: None
    idle_ms: Callable[[], float] = lambda: 0.0
    others: dict[str, Callable[[], Side]] = field(default_factory=dict)


@dataclass
class Side:
    """A model, its optimizer, and its results."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]
    optimizer: Stepped
    losses: list[torch.Tensor] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)

    def step(self, setting: Setting) -> float:
        """Train one step; return its milliseconds, from end to end."""
        begin_s, idle_ms = time.perf_counter(), setting.idle_ms()
        with megafsdp.microbatch(self.model, is_last=True):
            loss = self.loss(len(self.losses))
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        setting.synchronize()
        self.idle_ms.append(setting.idle_ms() - idle_ms)
        self.losses.append(loss.detach())
        return 1e3 * (time.perf_counter() - begin_s)

    def block(self, setting: Setting, num_steps: int) -> list[float]:
        """Train some steps with no work of others under way; return all times but the first."""
        self.idle_ms.clear()
        times_ms = [self.step(setting) for _ in range(num_steps)]
        self.optimizer.synchronize()
        return times_ms[1:]


def build_side(name: str, fraction: float, setting: Setting) -> Side:
    """Return one side in its initial state."""
    model, loss = setting.build()
    parameters = list(model.parameters())
    optimizer: Stepped
    if name in (RIVAL_BASE, RIVAL):
        optimizer = PerParameterHybrid(
            parameters,
            offload_fraction=fraction if name == RIVAL else 0.0,
            link=setting.link(),
            max_grad_norm=setting.max_grad_norm,
            **HYPER,
        )
    else:
        optimizer = megafsdp.HybridDeviceOptimizer(
            parameters,
            **HYPER,
            offload_fraction=0.0 if name == BASE else fraction,
            max_grad_norm=setting.max_grad_norm,
            speculate=name == AHEAD,
            link=setting.link(),
        )
    return Side(model, loss, optimizer)


def build_sides(fraction: float, setting: Setting) -> dict[str, Side]:
    """Return all sides of a fraction, with equal weights."""
    sides = {name: build_side(name, fraction, setting) for name in SIDES}
    return sides | {name: build() for name, build in setting.others.items()}


def warm_up(sides: dict[str, Side], setting: Setting, num_steps: int) -> None:
    """Train some steps on every side; peaks of memory count from here on."""
    for side in sides.values():
        side.block(setting, num_steps)
        root = unit_of(side.model)
        if root is not None:
            root.ledger.reset_peak()


def check(sides: dict[str, Side], what: str, *, loss_tolerance: float = 0.0) -> dict[str, bool]:
    """Compare losses of all steps and the weights at the end with those of the first side.

    Args:
        sides: The first has nothing offloaded.
        what: What the error names.
        loss_tolerance: How far losses may differ; weights are compared if it is zero.

    Returns:
        Whether all losses of a side are equal in every bit to those of the first.

    Raises:
        CheckError: A loss or a weight differs, or the losses of all steps are the same.
    """
    losses = {name: torch.stack(side.losses).float().cpu() for name, side in sides.items()}
    for name, side in sides.items():
        side.optimizer.synchronize()
        difference = (losses[name] - losses[BASE]).abs().max().item()
        if not difference <= loss_tolerance:
            raise CheckError(f"{what}: losses of '{name}' differ by {difference:.1e}")
        if loss_tolerance:
            continue
        for number, (own, wanted) in enumerate(
            zip(_main_weights(side), _main_weights(sides[BASE]), strict=True)
        ):
            if not torch.equal(own, wanted):
                raise CheckError(f"{what}: weight {number} of '{name}' differs")
    if len(losses[BASE]) > 1 and losses[BASE].unique().numel() == 1:
        raise CheckError(f"{what}: no loss changes")
    return {name: torch.equal(own, losses[BASE]) for name, own in losses.items()}


def _main_weights(side: Side) -> list[torch.Tensor]:
    if isinstance(side.optimizer, PerParameterHybrid):
        return side.optimizer.main_weights()
    return [local_tensor(parameter.detach()) for parameter in side.model.parameters()]


@dataclass
class Timed:
    """Times of one side.

    Attributes:
        step_ms: Time of each timed step, by the clock.
        idle_ms: How long a simulated device had nothing to do in each.
    """

    step_ms: list[float] = field(default_factory=list)
    idle_ms: list[float] = field(default_factory=list)

    def on_device_ms(self) -> list[float]:
        """Return the times of a device that never waits for the calling thread within a step.

        For sides with nothing on the host: there that thread does what a device would do itself.
        """
        return [step - idle for step, idle in zip(self.step_ms, self.idle_ms, strict=True)]


def time_blocks(sides: dict[str, Side], setting: Setting, options: Options) -> dict[str, Timed]:
    """Return the times of steps by side; blocks of the sides alternate."""
    times = {name: Timed() for name in sides}
    for repeat in range(options.repeats):
        for name in sides if repeat % 2 else reversed(sides):
            gc.collect()
            times[name].step_ms += sides[name].block(setting, options.steps)
            times[name].idle_ms += sides[name].idle_ms[1:]
    return times


def summarize(
    sides: dict[str, Side],
    times: dict[str, Timed],
    *,
    gb_per_s: dict[str, dict[str, float]],
    link_gb_per_s: float,
) -> dict[str, dict[str, Any]]:
    """Return the record of each side of a fraction."""
    found: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        is_base = name in _BASE_OF.values()
        step_ms = times[name].on_device_ms() if is_base else times[name].step_ms
        own: dict[str, Any] = {"step_ms": spread(step_ms)}
        own["idle_ms"] = statistics.median(times[name].idle_ms)
        if name in SIDES:
            own |= _nbytes(side)
        if name in _BASE_OF:
            base = statistics.median(times[_BASE_OF[name]].on_device_ms())
            work = _work_ms(name, side, gb_per_s, link_gb_per_s)
            exposed = own["step_ms"]["median"] - base
            own |= {"baseline_ms": base, "work_ms": work}
            own |= {"exposed_ms": exposed, "exposed_share": exposed / base}
            own["overlap"] = 1.0 - exposed / max(sum(work.values()), 1e-9)
        if isinstance(side.optimizer, megafsdp.HybridDeviceOptimizer):
            own["ahead"] = dataclasses.asdict(side.optimizer.offload_counts)
        found[name] = own
    ours, rival = (max(found[n]["exposed_ms"], _LEAST_EXPOSED_MS) for n in (AHEAD, RIVAL))
    found[AHEAD]["rival_to_ours"] = rival / ours
    return found


def _groups(model: nn.Module) -> Iterable[ParameterGroup]:
    for module in model.modules():
        unit = unit_of(module)
        if unit is not None:
            yield from unit.groups


def _nbytes(side: Side) -> dict[str, int]:
    """Return the bytes on the device at the peak of a step, and those on the host."""
    root = unit_of(side.model)
    assert root is not None, "the model is a unit"
    device = root.ledger.peak_total
    if isinstance(side.optimizer, PerParameterHybrid):
        device += side.optimizer.device_nbytes
    else:
        kept = [g for g in _groups(side.model) if g.host_memory is None]
        device += _STATE_BYTES_PER_ELEMENT * sum(g.main_weight.flat.numel() for g in kept)
    optimizer = side.optimizer
    assert isinstance(optimizer, megafsdp.HybridDeviceOptimizer | PerParameterHybrid)
    return {"device_nbytes": device, "host_nbytes": optimizer.host_nbytes}


def _work_ms(
    name: str, side: Side, gb_per_s: dict[str, dict[str, float]], link_gb_per_s: float
) -> dict[str, float]:
    """Return the milliseconds that copies and the host's kernel each take by themselves."""
    optimizer = side.optimizer
    if isinstance(optimizer, PerParameterHybrid):
        numel, host_ms = optimizer.host_numel, 1e3 * optimizer.host_s
    else:
        groups = [g for g in _groups(side.model) if g.host_memory is not None]
        numel = sum(g.main_weight.flat.numel() for g in groups)
        kernel = gb_per_s["kernel out of place" if name == AHEAD else "kernel in place"]
        host_ms = KERNEL_BYTES_PER_ELEMENT * numel / kernel["beside transfers"] / 1e6
    copy_ms = _LINK_BYTES_PER_ELEMENT * numel / link_gb_per_s / 1e6
    # The rival brings fp32 weights back.
    num_back = 2 if isinstance(optimizer, PerParameterHybrid) else 1
    return {"to_host": copy_ms, "host": host_ms, "to_device": num_back * copy_ms}
