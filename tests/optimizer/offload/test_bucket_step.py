"""Steps on the host run beside the calling thread and are waited for where they must be."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megafsdp import microbatch
from megafsdp.device.host_copies import ThreadLink, _ThreadTransfer
from megafsdp.optimizer.offload.bucket_step import BucketStep
from megafsdp.optimizer.offload.run_ahead import AheadStep
from tests.optimizer.offload.hybrid_runs import (
    Case,
    assert_same,
    backward,
    local_bits,
    make_net,
    make_optimizer,
    train,
)
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


_PLACES = {"copy": (_ThreadTransfer, "run"), "update": (BucketStep, "_update")}
_PLACES["upload"] = (BucketStep, "_upload")


class _Gate:
    """Holds work beside this thread back at one of its places until it is opened."""

    def __init__(self, patch: pytest.MonkeyPatch, place: str) -> None:
        self.event = threading.Event()
        self.num_passed = 0
        owner, name = _PLACES[place]
        inner = getattr(owner, name)

        def held_back(step: object, *arguments: object) -> None:
            assert self.event.wait(120), "the gate was opened"
            # Before the place itself: who waits for what happens there may look right after it.
            self.num_passed += 1
            inner(step, *arguments)

        patch.setattr(owner, name, held_back)


@contextmanager
def _held_back(place: str) -> Iterator[_Gate]:
    """Put up a gate that is open in the end, whatever fails: threads must be able to end."""
    with pytest.MonkeyPatch.context() as patch:
        gate = _Gate(patch, place)
        try:
            yield gate
        finally:
            gate.event.set()


@functools.cache
def _losses_without_offload() -> list[float]:
    net = make_net(Case())
    return train(net, make_optimizer(net, Case()), Case())["losses"]


def _step_returns_first(place: str) -> None:
    case = Case(1.0)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    losses = []
    for seed in range(3):
        losses.append(backward(net, seed))
        with _held_back(place) as gate:
            optimizer.step()
            assert not gate.num_passed, "step() came back before the worker was done"
            if seed % 2:
                # Opened by another thread while this one waits for gradients to be read, in place.
                threading.Timer(0.05, gate.event.set).start()
                optimizer.zero_grad(set_to_none=False)
                assert place != "copy" or gate.num_passed
            else:
                optimizer.zero_grad()
            gate.event.set()
            optimizer.synchronize()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    # The schedule of the other run multiplies in another way: rates, not bits, are equal.
    assert losses == pytest.approx(_losses_without_offload(), rel=1e-6)


@pytest.mark.parametrize("place", list(_PLACES))
def test_step_returns_while_the_worker_is_held_back(ranks: Ranks, place: str) -> None:
    """At each of its three places; clearing gradients waits where it must."""
    ranks(2).run(_step_returns_first, place)


def _forward_waits_for_its_own_bucket() -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0))
    backward(net, 0)
    optimizer.step()
    optimizer.zero_grad()
    backward(net, 1)
    events: list[str] = []
    inner = BucketStep._upload

    def slowly(step: BucketStep) -> None:
        if step.bucket.group.label == "blocks.1":
            # The next block's bucket, which is gathered ahead in other steps, comes only then.
            assert ran.wait(60), "block 0 ran without waiting for block 1"
        inner(step)
        events.append(f"uploaded {step.bucket.group.label}")

    ran = threading.Event()

    def note(*unused: object) -> None:
        events.append("ran blocks.0")
        ran.set()

    net.blocks[0].register_forward_hook(note)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStep, "_upload", slowly)
        try:
            optimizer.step()
            optimizer.zero_grad()
            backward(net, 2)
        finally:
            ran.set()
        optimizer.synchronize()
    assert events.index("ran blocks.0") < events.index("uploaded blocks.1")
    assert events.index("uploaded blocks.0") < events.index("ran blocks.0")


def test_a_unit_waits_for_its_own_bucket_only(ranks: Ranks) -> None:
    """The first block runs while the next one's bucket is on its way."""
    ranks(2).run(_forward_waits_for_its_own_bucket)


def _accumulates_after_a_step() -> None:
    """Run two backwards, step, backward again without clearing, step."""
    found = []
    for fraction in (None, 1.0):
        net = make_net(Case(num_blocks=1))
        optimizer = make_optimizer(net, Case(fraction))
        with _held_back("copy") as gate:
            for seed in range(3):
                backward(net, seed)
                gate.event.clear()
                optimizer.step()
                threading.Timer(0.05, gate.event.set).start()
            optimizer.synchronize() if fraction else None
        found.append(local_bits(net, optimizer))
    assert_same(found[1], found[0])


def test_a_backward_that_adds_to_gradients_waits_until_they_are_read(ranks: Ranks) -> None:
    """Nothing clears the gradients between the steps."""
    ranks(2).run(_accumulates_after_a_step)


def _failure_surfaces(place: str) -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0))
    backward(net, 0)
    with pytest.MonkeyPatch.context() as patch:
        if place == "copy back":
            inner = ThreadLink.to_device
            broken = [(_NoMemory(), torch.zeros(1))]
            patch.setattr(ThreadLink, "to_device", lambda link, copies: inner(link, broken))
        else:
            patch.setattr(*_FAILING[place], _fails)
        optimizer.step()
        for use in (optimizer.step, lambda: backward(net, 1), net.state_dict):
            with pytest.raises(RuntimeError, match="no host memory") as error:
                use()
            causes = [error.value.__cause__]
            while causes[-1] is not None:
                causes.append(causes[-1].__cause__)
            assert isinstance(causes[-2], MemoryError), causes


class _NoMemory:
    """A target without memory."""

    def copy_(self, source: torch.Tensor) -> None:
        """Fail."""
        raise MemoryError("no host memory")


def _fails(*unused: object) -> None:
    raise MemoryError("no host memory")


_FAILING = {
    "copy": (_ThreadTransfer, "_run"),
    "update": (BucketStep, "_update"),
    "upload": (BucketStep, "_upload"),
}


@pytest.mark.parametrize("place", [*_FAILING, "copy back"])
def test_a_failure_of_the_worker_is_raised_with_its_cause(ranks: Ranks, place: str) -> None:
    """In the next step, the next forward and the state dict, wherever it happened."""
    ranks(2).run(_failure_surfaces, place)


def _threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("megafsdp-"))


def _no_thread_outlives(end: str) -> tuple[list[str], list[str]]:
    before = _threads()
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0, max_grad_norm=1e3, speculate=True))
    with pytest.MonkeyPatch.context() as patch:
        if end == "failed":
            patch.setattr(BucketStep, "_upload", _fails)
        with microbatch(net, is_last=True):
            backward(net, 0)
        if end != "begun":
            optimizer.step()
        if end == "failed":
            with pytest.raises(RuntimeError, match="no host memory"):
                optimizer.synchronize()
        alive = _threads()
        if end == "in a cycle":
            optimizer.itself = optimizer
        del optimizer
        gc.collect()
        left = _threads()
    # The model outlives its optimizer, and what it was doing.
    if end != "failed":
        backward(net, 1)
    return alive, [name for name in left if name not in before]


@pytest.mark.parametrize("end", ["begun", "stepped", "failed", "in a cycle"])
def test_no_thread_outlives_the_optimizer(ranks: Ranks, end: str) -> None:
    """They end when it is collected, in the middle of what they do or after a failure."""
    for alive, left in ranks(2).run(_no_thread_outlives, end):
        assert "megafsdp-offload" in alive
        assert left == []


def _stressed(num_steps: int) -> None:
    """Delay copies and steps at random: the bits of a run without offload, and without delays."""
    case = Case(0.5, max_grad_norm=0.5)
    wanted_net = make_net(case)
    wanted = train(
        wanted_net, make_optimizer(wanted_net, replace(case, fraction=None)), case, num_steps
    )
    net = make_net(case)
    generator = random.Random(dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in [*_PLACES.values(), (AheadStep, "_run")]:
            inner = getattr(owner, name)

            def late(step: object, *given: object, inner: Callable[..., None] = inner) -> None:
                time.sleep(generator.random() * 2e-3)
                inner(step, *given)

            patch.setattr(owner, name, late)
        found = train(net, make_optimizer(net, case), case, num_steps)
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "num_steps", [12, pytest.param(200, marks=pytest.mark.matrix("offload-delays"))]
)
def test_random_delays_of_copies_and_steps_change_no_bit(ranks: Ranks, num_steps: int) -> None:
    """Steps with clipping, each place of each bucket delayed at random."""
    ranks(2).run(_stressed, num_steps)


def _blocking_step_ends() -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0, overlap=False))
    backward(net, 0)
    ended = []
    inner = BucketStep._upload

    def late(step: BucketStep) -> None:
        time.sleep(0.02)
        inner(step)
        ended.append(step.bucket.group.label)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStep, "_upload", late)
        optimizer.step()
        assert len(ended) == 4, "all units have been stepped"


def test_a_step_without_overlap_ends_with_the_worker(ranks: Ranks) -> None:
    """Nothing is under way when it returns."""
    ranks(2).run(_blocking_step_ends)
