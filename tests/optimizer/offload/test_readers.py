"""Who reads parameters or states right after step() reads what the host's step makes of them."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from megafsdp import full_tensor, mark_main_weights_changed, microbatch
from megafsdp.buffer.dtensor.busy_memory import is_any_in_use
from megafsdp.optimizer.offload.bucket_step import BucketStep
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.optimizer.offload.hybrid_runs import Case, backward, make_net, make_optimizer
from tests.ranks import Ranks

Values = list[torch.Tensor]


def _average(parameters: list[nn.Parameter]) -> Values:
    averages = [torch.zeros_like(p) for p in parameters]
    torch._foreach_lerp_(averages, [p.detach() for p in parameters], 0.5)
    return [full_tensor(a) for a in averages]


def _edited(parameters: list[nn.Parameter]) -> Values:
    with torch.no_grad():
        torch._foreach_mul_(parameters, 2.0)
    return [full_tensor(p) for p in parameters]


READERS: dict[str, Callable[[list[nn.Parameter]], Values]] = {
    "norms": lambda parameters: [full_tensor(p.detach().norm()) for p in parameters],
    "arithmetic": lambda parameters: [full_tensor(p.detach() + 1.0) for p in parameters],
    "average": _average,
    "edit": _edited,
    "full_tensor": lambda parameters: [full_tensor(p) for p in parameters],
    "to_local": lambda parameters: [p.detach().to_local().clone() for p in parameters],
    "local": lambda parameters: [p.local.clone() for p in parameters],
    "deepcopy": lambda parameters: [copy.deepcopy(p).local for p in parameters],
}


@contextmanager
def _held_worker() -> Iterator[threading.Event]:
    """Hold each bucket's step back until the event is set; open it in the end, whatever fails."""
    may_run, inner = threading.Event(), BucketStep.run

    def late(step: BucketStep) -> None:
        assert may_run.wait(120), "the gate was opened"
        inner(step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketStep, "run", late)
        try:
            yield may_run
        finally:
            may_run.set()


def _read(readers: Sequence[str], case: Case) -> tuple[list[Values], list[bool]]:
    """Read in another way after each step."""
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    parameters = [p for p in net.parameters() if p.requires_grad]
    found, in_use = [], []
    # Of replicated parameters step() itself waits.
    is_sharded = case.strategy != "no_shard"
    with _held_worker() as may_run:
        for seed, how in enumerate(readers):
            with microbatch(net, is_last=True):
                backward(net, seed)
            may_run.clear()
            # So late that whoever does not wait comes before it.
            opening = threading.Timer(0.05, may_run.set)
            if not is_sharded:
                opening.start()
            optimizer.step()
            in_use.append(is_any_in_use())
            if is_sharded:
                opening.start()
            found.append(READERS[how](parameters))
            mark_main_weights_changed(net)
            opening.join()
            in_use.append(is_any_in_use())
            optimizer.zero_grad()
    if isinstance(optimizer, HybridDeviceOptimizer) and case.max_grad_norm is not None:
        assert (optimizer.offload_counts.committed > 0) is case.speculate
    return found, in_use


@functools.cache
def _without_offload(readers: tuple[str, ...], case: Case) -> list[Values]:
    return _read(readers, case)[0]


def _reads_what_is_stepped(readers: tuple[str, ...], case: Case) -> None:
    wanted = _without_offload(readers, replace(case, fraction=None, speculate="auto"))
    found, in_use = _read(readers, case)
    assert in_use == [case.strategy != "no_shard", False] * len(readers)
    for how, ours, theirs in zip(readers, found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs)), how


@pytest.mark.parametrize("speculate", [True, False])
def test_readers_wait_for_the_step_on_the_host(ranks: Ranks, speculate: bool) -> None:
    """By operation, in lists, in place, by shards and whole: the bits of FusedAdam."""
    case = Case(1.0, speculate=speculate, max_grad_norm=1e6, num_blocks=1)
    # Each once as the first to read: it alone meets steps that are still under way.
    ranks(2).run(_reads_what_is_stepped, tuple(READERS), case)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "hsdp"])
def test_readers_wait_in_every_strategy(ranks: Ranks, strategy: str) -> None:
    """Replicated parameters are plain DTensors of torch: there ``step`` itself has waited."""
    case = Case(1.0, strategy=strategy, num_blocks=1)
    ranks(2).run(_reads_what_is_stepped, ("full_tensor", "norms"), case)


def _readers_beside_a_waiting_thread() -> list[bool]:
    """Return whether readers of each unit still wait after another thread has begun to wait."""
    net = make_net(Case(num_blocks=1))
    optimizer = make_optimizer(net, Case(1.0))
    assert isinstance(optimizer, HybridDeviceOptimizer)
    weights = [net.embedding.weight, net.blocks[0].up.weight]
    with _held_worker() as may_run:
        backward(net, 0)
        optimizer.step()
        waiter = threading.Thread(target=optimizer.synchronize)
        waiter.start()
        waiter.join(0.05)
        readers = [threading.Thread(target=READERS["local"], args=([each],)) for each in weights]
        for reader in readers:
            reader.start()
        readers[0].join(0.05)
        readers[1].join(0.05)
        are_waiting = [reader.is_alive() for reader in readers]
        may_run.set()
        for thread in (waiter, *readers):
            thread.join()
    return are_waiting


def test_a_thread_that_waits_for_a_step_lets_no_other_pass(ranks: Ranks) -> None:
    """Readers on other threads find the step until it has ended."""
    assert ranks(2).run(_readers_beside_a_waiting_thread) == [[True, True]] * 2
