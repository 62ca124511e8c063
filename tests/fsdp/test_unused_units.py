"""Units whose outputs some ranks, or all, do not use, with ``set_reduce_scatter_unused_params``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from megafsdp import FSDPModule, fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.runtime.unit import units_below
from tests.fsdp.toy import (
    adamw,
    assert_same_grads,
    assert_same_parameters,
    options_of_strategies,
)
from tests.ranks import Ranks

WIDTH = 4


class Branch(nn.Module):
    """A residual branch, with a weight that it never uses and a frozen one."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.idle, self.frozen = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the branch's addend to x."""
        out: Tensor = self.down(torch.tanh(self.up(self.frozen(x))))
        return out


class Net(nn.Module):
    """Branches of unequal sizes, of which a batch uses some; the last is a head of its own.

    Args:
        recomputes: Whether backward computes the branches' activations again.
    """

    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.encoder, self.second = Branch(3), Branch(5)
        self.body, self.tail = Branch(2), Branch(7)
        self.never, self.out = Branch(1), nn.Linear(WIDTH, WIDTH)
        self.positions = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor, used: str) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and outputs that a user may read or not."""
        for name in ("encoder", "second", "body"):
            if f"no {name}" in used:
                continue
            addend = self._run(self.get_submodule(name), x)
            if name in used:
                x = x + addend
        # A second run of a unit, with the unit in it, in the same backward.
        again = self._run(self.second, x) if "no second" not in used else 0
        if "again" in used:
            x = x + again
        x = x + self.positions(torch.arange(3))
        tail = self._run(self.tail, x)
        # Backward reads the result of exp().
        return self.out(x).square().mean(), {"tail": tail.square().mean().exp()}

    def _run(self, branch: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(branch, x, use_reentrant=False) if self.recomputes else branch(x)


def _shard(net: Net, shard: Callable[..., Any] = fully_shard, **options: object) -> Net:
    for name in ("encoder", "second", "body", "tail", "never"):
        branch = net.get_submodule(name)
        shard(branch.up, **options)
        shard(branch, **options)
    shard(net.positions, **options)
    net = shard(net, **options)
    assert isinstance(net, (FSDPModule, TorchFSDPModule))
    net.set_reduce_scatter_unused_params(True)
    net.positions.set_reduce_scatter_unused_params(False)
    return net


def _loss(net: Net, x: Tensor, used: str, num_microbatches: int) -> Tensor:
    loss, others = net(x, used)
    if "tail" in used:
        loss = loss + others["tail"]
    # In place: what a root returns is the user's.
    loss /= num_microbatches
    return loss


# What the ranks use in each microbatch; a rank beyond the list uses what the first does.
STEPS = (
    (("body encoder", "body again"),),
    (("body", "body tail"), ("second", "encoder again")),
    (("", "tail second"),),
    (("body", "body"),),
)


def _add_zeros(reference: Net) -> None:
    """Give zeros to what has no gradient, in branches that have run."""
    for name, parameter in reference.named_parameters():
        if parameter.grad is None and parameter.requires_grad and "never" not in name:
            parameter.grad = torch.zeros_like(parameter)


def _train(recomputes: bool) -> None:
    torch.manual_seed(0)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for options in [{}] if recomputes else options_of_strategies():
        reference = Net(recomputes=recomputes).double()
        net = _shard(copy.deepcopy(reference), **options)
        optimizers = [adamw(each, weight_decay=0.1) for each in (reference, net)]
        for microbatches in STEPS:
            for by_rank in microbatches:
                used = [by_rank[r] if r < len(by_rank) else by_rank[0] for r in range(num_ranks)]
                inputs = torch.randn(num_ranks, 3, WIDTH, dtype=torch.float64)
                for x, names in zip(inputs, used, strict=True):
                    (_loss(reference, x, names, len(microbatches)) / num_ranks).backward()
                # Whether the first units' inputs need gradients differs between ranks too.
                x = inputs[rank].requires_grad_(rank == 0)
                _loss(net, x, used[rank], len(microbatches)).backward()
            _add_zeros(reference)
            assert_same_grads(net, reference, rtol=1e-9, atol=1e-12)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_same_parameters(net, reference, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("num_ranks", "recomputes"), [(1, False), (2, False), (2, True), (4, False)]
)
def test_ranks_that_use_other_units_train_as_one_process(
    ranks: Ranks, num_ranks: int, recomputes: bool
) -> None:
    """Gradients in every strategy, recomputed ones too, and steps with weight decay."""
    ranks(num_ranks).run(_train, recomputes)


def _train_beside_torch(recurse: bool) -> None:
    torch.manual_seed(0)
    theirs = Net()
    ours = _shard(copy.deepcopy(theirs))
    theirs = _shard(theirs, torch_fully_shard)
    for net in (ours, theirs):
        if not recurse:
            net.set_reduce_scatter_unused_params(False)
            net.encoder.set_reduce_scatter_unused_params(True, recurse=False)
    # A unit that ran in an earlier step has zeros too; one that never ran has nothing.
    for used in ("body encoder tail", "body", "no encoder second"):
        x = torch.randn(3, WIDTH)
        for net in (ours, theirs):
            _loss(net, x, used, 1).backward()
        shown = zip(ours.named_parameters(), theirs.parameters(), strict=True)
        for (name, own), their in shown:
            assert (own.grad is None) == (their.grad is None), f"{name}, {used}"
            if own.grad is not None:
                torch.testing.assert_close(own.grad.full_tensor(), their.grad.full_tensor())
        for net in (ours, theirs):
            net.zero_grad()
            net.body.idle.weight.requires_grad_(False)


@pytest.mark.skipif(
    not hasattr(TorchFSDPModule, "set_reduce_scatter_unused_params"),
    reason="torch has no such switch",
)
@pytest.mark.parametrize("recurse", [True, False], ids=["all", "one"])
def test_gradients_are_those_of_fsdp2(ranks: Ranks, recurse: bool) -> None:
    """Zeros, or None, where FSDP2 with the same switch has them; all ranks use the same units."""
    ranks(2).run(_train_beside_torch, recurse)


def _train_after_an_error() -> None:
    reference = Net().double()
    net = _shard(copy.deepcopy(reference))
    x = torch.randn(3, WIDTH, dtype=torch.float64)

    def fail(*_: object) -> None:
        raise RuntimeError("no head")

    handle = net.out.register_forward_pre_hook(fail)
    anchors = net._fsdp_unit().require_context().anchors
    with pytest.raises(RuntimeError, match="no head"):
        net(x, "body")
    handle.remove()
    graphs = [weakref.ref(each.grad_fn) for each in anchors._anchors]
    assert graphs
    loss = _loss(net, x, "no second body", 1)
    assert [graph() for graph in graphs] == [None] * len(graphs)
    loss.backward()
    assert not anchors._anchors
    _loss(reference, x, "no second body", 1).backward()
    # The second branch ran in the forward that failed.
    _add_zeros(reference)
    assert_same_grads(net, reference, rtol=1e-9, atol=1e-12)
    assert not any(unit.outstanding._by_pass for unit in units_below([net]).values())


def test_a_forward_that_raises_leaves_nothing(ranks: Ranks) -> None:
    """Its graph is gone with the next forward, and nothing is kept after the backward."""
    ranks(2).run(_train_after_an_error)


def _reductions(net: Net, used: str) -> int:
    with record_collectives() as record:
        _loss(net, torch.randn(3, WIDTH), used, 1).backward()
    net.zero_grad()
    assert not any(unit.outstanding._begun for unit in units_below([net]).values()), "growth"
    return record.calls["reduce_scatter"]


def _counted() -> None:
    net = _shard(Net())
    net.set_reduce_scatter_unused_params(True)
    # Of a unit and the unit in it, twice for the second; the root's, and the positions'.
    assert _reductions(net, "body encoder second again tail") == 10
    # Zeros of what ran before.
    assert _reductions(net, "no encoder second body") == 10
    net.set_reduce_scatter_unused_params(False)
    assert _reductions(net, "no encoder body second") < 10


def test_only_missing_zeros_take_reductions_of_their_own(ranks: Ranks) -> None:
    """A unit that ran has one reduction, whatever in it was used or frozen."""
    ranks(2).run(_counted)
