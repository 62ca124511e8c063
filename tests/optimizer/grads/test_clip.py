"""Norms over shards count every element once, and clipping equals torch's on the whole."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megafsdp import (
    clip_grad_norm_,
    full_tensor,
    fully_shard,
    num_zero_grads,
    param_group_norms,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.grads.norms import parts_of
from tests.fsdp.toy import Net, assert_same_grads, batches, mine, pair, shard
from tests.optimizer.offload.host_reads import NoHostReads
from tests.ranks import Ranks

pytestmark = pytest.mark.native


def _clip(strategy: str, norm_type: float, of_module: bool) -> None:
    reference = Net()
    reference.scale = nn.Parameter(torch.full((3,), 2.0))
    net = copy.deepcopy(reference)
    shard(net, strategy=strategy, ignored_params={net.scale})
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    # The first limit is above the norm: the second clips what backward has left.
    for max_norm in (100.0, 0.01):
        for model in (reference, net):
            model.scale.grad = torch.full((3,), 0.5)
        wanted = nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
        with record_collectives() as record:
            norm = clip_grad_norm_(net if of_module else net.parameters(), max_norm, norm_type)
        assert record.calls["all_reduce"] <= 1
        torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
        assert_same_grads_with_scale(net, reference)


def assert_same_grads_with_scale(net: nn.Module, reference: nn.Module) -> None:
    """Compare the plain parameter, then the sharded ones."""
    torch.testing.assert_close(net.scale.grad, reference.scale.grad, rtol=1e-5, atol=0)
    net.scale.grad = reference.scale.grad = None
    assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_equals_torchs_on_the_whole_model(
    ranks: Ranks, strategy: str, norm_type: float
) -> None:
    """Sharded, replicated and plain gradients, some shards empty, one all-reduce at most."""
    ranks(3).run(_clip, strategy, norm_type, norm_type == 2.0)


def _clips_while_unsharded(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    net.blocks[0].unshard()
    torch.testing.assert_close(clip_grad_norm_(net, 0.01), wanted, rtol=1e-5, atol=0)
    net.blocks[0].reshard()
    assert_same_grads(net, reference)


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_gradients_of_parameters_that_are_not_shown_are_clipped(
    ranks: Ranks, strategy: str
) -> None:
    """A model has the full parameters of a unit after unshard(), which have no gradients."""
    ranks(2).run(_clips_while_unsharded, strategy)


def _clips_parts_while_unsharded() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    net = parallelize_module(nn.Linear(4, 6), mesh["tp"], ColwiseParallel())
    fully_shard(net, mesh=mesh["dp"])
    net(torch.ones(2, 4)).square().sum().backward()
    wanted = full_tensor(clip_grad_norm_(net, math.inf))
    net.unshard()
    assert torch.equal(full_tensor(clip_grad_norm_(net, math.inf)), wanted) and wanted > 0


def test_gradients_of_parts_that_are_not_shown_are_clipped(ranks: Ranks) -> None:
    """Full parameters of a model that tp has cut are DTensors too."""
    ranks(2).run(_clips_parts_while_unsharded)


def test_the_norm_of_a_long_tensor_is_exact() -> None:
    """10 M elements of fp32 lose less than 1e-6, where one running sum would lose 4e-3."""
    parameter = nn.Parameter(torch.zeros(10_000_000))
    parameter.grad = torch.rand(10_000_000, generator=torch.Generator().manual_seed(0))
    wanted = math.sqrt(sum(c.double().square().sum().item() for c in parameter.grad.split(1 << 20)))
    assert clip_grad_norm_([parameter], 1e9).item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_powers_of_narrow_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    """A sum of 100,000 is infinite in fp16, and far from 100,003 in bf16."""
    parameter = nn.Parameter(torch.zeros(100_003, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    assert clip_grad_norm_(parameter, 1.0, norm_type=1.0).item() == 100_003


def _nonfinite(norm_type: float) -> float:
    _, net = pair()
    batch = batches(1)[0]
    net(*mine(batch)).backward()
    if dist.get_rank() == 1:
        net.blocks[0].up.weight.grad.fill_(math.nan)
    before = net.head.weight.grad.local.clone()
    with pytest.raises(RuntimeError, match="finite gradient norm"):
        clip_grad_norm_(net, 1.0, norm_type, error_if_nonfinite=True)
    assert torch.equal(net.head.weight.grad.local, before)
    return clip_grad_norm_(net, 1.0, norm_type).item()


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nonfinite_norm_is_seen_by_all_ranks(ranks: Ranks, norm_type: float) -> None:
    """A NaN on one rank raises on all, before anything is scaled."""
    assert all(math.isnan(norm) for norm in ranks(2).run(_nonfinite, norm_type))


def _clips_after_a_nan() -> float:
    net = shard(Net())
    net(*mine(batches(1)[0])).backward()
    net.blocks[0].up.weight.grad.fill_(math.nan)
    clip_grad_norm_(net, 1.0)
    for parameter in net.parameters():
        parameter.grad.fill_(0.5)
    return clip_grad_norm_(net, math.inf).item()


def test_nothing_of_a_nan_stays_where_gradients_are_mended(ranks: Ranks) -> None:
    """The gaps between gradients have been multiplied by it too, and are read with them."""
    wanted = 0.5 * math.sqrt(sum(parameter.numel() for parameter in Net().parameters()))
    assert ranks(3).run(_clips_after_a_nan) == [pytest.approx(wanted, rel=1e-6)] * 3


def _clips_twice_given() -> None:
    reference, net = pair()
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    wanted = nn.utils.clip_grad_norm_([*reference.parameters()] * 2, 0.01)
    norm = clip_grad_norm_([*net.parameters()] * 2, 0.01)
    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)


def test_a_gradient_that_is_given_twice_counts_twice(ranks: Ranks) -> None:
    """As torch counts it."""
    ranks(2).run(_clips_twice_given)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_a_norm_needs_a_positive_order(norm_type: float) -> None:
    """Gradients stay as they are."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with pytest.raises(ValueError, match="positive order"):
        clip_grad_norm_(parameter, 0.5, norm_type)
    assert torch.equal(parameter.grad, torch.ones(1))


def _counts_zeros_and_norms(strategy: str) -> None:
    reference, net = pair(strategy=strategy)
    batch = batches(1)[0]
    reference(*batch).backward()
    net(*mine(batch)).backward()
    for model in (reference, net):
        model.plain = nn.Parameter(torch.ones(3))
        model.plain.grad = torch.tensor([0.0, 2.0, 0.0])
        model.unused = nn.Parameter(torch.ones(3))
    for sharded, own in zip(net.parameters(), reference.parameters(), strict=True):
        if own.grad is None:
            continue
        # Rows of zeros on every rank, wherever rows are cut.
        own.grad[::3] = 0.0
        if sharded is net.plain:
            sharded.grad[::3] = 0.0
        elif strategy == "no_shard":
            sharded.grad.to_local().copy_(own.grad)
        else:
            sharded.grad.copy_from_full_(own.grad)
    names = [["embedding", "head", "blocks"], ["norm", "plain"], ["unused"]]
    optimizers = []
    for model in (net, reference):
        groups = [[p for n, p in model.named_parameters() if n.split(".")[0] in g] for g in names]
        optimizers.append(torch.optim.SGD([{"params": group} for group in groups], lr=1.0))
    with record_collectives() as record:
        norms = param_group_norms(optimizers[0])
        assert record.calls["all_reduce"] <= 1
        zeros = num_zero_grads(net)
        assert record.calls["all_reduce"] <= 2
    wanted = [
        torch.nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
        for group in optimizers[1].param_groups
    ]
    assert wanted[-1] == norms[-1] == 0
    torch.testing.assert_close(norms, torch.stack(wanted), rtol=1e-6, atol=0)
    grads = [p.grad for p in reference.parameters() if p.grad is not None]
    assert zeros == sum(int((grad == 0).sum()) for grad in grads)
    assert param_group_norms(optimizers[0], math.inf)[0] == max(
        p.grad.abs().max() for p in optimizers[1].param_groups[0]["params"]
    )


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
def test_group_norms_and_zeros_count_every_element_once(ranks: Ranks, strategy: str) -> None:
    """Sharded, replicated, plain and missing gradients; gaps of flat buffers are nobody's zeros."""
    ranks(3).run(_counts_zeros_and_norms, strategy)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_torchs_keywords_are_taken(foreach: bool | None) -> None:
    """A call written for torch's function clips alike."""
    both = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    for clip, parameter in zip(
        (torch.nn.utils.clip_grad_norm_, clip_grad_norm_), both, strict=True
    ):
        parameter.grad = torch.full((4,), 3.0)
        norm = clip([parameter], 1.0, norm_type=2.0, error_if_nonfinite=True, foreach=foreach)
        assert norm.item() == 6.0
    assert torch.equal(both[0].grad, both[1].grad)


def _clips_buffers(norm_type: float) -> None:
    _, net = pair()
    net(*mine(batches(1)[0])).backward()
    grads = [p.grad for p in net.parameters()]
    flats = {id(flat): flat for flat in (grad.buffer.flat for grad in grads)}
    assert len(flats) == 4 < len(grads), "three blocks and the net itself"
    (part,) = parts_of(grads)
    assert sorted(map(id, part.tensors)) == sorted(flats)
    before = [local_tensor(grad).clone() for grad in grads]
    with NoHostReads():
        norm = clip_grad_norm_(net, 0.01, norm_type)
    for grad, own in zip(grads, before, strict=True):
        assert torch.equal(local_tensor(grad), own * (0.01 / (norm + 1e-6)))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clipping_passes_over_flat_buffers_and_reads_nothing(
    ranks: Ranks, norm_type: float
) -> None:
    """One tensor a unit, whatever the number of parameters, and no wait for a device."""
    ranks(2).run(_clips_buffers, norm_type)


def _clips_partial_sums() -> None:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.full((4,), 1.5), mesh, [Partial()])
    assert clip_grad_norm_([parameter], 1.0) == 6
    torch.testing.assert_close(parameter.grad.full_tensor(), torch.full((4,), 0.5))


def test_gradients_that_are_still_to_be_summed_are_summed(ranks: Ranks) -> None:
    """Norms of layers that are cut over tp alone have an addend on each rank."""
    ranks(2).run(_clips_partial_sums)
