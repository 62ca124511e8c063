"""What the kernel is given: the memory of gradients, weights and moments itself, in its dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp import FusedAdam, MixedPrecisionPolicy
from megafsdp.buffer.dtensor.uneven import local_tensor, wrap_like
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamKernel
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import Ranks

BF16 = torch.bfloat16


def _given_by(optimizer: FusedAdam) -> list[AdamBuffers]:
    """Return the buffers of each launch of a step."""
    given = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            AdamKernel, "__call__", lambda kernel, buffers, hyper, step: given.append(buffers)
        )
        optimizer.step()
    return given


def _is_same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.data_ptr() == other.data_ptr() and tensor.dtype == other.dtype


def _takes_flat_gradients(grad_dtype: torch.dtype) -> None:
    net = shard(Net(), mp_policy=MixedPrecisionPolicy(BF16, main_grads_dtype=grad_dtype))
    optimizer = FusedAdam(net.parameters())
    net(*mine(batches(1)[0])).backward()
    flats = {f.data_ptr(): f for f in (p.grad.buffer.flat for p in net.parameters())}
    given = _given_by(optimizer)
    assert len(given) == len(flats) == 4
    for buffers in given:
        assert buffers.grad is flats.pop(buffers.grad.data_ptr())
        assert buffers.grad.dtype == grad_dtype
        assert buffers.weight.dtype == buffers.exp_avg.dtype == torch.float32


def _takes_decoupled_gradients(grad_dtype: torch.dtype) -> int:
    """Return how many parameters were stepped one by one, which this rank holds rows of."""
    net = shard(Net())
    optimizer = FusedAdam(net.parameters(), use_decoupled_grad=True)
    for parameter in net.parameters():
        own = torch.ones_like(local_tensor(parameter), dtype=grad_dtype)
        parameter.decoupled_grad = wrap_like(parameter, own)
    given = {buffers.weight.data_ptr(): buffers for buffers in _given_by(optimizer)}
    held = [p for p in net.parameters() if local_tensor(p).numel()]
    assert len(given) == len(held)
    for parameter in held:
        buffers = given[local_tensor(parameter).data_ptr()]
        assert _is_same_memory(buffers.grad, local_tensor(parameter.decoupled_grad))
        assert buffers.grad.dtype == grad_dtype
        assert _is_same_memory(buffers.weight, local_tensor(parameter))
        for name in ("exp_avg", "exp_avg_sq"):
            assert _is_same_memory(
                getattr(buffers, name), local_tensor(optimizer.state[parameter][name])
            )
    return len(held)


@pytest.mark.parametrize("grad_dtype", [torch.float32, BF16, torch.float16])
def test_gradients_are_read_where_they_lie(ranks: Ranks, grad_dtype: torch.dtype) -> None:
    """Flat and decoupled ones of sharded parameters, in their dtype; nothing is widened before."""
    ranks(2).run(_takes_flat_gradients, grad_dtype)
    assert min(ranks(2).run(_takes_decoupled_gradients, grad_dtype)) > 0


def test_gradients_of_plain_parameters_are_read_where_they_lie() -> None:
    """In bf16 beside fp32 weights; a transposed one is copied, in its dtype."""
    weights = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    weights[0].decoupled_grad = torch.ones(4, 3, dtype=BF16)
    weights[1].decoupled_grad = torch.ones(3, 4, dtype=BF16).t()
    first, second = _given_by(FusedAdam(weights, use_decoupled_grad=True))
    assert _is_same_memory(first.grad, weights[0].decoupled_grad)
    assert not _is_same_memory(second.grad, weights[1].decoupled_grad)
    assert second.grad.dtype == BF16
