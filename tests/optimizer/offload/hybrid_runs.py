"""Runs of the toy with and without offload, and all bits that they show."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import FusedAdam, MixedPrecisionPolicy, full_tensor, microbatch
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.fsdp.toy import Net, batches, mine, shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy()
_ADAM = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}


class HeldTarget(torch.Tensor):
    """A target that is not written before its event is set."""

    may_begin: threading.Event

    def copy_(self, *args: object, **kwargs: object) -> torch.Tensor:
        """Write it once it may be."""
        assert self.may_begin.wait(120), "the gate was opened"
        return super().copy_(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        fraction: What is offloaded; None for FusedAdam.
        overlap: Whether step() returns early.
        max_grad_norm: The optimizer's clipping.
        num_microbatches: Of each step.
        strategy: What is sharded, or ``hsdp`` or ``hfsdp`` over two mesh axes.
        policy: Dtypes.
        speculate: Whether Adam runs ahead of step().
        optimizer_may_start: Whether the loop says which microbatch is the last.
        num_blocks: Of the toy; there is one unit more.
    """

    fraction: float | str | None = None
    overlap: bool = True
    max_grad_norm: float | None = None
    num_microbatches: int = 1
    strategy: str = "optim_grads_params"
    policy: MixedPrecisionPolicy = BF16
    speculate: bool | str = "auto"
    optimizer_may_start: bool = True
    num_blocks: int = 3


def make_net(case: Case) -> Net:
    """Return the toy as a case shards it, with the same values every time."""
    options: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy in ("hsdp", "hfsdp"):
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        options = {"mesh": mesh}
        if case.strategy == "hfsdp":
            options["outer_strategy"] = "optim"
    return shard(Net(case.num_blocks), mp_policy=case.policy, **options)


def make_scaled_net(strategy: str, policy: MixedPrecisionPolicy) -> Net:
    """Return the toy with a factor without dimensions, which every strategy replicates."""
    net = Net()
    net.scale = nn.Parameter(torch.ones(()))
    net.norm.register_forward_hook(lambda _, inputs, output: output * net.scale)
    return shard(net, strategy=strategy, mp_policy=policy)


def make_optimizer(net: nn.Module, case: Case, **options: Any) -> FusedAdam:
    """Return FusedAdam or the hybrid, with two groups of the parameters that are not frozen."""
    decays = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    if case.fraction is None:
        return FusedAdam(groups, max_grad_norm=case.max_grad_norm, **_ADAM)
    return HybridDeviceOptimizer(
        groups,
        offload_fraction=case.fraction,
        overlap=case.overlap,
        speculate=case.speculate,
        max_grad_norm=case.max_grad_norm,
        **_ADAM,
        **options,
    )


def train(net: Net, optimizer: FusedAdam, case: Case, num_steps: int = 3) -> dict[str, Any]:
    """Train with a schedule of the learning rate; return all that a run shows on this rank."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms = [], []
    for step in range(num_steps):
        parts = batches(case.num_microbatches, seed=step)
        for number, batch in enumerate(parts, start=1):
            is_last = number == len(parts)
            with microbatch(net, is_last=is_last) if case.optimizer_may_start else nullcontext():
                loss = net(*mine(batch)) / len(parts)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        norms.append(None if optimizer.grad_norm is None else optimizer.grad_norm.item())
        optimizer.zero_grad()
        schedule.step()
    return {"losses": losses, "norms": norms} | local_bits(net, optimizer)


def bits(net: nn.Module, optimizer: FusedAdam) -> dict[str, Any]:
    """Return every weight and state in full; collective."""
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        for state_name, value in optimizer.state[parameter].items():
            found[f"{name}.{state_name}"] = full_tensor(value).clone()
        found[name] = full_tensor(parameter.detach()).clone()
    return found


def local_bits(net: nn.Module, optimizer: FusedAdam) -> dict[str, Any]:
    """Return this rank's rows of every weight and state, once all steps on the host have ended."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        for state_name, value in optimizer.state[parameter].items():
            found[f"{name}.{state_name}"] = local_tensor(value).clone()
        found[name] = local_tensor(parameter).clone()
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that two runs agree in every bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def backward(net: Net, seed: int) -> float:
    """Run forward and backward on a batch; return the loss."""
    loss = net(*mine(batches(1, seed=seed)[0]))
    loss.backward()
    return loss.item()


def go_on(net: Net, optimizer: FusedAdam, seeds: range) -> list[float]:
    """Train a step on each batch; return the losses."""
    losses = []
    for seed in seeds:
        with microbatch(net, is_last=True):
            losses.append(backward(net, seed))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def make_host_adamw(net: nn.Module, fraction: float = 1.0) -> HybridDeviceOptimizer:
    """Return a hybrid whose part on the host is stepped by an optimizer of torch."""
    return HybridDeviceOptimizer(
        net.parameters(),
        lr=1e-2,
        eps=1e-5,
        weight_decay=0.01,
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        cpu_optimizer_kwargs={"foreach": False},
    )


KINDS = ["ours", "ahead", "torch's"]


def make_kind(net: nn.Module, kind: str, fraction: float = 1.0) -> FusedAdam:
    """Return a hybrid with our Adam on the host, also ahead of step(), or with one of torch."""
    if kind == "torch's":
        return make_host_adamw(net, fraction)
    if kind == "ahead":
        # So high that the guess is always right.
        return make_optimizer(net, Case(fraction, max_grad_norm=1e3, speculate=True))
    return make_optimizer(net, Case(fraction, max_grad_norm=0.5, speculate=False))
