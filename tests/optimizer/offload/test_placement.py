"""Which units are offloaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp.optimizer.offload import placement as offload_plan
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import groups_of, num_kept_on_device, zero_by_workers
from tests.optimizer.offload.hybrid_runs import Case, make_net, make_optimizer
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize(
    ("numels", "fraction", "kept"),
    [
        ([30, 10, 10, 10], 0.5, 1),
        ([60, 10, 10, 10], 0.5, 1),
        ([10, 10, 10, 60], 0.5, 3),
        ([10, 10], 0.0, 2),
        ([10, 10], 1.0, 0),
        ([10, 10], 0.75, 0),
        ([], 0.5, 0),
    ],
)
def test_the_front_stays_on_the_device(numels: list[int], fraction: float, kept: int) -> None:
    """Of two boundaries equally near the one that offloads more is taken."""
    assert num_kept_on_device(numels, fraction) == kept


@pytest.mark.parametrize("fraction", [-0.1, 1.5, True, "half", float("nan")])
def test_a_fraction_without_meaning_is_refused(fraction: object) -> None:
    """A number from 0 to 1 it must be."""
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="offload_fraction"):
        HybridDeviceOptimizer([parameter], offload_fraction=fraction)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("nbytes", [1, 4097, (9 << 21) + 5])
def test_slabs_are_zeroed_by_the_threads_of_the_kernels(
    monkeypatch: pytest.MonkeyPatch, num_threads: int, is_native: bool, nbytes: int
) -> None:
    """Every byte, and none beside them."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    memory = torch.full((nbytes + 2,), 0x7F, dtype=torch.uint8)
    zero_by_workers(memory[1:-1])
    assert not memory[1:-1].any()
    assert memory[0] == memory[-1] == 0x7F


def test_a_slab_is_touched_by_those_who_step_it_first(ranks: Ranks) -> None:
    """Before weights are copied to it and states are made."""
    ranks(1).run(_first_touch)


def _first_touch() -> None:
    net = make_net(Case())
    touched: list[int] = []
    inner = offload_plan.zero_by_workers

    def noted(memory: torch.Tensor) -> None:
        touched.append(memory.nbytes)
        inner(memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_plan, "zero_by_workers", noted)
        make_optimizer(net, Case(1.0))
    assert len(touched) == len(groups_of(net.parameters()))
    assert min(touched) > 0
