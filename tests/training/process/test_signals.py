"""Requests to stop, and their agreement between ranks."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from megafsdp.training.process.signals import StopRequest
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_a_request_while_listening(number: int) -> None:
    """The process goes on, a second signal too, and the old handler comes back."""
    before = signal.getsignal(number)
    stop = StopRequest(CPU)
    with stop.listening():
        assert not stop.is_requested
        for _ in range(2):
            os.kill(os.getpid(), number)
        assert stop.is_requested
    assert signal.getsignal(number) is before


def _agreements() -> list[bool]:
    stop = StopRequest(CPU)
    seen = [stop.agreed()]
    if dist.get_rank() == 1:
        stop.request()
    seen.append(stop.is_agreed)
    seen.append(stop.agreed())
    return [*seen, stop.is_agreed]


def test_request_of_one_rank_is_agreed_by_all(ranks: Ranks) -> None:
    """No rank acts on its own flag; after the collective all do."""
    assert ranks(3).run(_agreements) == [[False, False, True, True]] * 3


def test_agreement_made_elsewhere_holds() -> None:
    """What the training step learned with the loss counts, and is never taken back."""
    stop = StopRequest(CPU)
    stop.record_agreement(2.0)
    stop.record_agreement(0.0)
    assert stop.is_agreed
    assert stop.agreed()
