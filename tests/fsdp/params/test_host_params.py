"""Parameters on the host: trained, saved and counted as parameters on the device are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from megafsdp import (
    FusedAdam,
    MixedPrecisionPolicy,
    OffloadPolicy,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    full_tensor,
    load_full_state_dict,
    mark_main_weights_changed,
    materialize,
    microbatch,
    summon_full_params,
)
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device.memory import Category
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.params import host_grads, host_params
from megafsdp.fsdp.params.parameter_group import ParameterGroup
from megafsdp.optimizer.local_parameters import local_parameters
from megafsdp.optimizer.loss_scaler import LossScaler, ScaleRule
from megafsdp.optimizer.muon.muon import Muon
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from tests.end_to_end.strategy_cases import ENGINES, Engine, MeshShape, trajectory
from tests.fsdp.toy import Net, adamw, batches, mine, shard
from tests.pairwise import each_value, gate_of
from tests.ranks import Ranks

HOST = OffloadPolicy(params=True)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP32 = MixedPrecisionPolicy()
SHAPES: dict[str, MeshShape] = {"hsdp": (2, 1), "hfsdp": (2, 1)}
OFFLOADED = {name: engine.with_options(offload_policy=HOST) for name, engine in ENGINES.items()}
MIXED = {
    "blocks alone": Engine(((2,),), {"offload_policy": HOST}, {"offload_policy": OffloadPolicy()}),
    "root alone": Engine(((2,),), root_options={"offload_policy": HOST}),
}
LOOPS = (("plain", 3), ("microbatch", 3), ("mixed", 3))
NUM_STEPS = 3
PRODUCT_NAME = "host-parameters"

CASES = [
    (name, model, *loop)
    for name in [*OFFLOADED, *MIXED]
    for model in ("even", "odd")
    for loop in LOOPS
]


@pytest.mark.parametrize(
    ("engine", "model", "kind", "num_microbatches"), gate_of(CASES, PRODUCT_NAME, each_value(CASES))
)
def test_three_steps_equal_one_process(
    ranks: Ranks, engine: str, model: str, kind: str, num_microbatches: int
) -> None:
    """Gradients, losses and parameters; frozen, unused, tied and 0-dim parameters too."""
    shape = SHAPES.get(engine, (2,))
    given = (OFFLOADED | MIXED)[engine]
    ratios = ranks(2).run(trajectory, given, shape, model, kind, num_microbatches, NUM_STEPS)
    assert ratios == pytest.approx([1.0, 1.0], rel=1e-5)


@pytest.mark.parametrize("engine", ["hsdp", "hfsdp"])
def test_three_steps_on_two_axes_equal_one_process(ranks: Ranks, engine: str) -> None:
    """Both axes divide or replicate something."""
    arguments = (OFFLOADED[engine], (2, 2), "odd", "microbatch", 3, NUM_STEPS)
    ratios = ranks(4).run(trajectory, *arguments)
    assert ratios == pytest.approx([1.0] * 4, rel=1e-5)


def _groups(net: nn.Module) -> list[ParameterGroup]:
    units = [module._fsdp_unit() for module in net.modules() if isinstance(module, FSDPModule)]
    return [group for unit in units for group in unit.groups]


def _net(
    engine: str,
    policy: MixedPrecisionPolicy,
    offload: object,
    num_blocks: int = 2,
    **options: object,
) -> Net:
    given = ENGINES[engine].with_options(mp_policy=policy, offload_policy=offload, **options)
    shape = SHAPES.get(engine, (dist.get_world_size(),))
    return given.shard(Net(num_blocks), shape)


def _fused(net: nn.Module) -> FusedAdam:
    return FusedAdam(net.parameters(), lr=1e-2, eps=1e-5, max_grad_norm=0.5)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": adamw,
    "FusedAdam": _fused,
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Muon": lambda net: Muon(net.parameters(), lr=1e-2),
}


def _train(
    net: Net, optimizer: torch.optim.Optimizer, kind: str, *, num_steps: int
) -> list[torch.Tensor]:
    """Train with two microbatches and a loss scale; return what a run shows on this rank."""
    shown = []
    scaler = LossScaler(ScaleRule.constant(4.0))
    for step in range(num_steps):
        parts = batches(2, seed=step)
        for k, batch in enumerate(parts):
            with microbatch(net, is_last=kind == "plain" or k == len(parts) - 1):
                loss = net(*mine(batch)) / len(parts)
                scaler.scale(loss).backward()
            shown.append(loss.detach())
        assert scaler.unscale_(optimizer)
        shown.append(clip_grad_norm_(net, 1.0))
        shown += [local_tensor(p.grad).clone() for p in net.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    shown += [local_tensor(p) for p in net.parameters()]
    states = [optimizer.state[p] for p in net.parameters()]
    values = [state[name] for state in states for name in sorted(state)]
    return shown + [local_tensor(value) for value in values if torch.is_tensor(value)]


def _bits(engine: str, policy: MixedPrecisionPolicy, kind: str, name: str) -> None:
    runs = []
    for offload in (OffloadPolicy(), HOST):
        net = _net(engine, policy, offload)
        runs.append(_train(net, OPTIMIZERS[name](net), kind, num_steps=2))
    assert len(runs[0]) == len(runs[1])
    assert all(torch.equal(*both) for both in zip(*runs, strict=True))
    assert all(group.lives_on_host for group in _groups(net))


BIT_CASES = [
    (engine, policy, kind, name)
    for engine in ENGINES
    for policy in (FP32, BF16)
    for kind in ("plain", "microbatch")
    for name in OPTIMIZERS
]


@pytest.mark.parametrize(
    ("engine", "policy", "kind", "name"), gate_of(BIT_CASES, PRODUCT_NAME, each_value(BIT_CASES))
)
def test_a_run_has_the_bits_of_a_run_on_the_device(
    ranks: Ranks, engine: str, policy: MixedPrecisionPolicy, kind: str, name: str
) -> None:
    """Losses, unscaled and clipped gradients, weights and states of any optimizer."""
    ranks(2).run(_bits, engine, policy, kind, name)


@pytest.mark.parametrize("engine", ["optim_grads", "optim_grads_params"])
def test_a_bf16_run_stays_beside_one_process(ranks: Ranks, engine: str) -> None:
    """Main weights in fp32 against one process that computes in bf16 and sums in fp32."""
    ranks(2).run(_beside_one_process, engine)


def _beside_one_process(engine: str) -> None:
    reference, net = Net(num_blocks=2), _net(engine, BF16, HOST)
    optimizers = [adamw(reference), adamw(net)]
    for step in range(3):
        (batch,) = batches(1, seed=step)
        rounded = copy.deepcopy(reference).bfloat16()
        for rank in range(dist.get_world_size()):
            rows = [tensor[2 * rank : 2 * rank + 2] for tensor in batch]
            rounded.zero_grad()
            rounded(*rows).backward()
            for own, part in zip(reference.parameters(), rounded.parameters(), strict=True):
                grad = part.grad.float() / dist.get_world_size()
                own.grad = grad if own.grad is None else own.grad + grad
        net(*mine(batch)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Same forward and backward on each rank, and two summands: equal but for the order of a sum.
    for own, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(own.detach()), wanted, rtol=1e-6, atol=1e-7)


# What is counted on the device at rest, of a compute weight of C bytes over N ranks.
KEPT: dict[str, Callable[[int], int]] = {
    "no_shard": lambda c: c,
    "optim": lambda c: c,
    "optim_grads": lambda c: c,
    "optim_grads_params": lambda c: 0,
    "hsdp": lambda c: 0,
    "hfsdp": lambda c: c,  # Of one rank of the inner axis.
}


def _bytes(engine: str, policy: MixedPrecisionPolicy) -> None:
    net = _net(engine, policy, HOST)
    optimizer = _fused(net)
    local = sum(group.main_weight.flat.numel() for group in _groups(net))
    whole = sum(group.layout.gathered_numel for group in _groups(net))
    assert local * (1 if engine == "no_shard" else dist.get_world_size()) >= whole
    is_cast = policy.param_dtype is not None
    itemsize = 2 if is_cast else 4
    kept = KEPT[engine](whole * itemsize)
    cast = local * itemsize if is_cast else 0
    for _ in range(2):
        for k, batch in enumerate(batches(2)):
            with microbatch(net, is_last=k == 1):
                net(*mine(batch)).backward()
        unit = net._fsdp_unit()
        live, host = unit.ledger.live, unit.host_ledger.live
        assert live[Category.MAIN_GRAD] == 0
        assert host[Category.MAIN_GRAD] == 4 * local
        assert all(p.grad.device == local_tensor(p).device for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
        assert {c: n for c, n in live.items() if n} == (
            {Category.COMPUTE_WEIGHT: kept} if kept else {}
        )
        assert {c: n for c, n in host.items() if n} == {
            Category.MAIN_WEIGHT: 4 * local,
            Category.OPTIMIZER_STATE: 8 * local,
            **({Category.COMPUTE_WEIGHT: cast} if cast else {}),
        }


@pytest.mark.parametrize("policy", [FP32, BF16])
@pytest.mark.parametrize("engine", list(KEPT))
def test_the_device_holds_nothing_that_lives_on_the_host(
    ranks: Ranks, engine: str, policy: MixedPrecisionPolicy
) -> None:
    """At rest: main weights, states and casts on the host, gradients until they are cleared."""
    ranks(2).run(_bytes, engine, policy)


def _peaks() -> None:
    net = _net("optim_grads_params", BF16, HOST, num_blocks=3, prefetch=1)
    groups, ledger = _groups(net), net._fsdp_unit().ledger
    optimizer = adamw(net)
    for _ in range(2):
        ledger.reset_peak()
        for batch in batches(2):
            net(*mine(batch)).backward()
            assert ledger.live[Category.MAIN_GRAD] == 0, "a plain loop leaves no sum behind"
        optimizer.step()
        optimizer.zero_grad()
    numels = sorted(group.main_weight.flat.numel() for group in groups)
    # The unit at work and the one gathered ahead; three sums: packed, reduced, on its way.
    assert 0 < ledger.peak[Category.COMPUTE_WEIGHT] <= 2 * sum(numels[-2:])
    assert 0 < ledger.peak[Category.MAIN_GRAD] <= 4 * sum(numels[-3:])
    with microbatch(net, is_last=False):
        net(*mine(batches(1)[0])).backward()
    assert ledger.live[Category.MAIN_GRAD] == 4 * sum(numels), "sums wait on the device"
    assert net._fsdp_unit().host_ledger.live[Category.MAIN_GRAD] == 0


def test_the_device_holds_few_shards_at_a_time(ranks: Ranks) -> None:
    """Temporary compute shards go with their gathers, sums with their copies."""
    ranks(2).run(_peaks)


def _casts() -> None:
    def num_casts() -> int:
        return sum(group.compute_weight._host_weight._cast.tensor._version for group in groups)

    for make, num_a_step in ((adamw, 1), (_fused, 0)):
        net = _net("optim_grads_params", BF16, HOST)
        groups, optimizer = _groups(net), make(net)
        for step in range(2):
            before = num_casts()
            for batch in batches(2):
                net(*mine(batch)).backward()
            casts = num_casts() - before
            assert casts == len(groups) * (num_a_step if step else 1)
            optimizer.step()
            optimizer.zero_grad()


def test_all_gathers_of_a_step_share_one_cast(ranks: Ranks) -> None:
    """FusedAdam writes it along with the main weight, hence none is made after its steps."""
    ranks(2).run(_casts)


def _policies() -> None:
    for policy, is_on_host in (
        (CPUOffloadPolicy(), True),
        (CPUOffloadPolicy(pin_memory=False), True),
        (OffloadPolicy(params=True, pin_memory=False), True),
        (TorchOffloadPolicy(), False),
        (OffloadPolicy(), False),
    ):
        net = shard(Net(num_blocks=1), offload_policy=policy)
        assert all(group.lives_on_host == is_on_host for group in _groups(net))
        net(*mine(batches(1)[0])).backward()
        nbytes = net._fsdp_unit().host_ledger.total
        assert (nbytes > 0) == is_on_host
        assert not any(local_tensor(p).is_pinned() for p in net.parameters())


def test_the_policies_of_torch_mean_the_same(ranks: Ranks) -> None:
    """A change from FSDP2 keeps its offload_policy."""
    ranks(2).run(_policies)


def _hybrid() -> None:
    net = shard(Net(), offload_policy=HOST)
    with pytest.raises(ValueError, match=r"offload_policy.*HybridDeviceOptimizer.*use FusedAdam"):
        HybridDeviceOptimizer(net.parameters())

    net(*mine(batches(1)[0])).backward()
    optimizer = FusedAdam(net.parameters(), capturable=True)
    with pytest.raises(ValueError, match=r"offload_policy.*FusedAdam\(capturable=True\)"):
        optimizer.step()


def test_what_needs_parameters_on_the_device_refuses_others(ranks: Ranks) -> None:
    """HybridDeviceOptimizer moves main weights itself, CUDA graphs run nothing on the host."""
    ranks(2).run(_hybrid)


def _local_parameters() -> None:
    nets = [_net("optim_grads_params", BF16, offload) for offload in (OffloadPolicy(), HOST)]
    optimizers = [torch.optim.Adam(local_parameters(net), lr=1e-2, eps=1e-5) for net in nets]
    for step in range(2):
        for net, optimizer in zip(nets, optimizers, strict=True):
            net(*mine(batches(1, seed=step)[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
        _same_outputs(*nets)


class _ThreadsOf(TorchDispatchMode):
    """Notes the threads of torch at casts of main weights and sums of gradients, of some size."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, set[int]] = {"copy_": set(), "add_": set()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        """Note, then run."""
        name = func._schema.name.rpartition("::")[2]
        is_cast = name == "copy_" and args[0].dtype == torch.bfloat16 != args[1].dtype
        is_sum = name == "add_" and args[0].ndim == 1 and args[0].dtype == torch.float32
        if is_cast or is_sum:
            self.found[name].add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def _threads_on_host() -> tuple[dict[str, set[int]], int]:
    net = _net("optim_grads_params", BF16, HOST)
    with pytest.MonkeyPatch.context() as patch, _ThreadsOf() as seen:
        for module in (host_params, host_grads):
            patch.setattr(module, "default_host_threads", lambda device_type: 3)
        _train(net, adamw(net), "plain", num_steps=1)
    return seen.found, torch.get_num_threads()


def test_casts_and_sums_on_the_host_use_its_threads(ranks: Ranks) -> None:
    """In these operations alone: torch's number is as before afterwards."""
    # Other sums of the toy and of the optimizer use one.
    assert ranks(1).run(_threads_on_host) == [({"copy_": {3}, "add_": {1, 3}}, 1)]


def test_local_parameters_lie_over_the_host_memory(ranks: Ranks) -> None:
    """An element-wise optimizer over flat buffers steps them there."""
    ranks(2).run(_local_parameters)


def _same_outputs(net: nn.Module, other: nn.Module) -> None:
    batch = mine(batches(1, seed=9)[0])
    with torch.no_grad():
        assert torch.equal(net(*batch), other(*batch))


def _values(engine: str) -> None:
    plain, net = _net(engine, BF16, OffloadPolicy()), _net(engine, BF16, HOST)
    for own in (plain, net):
        _train(own, adamw(own, fused=True), "plain", num_steps=1)
    wanted, state = full_state_dict(plain), full_state_dict(net)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    fresh = _net(engine, BF16, HOST)
    _same_outputs(fresh, _net(engine, BF16, OffloadPolicy()))
    load_full_state_dict(fresh, wanted)
    _same_outputs(fresh, plain)
    changed = {name: tensor.clone().mul_(1.5) for name, tensor in net.state_dict().items()}
    for own in (fresh, plain):
        own.load_state_dict(changed)
    _same_outputs(fresh, plain)
    with torch.no_grad():
        for own in (fresh, plain):
            own.norm.weight.mul_(2.0)
            mark_main_weights_changed(own)
    _same_outputs(fresh, plain)
    with summon_full_params(fresh), summon_full_params(plain):
        for one, other in zip(fresh.parameters(), plain.parameters(), strict=True):
            assert one.dtype == torch.bfloat16 and torch.equal(one, other)
        _same_outputs(fresh, plain)
    _same_outputs(fresh, plain)


@pytest.mark.parametrize("engine", list(ENGINES))
def test_values_go_in_and_out(ranks: Ranks, engine: str) -> None:
    """State dicts, full state dicts, edits by hand, summoned parameters."""
    ranks(2).run(_values, engine)


def _materialized(engine: str) -> None:
    def initialize(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    nets = []
    for offload in (OffloadPolicy(), HOST):
        with torch.device("meta"):
            model = Net(num_blocks=2)
        given = ENGINES[engine].with_options(mp_policy=BF16, offload_policy=offload)
        net = given.shard(model, SHAPES.get(engine, (2,)))
        torch.manual_seed(3)
        nets.append(materialize(net, initialize))
    _same_outputs(*nets)
    assert all(group.lives_on_host for group in _groups(nets[1]))
    for net in nets:
        _train(net, _fused(net), "plain", num_steps=1)
    _same_outputs(*nets)


@pytest.mark.parametrize("engine", ["no_shard", "optim_grads", "optim_grads_params", "hfsdp"])
def test_models_on_the_meta_device_are_filled_on_the_host(ranks: Ranks, engine: str) -> None:
    """The values of materialize() without offload."""
    ranks(2).run(_materialized, engine)


def _checkpoints(directory: Path) -> None:
    for number, (saved, loaded) in enumerate(((HOST, OffloadPolicy()), (OffloadPolicy(), HOST))):
        net = _net("optim_grads_params", BF16, saved)
        optimizer = _fused(net)
        _train(net, optimizer, "plain", num_steps=1)
        path = directory / str(number)
        checkpoint.save(path, step=1, model=net, optimizer=optimizer)
        checkpoint.async_save(path, step=2, model=net, optimizer=optimizer).result()
        other = _net("optim_grads_params", BF16, loaded)
        other_optimizer = _fused(other)
        checkpoint.load(path, step=1 + number, model=other, optimizer=other_optimizer)
        runs = [
            _train(own, own_optimizer, "microbatch", num_steps=1)
            for own, own_optimizer in ((net, optimizer), (other, other_optimizer))
        ]
        assert all(torch.equal(*both) for both in zip(*runs, strict=True))


def test_checkpoints_do_not_tell_where_parameters_lived(ranks: Ranks, tmp_path: Path) -> None:
    """Saved with offload and loaded without, and the other way: equal bits from there on."""
    ranks(2).run(_checkpoints, tmp_path)


def _torch_checkpoint(directory: Path) -> None:
    net, other = (_net("optim_grads_params", BF16, policy) for policy in (HOST, HOST))
    _train(net, adamw(net), "plain", num_steps=1)
    dcp.save(get_model_state_dict(net), checkpoint_id=directory)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=directory)
    set_model_state_dict(other, state)
    _same_outputs(net, other)


def test_torch_checkpoints_load_into_the_host(ranks: Ranks, tmp_path: Path) -> None:
    """torch.distributed.checkpoint writes and reads the host's memory."""
    ranks(2).run(_torch_checkpoint, tmp_path)


def _resharding(choice: bool | int) -> None:
    nets = [
        _net("optim_grads_params", BF16, offload, reshard_after_forward=choice)
        for offload in (OffloadPolicy(), HOST)
    ]
    runs = [_train(net, adamw(net, fused=True), "microbatch", num_steps=2) for net in nets]
    assert all(torch.equal(*both) for both in zip(*runs, strict=True))


@pytest.mark.parametrize(("choice", "num_ranks"), [(True, 2), (False, 2), (2, 4)])
def test_parameters_are_freed_after_forward_as_asked(
    ranks: Ranks, choice: bool | int, num_ranks: int
) -> None:
    """Slices among two of four ranks stay on the device until backward."""
    ranks(num_ranks).run(_resharding, choice)


def _interrupted() -> None:
    nets = [_net("optim_grads_params", BF16, offload) for offload in (OffloadPolicy(), HOST)]
    results: list[list[Any]] = []
    for net in nets:
        optimizer = adamw(net, fused=True)
        _train(net, optimizer, "plain", num_steps=1)
        with microbatch(net, is_last=False):
            net(*mine(batches(1)[0])).backward()

        def fail(*unused: object) -> None:
            raise KeyError("cut short")

        handle = net.blocks[0].up.register_full_backward_pre_hook(fail)
        with pytest.raises(KeyError):
            net(*mine(batches(1)[0])).backward()
        handle.remove()
        optimizer.zero_grad()
        live = net._fsdp_unit().ledger.live
        results.append(_train(net, optimizer, "plain", num_steps=1))
        assert live[Category.PARTIAL_GRAD] == 0
    assert live[Category.MAIN_GRAD] == 0
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


def test_an_exception_in_backward_leaves_nothing_behind(ranks: Ranks) -> None:
    """Sums on the device and copies under way are forgotten."""
    ranks(2).run(_interrupted)


def _last_microbatch_skips(engine: str) -> None:
    nets = [_net(engine, BF16, offload) for offload in (OffloadPolicy(), HOST)]
    for net in nets:
        blocks = net.blocks
        for k, batch in enumerate(batches(2)):
            net.blocks = blocks[: 2 - k]
            with microbatch(net, is_last=k == 1):
                net(*mine(batch)).backward()
        net.blocks = blocks
    grads = [[p.grad for p in net.parameters()] for net in nets]
    for one, other in zip(*grads, strict=True):
        assert torch.equal(local_tensor(one), local_tensor(other))


@pytest.mark.parametrize("engine", ["no_shard", "optim_grads_params", "hsdp"])
def test_sums_of_a_unit_that_the_last_microbatch_skips_arrive(ranks: Ranks, engine: str) -> None:
    """What waits on the device is copied at the end of the last backward."""
    ranks(2).run(_last_microbatch_skips, engine)


def _flags() -> None:
    runs = []
    for offload in (OffloadPolicy(), HOST):
        net = _net("optim_grads_params", FP32, offload)
        seen = []
        net.norm.weight.register_post_accumulate_grad_hook(
            lambda p, s=seen: s.append(local_tensor(p.grad).clone())
        )
        net.set_requires_all_reduce(False)
        net(*mine(batches(1)[0])).backward()
        net.set_requires_gradient_sync(False)
        net(*mine(batches(1, seed=2)[0])).backward()
        net.set_requires_gradient_sync(True)
        net(*mine(batches(1, seed=3)[0])).backward()
        runs.append([*seen, *(local_tensor(p.grad) for p in net.parameters())])
    assert len(runs[0]) == len(runs[1])
    assert all(torch.equal(*both) for both in zip(*runs, strict=True))


def test_flags_of_reductions_mean_the_same(ranks: Ranks) -> None:
    """On one axis a reduction without an all-reduce is complete; hooks see each sum."""
    ranks(2).run(_flags)
