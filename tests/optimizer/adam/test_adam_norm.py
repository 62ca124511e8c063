"""A norm that is measured ahead of the step clips as the step's own would, once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, full_tensor
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.fsdp.toy import Net, batches, mine, shard
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    FP32,
    Case,
    assert_same,
    local_bits,
    make_net,
    make_optimizer,
)
from tests.ranks import Ranks

LIMIT = 0.3


def _backward(net: Net, seed: int, loss_scale: float = 1.0) -> None:
    (net(*mine(batches(1, seed=seed)[0])) * loss_scale).backward()


def _norm_of_one_process(net: Net, seed: int) -> float:
    """Return the norm of a batch's gradients in torch, on the weights that a sharded net has."""
    reference = Net(len(net.blocks))
    with torch.no_grad():
        for own, sharded in zip(reference.parameters(), net.parameters(), strict=True):
            own.copy_(full_tensor(sharded.detach()))
    reference(*batches(1, seed=seed)[0]).backward()
    return float(nn.utils.clip_grad_norm_(reference.parameters(), LIMIT))


def _num_norms(call: Callable[[], object]) -> int:
    """Return how many norms a call has reduced over ranks."""
    with record_collectives() as record:
        call()
    return sum(label == "grad norm" for _, label in record.events)


def _runs_agree(case: Case, loss_scale: float | None) -> None:
    found = []
    for is_ahead in (False, True):
        net = make_net(case)
        optimizer = make_optimizer(net, case)
        norms = []
        for step in range(2):
            if is_ahead:
                if isinstance(optimizer, HybridDeviceOptimizer):
                    optimizer.synchronize()
                wanted = _norm_of_one_process(net, step)
            _backward(net, step, loss_scale or 1.0)
            if is_ahead:
                norm = optimizer.measure_grad_norm(loss_scale=loss_scale or 1.0)
                assert norm is optimizer.grad_norm
                rtol = 1e-5 if case.policy == FP32 else 2e-2
                assert norm.item() == pytest.approx(wanted, rel=rtol)
                assert wanted > LIMIT
            if loss_scale is not None:
                # As torch.amp.GradScaler sets it for the time of a step.
                optimizer.grad_scale = torch.tensor(loss_scale)
            assert _num_norms(optimizer.step) == (not is_ahead)
            norms.append(optimizer.grad_norm.item())
            optimizer.grad_scale = None
            optimizer.zero_grad()
        found.append({"norms": norms} | local_bits(net, optimizer))
    assert_same(*found)


@pytest.mark.parametrize("loss_scale", [None, 1000.0])
@pytest.mark.parametrize(
    "case",
    [
        Case(max_grad_norm=LIMIT, policy=FP32, num_blocks=1),
        Case(max_grad_norm=LIMIT, strategy="optim", policy=BF16, num_blocks=1),
        Case(0.5, max_grad_norm=LIMIT, policy=FP32),
        Case(1.0, max_grad_norm=LIMIT, strategy="optim", policy=BF16, num_blocks=1),
    ],
    ids=["fused-fp32", "fused-bf16", "hybrid-half-fp32", "hybrid-bf16"],
)
def test_a_norm_measured_ahead_gives_the_same_bits(
    ranks: Ranks, case: Case, loss_scale: float | None
) -> None:
    """And it is that of one process; the step then makes no collective for it.

    Rounding of gradients to bf16 moves their norm by less than two in a hundred.
    """
    ranks(2).run(_runs_agree, case, loss_scale)


def _is_dropped(fraction: float | None) -> None:
    case = Case(fraction, max_grad_norm=LIMIT, policy=FP32)
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    _backward(net, 0)
    first = optimizer.measure_grad_norm().item()
    # Gradients that grow are no longer those measured: only a new measurement sees it.
    _backward(net, 0)
    second = optimizer.measure_grad_norm().item()
    assert second == pytest.approx(2 * first)
    assert _num_norms(optimizer.step) == 0
    assert optimizer.grad_norm.item() == second
    assert _num_norms(optimizer.step) == 1
    optimizer.measure_grad_norm()
    optimizer.zero_grad()
    _backward(net, 1)
    assert _num_norms(optimizer.step) == 1

    def closure() -> float:
        net.zero_grad()
        _backward(net, 2)
        return 7.0

    optimizer.measure_grad_norm()
    assert _num_norms(lambda: optimizer.step(closure)) == 1
    optimizer.measure_grad_norm()
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    optimizer.found_inf = None
    assert _num_norms(optimizer.step) == 1


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_a_measured_norm_serves_one_step_on_those_gradients(
    ranks: Ranks, fraction: float | None
) -> None:
    """A step, a skipped one, a closure and zero_grad() end it; the last measurement counts."""
    ranks(2).run(_is_dropped, fraction)


def _never_clips() -> None:
    found = []
    for limit in (None, math.inf):
        net = shard(Net(num_blocks=1))
        optimizer = FusedAdam(net.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=limit)
        for step in range(2):
            _backward(net, step)
            assert _num_norms(optimizer.step) == (limit is not None)
            assert (optimizer.grad_norm is None) == (limit is None)
            optimizer.zero_grad()
        found.append(local_bits(net, optimizer))
    assert_same(*found)


def test_an_infinite_limit_measures_and_never_clips(ranks: Ranks) -> None:
    """The steps are those without a limit."""
    ranks(2).run(_never_clips)


def test_an_infinite_norm_does_not_spread_under_an_infinite_limit() -> None:
    """Only the element whose gradient is infinite is lost, as without a limit."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.tensor([1.0, math.inf, -1.0])
    optimizer = FusedAdam([parameter], lr=0.5, max_grad_norm=math.inf)
    optimizer.step()
    assert optimizer.grad_norm.item() == math.inf
    torch.testing.assert_close(parameter.detach()[[0, 2]], torch.tensor([0.5, 1.5]))


def test_decoupled_gradients_are_the_ones_measured() -> None:
    """The norm is of what the step reads, in whatever dtype."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 100.0)
    parameter.decoupled_grad = torch.tensor([3.0, 4.0], dtype=torch.bfloat16)
    optimizer = FusedAdam([parameter], use_decoupled_grad=True, max_grad_norm=1.0)
    assert optimizer.measure_grad_norm(loss_scale=2.0).item() == 2.5


def _measures_originals() -> None:
    net = Net()
    optimizer = FusedAdam(net.parameters(), max_grad_norm=1.0)
    shard(net)
    with pytest.raises(ValueError, match=r"an original parameter.*after fully_shard\(\)"):
        optimizer.measure_grad_norm()


def test_originals_are_refused_before_the_collective(ranks: Ranks) -> None:
    """An optimizer made too early would find no gradients, and a norm of zero."""
    ranks(2).run(_measures_originals)


def test_a_norm_that_lacks_added_parameters_is_measured_again() -> None:
    """The step clips by the norm of all that it reads."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 12.0])
    optimizer = FusedAdam([first], max_grad_norm=1.0)
    assert optimizer.measure_grad_norm() == 5.0
    optimizer.add_param_group({"params": [second]})
    optimizer.step()
    assert optimizer.grad_norm == 13.0


def test_a_step_without_a_limit_leaves_the_measured_norm() -> None:
    """Also one that unscales gradients: it measures nothing itself."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = FusedAdam([parameter])
    optimizer.measure_grad_norm(loss_scale=2.0)
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()
    assert optimizer.grad_norm == 2.5
