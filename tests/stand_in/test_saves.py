"""Background saves from a device: what is saved is what was there, whatever training does next."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from megafsdp import OffloadPolicy
from megafsdp.checkpoint import async_save, load
from tests.ranks import Ranks
from tests.stand_in.device import Event, Order, on_device
from tests.stand_in.runs import (
    Case,
    bits,
    differences,
    losses_of_steps,
    make_net,
    make_optimizer,
    with_orders,
)

CASES = {
    "on the device": Case(),
    "half on the host": Case(offload={"offload_fraction": 0.5}),
    "parameters on the host": Case({"offload_policy": OffloadPolicy(params=True)}),
}


@contextlib.contextmanager
def _slow_save() -> Iterator[None]:
    """Have the save's thread wait for no event before this context has ended."""
    has_ended, synchronize = threading.Event(), Event.synchronize

    def late(event: Event) -> None:
        if threading.current_thread().name.startswith("megafsdp save"):
            assert has_ended.wait(60)
        synchronize(event)

    with mock.patch.object(Event, "synchronize", late):
        try:
            yield
        finally:
            has_ended.set()


def _saved(case: Case) -> dict[str, Any]:
    """Return what the save of step 1 has, and where training has come to meanwhile."""
    net = make_net(case)
    net.register_buffer("average", on_device(torch.arange(1024.0)))
    optimizer = make_optimizer(net, case)
    steps = losses_of_steps(net, optimizer, case)
    next(steps)
    with tempfile.TemporaryDirectory() as root:
        with _slow_save():
            pending = async_save(root, step=1, model=net, optimizer=optimizer)
            net.get_buffer("average").zero_()
            losses = [next(steps)]
        losses += steps
        pending.result()
        other = make_net(case)
        other.register_buffer("average", on_device(torch.zeros(1024)))
        loaded = make_optimizer(other, case)
        load(root, model=other, optimizer=loaded)
    found = {f"loaded {name}": value for name, value in bits(other, loaded).items()}
    found["loaded average"] = other.get_buffer("average").tolist()
    return found | bits(net, optimizer) | {"losses": torch.stack(losses).tolist()}


QUICK = {"on the device": Order.COMPUTE_FIRST, "half on the host": Order.COPIES_FIRST}
NUM_RANKS = 1
RUN = _saved


@with_orders(CASES, QUICK)
def test_a_background_save_has_what_was_there(ranks: Ranks, name: str, order: Order) -> None:
    """Weights, states and a buffer of the step that was saved, and of the run that went on."""
    assert ranks(1).run(differences, CASES[name], [order], _saved) == [[]]
