"""What the door to collectives counts, against what torch dispatches."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp.buffer.comm.collectives import (
    all_gather,
    all_reduce,
    all_reduce_partials,
    barrier,
    record_collectives,
    reduce_scatter,
)
from tests.ranks import Ranks

pytestmark = pytest.mark.native


class _C10dCounter(TorchDispatchMode):
    """Count c10d operators and the bytes of their largest tensor argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Count, then run."""
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg])]
            sizes = [t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.nbytes[name] += max(sizes)
        return func(*args, **(kwargs or {}))


def _counts_agree_with_c10d() -> tuple[Counter[str], Counter[str], Counter[str], Counter[str]]:
    world = dist.get_world_size()
    options = {"group": dist.group.WORLD, "label": ""}
    reducing = {"scale": 1.0, "accumulate": False, "reduce_dtype": torch.float32, **options}
    with _C10dCounter() as c10d, record_collectives() as ours:
        for _ in range(3):
            all_gather([torch.empty(32 * world)], [torch.zeros(32)], **options).wait()
        for _ in range(2):
            partial = torch.zeros(32 * world, dtype=torch.bfloat16)
            reduce_scatter([torch.empty(32)], [partial], **reducing).wait()
        all_reduce_partials(torch.empty(7), torch.zeros(7), **reducing).wait()
        all_reduce(torch.zeros(3))
    return ours.calls, ours.nbytes, c10d.calls, c10d.nbytes


def test_counters_agree_with_what_torch_dispatches(ranks: Ranks) -> None:
    """Calls and bytes are those that a dispatch mode sees; a reduce-scatter is an all-to-all."""
    for ours, nbytes, c10d, c10d_nbytes in ranks(4).run(_counts_agree_with_c10d):
        assert ours == Counter(all_gather=3, reduce_scatter=2, all_reduce=2)
        assert nbytes == Counter(
            all_gather=3 * 4 * 128, reduce_scatter=2 * 2 * 128, all_reduce=4 * 7 + 4 * 3
        )
        names = {
            "_allgather_base_": "all_gather",
            "alltoall_base_": "reduce_scatter",
            "allreduce_": "all_reduce",
        }
        assert Counter({names[k]: v for k, v in c10d.items()}) == ours
        assert Counter({names[k]: v for k, v in c10d_nbytes.items()}) == nbytes


def _records_see_their_span() -> tuple[int, int, int]:
    with record_collectives() as outer:
        with record_collectives():
            pass  # Both records are empty, hence equal; only the inner one closes.
        barrier()
        with record_collectives() as inner:
            barrier()
        barrier()
    barrier()
    return outer.calls["barrier"], inner.calls["barrier"], len(outer.events)


def test_records_count_what_happens_while_they_are_open(ranks: Ranks) -> None:
    """Three calls in the outer context, one in the inner, none after."""
    assert ranks(2).run(_records_see_their_span) == [(3, 1, 3)] * 2
