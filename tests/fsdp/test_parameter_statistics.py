"""Statistics of parameters and gradients that people log, and norms over units of two kinds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megafsdp import full_tensor, fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.op_rules import IS_DISPATCH_BYPASSED
from tests.buffer.dtensor.emulation import torch_2_11
from tests.fsdp.toy import (
    Net,
    assert_same_parameters,
    batches,
    mine,
    options_of_strategies,
    pair,
    shard,
    train_both,
)
from tests.ranks import Ranks

STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": torch.mean,
    "std": torch.std,
    "var": torch.var,
    "max": torch.max,
    "min": torch.min,
    "abs max": lambda t: t.abs().max(),
    "norm": torch.norm,
    "isnan": lambda t: t.isnan().any(),
    "isfinite": lambda t: t.isfinite().all(),
    "count_nonzero": torch.count_nonzero,
}


def _with_gradients(options: dict[str, object]) -> tuple[Net, Net]:
    reference = Net(num_blocks=1)
    net = shard(copy.deepcopy(reference), **options)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    return reference, net


def _are_those_of_one_process() -> None:
    for options in options_of_strategies():
        reference, net = _with_gradients(options)
        wanted = dict(reference.named_parameters())
        # Many rows, few rows of which some ranks have none, and vectors.
        for name in ("embedding.weight", "blocks.0.down.weight", "blocks.0.norm.bias"):
            parameter = net.get_parameter(name)
            assert parameter.grad is not None
            for key, statistic in STATISTICS.items():
                for own, full in ((parameter, wanted[name]), (parameter.grad, wanted[name].grad)):
                    with record_collectives() as record:
                        result = statistic(own.detach())
                    assert isinstance(result, DTensor) and not record.calls
                    torch.testing.assert_close(
                        result.full_tensor(),
                        statistic(full.detach()),
                        # Gradients differ by the order of their sum over ranks.
                        rtol=1e-4,
                        atol=1e-6,
                        msg=lambda m, n=name, k=key, o=options: f"{k} of {n}, {o}: {m}",
                    )
        # Before full_tensor() the parameter itself, which autograd watches, gives the same.
        weight = net.blocks[0].up.weight
        if IS_DISPATCH_BYPASSED and options.get("strategy") != "no_shard":
            with pytest.raises(NotImplementedError, match=r"'std within .*torch\.no_grad\(\)"):
                weight.std()
        else:
            assert torch.equal(weight.std().full_tensor(), weight.detach().std().full_tensor())


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_logged_statistics_are_those_of_one_process(ranks: Ranks, num_ranks: int) -> None:
    """Of every parameter and gradient, in every strategy, without a collective of the call."""
    ranks(num_ranks).run(_are_those_of_one_process)


def _mixed_units() -> None:
    reference = Net(num_blocks=1)
    net = copy.deepcopy(reference)
    fully_shard(net.blocks[0], strategy="no_shard")
    fully_shard(net)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    for order in (math.inf, 2.0):
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()], order)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()], order)
        torch.testing.assert_close(norm.full_tensor(), wanted, rtol=1e-4, atol=1e-6)


def test_norms_of_sharded_and_replicated_gradients_together(ranks: Ranks) -> None:
    """One list has gradients of two strategies."""
    ranks(3).run(_mixed_units)


class ByStatistics(torch.optim.Optimizer):
    """Divides gradients by norms that it changes in place, at a rate of numbers that it reads."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net.parameters(), {})

    def step(self, closure: Any = None) -> None:
        """Step the parameters."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.descent_step()

    def descent_step(self) -> None:
        """Step the parameters, as optimizers of several phases do; no hooks run."""
        with torch.no_grad():
            parameters = self.param_groups[0]["params"]
            grads = [p.grad for p in parameters]
            norms = torch._foreach_norm(grads)
            torch._foreach_clamp_min_(norms, 1e-3)
            for parameter, grad, norm in zip(parameters, grads, norms, strict=True):
                rate = 1e-2 + 1e-3 * grad.abs().sum().item() + 1e-3 * float(parameter.std())
                rate *= 1.0 + grad.max().item()
                if parameter.square().mean() > 1e-4:
                    rate *= 2
                parameter.sub_(grad / norm.mul_(2.0).sqrt_(), alpha=rate)


def _steps() -> None:
    for options in options_of_strategies():
        reference, net = pair(1, **options)
        train_both(reference, net, num_steps=2, make_optimizer=ByStatistics)
        assert_same_parameters(net, reference, rtol=1e-4, atol=1e-6)


def _phases() -> None:
    _, net = pair(1)
    net(*mine(batches(1)[0])).backward()
    copied = [copy.deepcopy(p) for p in net.parameters()]
    ByStatistics(net).step()
    wanted = [full_tensor(p.detach()) for p in net.parameters()]
    for parameter, own in zip(net.parameters(), copied, strict=True):
        with torch.no_grad():
            parameter.copy_(own)
    ByStatistics(net).descent_step()
    for parameter, whole in zip(net.parameters(), wanted, strict=True):
        assert torch.equal(full_tensor(parameter.detach()), whole)


def test_phases_of_a_step_that_are_called_alone_read_the_whole(ranks: Ranks) -> None:
    """``first_step()`` of SAM is no ``step()``, but all ranks run it."""
    ranks(2).run(_phases)


def _steps_on_2_11() -> None:
    with torch_2_11():
        _steps()


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_steps_read_and_change_statistics_of_the_whole(ranks: Ranks, num_ranks: int) -> None:
    """``item()``, ``float()``, ``bool()`` and changes in place, without a call of full_tensor()."""
    ranks(num_ranks).run(_steps)


def test_steps_read_statistics_of_the_whole_on_torch_2_11(ranks: Ranks) -> None:
    """Functions come to the rules by name there."""
    ranks(2).run(_steps_on_2_11)


def _logged_by_one_rank() -> None:
    net = shard(Net(num_blocks=1))
    optimizer = ByStatistics(net)
    batch = mine(batches(1)[0])
    weight = net.blocks[0].up.weight
    seen = []

    def log(*unused: object) -> None:
        if dist.get_rank() == 0:
            with torch.no_grad():
                seen.append(weight.norm())

    net.register_forward_hook(log)
    optimizer.register_step_pre_hook(log)
    optimizer.register_step_post_hook(log)
    optimizer.step(lambda: net(*batch).backward())
    # A closure that logs by itself, outside of the forward.
    torch.optim.SGD(net.parameters()).step(log)
    assert len(seen) == (4 if dist.get_rank() == 0 else 0)


def test_hooks_around_a_step_and_in_its_closure_may_log_on_one_rank(ranks: Ranks) -> None:
    """Only what the step itself computes is a collective."""
    ranks(2).run(_logged_by_one_rank)
