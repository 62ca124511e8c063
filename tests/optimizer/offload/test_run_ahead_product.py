"""Every way to work ahead of step() has the bits of FusedAdam without offload."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megafsdp import MixedPrecisionPolicy
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.run_ahead import OffloadCounts
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
_LIMITS = {1: 5.5, 3: 4.5}
_NUM_STEPS = 4


def _trajectories_agree(cases: list[Case]) -> list[OffloadCounts]:
    """Compare cases that differ in nothing that FusedAdam without offload knows of."""
    limit = _LIMITS[cases[0].num_microbatches]
    cases = [replace(case, max_grad_norm=limit) for case in cases]
    (reference,) = {replace(c, fraction=None, overlap=True, speculate="auto") for c in cases}
    net = make_net(reference)
    wanted = train(net, make_optimizer(net, reference), reference, _NUM_STEPS)
    assert min(wanted["norms"]) < limit < max(wanted["norms"]), "some steps clip, some do not"
    counts = []
    for case in cases:
        net = make_net(case)
        optimizer = make_optimizer(net, case)
        assert isinstance(optimizer, HybridDeviceOptimizer)
        assert_same(train(net, optimizer, case, _NUM_STEPS), wanted)
        counts.append(optimizer.offload_counts)
    return counts


def _check(ranks: Ranks, num_ranks: int, cases: list[Case]) -> None:
    for of_rank in ranks(num_ranks).run(_trajectories_agree, cases):
        for counts, case in zip(of_rank, cases, strict=True):
            assert counts.speculated == counts.committed + counts.replayed
            # A blocking step leaves nothing to run ahead; a plain loop may clip by itself.
            may_begin = case.fraction and case.overlap and case.optimizer_may_start
            if may_begin and case.speculate is True:
                assert counts.committed > 0
                assert counts.replayed > 0
            else:
                assert counts.speculated == 0


def _label(value: object) -> str:
    if not isinstance(value, list):
        return str(value)
    case = value[0]
    loop = "handed" if case.optimizer_may_start else "plain"
    words = [case.strategy, f"{case.num_microbatches}mb", loop]
    if case.policy is FP32:
        words.append("fp32")
    for way in value:
        ends = "overlap" if way.overlap else "blocking"
        words.append(f"f{way.fraction}_{ends}_{way.speculate}")
    return "-".join(words)


def _ways(
    strategy: str,
    num_microbatches: int,
    optimizer_may_start: bool,
    *ways: tuple[float, bool, bool],
    policy: MixedPrecisionPolicy = BF16,
) -> list[Case]:
    """Return cases with one reference and several (fraction, overlap, speculate)."""
    return [
        Case(f, overlap, None, num_microbatches, strategy, policy, speculate, optimizer_may_start)
        for f, overlap, speculate in ways
    ]


# Every value of a column is in one of the cases.
SELECTED = [
    (2, _ways("optim", 1, True, (1.0, True, True), (0.0, False, False))),
    (2, _ways("optim", 3, False, (0.5, False, True), (0.3, True, False))),
    (2, _ways("optim_grads_params", 1, False, (0.3, False, True), (0.0, True, False))),
    (2, _ways("hfsdp", 1, True, (0.3, True, True), (0.5, False, False))),
    (4, _ways("hfsdp", 3, False, (1.0, True, False), (0.0, False, True))),
    (2, _ways("optim_grads_params", 1, True, (1.0, True, True), policy=FP32)),
]
PRODUCT = [
    (num_ranks, _ways(strategy, num, optimizer_may_start, (f, overlap, speculate)))
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


@pytest.mark.parametrize(("num_ranks", "cases"), SELECTED, ids=_label)
def test_work_ahead_of_the_step_changes_no_bit(
    ranks: Ranks, num_ranks: int, cases: list[Case]
) -> None:
    """Losses, norms, weights and states, in steps that clip and in steps that do not."""
    _check(ranks, num_ranks, cases)


@pytest.mark.matrix("offload")
@pytest.mark.parametrize(("num_ranks", "cases"), PRODUCT, ids=_label)
def test_every_way_to_work_ahead_changes_no_bit(
    ranks: Ranks, num_ranks: int, cases: list[Case]
) -> None:
    """The whole product of fractions, overlap, guessing, microbatches, strategies and loops."""
    _check(ranks, num_ranks, cases)
