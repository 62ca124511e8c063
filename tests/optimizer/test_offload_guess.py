"""What a step ahead is guessed from: numbers that come late, and the outlook they give."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from megafsdp.device.link import Copies, ThreadLink, Transfer
from megafsdp.optimizer.offload_guess import Guesser, LateNumber, Outlook


class _HeldLink(ThreadLink):
    """A link whose device has not come to the copies until it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_begin = threading.Event()
        self.num_fences = 0

    def fence(self) -> None:
        self.num_fences += 1

    def to_host(self, copies: Copies) -> Transfer:
        held = [(torch.zeros(()).as_subclass(_Held), torch.zeros(()))]
        _Held.may_begin = self.may_begin
        super().to_host(held)
        return super().to_host(copies)


class _Held(torch.Tensor):
    may_begin: threading.Event

    def copy_(self, *args: object, **kwargs: object) -> torch.Tensor:
        self.may_begin.wait()
        return super().copy_(*args, **kwargs)


def test_a_number_of_the_device_comes_over_the_link() -> None:
    """After what is queued, and as it was then; a number of the host is there at once."""
    link = _HeldLink()
    assert LateNumber(0.5, link).is_there and LateNumber(0.5, link).value() == 0.5
    source = torch.tensor(3.0)
    late = LateNumber(source, link)
    source.zero_()
    assert link.num_fences == 1 and not late.is_there
    link.may_begin.set()
    assert late.value() == 3.0 and late.is_there
    link.close()


@pytest.mark.parametrize("norms", [[3.0, 4.1], [math.nan], [math.inf]])
def test_an_outlook_is_lost_when_the_norm_must_clip(norms: list[float]) -> None:
    """As soon as the gradients seen so far have such a norm, unscaled, or none at all."""
    outlook = Outlook(0.5, 2.5)
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
