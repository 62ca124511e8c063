"""Part 4: equal bits: kernels against their definition in torch on a CPU, runs against runs.

The definition is the fallback of the kernels on CPUs and GPUs, so a rehearsal compares the CPU's
kernels with it. The loss is compared within a tolerance: its kernel uses another exponential.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn

import megafsdp
from benchmarks.gpu.adam_kernel import LAYOUTS, make_buffers
from benchmarks.gpu.group import one_rank
from benchmarks.gpu.part import Report, Size
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.models import loss as loss_module
from megafsdp.models import masked_cross_entropy
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, adam_step
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.optimizer.kernels.square_sum import device_sum_of_squares

_HYPER = AdamHyper(1e-2, (0.9, 0.95), 1e-8, 0.1)
_KERNEL_STEPS, _RUN_STEPS, _OFFLOAD_STEPS = 3, 20, 6
_NUM_LAYERS = 4
# For a gradient, relative to the largest of its row: fp32 sums and exponentials differ; in bf16
# there are two roundings of 2**-9 each, as the loss has a factor of 3.
_LOSS_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
_CPU = torch.device("cpu")
Bits = dict[str, torch.Tensor]


def run(size: Size, report: Report) -> None:
    """Compare kernels, then runs."""
    device = torch.device(size.device_type)
    torch.manual_seed(0)
    numel = size.either(1 << 18, 1 << 14) + 5
    for layout, flushes in itertools.product(LAYOUTS, (True, False)):
        start = make_buffers(layout, numel, _CPU)
        found = _step(_copy(start, device), flushes=flushes)
        with _definition():
            wanted = _step(_copy(start, _CPU), flushes=flushes)
        is_met = _equal(found, wanted) and not torch.equal(wanted["weight"], start.weight)
        report.check(f"kernel, {layout}{'' if flushes else ', subnormal numbers kept'}", is_met)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(numel).to(dtype)
        with _definition():
            total = device_sum_of_squares(values).item()
        is_met = device_sum_of_squares(values.to(device)).item() == total
        report.check(f"sum of squares, {dtype}", is_met, total)
    _check_loss(size, report, device)
    with one_rank(size):
        width = size.either(512, 16)
        found = _train_by_given_grads(width, device)
        with _definition():
            wanted = _train_by_given_grads(width, _CPU)
        report.check(f"{_RUN_STEPS} steps of a sharded net", _equal(found, wanted))
        fractions = (0.0, 0.5, 1.0)
        runs = [_train_with_offload(fraction, width, device) for fraction in fractions]
        for fraction, found in zip(fractions[1:], runs[1:], strict=True):
            report.check(f"offload of {fraction}", _equal(found, runs[0]))


@contextlib.contextmanager
def _definition() -> Iterator[None]:
    with mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"):
        yield


def _copy(buffers: AdamBuffers, device: torch.device) -> AdamBuffers:
    return AdamBuffers(
        **{name: t.to(device, copy=True) for name, t in _tensors_of(buffers).items()}
    )


def _check_loss(size: Size, report: Report, device: torch.device) -> None:
    """Compare the loss, by the kernel if there is one, with its definition, both on the device."""
    # Qwen3's vocabulary, and one that is not a multiple of anything.
    for vocabulary, dtype in itertools.product(
        size.either((151_936, 50_257), (1_536, 257)), _LOSS_TOLERANCES
    ):
        logits = (4 * torch.randn(4, 16, vocabulary)).to(dtype).to(device)
        labels = torch.randint(0, vocabulary, (4, 16)).to(device)
        mask = (torch.rand(4, 16) < 0.8).float().to(device)
        found = _loss_and_gradient(logits, labels, mask)
        is_kernel = loss_module._kernels_for(logits) is not None
        with mock.patch.object(loss_module, "_kernels_for", lambda logits: None):
            wanted = _loss_and_gradient(logits, labels, mask)
        largest = wanted[1].abs().amax(dim=-1, keepdim=True)
        difference = ((found[1] - wanted[1]).abs() / largest.clamp(min=1e-30)).max().item()
        is_met = difference <= _LOSS_TOLERANCES[dtype] and bool(largest.max() > 0)
        is_met &= torch.allclose(found[0], wanted[0], rtol=1e-5, atol=0)
        name = "kernel" if is_kernel else "definition"
        report.check(f"loss of {vocabulary} words, {dtype}, by the {name}", is_met, difference)


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = masked_cross_entropy(leaf * 1, labels, mask, may_overwrite_logits=True)
    (gradient,) = torch.autograd.grad(loss * 3, leaf)
    return loss.detach(), gradient.float()


def _tensors_of(buffers: AdamBuffers) -> Bits:
    found = {field.name: getattr(buffers, field.name) for field in dataclasses.fields(buffers)}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _step(buffers: AdamBuffers, *, flushes: bool) -> Bits:
    for step in range(1, _KERNEL_STEPS + 1):
        adam_step(buffers, _HYPER, step=step, grad_scale=1 / 3, flush_denormals=flushes)
    return _tensors_of(buffers)


def _equal(left: Bits, right: Bits) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].cpu(), right[name].cpu()) for name in left
    )


def _net(width: int, device: torch.device) -> nn.Module:
    """Return a sharded net whose operators give the same bits in every run on one device."""
    torch.manual_seed(1)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(_NUM_LAYERS)]
    net = copy.deepcopy(nn.Sequential(*layers)).to(device)
    policy = megafsdp.MixedPrecisionPolicy(torch.bfloat16)
    for module in [*net, net]:
        megafsdp.fully_shard(module, mp_policy=policy)
    return net


def _backward(net: nn.Module, seed: int, width: int, device: torch.device) -> None:
    inputs = torch.randn(4, width, generator=torch.Generator().manual_seed(seed)).to(device)
    with megafsdp.microbatch(net, is_last=True):
        net(inputs).float().square().mean().backward()


def _local_bits(net: nn.Module, optimizer: torch.optim.Optimizer) -> Bits:
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = local_tensor(parameter.detach()).cpu().clone()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name}.{key}"] = local_tensor(optimizer.state[parameter][key]).cpu().clone()
    return found


def _train_by_given_grads(width: int, device: torch.device) -> Bits:
    """Step with gradients that are the same on all devices; return all bits.

    Nothing is clipped: without compiled kernels a norm is summed in another order.
    """
    net = _net(width, device)
    optimizer = megafsdp.FusedAdam(net.parameters(), weight_decay=0.1)
    generator = torch.Generator().manual_seed(2)
    for step in range(_RUN_STEPS):
        _backward(net, step, width, device)
        for parameter in net.parameters():
            assert parameter.grad is not None, "the only rank has all gradients"
            grad = local_tensor(parameter.grad)
            grad.copy_(torch.randn(grad.shape, generator=generator))
        optimizer.step()
        optimizer.zero_grad()
    return _local_bits(net, optimizer)


def _train_with_offload(fraction: float, width: int, device: torch.device) -> Bits:
    net = _net(width, device)
    optimizer = megafsdp.HybridDeviceOptimizer(
        net.parameters(), weight_decay=0.1, max_grad_norm=0.01, offload_fraction=fraction
    )
    for step in range(_OFFLOAD_STEPS):
        _backward(net, step, width, device)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return _local_bits(net, optimizer)
