"""Optimizer and parameters on the host: copies that are late, or early, change no bit."""

from __future__ import annotations

from megafsdp import OffloadPolicy
from tests.ranks import Ranks
from tests.stand_in.device import Order
from tests.stand_in.runs import FP32, Case, differences, train, with_orders

HOST = {"offload_policy": OffloadPolicy(params=True)}
ALL = {"offload_fraction": 1.0}
CASES = {
    "optimizer": Case(offload=ALL, is_odd=True),
    "optimizer, repeats": Case(offload=ALL, repeats=True),
    "optimizer, zeros": Case({"strategy": "optim"}, ALL, clears="to zeros", says_last=False),
    "optimizer, added": Case(offload=ALL, clears="never", policy=FP32),
    "optimizer, half, ahead": Case(
        offload={"offload_fraction": 0.5, "max_grad_norm": 1e3, "speculate": True}
    ),
    "optimizer, ahead, clipped": Case(
        {"strategy": "optim"},
        {"offload_fraction": 1.0, "max_grad_norm": 4.5, "speculate": True},
        num_microbatches=1,
    ),
    "optimizer, replicated": Case({"strategy": "no_shard"}, ALL, policy=FP32),
    "parameters": Case(HOST, is_odd=True),
    "parameters, plain loop": Case(HOST, policy=FP32, says_last=False),
    "parameters, added": Case(HOST | {"strategy": "optim"}, clears="never"),
    "parameters, SGD": Case(HOST, is_sgd=True, fails=True),
}

QUICK = {
    "optimizer": Order.COMPUTE_FIRST,
    "optimizer, half, ahead": Order.COPIES_FIRST,
    "parameters": Order.COMPUTE_FIRST,
    "parameters, plain loop": Order.LAZY,
    "parameters, SGD": Order.COPIES_FIRST,
}
NUM_RANKS = 1
RUN = train


@with_orders(CASES, QUICK)
def test_offload_on_a_device_changes_no_bit(ranks: Ranks, name: str, order: Order) -> None:
    """Losses, weights and states of a run whose host is ahead of all streams."""
    assert ranks(1).run(differences, CASES[name], [order]) == [[]]
