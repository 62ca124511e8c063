"""``offload_fraction="auto"``: measure in the first steps how much can be offloaded without a wait.

The host has a time window to step what is offloaded: from the first gradients of the last backward
to the end of the first forward after the step, or only that forward if no step runs ahead. If the
host steps ``rate`` elements a second, offload is free up to ``window * rate`` elements. Until that
is known everything is on the host, so that it fits on any device.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.device.streams import DeviceHandle, TimeMark
from megafsdp.fsdp.params.parameter_group import ParameterGroup

# The first steps compile kernels, fill pools and touch pages.
_WARM_UP_STEPS = 2
_MEASURED_STEPS = 3
# Main weight and two moments in fp32.
_RETURNED_NBYTES = 12
# The fraction to use of the device bytes that no allocation has needed so far.
_USABLE = 0.9


@dataclass
class HostRate:
    """The rate at which the host steps; written by the worker.

    Attributes:
        numel: Elements stepped.
        busy_s: Seconds that the steps took.
    """

    numel: int = 0
    busy_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, numel: int, busy_s: float) -> None:
        """Count a step of a bucket."""
        with self._lock:
            self.numel += numel
            self.busy_s += busy_s

    def start_over(self) -> None:
        """Forget what was counted."""
        with self._lock:
            self.numel, self.busy_s = 0, 0.0


@dataclass(slots=True)
class _Marks:
    """Moments of one step, from its backward to the forward after it."""

    first_grads: TimeMark | None = None
    step_begins: TimeMark | None = None
    step_ends: TimeMark | None = None
    uses: list[tuple[TimeMark, float]] = field(default_factory=list)

    def window_s(self) -> float | None:
        """Return the seconds from the first gradients to the last use, minus the waits."""
        if self.step_begins is None or self.step_ends is None or not self.uses:
            return None
        ahead_s = self.first_grads.seconds_until(self.step_begins) if self.first_grads else 0.0
        # The last wait is part of the window: until then the host may work.
        waited_s = sum(waited for _, waited in self.uses[:-1])
        forward_s = self.step_ends.seconds_until(self.uses[-1][0]) - waited_s
        return ahead_s + max(forward_s, 0.0)


class FractionMeter:
    """Measure the window and the host's rate in the first steps; local.

    Args:
        handle: The device.
    """

    def __init__(self, handle: DeviceHandle) -> None:
        self._handle = handle
        # A separate object with a lock, as the worker writes it; the rest has one thread.
        self.rate = HostRate()
        self._marks = _Marks()
        self._windows_s: list[float] = []
        self._num_steps = 0

    def note_grads(self) -> None:
        """Record that gradients of the coming step are complete and that Adam runs on them."""
        if self._marks.step_ends is not None:
            self._end_step()
        if self._marks.first_grads is None:
            self._marks.first_grads = self._handle.mark_time()

    def note_step_begin(self) -> None:
        """Record the beginning of a step."""
        if self._marks.step_ends is not None:
            self._end_step()
        self._marks.step_begins = self._handle.mark_time()

    def note_step_end(self) -> None:
        """Record the end of a step."""
        self._marks.step_ends = self._handle.mark_time()

    def note_use(self, begin: TimeMark, waited_s: float) -> None:
        """Record a use of weights: when it began, and how long the host waited for them."""
        self._marks.uses.append((begin, waited_s))

    def mark_time(self) -> TimeMark:
        """Return a mark of the present moment."""
        return self._handle.mark_time()

    def _end_step(self) -> None:
        self._num_steps += 1
        marks, self._marks = self._marks, _Marks()
        # Page faults and compilation would make the host look slower than it is.
        if self._num_steps == _WARM_UP_STEPS:
            self.rate.start_over()
        window_s = marks.window_s() if self._num_steps > _WARM_UP_STEPS else None
        if window_s is not None:
            self._windows_s.append(window_s)

    @property
    def is_done(self) -> bool:
        """Return whether enough steps were measured; the same on all ranks."""
        return self._num_steps >= _WARM_UP_STEPS + _MEASURED_STEPS

    def free_numel(self) -> float:
        """Return how many elements the host steps within the window; 0 if nothing was measured."""
        if not self._windows_s or not self.rate.busy_s:
            return 0.0
        # The median: a single step that a checkpoint or the system delayed must not decide.
        return statistics.median(self._windows_s) * self.rate.numel / self.rate.busy_s

    def returnable_numel(self) -> float:
        """Return the number of elements whose weights and states fit on the device."""
        nbytes = self._handle.unused_nbytes()
        return float("inf") if nbytes is None else _USABLE * max(nbytes, 0) / _RETURNED_NBYTES


def agree_on_fraction(
    meter: FractionMeter, groups: Sequence[ParameterGroup], device: torch.device
) -> float:
    """Return a fraction that costs no rank time, if memory allows it on all ranks; collective.

    Called by all ranks that share parameter groups, which must offload alike: one small all-reduce
    for each of their process groups.

    Args:
        meter: The measurements of this rank.
        groups: All parameter groups, in forward order.
        device: Where small tensors of collectives lie.
    """
    numel = sum(group.main_weight.flat.numel() for group in groups)
    free = min(meter.free_numel() / max(numel, 1), 1.0)
    fitting = max(1.0 - meter.returnable_numel() / max(numel, 1), 0.0)
    # One minimum over ranks: of the free fraction, and of the negated one that must be offloaded.
    values = torch.tensor([free, -fitting], dtype=torch.float64, device=device)
    meshes = {g: None for group in groups for g in (group.axes.group, group.axes.outer_group) if g}
    for process_group in meshes:
        all_reduce(values, op="min", group=process_group, label="offload fraction")
    free, fitting = values[0].item(), -values[1].item()
    return max(free, fitting)
