"""Training runs of a small net, on the host and on the stand-in, and every bit that they show."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import FusedAdam, MixedPrecisionPolicy, microbatch
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.fsdp.toy import Net, batches, mine, shard
from tests.stand_in.device import DEVICE, Order, StandInDevice, on_device

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy()
_ADAM = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}

Run = Callable[["Case"], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: Of fully_shard.
        offload: Of HybridDeviceOptimizer; None for FusedAdam.
        policy: Dtypes.
        mesh: Ranks of the outer and of the inner axis; None for one axis.
        num_microbatches: Of each step.
        num_steps: Steps.
        says_last: Whether the loop says which microbatch is the last.
        keeps_grads: Whether gradients of a step are added to those of the step before.
    """

    options: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] | None = None
    policy: MixedPrecisionPolicy = BF16
    mesh: tuple[int, int] | None = None
    num_microbatches: int = 2
    num_steps: int = 3
    says_last: bool = True
    keeps_grads: bool = False


def make_net(case: Case) -> Net:
    """Return the toy as a case shards it, with the same values every time."""
    options = dict(case.options)
    if case.mesh is not None:
        options["mesh"] = init_device_mesh("cpu", case.mesh, mesh_dim_names=("outer", "inner"))
    return shard(Net(2).to(DEVICE), mp_policy=case.policy, **options)


def make_optimizer(net: nn.Module, case: Case) -> FusedAdam:
    """Return the optimizer of a case."""
    if case.offload is None:
        return FusedAdam(net.parameters(), **_ADAM)
    return HybridDeviceOptimizer(net.parameters(), **_ADAM, **case.offload)


def losses_of_steps(net: Net, optimizer: FusedAdam, case: Case) -> Iterator[torch.Tensor]:
    """Train; yield the losses of each step, on the device, before its gradients are cleared."""
    for step in range(case.num_steps):
        losses = []
        parts = batches(case.num_microbatches, seed=step)
        for number, batch in enumerate(parts, start=1):
            is_last = number == len(parts)
            with microbatch(net, is_last=is_last) if case.says_last else nullcontext():
                loss = net(*map(on_device, mine(batch))) / len(parts)
                loss.backward()
                losses.append(loss.detach())
        optimizer.step()
        yield torch.stack(losses)
        if not case.keeps_grads:
            optimizer.zero_grad()


def train(case: Case) -> dict[str, Any]:
    """Train; return all that a run shows on this rank, as numbers."""
    net = make_net(case)
    optimizer = make_optimizer(net, case)
    losses = list(losses_of_steps(net, optimizer, case))
    # Read at the end: the host is as far ahead of the device as it can be.
    return {"losses": torch.stack(losses).tolist()} | bits(net, optimizer)


def bits(net: nn.Module, optimizer: FusedAdam) -> dict[str, Any]:
    """Return this rank's rows of every weight and state, as numbers."""
    found = {}
    for name, parameter in net.named_parameters():
        for state_name, value in optimizer.state[parameter].items():
            found[f"{name}.{state_name}"] = local_tensor(value).tolist()
        found[name] = local_tensor(parameter.detach()).tolist()
    return found


def differences(case: Case, orders: list[Order], run: Run = train) -> list[str]:
    """Return what differs between a run on the host and those on the stand-in, by their orders."""
    found = []
    # Without native code here too: the norm of a kernel has other bits.
    with mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"):
        wanted = run(case)
    assert repr(wanted).count("nan") == 0, "a difference can show"
    for order in orders:
        with StandInDevice(order, seed=1).active():
            shown = run(case)
        assert shown.keys() == wanted.keys()
        found += [f"{order.value}: {name}" for name in wanted if shown[name] != wanted[name]]
    return found
