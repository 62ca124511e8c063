"""What ``.grad`` of a sharded parameter is: rows of a flat buffer, known by its type."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.fsdp.params.main_gradient import FlatGradient
from tests.fsdp.toy import assert_same_grads, batches, mine, pair
from tests.ranks import Ranks


def _is_in_buffer(parameter: nn.Parameter, index: int) -> bool:
    grad = parameter.grad
    if not isinstance(grad, FlatGradient) or grad.index != index:
        return False
    rows = grad.buffer.tensor(index)
    return rows.data_ptr() == local_tensor(grad).data_ptr() and rows.numel() > 0


def _flat_gradients(strategy: str) -> None:
    _, net = pair(strategy=strategy)
    net(*mine(batches(1)[0])).backward()
    (group,) = net.blocks[0]._fsdp_unit().groups
    parameters = [p.sharded for p in group.parameters]
    assert any(_is_in_buffer(p, i) for i, p in enumerate(parameters)), "this rank has some rows"
    assert {id(p.grad.buffer) for p in parameters} == {id(group.gradients.main_grad.buffer)}
    grad = net.blocks[0].up.weight.grad
    assert isinstance(grad, FlatGradient)
    results = [
        grad.detach(),
        grad.clone(),
        grad * 2,
        grad.to(torch.float64),
        torch.zeros_like(grad),
        torch._foreach_mul([grad], 2.0)[0],
        copy.deepcopy(grad),
    ]
    if local_tensor(grad).numel() == grad.numel():
        assert len(pickle.dumps(grad)) < local_tensor(grad).nbytes + 10_000, "the rows alone"
    received = pickle.loads(ForkingPickler.dumps(grad))
    assert type(received) is type(results[-1]) and torch.equal(received.to_local(), grad.to_local())
    assert not any(isinstance(result, FlatGradient) for result in results)
    assert not any(hasattr(result, "buffer") for result in results)
    assert torch.equal(local_tensor(results[-1]), local_tensor(grad))
    grad.mul_(2)
    torch._foreach_mul_([grad], 0.5)
    net.zero_grad(set_to_none=False)
    assert net.blocks[0].up.weight.grad is grad and isinstance(grad, FlatGradient)
    assert not grad.buffer.flat.any()


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_only_what_lies_in_the_buffer_is_a_flat_gradient(ranks: Ranks, strategy: str) -> None:
    """Changes in place leave it one; operations and copies make tensors that are none."""
    ranks(2).run(_flat_gradients, strategy)


def _narrow_gradients(strategy: str) -> None:
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16)
    _, net = pair(strategy=strategy, mp_policy=policy)
    for batch in batches(2):
        net.zero_grad()
        net(*mine(batch)).backward()
        for parameter in net.parameters():
            grad = parameter.grad
            assert isinstance(grad, FlatGradient) and grad.dtype == torch.bfloat16
            assert grad._spec.tensor_meta.dtype == grad.to_local().dtype == torch.bfloat16
            assert grad.shape == parameter.shape
            assert grad.to_local().shape == parameter.detach().to_local().shape
            assert (grad * 2).dtype == torch.bfloat16
            assert parameter.dtype == torch.float32


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_gradients_may_be_narrower_than_their_parameters(ranks: Ranks, strategy: str) -> None:
    """What wraps them is made once, with their dtype; ranks without rows of one have it too."""
    ranks(4).run(_narrow_gradients, strategy)


def _freezes_between(strategy: str) -> None:
    twin, net = pair(strategy=strategy)
    for is_frozen in (True, False):
        for model, batch in ((twin, batches(1)[0]), (net, mine(batches(1)[0]))):
            model.zero_grad()
            loss = model(*batch)
            model.blocks[0].up.weight.requires_grad_(not is_frozen)
            loss.backward()
            model.blocks[0].up.weight.requires_grad_(True)
        for own, other in zip(net.parameters(), twin.parameters(), strict=True):
            assert (own.grad is None) == (other.grad is None)
        assert (net.blocks[0].up.weight.grad is None) == is_frozen


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_a_parameter_frozen_after_its_forward_gets_no_gradient(ranks: Ranks, strategy: str) -> None:
    """As in plain torch, and the next forward finds it trainable again."""
    ranks(2).run(_freezes_between, strategy)


def _freezes_before_a_microbatch(strategy: str, is_whole_unit: bool, has_sync: bool) -> None:
    twin, net = pair(strategy=strategy)
    for step, batch in enumerate(batches(3)):
        net.set_requires_gradient_sync(has_sync or step > 0)
        # After the forward of the second of three microbatches, until its backward is done.
        for model, inputs in ((twin, batch), (net, mine(batch))):
            block = model.blocks[0]
            frozen = list(block.parameters()) if is_whole_unit else [block.up.weight]
            loss = model(*inputs)
            for parameter in frozen:
                parameter.requires_grad_(step != 1)
            loss.backward()
            for parameter in frozen:
                parameter.requires_grad_(True)
        if has_sync or step > 0:
            assert_same_grads(net, twin)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
@pytest.mark.parametrize("is_whole_unit", [True, False])
@pytest.mark.parametrize("has_sync", [True, False])
def test_a_parameter_frozen_between_microbatches_keeps_its_gradient(
    ranks: Ranks, strategy: str, is_whole_unit: bool, has_sync: bool
) -> None:
    """That of before; what backward makes of it while it is frozen is dropped."""
    ranks(2).run(_freezes_before_a_microbatch, strategy, is_whole_unit, has_sync)
