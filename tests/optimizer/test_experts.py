"""Norms, Muon, Adam and offload of stacks of experts over meshes of their own."""

from __future__ import annotations

import math
from typing import Any

import torch

from megafsdp import (
    FusedAdam,
    HybridDeviceOptimizer,
    MixedPrecisionPolicy,
    Muon,
    ParallelDims,
    clip_grad_norm_,
    full_tensor,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.optimizer.states.formats import is_scaled
from tests.fsdp.mixture import Net, backwards, pair, shard
from tests.optimizer.offload.hybrid_runs import assert_same, local_bits
from tests.ranks import Ranks

# ep over data ranks, over those of tp, and experts whole on each rank of tp.
DIMS = (
    ParallelDims(ep=2),
    ParallelDims(dp_outer=2, ep=2),
    ParallelDims(tp=2, ep=2),
    ParallelDims(tp=2, ep=4),
    ParallelDims(tp=2),
)


def _norms() -> list[float]:
    found = []
    for dims in DIMS:
        # Copies on all ranks once.
        for strategy in ("optim_grads_params", *["no_shard"] * (dims == DIMS[2])):
            meshes = dims.build("cpu")
            reference, net = pair(meshes, torch.float32, strategy=strategy)
            list(backwards(reference, net, meshes, 1))
            whole = [p.grad for p in reference.parameters()]
            wanted = torch.nn.utils.get_total_norm([g.double() for g in whole]).item()
            with record_collectives() as record:
                norm = clip_grad_norm_(net.parameters(), 0.5).item()
            # Dense and experts together; replicas of all count alike without an exchange.
            assert record.calls.get("all_reduce", 0) <= 1
            assert math.isclose(norm, wanted, rel_tol=1e-5) and wanted > 1, (dims, strategy)
            found.append(norm)
            for p, grad in zip(net.parameters(), whole, strict=True):
                clipped = grad * (0.5 / wanted)
                torch.testing.assert_close(full_tensor(p.grad), clipped, rtol=1e-5, atol=1e-7)
    return found


def test_norm_and_clipping_are_those_of_one_process(ranks: Ranks) -> None:
    """An expert counts once under ep, tp and both, and all ranks have the same bits."""
    answers = ranks(4).run(_norms)
    assert all(answer == answers[0] for answer in answers)


def _muon() -> None:
    for dims in (ParallelDims(ep=2), ParallelDims(tp=2), ParallelDims(tp=2, ep=2)):
        meshes = dims.build("cpu")
        reference, net = pair(meshes, torch.float32)
        before = [p.detach().clone() for p in reference.parameters()]
        options: dict[str, Any] = {"lr": 0.02, "adamw_eps": 1e-5}
        # The oracle's stacks are declared alike, so that it splits the same matrices.
        for own, other in zip(reference.parameters(), net.parameters(), strict=True):
            vars(own).update({k: v for k, v in vars(other).items() if "annotation" in k})
        optimizers = [Muon(model.parameters(), **options) for model in (reference, net)]
        for _ in backwards(reference, net, meshes, 3):
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for old, p, q in zip(before, net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(p.detach()), q.detach(), rtol=1e-6, atol=1e-6)
            assert not torch.equal(old, q)


def test_muon_steps_each_experts_matrix_as_in_one_process(ranks: Ranks) -> None:
    """Of stacks that ep shares out, and that dp x tp ranks divide; gate and up apart."""
    ranks(4).run(_muon)


def _run(dims: ParallelDims, cls: type[FusedAdam], **options: Any) -> dict[str, Any]:
    meshes = dims.build("cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    net = shard(Net(), meshes, mp_policy=policy)
    optimizer = cls(net.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=0.5, **options)
    norms = []
    for _ in backwards(Net(), net, meshes, 3):
        optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad()
    return {"norms": norms} | local_bits(net, optimizer)


def _offloaded() -> None:
    for dims, fraction in ((ParallelDims(ep=2), 1.0), (ParallelDims(tp=2, ep=2), 0.5)):
        wanted = _run(dims, FusedAdam)
        assert_same(_run(dims, HybridDeviceOptimizer, offload_fraction=fraction), wanted)


def test_offload_of_a_mixture_changes_no_bit(ranks: Ranks) -> None:
    """Weights, states and norms, with all on the host or half of it, experts and dense."""
    ranks(4).run(_offloaded)


def _narrow() -> None:
    formats = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float16}
    assert any(map(is_scaled, formats.values()))
    for dims in (ParallelDims(ep=2), ParallelDims(tp=2)):
        meshes = dims.build("cpu")
        reference, net = pair(meshes, torch.float32)
        optimizers = [
            FusedAdam(model.parameters(), lr=1e-2, eps=1e-5, **formats)
            for model in (reference, net)
        ]
        list(backwards(reference, net, meshes, 1))
        # The same gradients in bits, so that states round alike.
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            q.grad = full_tensor(p.grad).clone()
        for optimizer in optimizers:
            optimizer.step()
        for name, p in net.named_parameters():
            q = reference.get_parameter(name)
            assert torch.equal(full_tensor(p.detach()), q.detach()), name
            for key, state in optimizers[0].state[q].items():
                own = full_tensor(optimizers[1].state[p][key])
                assert own.dtype == state.dtype
                if own.shape == state.shape:
                    assert torch.equal(own.float(), state.float()), (name, key)


def test_narrow_states_of_experts_are_those_of_one_process(ranks: Ranks) -> None:
    """FP8 and FP16 moments of stacks under ep and tp, bit for bit."""
    ranks(4).run(_narrow)
