"""Where the host time of our steps goes: hooks of units, work on flat buffers, and waiting.

Two passes over the same steps. The first replaces the entry points of the hooks, and the functions
that they call besides bookkeeping, by timed ones. The second asks torch's profiler how long
collectives ran on gloo's own threads and compares that with how long the main thread waited for
them; NCCL runs on streams, where the host never waits, so its share is None.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch.profiler import ProfilerActivity, profile

from megafsdp.buffer.comm import collectives
from megafsdp.buffer.comm.collectives import Pending
from megafsdp.device.memory import FlatStorage
from megafsdp.fsdp.params.gather_sources import CastOnGather
from megafsdp.fsdp.params.gradient_reducer import GradientReducer
from megafsdp.fsdp.runtime import agreement
from megafsdp.fsdp.runtime.schedule import FSDPContext
from megafsdp.fsdp.runtime.unit import FSDPUnit

_BOOKKEEPING = "bookkeeping"
_WAITING = "waiting"
ISSUING = "issuing"
_USAGE = "agreeing on usage"
_BLOCKING = (_WAITING, _USAGE)
# Autograd and modules call these; none calls another.
_HOOKS = (
    (FSDPUnit, "_pre_forward"),
    (FSDPUnit, "_post_forward"),
    (FSDPContext, "begin_backward"),
    (FSDPContext, "inputs_done"),
    (FSDPContext, "end_backward"),
)
# Parts of hooks besides bookkeeping. The time of an inner part does not count for the outer one.
_PARTS: tuple[tuple[Any, str, str], ...] = (
    (Pending, "wait", _WAITING),
    (agreement, "start_all_reduce", _USAGE),
    (collectives, "sum_shards", "summing"),
    (collectives, "write_scaled", "summing"),
    (GradientReducer, "_pack", "packing"),
    (CastOnGather, "input", "casting"),
    (FlatStorage, "allocate", "storage"),
    (FlatStorage, "release", "storage"),
    (collectives, "_all_gather_single", ISSUING),
    (collectives, "_reduce_scatter_single", ISSUING),
    (collectives, "_exchange", ISSUING),
)
# Collectives of data; the small all-reduces of the norm and of usage always block.
_GLOO_EVENTS = ("gloo:all_gather", "gloo:all_to_all")
_WARM_UP_STEPS = 3

Report = dict[str, dict[str, float] | float | None]


@dataclass
class HostTime:
    """Seconds by part, each without the parts inside it.

    Parts that block count by the clock, the others by the thread's processor time, which other load
    of the machine does not inflate.

    Attributes:
        seconds: ``bookkeeping`` is what hooks spend outside every other part.
        num_calls: Calls by part; for ``bookkeeping``, the number of hooks.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_calls: Counter[str] = field(default_factory=Counter)
    _inner_s: list[list[float]] = field(default_factory=list)

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return ``function`` with its own time added to ``part``, only inside hooks."""
        is_hook = part == _BOOKKEEPING
        which = 0 if part in _BLOCKING else 1

        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_hook and not self._inner_s:
                return function(*args, **kwargs)
            inner_s = [0.0, 0.0]
            self._inner_s.append(inner_s)
            start_s = (time.perf_counter(), time.thread_time())
            try:
                return function(*args, **kwargs)
            finally:
                spent_s = (time.perf_counter() - start_s[0], time.thread_time() - start_s[1])
                self._inner_s.pop()
                self.seconds[part] += spent_s[which] - inner_s[which]
                self.num_calls[part] += 1
                if self._inner_s:
                    outer_s = self._inner_s[-1]
                    outer_s[:] = [
                        outer + spent for outer, spent in zip(outer_s, spent_s, strict=True)
                    ]

        return call

    def clear(self) -> None:
        """Forget what was counted."""
        self.seconds.clear()
        self.num_calls.clear()


@contextlib.contextmanager
def timed_hooks() -> Iterator[HostTime]:
    """Time the hooks of units that are built inside the context."""
    host = HostTime()
    with contextlib.ExitStack() as stack:
        for owner, name in _HOOKS:
            timed = host.timed(getattr(owner, name), _BOOKKEEPING)
            stack.enter_context(mock.patch.object(owner, name, timed))
        for owner, name, part in _PARTS:
            timed = host.timed(getattr(owner, name), part)
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield host


def gloo_seconds(call: Callable[[], object]) -> float | None:
    """Return how long data collectives ran on gloo's threads in a call; None if none did."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() in _GLOO_EVENTS]
    return sum(e.duration_ns() for e in events) / 1e9 if events else None


def measure(build: Callable[[], Callable[[], object]], *, num_units: int, num_steps: int) -> Report:
    """Measure the steps of a freshly built side.

    Args:
        build: Builds the side and returns its step.
        num_units: Units of the model.
        num_steps: Steps to measure in each pass.

    Returns:
        ``hooks_ms_per_step`` by part, ``bookkeeping_ms_per_unit`` (forward and backward together),
        ``hooks_per_step``, and ``share_of_collective_time_not_waited_for``.
    """
    with timed_hooks() as host:
        step = build()
        for _ in range(_WARM_UP_STEPS):
            step()
        host.clear()
        for _ in range(num_steps):
            step()
        by_part = {part: 1e3 * s / num_steps for part, s in sorted(host.seconds.items())}
        num_hooks = host.num_calls[_BOOKKEEPING] / num_steps
        host.clear()
        running_s = gloo_seconds(lambda: [step() for _ in range(num_steps)])
        waiting_s = host.seconds[_WAITING]
    return {
        "hooks_ms_per_step": by_part,
        "hooks_per_step": num_hooks,
        "bookkeeping_ms_per_unit": by_part[_BOOKKEEPING] / num_units,
        "share_of_collective_time_not_waited_for": (
            None if running_s is None else max(0.0, 1.0 - waiting_s / running_s)
        ),
    }
