"""Stacks of experts that one mesh saved, another loads: ours, torch's, one process."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp

from megafsdp import FusedAdam, ParallelDims, checkpoint, full_state_dict, full_tensor
from tests.checkpoint.sharding import differences
from tests.fsdp.mixture import Net, backwards, shard
from tests.ranks import Ranks

# Of 4 ranks: all experts on each, two, one; then where ep borrows the ranks of tp, and where tp's
# ranks have all experts.
PLACES: list[tuple[ParallelDims, dict[str, str]]] = [
    (ParallelDims(ep=1), {}),
    (ParallelDims(ep=2), {"strategy": "optim"}),
    (ParallelDims(ep=4), {}),
    (ParallelDims(tp=2, ep=2), {}),
    (ParallelDims(dp_outer=2, tp=2), {"outer_strategy": "optim"}),
]
BIAS = torch.tensor([-9.0, 1 / 3, 2**-30, -0.0])
Tensors = dict[str, torch.Tensor]


def _build(dims: ParallelDims, options: dict[str, str]) -> tuple[Net, FusedAdam]:
    net = shard(Net(), dims.build("cpu"), **options)
    return net, FusedAdam(net.parameters(), lr=1e-2, eps=1e-5)


def _whole(net: Net, optimizer: FusedAdam) -> Tensors:
    found = {name: value.clone() for name, value in net.named_buffers()}
    for name, p in net.named_parameters():
        found[name] = full_tensor(p.detach()).clone()
        found |= {f"{name}/{k}": full_tensor(v).clone() for k, v in optimizer.state[p].items()}
    return found


def _around(folder: Path) -> None:
    saved = []
    for number, (dims, options) in enumerate(PLACES):
        net, optimizer = _build(dims, options)
        # Those of one process: regions that are wrong alike in saves and loads would agree.
        assert differences(Net().state_dict(), full_state_dict(net)) == []
        for mixture in net.mixtures:
            mixture.expert_bias.copy_(BIAS)
        for _ in backwards(Net(), net, dims.build("cpu"), 2):
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(folder / str(number), step=1, model=net, optimizer=optimizer)
        dcp.save(net.state_dict(), checkpoint_id=folder / f"dcp-{number}")
        saved.append(_whole(net, optimizer))
    assert saved[0]["mixtures.0.experts.fc1/exp_avg"].any()
    for number, (dims, options) in enumerate(PLACES, start=-1):
        # Of the place before, and of the last for the first one.
        number %= len(PLACES)
        net, optimizer = _build(dims, options)
        checkpoint.load(folder / str(number), model=net, optimizer=optimizer)
        assert differences(saved[number], _whole(net, optimizer)) == [], (dims, number)
        bits = [m.expert_bias.view(torch.int32) for m in net.mixtures]
        assert all(torch.equal(each, BIAS.view(torch.int32)) for each in bits)
        # The same by torch, into the weights of another model.
        net, _ = _build(dims, options)
        state = net.state_dict()
        dcp.load(state, checkpoint_id=folder / f"dcp-{number}")
        for name, tensor in net.state_dict().items():
            assert torch.equal(full_tensor(tensor).detach(), saved[number][name]), (dims, name)


def _into_a_plain_dict(folder: Path) -> int:
    for number in (2, 3):
        state = {name: torch.full_like(t, torch.nan) for name, t in Net().state_dict().items()}
        dcp.load(state, checkpoint_id=folder / f"dcp-{number}")
        net = Net()
        for mixture in net.mixtures:
            mixture.experts.cut(None)
        checkpoint.load(folder / str(number), model=net)
        assert differences(state, net.state_dict()) == []
    return len(state)


def test_experts_move_between_meshes_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Weights, moments and the router's bias; files of ours and of torch, also in one process."""
    ranks(4).run(_around, tmp_path)
    assert ranks(1).run(_into_a_plain_dict, tmp_path)[0] == len(Net().state_dict())
