"""Element-wise optimizers over a few flat tensors do what they do over a thousand parameters."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import (
    FusedAdam,
    Muon,
    clip_grad_norm_,
    full_state_dict,
    local_parameters,
    num_zero_grads,
    param_group_norms,
)
from megafsdp.fsdp.runtime.unit import units_below
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from tests.fsdp.toy import Net, assert_same_parameters, batches, mine, shard, train_both
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _adamw(parameters: list[nn.Parameter], **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, **options)


def _optimizer(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "rmsprop":
        return torch.optim.RMSprop(parameters, lr=1e-3, eps=1e-5)
    return _adamw(parameters, **{kind: True})


def _trains(kind: str, strategy: str) -> None:
    reference = Net(num_blocks=1)
    net, other = (shard(copy.deepcopy(reference), strategy=strategy) for _ in range(2))
    kinds = iter([reference, net])
    train_both(
        reference,
        net,
        num_steps=2,
        num_microbatches=2,
        make_optimizer=lambda model: _optimizer(
            kind, list(model.parameters()) if next(kinds) is reference else local_parameters(net)
        ),
    )
    assert_same_parameters(net, reference, rtol=1e-4, atol=1e-5)
    optimizer = _optimizer(kind, list(other.parameters()))
    for step in range(2):
        for batch in batches(2, seed=step):
            (other(*mine(batch)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = full_state_dict(other)
    for name, value in full_state_dict(net).items():
        # Vector bodies and tails of torch's fused kernel differ by one unit in the last place.
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["fused", "foreach", "rmsprop"])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_a_flat_optimizer_does_what_one_over_parameters_does(
    ranks: Ranks, kind: str, strategy: str
) -> None:
    """The same steps, from one tensor a group."""
    ranks(2).run(_trains, kind, strategy)


def _follows_gradients() -> None:
    net = shard(Net())
    flat = local_parameters(net)
    assert len(flat) == 4 and all(p.grad is None and p.ndim == 1 for p in flat)
    net(*mine(batches(1)[0])).backward()
    grads = [p.grad for p in flat]
    assert all(g is not None and bool(g.isfinite().all()) for g in grads)
    norm = clip_grad_norm_(net, 1e-3)
    assert norm > 1e-3
    largest = max(float(p.grad.abs().max()) for p in flat)
    assert 0 < largest <= 1e-3
    first = net.blocks[0].up.weight
    storage = first.local.untyped_storage().data_ptr()
    block = next(p for p in flat if p.untyped_storage().data_ptr() == storage)
    first.grad = torch.ones_like(first)
    assert bool((block.grad == 1).any())
    kept, first.grad = first.grad, None
    assert not bool((block.grad == 1).any())
    # What the user has kept is memory of its own.
    assert bool((kept.to_local() == 1).all())
    torch.optim.SGD(flat, lr=0.1).zero_grad()
    assert all(p.grad is None for p in net.parameters())
    with pytest.raises(RuntimeError, match="a change in place"):
        flat[0].grad = torch.zeros_like(flat[0])
    with pytest.raises(RuntimeError, match="a local parameter"):
        pickle.dumps(flat[0])
    with pytest.raises(ValueError, match="units below it"):
        local_parameters(nn.Linear(2, 2))


def test_the_flat_gradient_follows_those_of_the_parameters(ranks: Ranks) -> None:
    """Clipped, replaced, cleared one by one and all together."""
    ranks(1).run(_follows_gradients)


def _leaves_frozen_parts_alone() -> None:
    net = Net()
    net.blocks[1].requires_grad_(False)
    net = shard(net)
    flat = local_parameters(net)
    assert len(flat) == 3 and all(parameter.requires_grad for parameter in flat)
    net(*mine(batches(1)[0])).backward()
    before = full_state_dict(net)
    torch.optim.AdamW(flat, lr=0.1, weight_decay=0.5).step()
    for name, value in full_state_dict(net).items():
        assert torch.equal(value, before[name]) == name.startswith("blocks.1."), name


def test_frozen_parts_have_no_flat_tensors(ranks: Ranks) -> None:
    """An optimizer over them would count their elements, and decay some."""
    ranks(1).run(_leaves_frozen_parts_alone)


def _takes_assigned_gradients(strategy: str, is_after_backward: bool) -> None:
    net = shard(Net(), strategy=strategy)
    flat = local_parameters(net)
    if is_after_backward:
        net(*mine(batches(1)[0])).backward()
    before = full_state_dict(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    # As torch's clipping and GradScaler do.
    torch._foreach_mul_([p.grad for p in flat], 0.5)
    torch.optim.SGD(flat, lr=1.0).step()
    for name, value in full_state_dict(net).items():
        assert torch.equal(value, before[name] - 0.5), name
    torch.optim.SGD(flat).zero_grad(set_to_none=False)
    assert all(bool((p.grad == 0).all()) for p in net.parameters())
    for parameter in net.parameters():
        parameter.grad = None
    groups = [group for unit in units_below([net]).values() for group in unit.groups]
    assert all(group.gradients.main_grad.buffer is None for group in groups)


@pytest.mark.parametrize("is_after_backward", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_gradients_that_the_user_assigned_are_changed_and_stepped(
    ranks: Ranks, strategy: str, is_after_backward: bool
) -> None:
    """Those of all parameters, without a backward too."""
    ranks(2).run(_takes_assigned_gradients, strategy, is_after_backward)


def _skips_together(strategy: str) -> None:
    net = shard(Net(), strategy=strategy)
    flat = local_parameters(net)
    optimizer = torch.optim.SGD(flat, lr=0.1)
    scaler = LossScaler(ScaleRule.constant(4.0))
    scaler.scale(net(*mine(batches(1)[0]))).backward()
    before = [p.detach().clone() for p in flat]
    if dist.get_rank() == 1:
        flat[0].grad[:1] = float("inf")
    assert not scaler.step(optimizer)
    assert all(torch.equal(p, rows) for p, rows in zip(flat, before, strict=True))


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_loss_scaler_skips_a_step_on_all_ranks(ranks: Ranks, strategy: str) -> None:
    """Also where the gradient that overflows is one rank's own."""
    ranks(2).run(_skips_together, strategy)


def _net_with_gradients(strategy: str) -> Net:
    net = shard(Net(), strategy=strategy)
    net(*mine(batches(1)[0])).backward()
    # Of one group some have no gradient, and one has a gradient that lies elsewhere.
    first, second = net.blocks[0], net.blocks[1]
    first.up.weight.grad = None
    second.down.weight.grad = torch.full_like(second.down.weight, 0.5)
    return net


def _has_the_norm_of_all_ranks(strategy: str) -> None:
    net, wanted = (_net_with_gradients(strategy) for _ in range(2))
    flat = local_parameters(net)
    own = torch.optim.SGD(wanted.parameters(), lr=1.0)
    assert torch.equal(param_group_norms(torch.optim.SGD(flat, lr=1.0)), param_group_norms(own))
    assert num_zero_grads(flat) == num_zero_grads(wanted)
    norms = [clip_grad_norm_(flat, 1e-2), clip_grad_norm_(wanted, 1e-2)]
    assert torch.equal(*norms) and norms[0] > 1e-2
    for local, other in zip(flat, local_parameters(wanted), strict=True):
        assert torch.equal(local.grad, other.grad)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_norms_and_clipping_count_the_rows_of_all_ranks(ranks: Ranks, strategy: str) -> None:
    """As over the parameters of the model, bit by bit."""
    ranks(2).run(_has_the_norm_of_all_ranks, strategy)


def _steps_alike(strategy: str, is_decoupled: bool) -> None:
    found = []
    for is_flat in (False, True):
        net = shard(Net(), strategy=strategy)
        parameters = local_parameters(net) if is_flat else list(net.parameters())
        optimizer = FusedAdam(
            parameters, lr=1e-2, eps=1e-5, max_grad_norm=0.1, use_decoupled_grad=is_decoupled
        )
        norms = []
        for batch in batches(2):
            net(*mine(batch)).backward()
            if is_decoupled:
                for parameter in parameters:
                    parameter.decoupled_grad = parameter.grad.to(torch.bfloat16)
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
        found.append((torch.stack(norms), full_state_dict(net)))
    (norms, weights), (flat_norms, flat_weights) = found
    assert bool((norms > 0.1).all())
    assert torch.equal(flat_norms, norms)
    assert all(torch.equal(value, weights[name]) for name, value in flat_weights.items())


@pytest.mark.parametrize("is_decoupled", [False, True])
@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_a_step_clips_by_the_norm_of_all_ranks(
    ranks: Ranks, strategy: str, is_decoupled: bool
) -> None:
    """Ranks that each clipped by their own rows would step by different factors."""
    ranks(2).run(_steps_alike, strategy, is_decoupled)


def _no_matrices() -> None:
    flat = local_parameters(shard(Net()))
    with pytest.raises(ValueError, match="no matrix is to be found"):
        Muon(flat)
    Muon([{"params": flat, "use_muon": False}])


def test_muon_finds_no_matrices_in_local_parameters(ranks: Ranks) -> None:
    """They are refused, unless AdamW is to step them."""
    ranks(1).run(_no_matrices)
