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


def _skipped_by_a_flag(options: dict[str, object]) -> None:
    policy = MixedPrecisionPolicy(BF16)
    nets = [shard(Net(num_blocks=1), mp_policy=policy, strategy="optim_grads") for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    # A plain tensor is stepped by itself.
    singles = [nn.Parameter(torch.ones(3, 5)) for _ in nets]
    plain, queued = (
        FusedAdam([*net.parameters(), single], max_grad_norm=0.3, **options)
        for net, single in zip(nets, singles, strict=True)
    )
    for step, mark in enumerate(".!.!!."):
        for net, single in zip(nets, singles, strict=True):
            net(*mine(batches(1, seed=step)[0])).backward()
            single.grad = torch.full((3, 5), step + 1.0)
        if step == 2:
            # One of several that share a buffer is not stepped, so counts differ from here on.
            for net in nets:
                net.blocks[0].up.weight.grad = None
        if mark == "!":
            for parameter in nets[1].parameters():
                local_tensor(parameter.grad).mul_(torch.nan)
            queued.step_unless(torch.ones(()))
            queued.take_back_step()
        else:
            plain.step()
            queued.step_unless(torch.zeros(()))
        plain.zero_grad()
        queued.zero_grad()
    pairs = zip(plain.state.items(), queued.state.items(), strict=True)
    for (own, wanted), (other, found) in pairs:
        assert torch.equal(local_tensor(own.detach()), local_tensor(other.detach()))
        assert all(torch.equal(local_tensor(wanted[n]), local_tensor(found[n])) for n in wanted)
    assert {int(state["step"]) for state in queued.state.values()} == {2, 3}
    # What the step writes beside the weights is what forward computes with.
    batch = mine(batches(1)[0])
    assert torch.equal(nets[0](*batch).detach(), nets[1](*batch).detach())


@pytest.mark.parametrize(
    "options", [{}, {"exp_avg_dtype": BF16}, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}]
)
def test_a_step_that_the_device_skips_leaves_no_trace(
    ranks: Ranks, options: dict[str, object]
) -> None:
    """Weights, moments, counts and casts have the bits of a run that never came to it."""
    ranks(2).run(_skipped_by_a_flag, options)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_flag_on_the_device() -> None:
    """The kernel reads it; a set flag leaves the weights, one that is not set changes them."""
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = FusedAdam([weight], lr=0.1, max_grad_norm=1.0)
    assert optimizer.skips_on_device
    weight.grad = torch.full((64, 64), torch.nan, device="cuda")
    flag = torch.ones((), device="cuda")
    # States and the segment table are made in the first step.
    optimizer.step_unless(flag)
    optimizer.take_back_step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step_unless(flag)
        optimizer.take_back_step()
        weight.grad = torch.ones(64, 64, device="cuda")
        optimizer.step_unless(flag * 0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[weight]["step"] == 1
    torch.testing.assert_close(weight, torch.full((64, 64), 0.9, device="cuda"))
