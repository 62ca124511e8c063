"""Every way to work ahead of step() has the bits of FusedAdam without offload."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest

from megafsdp.optimizer.offload.bucket_step import OffloadCounts
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    FP32,
    Case,
    assert_same,
    make_net,
    make_optimizer,
    train,
)
from tests.ranks import Ranks

# Norms of the toy fall through them: the first steps are clipped, the last ones are not.
_LIMITS = {1: 5.0, 3: 4.0}
_NUM_STEPS = 6


@functools.cache
def _without_offload(case: Case) -> dict[str, Any]:
    net = make_net(case)
    return train(net, make_optimizer(net, case), case, _NUM_STEPS)


def _trajectories_agree(case: Case) -> OffloadCounts:
    limit = _LIMITS[case.num_microbatches]
    case = replace(case, max_grad_norm=limit)
    wanted = _without_offload(replace(case, fraction=None, overlap=True, speculate="auto"))
    assert min(wanted["norms"]) < limit < max(wanted["norms"]), "some steps clip, some do not"
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    found = train(net, optimizer, case, _NUM_STEPS)
    assert_same(found, wanted)
    return optimizer.offload_counts


def _check(ranks: Ranks, num_ranks: int, case: Case) -> None:
    for counts in ranks(num_ranks).run(_trajectories_agree, case):
        assert counts.speculated == counts.committed + counts.replayed
        # A blocking step leaves nothing to run ahead; a plain loop may clip by itself.
        may_begin = case.fraction and case.overlap and case.optimizer_may_start
        if may_begin and case.speculate is True:
            assert counts.committed > 0
            assert counts.replayed > 0
        else:
            assert counts.speculated == 0


def _label(value: object) -> str:
    if not isinstance(value, Case):
        return str(value)
    words = [value.strategy, f"f{value.fraction}", f"{value.num_microbatches}mb"]
    words += ["overlap" if value.overlap else "blocking", f"speculate-{value.speculate}"]
    return "-".join([*words, "handed" if value.optimizer_may_start else "plain"])


# Every pair of values of two columns is in one of the rows.
PAIRWISE = [
    (2, Case(1.0, True, None, 1, "optim", BF16, True, True)),
    (4, Case(0.5, True, None, 3, "optim_grads_params", BF16, True, True)),
    (2, Case(0.3, True, None, 3, "hfsdp", BF16, True, True)),
    (4, Case(1.0, False, None, 3, "hfsdp", BF16, False, False)),
    (2, Case(0.5, False, None, 1, "optim_grads_params", BF16, False, True)),
    (4, Case(0.0, True, None, 1, "hfsdp", BF16, True, False)),
    (2, Case(0.0, False, None, 3, "optim", BF16, False, True)),
    (4, Case(0.3, False, None, 1, "optim", BF16, True, False)),
    (2, Case(1.0, True, None, 3, "optim_grads_params", BF16, False, False)),
    (2, Case(0.5, True, None, 1, "hfsdp", BF16, True, False)),
    (4, Case(0.3, True, None, 1, "optim_grads_params", BF16, False, True)),
    (4, Case(0.5, False, None, 3, "optim", BF16, True, False)),
    (2, Case(0.0, True, None, 3, "optim_grads_params", BF16, True, True)),
    (2, Case(1.0, True, None, 1, "optim_grads_params", FP32, True, True)),
]
PRODUCT = [
    (num_ranks, Case(f, overlap, None, num, strategy, BF16, speculate, optimizer_may_start))
    for num_ranks, f, overlap, speculate, num, strategy, optimizer_may_start in itertools.product(
        (2, 4),
        (0.0, 0.3, 0.5, 1.0),
        (True, False),
        (True, False),
        (1, 3),
        ("optim", "optim_grads_params", "hfsdp"),
        (True, False),
    )
]


@pytest.mark.parametrize(("num_ranks", "case"), PAIRWISE, ids=_label)
def test_work_ahead_of_the_step_changes_no_bit(ranks: Ranks, num_ranks: int, case: Case) -> None:
    """Losses, norms, weights and states, in steps that clip and in steps that do not."""
    _check(ranks, num_ranks, case)


@pytest.mark.matrix("offload")
@pytest.mark.parametrize(("num_ranks", "case"), PRODUCT, ids=_label)
def test_every_way_to_work_ahead_changes_no_bit(ranks: Ranks, num_ranks: int, case: Case) -> None:
    """The whole product of fractions, overlap, guessing, microbatches, strategies and loops."""
    _check(ranks, num_ranks, case)
