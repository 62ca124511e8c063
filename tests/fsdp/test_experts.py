"""Groups of experts beside dense ones: their meshes, averages and neighbours, by a toy mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import (
    ParallelDims,
    checkpoint,
    clip_grad_norm_,
    full_state_dict,
    full_tensor,
    fully_shard,
    load_full_state_dict,
    materialize,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ExpertRange, annotate
from tests.fsdp.mixture import NUM_TOKENS, WIDTH, Net, backwards, cut, pair, shard
from tests.fsdp.toy import adamw
from tests.ranks import Ranks

# In fp64 the sides differ by the order of sums alone.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def _equal_one_process(dims: ParallelDims, options: dict[str, object]) -> None:
    meshes = dims.build("cpu")
    reference, net = pair(meshes, **options)
    net.recomputes = dims.dp_outer > 1
    axes = [group.axes for group in net.mixtures[0]._fsdp_unit().groups]
    assert [a.is_expert for a in axes] == [False, True], "one group of each kind"
    optimizers = [adamw(reference), adamw(net)]
    with record_collectives() as record:
        for expected, loss in backwards(reference, net, meshes, 2):
            torch.testing.assert_close(loss, expected, **TOLERANCE)
            for p, q in zip(net.parameters(), reference.parameters(), strict=True):
                assert p.grad is not None and p.shape == q.shape
                torch.testing.assert_close(full_tensor(p.grad), q.grad, **TOLERANCE)
            idle = reference.mixtures[1].experts.fc2.grad.flatten(1).any(1)
            assert idle.tolist() == [False, True, True, True], "one got no tokens"
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if meshes.tp is not None and dims.dp_outer == 1:
        sums = [label for kind, label in record.events if kind == "all_reduce"]
        assert sums == ["mixtures.1", "mixtures.0", "Net", "usage"] * 2
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
        (ParallelDims(dp_shard=1, tp=4, ep=2), {"reshard_after_forward": 2}),
        # Every rank of tp has all experts, and divides them as one of data parallelism.
        (ParallelDims(dp_shard=2, tp=2), {"reshard_after_forward": 2}),
        (ParallelDims(dp_outer=2, dp_shard=1, tp=2), {"outer_strategy": "optim"}),
        (ParallelDims(dp_outer=2, dp_shard=1, tp=2, ep=2), {}),
        # A node of two ranks: half of the dense ranks, all of the experts'.
        (ParallelDims(dp_shard=4, ep=2), {"reshard_after_forward": 2}),
    ]
    ranks(4).run(_all_equal_one_process, cases)


def _backward_of_neighbours(dims: ParallelDims) -> tuple[list[bool], int, int]:
    meshes = dims.build("cpu")
    assert meshes.experts is not None
    net = shard(Net(), meshes, reshard_after_forward=2)
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


def _whole_tensors() -> None:
    """Values drawn, shown, loaded: each as in one process, bit for bit."""
    for dims in (ParallelDims(ep=2), ParallelDims(tp=2, ep=2), ParallelDims(tp=2)):
        meshes = dims.build("cpu")
        reference = Net()
        torch.manual_seed(3)
        reference.apply(_reset)
        with torch.device("meta"):
            net = Net()
        for mixture in net.mixtures:
            mixture.expert_bias = torch.arange(4.0)
        shard(net, meshes)
        torch.manual_seed(3)
        materialize(net)
        wanted = dict(reference.named_parameters())
        found = full_state_dict(net)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        for name, value in net.named_parameters():
            assert torch.equal(full_tensor(value), wanted[name])
        other = shard(Net(), meshes)
        load_full_state_dict(other, found)
        loaded = full_state_dict(other)
        assert loaded.keys() == found.keys()
        assert all(torch.equal(loaded[name], value) for name, value in found.items())


def _reset(module: nn.Module) -> None:
    if callable(reset := getattr(module, "reset_parameters", None)):
        reset()


def test_whole_experts_are_drawn_shown_and_loaded(ranks: Ranks) -> None:
    """By materialize(), full_tensor(), full_state_dict() and load_full_state_dict()."""
    ranks(4).run(_whole_tensors)


def _refusals() -> None:
    meshes = ParallelDims(ep=2).build("cpu")
    net = cut(Net(), meshes)
    mixture, options = net.mixtures[0], {"mesh": meshes.data, "expert_mesh": meshes.experts}

    def refused(message: str, module: nn.Module = mixture, **others: object) -> None:
        with pytest.raises(ValueError, match=message):
            fully_shard(module, **{**options, **others})

    refused("an expert_mesh, of the ranks.*got none.*Meshes.experts", expert_mesh=None)
    refused("an expert_mesh, of the ranks.*got none", mesh=None, expert_mesh=None)
    alone = ParallelDims(ep=4).build("cpu").experts
    refused(r"covers ranks \[0, 1, 2, 3\].*got ranks \[\d, \d\]", expert_mesh=alone)
    refused(r"divisor of the 4 or 2 ranks.*got 3", reshard_after_forward=3)
    # Orthogonal to the data mesh, the axis could be one of tensor parallelism.
    beside = ParallelDims(tp=2, ep=2).build("cpu")
    other = cut(Net(), beside).mixtures[0]
    refused("an expert_mesh, of the ranks", other, mesh=beside.data, expert_mesh=None)
    # Stacks of this rank alone, which are no DTensors.
    local = Net().mixtures[0]
    for stack in local.experts.parameters():
        annotate(stack, experts=ExpertRange(4 * (dist.get_rank() % 2), 4, 8))
    refused(r"at most 2 ranks with the same 4 of 8 experts, got 4 ranks", local, expert_mesh=None)
    fully_shard(local, **options)
    # Nothing was changed: the right call works.
    fully_shard(mixture, **options)
    assert torch.isfinite(mixture(torch.ones(NUM_TOKENS, WIDTH))).all()


def test_meshes_that_mix_experts_are_refused(ranks: Ranks) -> None:
    """Before anything is changed, on all ranks alike."""
    ranks(4).run(_refusals)


def _disagreement() -> None:
    meshes = ParallelDims(tp=2).build("cpu")
    net = cut(Net(), meshes)
    expert_mesh = meshes.experts if dist.get_rank() == 1 else None
    for module in (*net.mixtures, net):
        fully_shard(module, mesh=meshes.data, expert_mesh=expert_mesh)
    with pytest.raises(ValueError, match=r"the same parameters, shapes, dtypes and recipes on all"):
        net(torch.ones(NUM_TOKENS, WIDTH))


def test_ranks_that_disagree_on_the_mesh_of_experts_are_refused(ranks: Ranks) -> None:
    """All of them raise, where the rest would wait for one."""
    ranks(4).run(_disagreement)


def _wrong_expert_ranks() -> None:
    net = Net()
    for degree, mixture in zip((2, 4), net.mixtures, strict=True):
        meshes = ParallelDims(ep=degree).build("cpu")
        mixture.experts.cut(meshes.ep)
        fully_shard(mixture, mesh=meshes.data, expert_mesh=meshes.experts)
    fully_shard(net, mesh=meshes.data, expert_mesh=meshes.experts)
    with pytest.raises(ValueError, match=r"the same mesh and expert_mesh for all units"):
        net(torch.ones(NUM_TOKENS, WIDTH))


def test_units_with_experts_over_other_ranks_are_refused(ranks: Ranks) -> None:
    """Each kind of parameter has one mesh under one root."""
    ranks(4).run(_wrong_expert_ranks)


class Stacked(nn.Module):
    """A module with the stack alone, which becomes a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, added up, through tanh."""
        return torch.tanh(torch.einsum("ti,eij->tj", x, self.stack))


def _plain_parts(
    shard: Callable[..., Any], is_own: bool, directory: str
) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
    # Named as the mesh that fully_shard() makes by default.
    whole = mesh._flatten("dp_shard")
    torch.manual_seed(0)
    net = nn.Sequential(Stacked(), nn.Linear(WIDTH, WIDTH), Stacked(), nn.Linear(WIDTH, WIDTH))
    torch.manual_seed(mesh.get_local_rank("ep"))
    for index in (0, 2):
        nn.init.normal_(net[index].stack)
        shard(net[index], mesh=mesh["dp"])
    if not is_own:
        # Then the root has no parameters, and units of experts come first.
        for index in (1, 3):
            shard(net[index], mesh=whole)
    shard(net, mesh=whole)
    optimizer = adamw(net)
    torch.manual_seed(dist.get_rank())
    found = {}
    for step in range(2):
        net(torch.randn(5, WIDTH)).square().mean().backward()
        for name, parameter in net.named_parameters():
            found[f"{name}.grad.{step}"] = parameter.grad.full_tensor()
        optimizer.step()
        if step == 0:
            optimizer.zero_grad()
    found |= {name: p.full_tensor().detach() for name, p in net.named_parameters()}
    if shard is fully_shard:
        _refuse_wholes(net, directory)
        stacks = [p for name, p in net.named_parameters() if "stack" in name]
        norm = clip_grad_norm_(stacks, math.inf)
        squares = [found[f"{index}.stack.grad.1"].square().sum() for index in (0, 2)]
        torch.testing.assert_close(norm, sum(squares).sqrt())
    return found


def _refuse_wholes(net: nn.Module, directory: str) -> None:
    words = r"ranks \[0, 1, 2, 3\].*ranks \[(0, 1|2, 3)\]"
    calls = (
        lambda: clip_grad_norm_(net, 1.0),
        lambda: full_state_dict(net),
        lambda: checkpoint.save(directory, model=net, step=1),
    )
    for call in calls:
        with pytest.raises((ValueError, CheckpointError), match=words):
            call()


@pytest.mark.parametrize("is_own", [True, False], ids=["root with layers", "root without"])
def test_units_of_plain_parts_train_as_under_fsdp2(
    ranks: Ranks, is_own: bool, tmp_path: Path
) -> None:
    """A unit on some ranks of its root; what needs the whole of it is refused on all ranks."""
    ours = ranks(4).run(_plain_parts, fully_shard, is_own, str(tmp_path))
    theirs = ranks(4).run(_plain_parts, torch_fully_shard, is_own, str(tmp_path))
    for found, wanted in zip(ours, theirs, strict=True):
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(ours[0]["0.stack"], ours[2]["0.stack"])


def _beyond_the_root() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    fully_shard(net[0], mesh=mesh._flatten("whole"))
    fully_shard(net, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"one mesh.*\[0, 1, 2, 3\] of unit '0'"):
        net(torch.ones(2, WIDTH))


def test_a_unit_on_ranks_that_the_root_has_not_is_refused(ranks: Ranks) -> None:
    """As where one call has another stage's mesh."""
    ranks(4).run(_beyond_the_root)
