"""Optimizer and parameters on the host: copies that are late, or early, change no bit."""

from __future__ import annotations

import pytest

from megafsdp import OffloadPolicy
from tests.ranks import Ranks
from tests.stand_in.device import Order
from tests.stand_in.runs import FP32, Case, differences

AHEAD = {"max_grad_norm": 1e3, "speculate": True}
HOST = {"offload_policy": OffloadPolicy(params=True)}
CASES = {
    "all": Case(offload={"offload_fraction": 1.0}),
    "half, ahead": Case(offload={"offload_fraction": 0.5, **AHEAD}),
    "all, clipped, ahead": Case(
        {"strategy": "optim"},
        {"offload_fraction": 1.0, "max_grad_norm": 4.5, "speculate": True},
        num_microbatches=1,
    ),
    "all, replicated": Case({"strategy": "no_shard"}, {"offload_fraction": 1.0}, policy=FP32),
    "parameters": Case(HOST),
    "parameters, plain loop": Case(HOST, policy=FP32, says_last=False),
    "parameters, added": Case(HOST | {"strategy": "optim"}, keeps_grads=True),
}


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("name", CASES)
def test_offload_on_a_device_changes_no_bit(ranks: Ranks, name: str, order: Order) -> None:
    """Losses, weights and states of a run whose host is ahead of all streams."""
    assert ranks(1).run(differences, CASES[name], [order]) == [[]]
