"""A user's hook on each new sum of gradients, as torch's ``set_all_reduce_hook`` sets it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafsdp import FSDPModule, OffloadPolicy, fully_shard, microbatch
from megafsdp.fsdp.params.reduced_hook import ReducedHook
from tests.fsdp.toy import Net, assert_same_grads, batches, shard
from tests.ranks import Ranks

OPTIONS: list[dict[str, object]] = [
    {"strategy": "optim_grads_params"},
    {"strategy": "optim"},
    {"strategy": "no_shard"},
    {"strategy": "optim_grads_params", "offload_policy": OffloadPolicy(params=True)},
]


def _set_everywhere(net: Net, hook: Callable[[torch.Tensor], None] | None) -> None:
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(hook)


def _mean_over(group: dist.ProcessGroup) -> Callable[[torch.Tensor], None]:
    def hook(sums: torch.Tensor) -> None:
        dist.all_reduce(sums, group=group)
        sums /= group.size()

    return hook


def _replicas_of_the_user(options: dict[str, object]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    reference = Net().double()
    net = shard(copy.deepcopy(reference), mesh=mesh["shard"], **options)
    _set_everywhere(net, _mean_over(mesh.get_group("replica")))
    # The second step adds to the gradients of the first, as two backwards without zero_grad() do.
    for step in range(2):
        for is_last, (tokens, labels) in zip((False, True), batches(2, seed=step), strict=True):
            reference(tokens, labels).backward()
            rows = tokens.chunk(4)[dist.get_rank()], labels.chunk(4)[dist.get_rank()]
            with microbatch(net, is_last=is_last):
                net(*rows).backward()
        assert_same_grads(net, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replicas_that_a_hook_sums_equal_one_process(
    ranks: Ranks, options: dict[str, object]
) -> None:
    """The hook's mean over replicas is that of the whole batch, over two microbatches and steps."""
    ranks(4).run(_replicas_of_the_user, options)


def _each_sum_alone(outer: bool) -> None:
    names = ("outer", "shard")
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 1) if outer else (1, 2), mesh_dim_names=names)
    net = shard(Net(1).double(), mesh=mesh)
    plain = shard(Net(1).double(), mesh=mesh)
    tokens, labels = (each.chunk(2)[dist.get_rank()] for each in batches(1)[0])
    _set_everywhere(net, lambda sums: sums.mul_(2))
    for _ in range(3):
        net(tokens, labels).backward()
        plain(tokens, labels).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), 2 * q.grad.to_local()), "4, 6 or 8 times for some"
    _set_everywhere(net, None)
    net(tokens, labels).backward()
    plain(tokens, labels).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        # Three doubled addends and a plain one, beside four plain ones.
        torch.testing.assert_close(p.grad.to_local() * 4, q.grad.to_local() * 7)


def _beside_backward() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReducedHook, "runs_beside", property(lambda _: True))
        _replicas_of_the_user({"strategy": "optim_grads_params"})


def test_a_hook_whose_work_goes_on_is_waited_for_later(ranks: Ranks) -> None:
    """As on a GPU, where the sum becomes ``.grad`` one reduction later."""
    ranks(4).run(_beside_backward)


@pytest.mark.parametrize("outer", [False, True])
def test_the_hook_sees_each_sum_without_the_earlier_ones(ranks: Ranks, outer: bool) -> None:
    """Three backwards that add up: every addend is doubled once; None ends it."""
    ranks(2).run(_each_sum_alone, outer)


def _raising() -> None:
    net, plain = shard(Net(1)), shard(Net(1))
    tokens, labels = (each.chunk(2)[dist.get_rank()] for each in batches(1)[0])

    def fail(sums: torch.Tensor) -> None:
        raise RuntimeError(f"a replica has left, with {sums.dim()} dims")

    net.blocks[0].set_all_reduce_hook(fail)
    with pytest.raises(RuntimeError, match="a replica has left, with 1 dims"):
        net(tokens, labels).backward()
    net.blocks[0].set_all_reduce_hook(None)
    net.zero_grad()
    for each in (net, plain):
        each(tokens, labels).backward()
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


def test_a_hook_that_raises_ends_the_backward(ranks: Ranks) -> None:
    """The next step has the gradients of a model that never had a hook."""
    ranks(2).run(_raising)


def _refused() -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "shard"))
    unit = fully_shard(torch.nn.Linear(3, 2), mesh=mesh)
    with pytest.raises(TypeError, match="a function of a tensor, got 'mean'"):
        unit.set_all_reduce_hook("mean")
    with pytest.raises(ValueError, match="no stream on a mesh of two axes"):
        unit.set_all_reduce_hook(torch.neg, stream=object())


def test_a_hook_that_cannot_run_is_refused(ranks: Ranks) -> None:
    """What cannot be called, and a stream where the sum over the outer axis has its own."""
    ranks(1).run(_refused)
