"""The engine on CUDA: NCCL with one rank, gloo with ranks that share a GPU."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    clip_grad_norm_,
    full_state_dict,
    mark_main_weights_changed,
    microbatch,
)
from megafsdp.buffer.comm import collectives as door
from megafsdp.buffer.comm.collectives import backends, record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from tests.fsdp.toy import Net, adamw, assert_same_grads, batches, mine, shard
from tests.ranks import Ranks
from tests.user_comms import UserAllGather, UserReduceScatter, give

pytestmark = pytest.mark.gpu

HOST = OffloadPolicy(params=True)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
OPTIONS: dict[str, dict[str, object]] = {
    "zero-3": {},
    "zero-3 without prefetch": {"prefetch": 0},
    "zero-3 bf16": {"mp_policy": BF16},
    "zero-3 bf16 in user buffers": {"nccl_user_buffers": True, "mp_policy": BF16},
    "zero-1": {"strategy": "optim"},
    "ddp": {"strategy": "no_shard"},
    "hsdp": {"mesh": (2, 1)},
    "hfsdp": {"mesh": (2, 1), "outer_strategy": "optim"},
    "zero-3 on the host": {"offload_policy": HOST},
    "zero-3 on the host, not pinned": {"offload_policy": OffloadPolicy(True, pin_memory=False)},
    "zero-3 bf16 on the host": {
        "offload_policy": HOST,
        "mp_policy": BF16,
    },
    "zero-1 on the host": {"strategy": "optim", "offload_policy": HOST},
    "ddp on the host": {"strategy": "no_shard", "offload_policy": HOST},
    "hsdp on the host": {"mesh": (2, 1), "offload_policy": HOST},
    "hfsdp on the host": {"mesh": (2, 1), "outer_strategy": "optim", "offload_policy": HOST},
}


def _backward(net: Net, batch: tuple[torch.Tensor, ...], dtype: torch.dtype | None) -> None:
    """Add the gradients of a global batch; in a narrow dtype of each rank's rows by themselves."""
    if dtype is None:
        net(*batch).backward()
        return
    num_ranks = dist.get_world_size()
    for rows in zip(*(tensor.chunk(num_ranks) for tensor in batch), strict=True):
        narrow = copy.deepcopy(net).to(dtype)
        narrow.zero_grad()
        narrow(*rows).backward()
        for wide, parameter in zip(net.parameters(), narrow.parameters(), strict=True):
            grad = parameter.grad.to(wide.dtype) / num_ranks
            wide.grad = grad if wide.grad is None else wide.grad + grad


def _trains(name: str) -> set[tuple[str, str]]:
    options = dict(OPTIONS[name])
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cuda", options["mesh"], mesh_dim_names=("o", "i"))
    reference = Net().cuda()
    net = shard(copy.deepcopy(reference), **options)
    optimizers = [adamw(reference), adamw(net, fused=True)]
    policy = options.get("mp_policy")
    dtype = policy.param_dtype if isinstance(policy, MixedPrecisionPolicy) else None
    for step in range(3):
        global_batches = batches(2, seed=step)
        with record_collectives() as record:
            for k, batch in enumerate(global_batches):
                _backward(reference, tuple(t.cuda() for t in batch), dtype)
                with microbatch(net, is_last=k == 1):
                    net(*(t.cuda() for t in mine(batch))).backward()
        # Sums on a GPU are made in another order, in bf16 too: rounded to 2 ** -9 of what is added.
        tolerance = {"rtol": 1e-3, "atol": 1e-5} if dtype is None else {"rtol": 0.02, "atol": 2e-3}
        assert_same_grads(net, reference, **tolerance)
        norms = [
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0),
            clip_grad_norm_(net, 1.0),
        ]
        tolerance = {"rtol": 1e-4, "atol": 1e-6} if dtype is None else {"rtol": 1e-3, "atol": 0.0}
        torch.testing.assert_close(norms[1].to(norms[0].device), norms[0], **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        wanted = reference.state_dict()
        for key, value in full_state_dict(net).items():
            if dtype is None:
                value = value.to(wanted[key].device)
                torch.testing.assert_close(value, wanted[key], rtol=1e-3, atol=1e-4)
            else:
                # Adam makes full steps of gradients that are all rounding: equal weights again.
                wanted[key].copy_(value)
    if options.get("nccl_user_buffers"):
        weights = [g.compute_weight for g in net._fsdp_unit().context.groups]
        is_nccl = backends(weights[0]._axes.group).get("cuda") == "nccl"
        assert all((s.slabs is not None) == is_nccl for w in weights for s in w.gathered_storages)
    return set(record.calls_by_group)


@pytest.mark.parametrize("name", [n for n, o in OPTIONS.items() if "mesh" not in o])
def test_one_rank_trains_on_nccl(ranks: Ranks, name: str) -> None:
    """Gradients, norm and parameters of three steps equal the unsharded model's."""
    (groups,) = ranks(1, "nccl").run(_trains, name)
    assert not groups, "one rank issues no collective"


@pytest.mark.parametrize("name", OPTIONS)
def test_two_ranks_that_share_a_gpu_train_on_gloo(ranks: Ranks, name: str) -> None:
    """CUDA tensors through gloo: the engine's streams and events with real exchanges."""
    ranks(2, "gloo").run(_trains, name)


def _sums_of_nccl() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        # One GPU has one rank, whose collectives NCCL makes as it does for many, but for factors:
        # a premultiplied sum of one addend is the addend.
        patch.setattr(door, "_is_alone", lambda group: False)
        f32, bf16 = torch.float32, torch.bfloat16
        for wire, grad in ((f32, f32), (bf16, f32), (bf16, bf16), (torch.float16, f32)):
            for accumulate, num_buffers in itertools.product((False, True), (1, 3)):
                outputs = [torch.ones(32, dtype=grad, device="cuda") for _ in range(num_buffers)]
                partials = [torch.full((32,), 6.0, dtype=wire, device="cuda") for _ in outputs]
                door.reduce_scatter(
                    outputs,
                    partials,
                    group=group,
                    scale=0.25,
                    accumulate=accumulate,
                    reduce_dtype=wire,
                    label="",
                    force_sum=True,
                ).wait()
                for out in outputs:
                    assert out.tolist() == [1.5 + accumulate] * 32


def test_nccl_sums_and_scales_as_it_is_asked_to(ranks: Ranks) -> None:
    """Sums in place and beside the output, one and several sub-buffers, of each dtype."""
    ranks(1, "nccl").run(_sums_of_nccl)


def _memory() -> list[int]:
    net = shard(Net(num_blocks=8, width=256).cuda())
    optimizer = adamw(net, fused=True)
    allocations = []
    for step in range(5):
        net(*(t.cuda() for t in batches(1, seed=step)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
    return allocations


def test_steady_steps_ask_the_device_for_no_memory(ranks: Ranks) -> None:
    """What units free, the next ones get."""
    (allocations,) = ranks(1, "nccl").run(_memory)
    assert allocations[2] == allocations[-1]


def _host_bits() -> None:
    nets = [
        shard(Net(num_blocks=6, width=256).cuda(), offload_policy=policy, mp_policy=BF16)
        for policy in (OffloadPolicy(), HOST)
    ]
    optimizer = adamw(nets[1])
    for step in range(4):
        for k, batch in enumerate(batches(2, seed=step)):
            for net in nets:
                with microbatch(net, is_last=k == 1):
                    net(*(t.cuda() for t in mine(batch))).backward()
        for one, other in zip(*(net.parameters() for net in nets), strict=True):
            assert other.grad.device.type == other.device.type == "cpu"
            assert local_tensor(other).is_pinned()
            assert torch.equal(local_tensor(one.grad).cpu(), local_tensor(other.grad))
        optimizer.step()
        # The device need not round an update as the host does: the weights are copied.
        with torch.no_grad():
            for one, other in zip(*(net.parameters() for net in nets), strict=True):
                local_tensor(one).copy_(local_tensor(other))
        mark_main_weights_changed(nets[0])
        for net in nets:
            net.zero_grad()


def test_copies_beside_the_kernels_lose_nothing(ranks: Ranks) -> None:
    """Gradients of pinned parameters are those of parameters on the device, in every bit."""
    ranks(1, "nccl").run(_host_bits)


def _hooked(options: dict[str, object]) -> None:
    reference = Net().cuda()
    net = shard(copy.deepcopy(reference), **options)
    main, streams = torch.cuda.current_stream(), set()

    def double(sums: torch.Tensor) -> None:
        streams.add(torch.cuda.current_stream())
        # Long after the next unit's backward, which would read or free what is not waited for.
        torch.cuda._sleep(10_000_000)
        sums.mul_(2)

    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(double)
    for batch in batches(3):
        reference(*(t.cuda() for t in batch)).backward()
        net(*(t.cuda() for t in mine(batch))).backward()
    for parameter in reference.parameters():
        parameter.grad *= 2
    assert_same_grads(net, reference, rtol=1e-3, atol=1e-5)
    assert len(streams) == 1 and main not in streams


class _Slow:
    """Makes a user's collective later than the engine's other work could be."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: set[torch.cuda.Stream] = set()

    def _note(self, input_tensor: torch.Tensor) -> None:
        super()._note(input_tensor)
        self.streams.add(torch.cuda.current_stream())
        torch.cuda._sleep(10_000_000)


class _SlowAllGather(_Slow, UserAllGather):
    pass


class _SlowReduceScatter(_Slow, UserReduceScatter):
    pass


def _with_comms(options: dict[str, object]) -> None:
    reference = Net().cuda()
    net = shard(copy.deepcopy(reference), **options)
    comms = _SlowAllGather(), _SlowReduceScatter()
    give(net, *comms)
    for batch in batches(3):
        reference(*(t.cuda() for t in batch)).backward()
        net(*(t.cuda() for t in mine(batch))).backward()
    assert_same_grads(net, reference, rtol=1e-3, atol=1e-5)
    streams = {torch.cuda.current_stream()}.union(*(comm.streams for comm in comms))
    assert len(streams) == 3, "one for gathers, one for sums, and that of forward and backward"


@pytest.mark.parametrize("name", ["zero-3", "zero-1", "zero-3 on the host"])
def test_collectives_of_the_users_run_beside_the_kernels(ranks: Ranks, name: str) -> None:
    """On streams of their own; nothing is read, or freed, before their work is done."""
    ranks(2, "gloo").run(_with_comms, OPTIONS[name])


@pytest.mark.parametrize("name", ["zero-3", "zero-1", "zero-3 on the host"])
def test_a_hook_on_sums_runs_beside_backward(ranks: Ranks, name: str) -> None:
    """On a stream of its own, with no sum shown before its work is done."""
    ranks(1, "nccl").run(_hooked, OPTIONS[name])
