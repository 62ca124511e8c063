"""Groups of experts beside dense ones: their meshes, averages and neighbours, by a toy mixture."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megafsdp import ParallelDims, full_tensor, fully_shard, fully_shard_model
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.mesh.annotation import annotate
from megafsdp.mesh.parallel_dims import Meshes
from tests.fsdp.toy import adamw
from tests.ranks import Ranks

NUM_EXPERTS, WIDTH, NUM_TOKENS = 4, 6, 5
# In fp64 the sides differ by the order of sums alone.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Experts(nn.Module):
    """A stack of matrices, each applied to all tokens and weighted; every rank has some of them."""

    computes_on_part = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, WIDTH) / 3)
        self.ep: DeviceMesh | None = None

    def cut(self, ep: DeviceMesh) -> None:
        """Keep the experts of this rank."""
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), ep, [Shard(0)]))
        annotate(self.weight, is_expert=True)
        self.ep = ep

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """Mix the experts' outputs for this rank's tokens (tokens, width)."""
        assert type(self.weight) is nn.Parameter, "the plain part"
        if self.ep is None:
            return torch.einsum("te,enk,tk->tn", gates, self.weight, x)
        # Tokens go to all ranks, each computes with its experts, and the sums come back.
        x, gates = (_shown_to_all(t, self.ep) for t in (x, gates))
        own = gates.chunk(self.ep.size(), 1)[self.ep.get_local_rank()]
        y = torch.einsum("te,enk,tk->tn", own, self.weight, x)
        summed = DTensor.from_local(y, self.ep, [Partial()], run_check=False)
        return summed.redistribute(placements=[Shard(0)]).to_local()


def _shown_to_all(x: Tensor, ep: DeviceMesh) -> Tensor:
    shown = DTensor.from_local(x, ep, [Shard(0)], run_check=False)
    return shown.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class Mixture(nn.Module):
    """A dense layer, a router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        """Return x plus the mixture."""
        h = torch.tanh(self.dense(x))
        return x + self.experts(h, self.router(h).softmax(1))


class Net(nn.Module):
    """Two mixtures under a dense root; returns the mean square."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean over tokens."""
        x = self.first(x)
        for mixture in self.mixtures:
            x = mixture(x)
        return x.square().sum(1).mean()


def _cut(net: Net, meshes: Meshes) -> Net:
    assert meshes.ep is not None
    for mixture in net.mixtures:
        mixture.experts.cut(meshes.ep)
    if meshes.tp is not None:
        # Every rank of tp has tokens of its own, as under sequence parallelism.
        for name, parameter in net.named_parameters():
            if "experts" not in name:
                annotate(parameter, sums_over_tp=True)
    return net


def _equal_one_process(dims: ParallelDims, options: dict[str, object]) -> None:
    meshes = dims.build("cpu")
    reference = Net().double()
    net = _cut(copy.deepcopy(reference), meshes)
    fully_shard_model(net, [Mixture], mesh=meshes.data, expert_mesh=meshes.experts, **options)
    axes = [group.axes for group in net.mixtures[0]._fsdp_unit().groups]
    assert [a.is_expert for a in axes] == [False, True], "one group of each kind"
    world, num_shares = dist.get_world_size(), dist.get_world_size() // meshes.data_size
    optimizers = [adamw(reference), adamw(net)]
    x = torch.randn(2, world, NUM_TOKENS, WIDTH, dtype=torch.float64)
    for batch in x:
        expected = reference(batch.flatten(0, 1))
        expected.backward()
        # Each data rank's loss is a mean over the tokens of its tp ranks.
        loss = net(batch[dist.get_rank()]) / num_shares
        with record_collectives() as record:
            loss.backward()
        dist.all_reduce(loss := loss.detach())
        torch.testing.assert_close(loss / meshes.data_size, expected.detach(), **TOLERANCE)
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None and p.shape == q.shape
            torch.testing.assert_close(full_tensor(p.grad), q.grad, **TOLERANCE)
        if meshes.tp is not None:
            sums = [label for kind, label in record.events if kind == "all_reduce"]
            assert sums == ["mixtures.1", "mixtures.0", "Net", "usage"]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full_tensor(p.detach()), q.detach(), **TOLERANCE)


def _all_equal_one_process(cases: list[tuple[ParallelDims, dict[str, object]]]) -> None:
    for dims, options in cases:
        _equal_one_process(dims, options)


def test_experts_train_as_in_one_process(ranks: Ranks) -> None:
    """Experts over fewer ranks than the rest, and over more: ep borrows the ranks of tp."""
    cases = [
        (ParallelDims(dp_shard=4, ep=4), {"strategy": "optim"}),
        (ParallelDims(dp_shard=4, ep=2), {"strategy": "no_shard"}),
        (ParallelDims(dp_outer=2, dp_shard=2, ep=2), {"outer_strategy": "optim"}),
        # Dense weights on one rank each, experts divided among two.
        (ParallelDims(dp_shard=1, tp=4, ep=2), {}),
        # A node of two ranks: half of the dense ranks, all of the experts'.
        (ParallelDims(dp_shard=4, ep=2), {"reshard_after_forward": 2}),
    ]
    ranks(4).run(_all_equal_one_process, cases)


def _backward_of_neighbours(dims: ParallelDims) -> tuple[list[bool], int, int]:
    meshes = dims.build("cpu")
    assert meshes.experts is not None
    net = _cut(Net(), meshes)
    fully_shard_model(
        net, [Mixture], mesh=meshes.data, expert_mesh=meshes.experts, reshard_after_forward=2
    )
    loss = net(torch.ones(NUM_TOKENS, WIDTH))
    groups = net.mixtures[0]._fsdp_unit().groups
    is_kept = [group.is_unsharded for group in groups]
    with record_collectives() as record:
        loss.backward()
    assert not any(group.is_unsharded for group in groups), "backward frees what forward has kept"
    names = [mesh.get_group().group_name for mesh in (meshes.data, meshes.experts)]
    # Of neighbours, and of all that have the same experts.
    of_experts = record.calls_by_group["all_gather", names[1]]
    return is_kept, record.calls["all_gather"] - of_experts, of_experts


def test_neighbours_divide_experts_among_those_that_have_the_same(ranks: Ranks) -> None:
    """Of a node's two ranks both have the same experts, or one of three does, which keeps them."""
    both = ranks(4).run(_backward_of_neighbours, ParallelDims(dp_shard=4, ep=2))
    assert both == [([False, False], 3, 2)] * 4
    alone = ranks(6).run(_backward_of_neighbours, ParallelDims(dp_shard=6, ep=2))
    assert alone == [([False, True], 3, 0)] * 6


def _wrong_expert_ranks() -> None:
    meshes = ParallelDims(dp_shard=4, ep=2).build("cpu")
    net = _cut(Net(), meshes)
    fully_shard(net.mixtures[0], mesh=meshes.data, expert_mesh=meshes.experts)
    alone = ParallelDims(dp_shard=4, ep=4).build("cpu").experts
    fully_shard(net.mixtures[1], mesh=meshes.data, expert_mesh=alone)
    fully_shard(net, mesh=meshes.data, expert_mesh=meshes.experts)
    with pytest.raises(ValueError, match=r"the same mesh and expert_mesh for all units"):
        net(torch.ones(NUM_TOKENS, WIDTH))


def test_units_with_experts_over_other_ranks_are_refused(ranks: Ranks) -> None:
    """Each kind of parameter has one mesh under one root."""
    ranks(4).run(_wrong_expert_ranks)
