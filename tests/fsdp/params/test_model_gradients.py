"""Sums of gradients over a model axis: what counts once, in which dtype, on which ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megafsdp import MixedPrecisionPolicy, OffloadPolicy, full_tensor, fully_shard, microbatch
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.params.model_gradients import ModelGradients
from megafsdp.fsdp.params.model_parts import DTensorForm, ModelPlacement
from megafsdp.mesh.annotation import annotate
from megafsdp.mesh.model_part import part_of
from tests.ranks import Ranks


def _grid(num_tp: int) -> DeviceMesh:
    shape = (dist.get_world_size() // num_tp, num_tp)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "tp"))


def _addends() -> None:
    tp = init_device_mesh("cpu", (2,))
    rank, value = dist.get_rank(), torch.arange(8.0).view(4, 2)
    cut, all_of_it = (part_of((4, 2), dim, 2, rank) for dim in (0, None))
    axis = ModelGradients(
        tp,
        [
            ModelPlacement(cut, tp, DTensorForm(tp, (Shard(0),))),
            ModelPlacement(all_of_it, tp, DTensorForm(tp, (Replicate(),)), is_summed=True),
        ],
    )

    def grad(whole: torch.Tensor, placement: object) -> DTensor:
        if placement == Partial():
            return DTensor.from_local(whole * (0.75 if rank else 0.25), tp, [Partial()])
        return distribute_tensor(whole, tp, [placement])

    # Of a cut parameter: the own part, however autograd left it.
    for placement in (Shard(0), Shard(1), Replicate()):
        assert torch.equal(axis.addend(0, grad(value, placement)), value[2 * rank : 2 * rank + 2])
    # Of one that all ranks have: addends that make the whole once.
    for placement in (Replicate(), Shard(1), Partial()):
        addend = axis.addend(1, grad(value, placement)).clone()
        dist.all_reduce(addend)
        assert torch.equal(addend, value), placement
    plain = torch.ones(2, 2)
    assert axis.addend(0, plain) is plain


def test_an_addend_counts_once_however_autograd_left_it(ranks: Ranks) -> None:
    """Replicated gradients count on the first rank, partial ones on each."""
    ranks(2).run(_addends)


def _addends_on_all_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    data, tp = mesh.get_local_rank("data"), mesh.get_local_rank("tp")
    value = torch.arange(8.0).view(4, 2)
    form = DTensorForm(mesh, (Replicate(), Shard(0)), model_axis=1)
    axis = ModelGradients(mesh["tp"], [ModelPlacement(part_of((4, 2), 0, 2, tp), mesh["tp"], form)])
    own = value[2 * tp : 2 * tp + 2]
    share = 0.75 if data else 0.25
    grads = [
        DTensor.from_local(own * share, mesh, [Partial(), Shard(0)]),
        DTensor.from_local(value * share / 2, mesh, [Partial(), Partial()]),
        distribute_tensor(value, mesh, [Replicate(), Shard(0)]),
        distribute_tensor(value, mesh, [Shard(1), Shard(0)]),
        distribute_tensor(value, mesh, [Shard(0), Replicate()]),
    ]
    for grad in grads:
        addend = axis.addend(0, grad).clone()
        dist.all_reduce(addend, group=mesh.get_group("data"))
        assert torch.equal(addend, own), grad.placements


def test_an_addend_on_all_axes_counts_once(ranks: Ranks) -> None:
    """DTensor sums some gradients over data axes itself, and cuts others along them."""
    ranks(4).run(_addends_on_all_axes)


class Scaled(nn.Module):
    """A matrix that tp cuts, and vectors that all of its ranks have; each rank sees own rows of x.

    Attributes:
        uses_bias: Whether this rank's forward uses the bias.
    """

    computes_on_part = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(4))
        self.uses_bias = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sum over the rows of x."""
        y = x * self.norm + (self.bias if self.uses_bias else 0)
        return y.square().sum()


def _summed_by_declaration(options: dict[str, object]) -> None:
    grid = _grid(2)
    tp_rank, data_rank = grid["tp"].get_local_rank(), grid["data"].get_local_rank()
    reference = Scaled().double()
    net = copy.deepcopy(reference)
    # One is a DTensor, one plain beside it: the axis of the one is that of the other.
    net.norm = nn.Parameter(distribute_tensor(net.norm.detach(), grid["tp"], [Replicate()]))
    for parameter in (net.norm, net.bias):
        annotate(parameter, sums_over_tp=True)
    fully_shard(net, mesh=grid["data"], **options)
    # In a branch of one rank alone: the others get its gradient all the same.
    net.uses_bias = tp_rank == 0
    x = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    for k, batch in enumerate(x):
        for rows in batch.flatten(0, 1)[::2]:
            reference(rows).backward()
        reference.uses_bias = False
        for rows in batch.flatten(0, 1)[1::2]:
            reference(rows).backward()
        reference.uses_bias = True
        with record_collectives() as record, microbatch(net, is_last=k == 2):
            assert type(net.norm) is not nn.Parameter, "sharded outside of its forward"
            net(batch[data_rank, tp_rank]).backward()
        sums = record.calls_by_group["all_reduce", grid["tp"].get_group().group_name]
        is_late = options["strategy"] in ("no_shard", "optim")
        assert sums == (k == 2 or not is_late), "one with each reduction"
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None
        torch.testing.assert_close(full_tensor(p.grad).to(q.grad) * 2, q.grad, rtol=1e-9, atol=0)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
def test_declared_sums_are_made_once_a_reduction(ranks: Ranks, strategy: str) -> None:
    """Where reductions wait for the last microbatch the sum does too; usage is agreed on."""
    ranks(4).run(_summed_by_declaration, {"strategy": strategy})
    if strategy == "optim_grads_params":
        host = {"strategy": strategy, "offload_policy": OffloadPolicy(params=True)}
        ranks(4).run(_summed_by_declaration, host)


def _sums_in_fp32() -> None:
    grid = _grid(4)
    net = Scaled()
    for parameter in net.parameters():
        annotate(parameter, sums_over_tp=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(net, mesh=grid["data"], mp_policy=policy)
    with torch.no_grad():
        net.norm.fill_(1.0)
        net.bias.zero_()
    # d(bias) is 2 x: 256 on rank 0, and 1 on each other, which bf16 could not add to 256 alone.
    net(torch.full((1, 4), 128.0 if dist.get_rank() == 0 else 0.5)).backward()
    assert torch.equal(full_tensor(net.bias.grad), torch.full((4,), 259.0).bfloat16().float())


def test_the_sum_is_rounded_once(ranks: Ranks) -> None:
    """bf16 addends are added in the dtype of reductions, then rounded to that of the buffer."""
    ranks(4).run(_sums_in_fp32)
