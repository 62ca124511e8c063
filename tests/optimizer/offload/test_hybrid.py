"""HybridDeviceOptimizer is FusedAdam bit for bit, wherever main weights and states live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megafsdp import clip_grad_norm_, full_tensor
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.device import host_threads
from megafsdp.device.host_copies import ThreadLink
from megafsdp.device.streams import DeviceHandle
from megafsdp.optimizer.offload import hybrid
from megafsdp.optimizer.offload.bucket_step import HostThreads
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import groups_of
from tests.fsdp.toy import Net, batches, mine, shard
from tests.optimizer.offload.hybrid_runs import (
    BF16,
    FP32,
    Case,
    assert_same,
    backward,
    local_bits,
    make_net,
    make_optimizer,
    make_scaled_net,
    train,
)
from tests.ranks import Ranks


def _trajectories_agree(case: Case, reference: Case, is_partial: bool) -> float:
    wanted_net = make_net(reference)
    wanted = train(wanted_net, make_optimizer(wanted_net, reference), reference)
    net = make_net(case)
    before = {name: local_tensor(p).clone() for name, p in net.named_parameters()}
    optimizer = make_optimizer(net, case)
    assert isinstance(optimizer, HybridDeviceOptimizer)
    found = train(net, optimizer, case)
    assert_same(found, wanted)
    unmoved = [torch.equal(found[name], rows) for name, rows in before.items() if rows.numel()]
    assert unmoved and not any(unmoved)
    on_host = [g for g in groups_of(net.parameters()) if g.host_memory is not None]
    assert bool(on_host) == (case.fraction != 0.0)
    assert (len(on_host) < len(groups_of(net.parameters()))) == is_partial
    return optimizer.offloaded_fraction


# Every value is in one of the first, every pair of two in one of all.
SELECTED = [
    Case(0.5, True, 0.5, 3, "optim_grads_params", BF16),
    Case(0.3, False, 1e3, 1, "optim_grads_params", FP32),
    Case(0.0, True, 0.5, 1, "optim", BF16),
    Case(1.0, False, 0.5, 3, "optim", BF16),
    Case(1.0, True, 0.5, 1, "optim_grads", BF16),
    Case(0.5, True, None, 3, "no_shard", FP32),
    Case(1.0, True, 0.5, 3, "hfsdp", BF16),
]
OTHERS = [
    Case(1.0, True, None, 1, "optim_grads_params", BF16),
    Case(0.5, True, None, 1, "optim", FP32),
    Case(1.0, True, 0.5, 1, "no_shard", BF16),
    Case(0.5, False, None, 1, "hfsdp", FP32),
    Case(0.3, True, 1e3, 1, "hfsdp", BF16),
]
PAIRWISE = [
    *SELECTED,
    *(pytest.param(case, marks=pytest.mark.matrix("offload")) for case in OTHERS),
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


@dataclass(frozen=True)
class _Gpu(DeviceHandle):
    """A GPU as far as threads of the host go: it copies and computes as a CPU does."""

    is_asynchronous = True

    def adopt_thread(self) -> None:
        """Need nothing."""


def _threads_of(given: int | None, device: str) -> tuple[set[int], list[str], list[str]]:
    """Return the threads of the kernel's calls, where its thread stayed, and what was logged."""
    numbers, near, logged = set(), list[str](), list[str]()
    inner = HostThreads.update

    def update(threads: HostThreads, *arguments: Any) -> None:
        numbers.add(threads.num_threads)
        inner(threads, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostThreads, "update", update)
        patch.setattr(host_threads, "share_of_cores", lambda: 5)
        patch.setattr(hybrid, "stay_near", lambda where: near.append(str(where)))
        patch.setattr(hybrid._LOGGER, "info", lambda text, *values: logged.append(text % values))
        if device == "cuda":
            patch.setattr(
                hybrid, "device_handle", lambda device_type: _Gpu(torch.device("cuda", 0))
            )
        wanted_net, net = make_net(Case()), make_net(Case())
        wanted = train(wanted_net, make_optimizer(wanted_net, Case()), Case())
        optimizer = make_optimizer(net, Case(1.0), host_threads=given, link=ThreadLink())
        assert_same(train(net, optimizer, Case(1.0)), wanted)
    return numbers, near, logged


@pytest.mark.parametrize(
    ("given", "device", "wanted"),
    [(None, "cpu", 1), (3, "cpu", 3), (None, "cuda", 5), (3, "cuda", 3)],
)
def test_the_host_steps_by_its_share_of_the_cores(
    ranks: Ranks, given: int | None, device: str, wanted: int
) -> None:
    """For a GPU, unless a number is given; a model on a CPU computes on the same ones."""
    logged = [f"The host steps its part on {wanted} threads."] if device == "cuda" else []
    where = "cuda:0" if device == "cuda" else "cpu"
    assert ranks(1).run(_threads_of, given, device) == [({wanted}, [where], logged)]


def _closures_and_found_inf() -> None:
    net = make_net(Case())
    optimizer = make_optimizer(net, Case(1.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(*mine(batches(1)[0]))
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    before = local_bits(net, optimizer)
    optimizer.found_inf = torch.ones(())  # As torch.amp.GradScaler sets it.
    optimizer.step()
    assert_same(local_bits(net, optimizer), before)


def test_closures_are_called_and_overflows_skip_the_step(ranks: Ranks) -> None:
    """A step that finds an overflow changes nothing."""
    ranks(2).run(_closures_and_found_inf)


def _memory() -> None:
    net = make_net(Case())
    groups = groups_of(net.parameters())
    ledgers = list({id(g.buffers.ledger): g.buffers.ledger for g in groups}.values())
    whole = sum(ledger.total for ledger in ledgers)
    optimizer = make_optimizer(net, Case(1.0))
    assert isinstance(optimizer, HybridDeviceOptimizer)
    numel = sum(g.main_weight.flat.numel() for g in groups)
    # fp32 main weight and moments; fp32 gradient and bf16 copy on their way.
    assert optimizer.host_nbytes == numel * (3 * 4 + 4 + 2)
    assert optimizer.offloaded_fraction == 1.0
    # The device holds the bf16 copy in the place of the fp32 main weight.
    assert sum(ledger.total for ledger in ledgers) == whole - numel * (4 - 2)
    backward(net, 0)
    optimizer.step()
    for group in groups:
        parameter = group.parameters[0].sharded
        slab = local_tensor(parameter).untyped_storage().data_ptr()
        for name in ("exp_avg", "exp_avg_sq"):
            state = optimizer.state[parameter][name]
            assert local_tensor(state).untyped_storage().data_ptr() == slab


def test_each_bucket_is_one_slab_of_the_host(ranks: Ranks) -> None:
    """Main weights and moments lie in one piece of memory, and nothing else is on the host."""
    ranks(2).run(_memory)


def _some_gradients_are_none() -> None:
    """Gradients come and go; some are frozen, assigned by hand, or empty on a rank."""
    found = []
    for fraction in (None, 1.0, 0.5):
        net = Net()
        net.blocks[1].norm.requires_grad_(False)
        net.extra = nn.Parameter(torch.ones(1, 4))  # One row: an empty shard on a rank.
        net = shard(net, mp_policy=BF16)
        optimizer = make_optimizer(net, Case(fraction))
        generator = torch.Generator().manual_seed(3)
        losses = {}
        for seed in range(5):
            losses[f"loss {seed}"] = backward(net, seed)
            if seed in (1, 2):
                # An edit counts in the next forward, though no step writes its cast.
                net.blocks[0].up.weight.grad = None
                with torch.no_grad():
                    net.blocks[0].up.weight.mul_(1.5)
            if seed == 3:
                net.blocks[2].norm.weight.grad = None
                bias = net.blocks[2].down.bias
                values = torch.randn(bias.shape, generator=generator)
                bias.grad = bias.grad.clone()
                bias.grad.mul_(values.mean())
            if seed % 2:
                rows = local_tensor(net.extra)
                like = net.blocks[0].norm.weight
                assert like.grad is not None
                net.extra.grad = torch.ones_like(net.extra) if rows is not None else None
            optimizer.step()
            optimizer.zero_grad()
        found.append(losses | local_bits(net, optimizer))
    assert (
        any(
            local_tensor(p).numel() == 0 and id(p) in {id(q) for q in optimizer.state}
            for p in net.parameters()
        )
        or dist.get_rank() == 0
    )
    for other in found[1:]:
        assert_same(other, found[0])
    steps = found[0]["blocks.0.up.weight.step"].item()
    assert steps == 3, "a step without a gradient moves no state"


def test_gradients_that_are_none_frozen_parts_and_empty_shards(ranks: Ranks) -> None:
    """A parameter of which a rank holds no row gets its gradient by hand on some steps."""
    ranks(2).run(_some_gradients_are_none)


def _plain_loop(clip: Callable[..., torch.Tensor]) -> None:
    """Clip and edit gradients before the step, change the rate after it."""
    found = []
    for fraction in (None, 0.5, 1.0):
        net = make_net(Case())
        optimizer = make_optimizer(net, Case(fraction))
        for seed in range(3):
            backward(net, seed)
            clip(net.parameters(), 0.5 if seed % 2 else 1e3)
            for parameter in net.blocks[2].parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            optimizer.step()
            for param_group in optimizer.param_groups:
                param_group["lr"] = 1e-2 / (seed + 1)
            optimizer.zero_grad()
        found.append(local_bits(net, optimizer))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_a_plain_loop_clips_and_edits_gradients_as_ever(
    ranks: Ranks, clip: Callable[..., torch.Tensor]
) -> None:
    """Ours or torch's clipping, a change by hand, a rate that changes while the worker steps."""
    ranks(2).run(_plain_loop, clip)


def _edited_between_steps(strategy: str) -> None:
    found = []
    for fraction in (None, 1.0):
        net = make_scaled_net(strategy, FP32)
        optimizer = make_optimizer(net, Case(fraction))
        backward(net, 0)
        optimizer.step()
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.grad.mul_(1.5)
        optimizer.step()
        found.append(local_bits(net, optimizer))
    assert_same(found[1], found[0])


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_gradients_may_be_edited_and_stepped_again(ranks: Ranks, strategy: str) -> None:
    """Also those of replicated parameters, of which the host has a copy from the last step."""
    ranks(2).run(_edited_between_steps, strategy)


def _states_rest_without_gradients(fraction: float) -> None:
    net = Net()
    net.blocks[1].norm.requires_grad_(False)
    net = shard(net, mp_policy=BF16)
    frozen = {n: full_tensor(p.detach()).clone() for n, p in net.blocks[1].norm.named_parameters()}
    optimizer = make_optimizer(net, Case(fraction))
    resting = {"one parameter": ["blocks.0.up.weight"]}
    resting["a unit"] = [n for n, p in net.named_parameters() if n.startswith("blocks.2.")]
    resting["all"] = [n for n, _ in net.named_parameters()]
    backward(net, 0)
    optimizer.step()
    for seed, (what, names) in enumerate(resting.items(), start=1):
        optimizer.zero_grad()
        backward(net, seed)
        before = local_bits(net, optimizer)
        for name in names:
            net.get_parameter(name).grad = None
        optimizer.step()
        after = local_bits(net, optimizer)
        assert before.keys() == after.keys()
        for key, value in before.items():
            rests = key in names or key.rpartition(".")[0] in names or "blocks.1.norm" in key
            if value.numel():
                assert torch.equal(after[key], value) == rests, (what, key)
    for name, parameter in net.blocks[1].norm.named_parameters():
        assert parameter not in optimizer.state or not optimizer.state[parameter]
        assert torch.equal(full_tensor(parameter.detach()), frozen[name])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_gets_no_gradient_is_not_moved(ranks: Ranks, fraction: float) -> None:
    """Weights, moments and counts of a parameter, of a whole unit, of the model; frozen parts."""
    ranks(2).run(_states_rest_without_gradients, fraction)


def _trains_alike_on_axes(strategy: str) -> list[float]:
    """Return what was offloaded of all by fractions of a half and of one."""
    found, offloaded = [], []
    for fraction in (None, 0.5, 1.0):
        case = Case(fraction, True, 0.5, 3, strategy)
        net = make_net(case)
        optimizer = make_optimizer(net, case)
        found.append(train(net, optimizer, case, num_steps=2))
        if isinstance(optimizer, HybridDeviceOptimizer):
            offloaded.append(optimizer.offloaded_fraction)
    for other in found[1:]:
        assert_same(other, found[0])
    return offloaded


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
def test_two_mesh_axes_change_no_bit(ranks: Ranks, strategy: str) -> None:
    """Replicated or divided over the outer axis, by four ranks, with clipping and microbatches."""
    found = ranks(4).run(_trains_alike_on_axes, strategy)
    assert all(offloaded == found[0] for offloaded in found)
    assert found[0] == pytest.approx([0.5, 1.0], abs=0.2)


def _trains_on_cuda(strategy: str, fraction: float) -> None:
    """The kernels of both devices have the same bits, so runs with and without offload do."""
    found = []
    for own in (None, fraction):
        case = Case(own, max_grad_norm=0.5, strategy=strategy)
        net = shard(Net().cuda(), strategy=strategy, mp_policy=BF16)
        optimizer = make_optimizer(net, case)
        for seed in range(4):
            tokens, labels = (tensor.cuda() for tensor in mine(batches(1, seed=seed)[0]))
            net(tokens, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(optimizer, HybridDeviceOptimizer):
            optimizer.synchronize()
            on_host = [g for g in groups_of(net.parameters()) if g.host_memory is not None]
            assert all(g.main_weight.flat.is_pinned() for g in on_host)
            assert on_host
        found.append({name: t.cpu() for name, t in local_bits(net, optimizer).items()})
    assert_same(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("fraction", [0.5, 1.0])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_a_run_on_cuda_has_the_bits_of_a_run_without_offload(
    ranks: Ranks, strategy: str, fraction: float
) -> None:
    """Pinned slabs, copies on streams of their own, main weights beside the device."""
    ranks(1, "nccl").run(_trains_on_cuda, strategy, fraction)
