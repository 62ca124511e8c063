"""What profilers see of a step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import torch

from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
_ONCE = ("pre_forward", "post_forward", "pre_backward", "post_backward", "reduce_scatter")


def _ranges() -> tuple[Counter[str], list[tuple[int, int]], list[str]]:
    net = shard(Net())
    batch = mine(batches(1)[0])
    net(*batch).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        net(*batch).backward()
    assert profiler.profiler is not None
    events = [
        e for e in profiler.profiler.kineto_results.events() if e.name().startswith("megafsdp::")
    ]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]
    names = Counter(e.name().removeprefix("megafsdp::") for e in events)
    return names, sorted(spans), ["Net", *(f"blocks.{i}" for i in range(3))]


def test_profilers_see_balanced_ranges_named_by_unit(ranks: Ranks) -> None:
    """Every hook of every unit once, every collective, and no two that overlap by half."""
    for names, spans, units in ranks(2).run(_ranges):
        for unit in units:
            for what in _ONCE:
                assert names[f"{what} {unit}"] == 1, (what, unit)
            assert names[f"all_gather {unit}"] == (1 if unit in ("Net", "blocks.2") else 2)
        for (start, stop), (other_start, other_stop) in itertools.combinations(spans, 2):
            assert other_start >= stop or (start <= other_start and other_stop <= stop)
