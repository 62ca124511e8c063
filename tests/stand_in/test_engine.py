"""Gathers and reductions between ranks whose completion is late, or early, change no bit."""

from __future__ import annotations

from megafsdp import OffloadPolicy
from tests.ranks import Ranks
from tests.stand_in.device import Order
from tests.stand_in.runs import FP32, Case, differences, train, with_orders

HOST = {"offload_policy": OffloadPolicy(params=True)}
CASES = {
    "ZeRO-1": Case({"strategy": "optim"}),
    "ZeRO-2": Case({"strategy": "optim_grads"}, says_last=False, clears="never"),
    "ZeRO-3": Case(),
    "ZeRO-3, odd": Case(is_odd=True),
    "ZeRO-3, fails": Case(fails=True),
    "ZeRO-3, two ahead": Case({"prefetch": 2}, policy=FP32),
    "ZeRO-3, slices": Case({"reshard_after_forward": 2}),
    "ZeRO-3, user's collectives": Case(comms="the user's"),
    "ZeRO-3, user's collectives, fails": Case(comms="the user's", fails=True),
    "ZeRO-3, user's collectives fail": Case(comms="failing"),
    "replicated": Case({"strategy": "no_shard"}),
    "parameters on the host": Case(HOST),
    "optimizer on the host": Case(offload={"offload_fraction": 0.5}),
    "HSDP": Case(mesh=(2, 1)),
    "HFSDP": Case({"outer_strategy": "optim"}, mesh=(2, 1)),
    "HFSDP, odd, repeats": Case(
        {"outer_strategy": "optim"}, mesh=(2, 1), is_odd=True, repeats=True
    ),
    "HFSDP, odd": Case({"outer_strategy": "optim"}, mesh=(2, 1), is_odd=True),
    "HFSDP, parameters on the host": Case(HOST | {"outer_strategy": "optim"}, mesh=(2, 1)),
}

QUICK = {
    "ZeRO-1": Order.COPIES_FIRST,
    "ZeRO-2": Order.RANDOM,
    "ZeRO-3, odd": Order.COMPUTE_FIRST,
    "HFSDP": Order.COMPUTE_FIRST,
    "ZeRO-3, user's collectives": Order.RANDOM,
    "ZeRO-3, user's collectives fail": Order.COMPUTE_FIRST,
}
NUM_RANKS = 2
RUN = train


@with_orders(CASES, QUICK)
def test_late_collectives_change_no_bit(ranks: Ranks, name: str, order: Order) -> None:
    """Losses, weights and states on each rank."""
    assert ranks(2).run(differences, CASES[name], [order]) == [[], []]
