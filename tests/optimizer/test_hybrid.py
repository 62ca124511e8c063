"""HybridDeviceOptimizer is FusedAdam bit for bit, wherever main weights and states live."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import FusedAdam, MixedPrecisionPolicy, clip_grad_norm_, full_tensor, microbatch
from megafsdp.buffer.uneven import local_tensor
from megafsdp.optimizer.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload_plan import groups_of
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy()
ADAM = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.01}
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "hfsdp")


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        fraction: What is offloaded; None for FusedAdam.
        overlap: Whether step() returns early.
        max_grad_norm: The optimizer's clipping.
        num_microbatches: Of each step.
        strategy: What is sharded, or ``hfsdp``.
        policy: Dtypes.
    """

    fraction: float | None = None
    overlap: bool = True
    max_grad_norm: float | None = None
    num_microbatches: int = 1
    strategy: str = "optim_grads_params"
    policy: MixedPrecisionPolicy = BF16


def _net(case: Case) -> Net:
    options: dict[str, Any] = {"strategy": case.strategy}
    if case.strategy == "hfsdp":
        shape = (2, dist.get_world_size() // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        options = {"mesh": mesh, "outer_strategy": "optim"}
    return shard(Net(), mp_policy=case.policy, **options)


def _optimizer(net: nn.Module, case: Case) -> FusedAdam:
    decays = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [{"params": decays}, {"params": others, "weight_decay": 0.0}]
    if case.fraction is None:
        return FusedAdam(groups, max_grad_norm=case.max_grad_norm, **ADAM)
    return HybridDeviceOptimizer(
        groups,
        offload_fraction=case.fraction,
        overlap=case.overlap,
        max_grad_norm=case.max_grad_norm,
        **ADAM,
    )


def _train(net: Net, optimizer: FusedAdam, case: Case, num_steps: int = 4) -> dict[str, Any]:
    """Train with a schedule of the learning rate; return all that a run shows."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses, norms = [], []
    for step in range(num_steps):
        parts = batches(case.num_microbatches, seed=step)
        for number, batch in enumerate(parts, start=1):
            with microbatch(net, is_last=number == len(parts)):
                loss = net(*mine(batch)) / len(parts)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        norms.append(None if optimizer.grad_norm is None else optimizer.grad_norm.item())
        optimizer.zero_grad()
        schedule.step()
    return {"losses": losses, "norms": norms} | _bits(net, optimizer)


def _bits(net: Net, optimizer: FusedAdam) -> dict[str, Any]:
    """Return every weight and state in full; collective."""
    found: dict[str, Any] = {}
    for name, parameter in net.named_parameters():
        for state_name, value in optimizer.state[parameter].items():
            found[f"{name}.{state_name}"] = full_tensor(value).clone()
        found[name] = full_tensor(parameter.detach()).clone()
    return found


def _assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert found[name] == value, name


def _trajectories_agree(case: Case, reference: Case, is_partial: bool) -> float:
    wanted_net = _net(reference)
    wanted = _train(wanted_net, _optimizer(wanted_net, reference), reference)
    net = _net(case)
    before = [full_tensor(p.detach()).clone() for p in net.parameters()]
    optimizer = _optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    found = _train(net, optimizer, case)
    _assert_same(found, wanted)
    assert not any(torch.equal(found[n], b) for (n, _), b in zip(net.named_parameters(), before))
    on_host = [g for g in groups_of(net.parameters()) if g.host_memory is not None]
    assert bool(on_host) == (case.fraction != 0.0)
    assert (len(on_host) < len(groups_of(net.parameters()))) == is_partial
    return optimizer.offloaded_fraction


PAIRWISE = [
    Case(1.0, True, None, 1, "optim_grads_params", BF16),
    Case(0.5, True, 0.5, 3, "optim_grads_params", BF16),
    Case(0.3, False, 1e3, 1, "optim_grads_params", FP32),
    Case(0.0, True, 0.5, 1, "optim", BF16),
    Case(1.0, False, 0.5, 3, "optim", BF16),
    Case(0.5, True, None, 1, "optim", FP32),
    Case(1.0, True, 0.5, 1, "optim_grads", BF16),
    Case(1.0, True, 0.5, 1, "no_shard", BF16),
    Case(0.5, True, None, 3, "no_shard", FP32),
    Case(1.0, True, 0.5, 3, "hfsdp", BF16),
    Case(0.5, False, None, 1, "hfsdp", FP32),
    Case(0.3, True, 1e3, 1, "hfsdp", BF16),
]


def _label(case: Case) -> str:
    ends = "overlap" if case.overlap else "blocking"
    dtype = "bf16" if case.policy is BF16 else "fp32"
    clip, num = case.max_grad_norm, case.num_microbatches
    return f"{case.strategy}-{case.fraction}-{ends}-clip{clip}-{num}mb-{dtype}"


@pytest.mark.parametrize("case", PAIRWISE, ids=_label)
def test_a_run_has_the_bits_of_a_run_without_offload(ranks: Ranks, case: Case) -> None:
    """Losses, norms, weights and states; two decay groups share each bucket."""
    reference = Case(
        None, True, case.max_grad_norm, case.num_microbatches, case.strategy, case.policy
    )
    is_partial = case.fraction != 1.0
    fractions = ranks(2).run(_trajectories_agree, case, reference, is_partial)
    assert fractions[0] == fractions[1] == pytest.approx(case.fraction, abs=0.2)
