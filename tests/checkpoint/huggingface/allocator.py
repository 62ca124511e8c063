"""The CPU allocator's own account of what a call allocates."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


def allocated(action: Callable[[], object]) -> int:
    """Return the most bytes beyond what was alive, by the CPU allocator's own events."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    # What earlier tests have left would be freed meanwhile and lower the count.
    gc.collect()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
