"""What a step ahead is guessed from: numbers that come late, and the outlook they give."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace

import pytest
import torch

from megafsdp import microbatch
from megafsdp.device.host_copies import Copies, ThreadLink, Transfer
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.offload_guess import ClippingForecast, DeferredScalar, Guesser
from tests.optimizer.offload.hybrid_runs import (
    Case,
    HeldTarget,
    assert_same,
    backward,
    bits,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks


class _LateLink(ThreadLink):
    """A link whose device comes to numbers, and to each bucket, when it is told so.

    Args:
        num_buckets: How many there are.
    """

    def __init__(self, num_buckets: int = 0) -> None:
        super().__init__()
        self.may_send_numbers = threading.Event()
        self.may_send = [threading.Event() for _ in range(num_buckets)]
        self.num_fences = 0
        self._gates = iter(self.may_send)

    def fence(self) -> None:
        self.num_fences += 1

    def to_host(self, copies: Copies) -> Transfer:
        is_number = copies[0][0].ndim == 0
        held = torch.zeros(()).as_subclass(HeldTarget)
        held.may_begin = self.may_send_numbers if is_number else next(self._gates)
        super().to_host([(held, torch.zeros(()))])
        return super().to_host(copies)


def test_a_number_of_the_device_comes_over_the_link() -> None:
    """After what is queued, and as it was then; a number of the host is there at once."""
    link = _LateLink()
    assert DeferredScalar(0.5, link).is_there and DeferredScalar(0.5, link).value() == 0.5
    source = torch.tensor(3.0)
    late = DeferredScalar(source, link)
    source.zero_()
    assert link.num_fences == 1 and not late.is_there
    link.may_send_numbers.set()
    assert late.value() == 3.0 and late.is_there
    link.close()


@pytest.mark.parametrize("norms", [[3.0, 4.1], [math.nan], [math.inf]])
def test_an_outlook_is_lost_when_the_norm_must_clip(norms: list[float]) -> None:
    """As soon as the gradients seen so far have such a norm, unscaled, or none at all."""
    outlook = ClippingForecast(0.5, 2.5)
    for norm in norms[:-1]:
        outlook.see(norm)
        assert not outlook.is_hopeless
    outlook.see(norms[-1])
    assert outlook.is_hopeless


def test_the_guess_of_a_step_is_made_of_the_last() -> None:
    """Its loss scale unscales the next step's gradients; "auto" waits for a norm."""
    link = ThreadLink()
    guesser = Guesser("auto")
    assert guesser.outlook(1.0) is None
    guesser.note_step(torch.tensor(0.7), torch.tensor(4.0), link)
    outlook = guesser.outlook(1.0)
    assert outlook is not None and outlook.scale == 0.25
    guesser.note_step(torch.tensor(5.0), None, link)
    assert guesser.outlook(1.0) is None
    assert guesser.outlook(2.0) is not None
    assert Guesser(speculate=False).outlook(1.0) is None
    link.close()


def _ahead_while_the_factor_is_late() -> int:
    """Return how many of four buckets ran ahead of a factor that step() left on the device."""
    case = Case(1.0, max_grad_norm=100.0, speculate=True)
    link = _LateLink(num_buckets=4)
    found = []
    for fraction in (None, 1.0):
        net = make_net(case)
        options = {} if fraction is None else {"link": link}
        optimizer = make_optimizer(net, replace(case, fraction=fraction), **options)
        with microbatch(net, is_last=True):
            backward(net, seed=0)
        optimizer.step()
        if isinstance(optimizer, HybridDeviceOptimizer):
            counts = optimizer.offload_counts
            for number, gate in enumerate(link.may_send, start=1):
                gate.set()
                end_s = time.monotonic() + 10
                while counts.speculated < number and time.monotonic() < end_s:
                    time.sleep(0.001)
            num_ahead = counts.speculated
            assert counts.committed == 0
            link.may_send_numbers.set()
            optimizer.synchronize()
            assert counts.committed == num_ahead
        found.append(bits(net, optimizer))
    assert_same(found[1], found[0])
    return num_ahead


def test_steps_ahead_run_while_their_factor_is_not_there(ranks: Ranks) -> None:
    """A step that only lacks its factor is not waited for in their stead."""
    assert ranks(2).run(_ahead_while_the_factor_is_late) == [4, 4]
