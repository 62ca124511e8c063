"""Units that are called within their own forward, or within a method that runs as one."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp

from megafsdp import fully_shard, register_fsdp_forward_method
from megafsdp.device.torch_private import num_gradient_hooks
from tests.fsdp.toy import (
    Net,
    assert_same_grads,
    batches,
    mine,
    options_of_strategies,
    shard,
    train_both,
)
from tests.ranks import Ranks


class _Learner(Net):
    """Has a training step that calls the forward, and reads other parameters after it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.scale = nn.Parameter(torch.full((), 0.5))

    def learn(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of two forwards."""
        return self.scale * self(tokens, labels) + self.scale * self(labels, tokens)


class _Looping(_Learner):
    """Goes backward itself, several times in one method."""

    def loop(self, microbatches: list[Any]) -> None:
        """Add the gradients of microbatches."""
        for tokens, labels in microbatches:
            loss = self(tokens, labels) * self.scale + self.head.weight.square().mean()
            loss.backward()


def _backwards_within_a_method(register: Callable[[nn.Module, str], None]) -> None:
    for options in options_of_strategies():
        reference = _Looping()
        net: Any = shard(copy.deepcopy(reference), **options)
        register(net, "loop")
        for step in range(2):
            both = batches(2, seed=step)
            reference.loop(both)
            net.loop([mine(batch) for batch in both])
            assert_same_grads(net, reference)
            assert net._fsdp_unit().is_resting


@pytest.mark.parametrize(
    "register", [register_fsdp_forward_method, torch_fsdp.register_fsdp_forward_method]
)
def test_a_registered_method_may_go_forward_and_backward_in_a_loop(
    ranks: Ranks, register: Callable[[nn.Module, str], None]
) -> None:
    """After each forward the parameters are full again."""
    ranks(2).run(_backwards_within_a_method, register)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _Learner()

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.inner.learn(tokens, labels)


class _Method(nn.Module):
    """Runs a method of a net as its forward."""

    def __init__(self, net: _Learner) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the method's loss."""
        return self.net.learn(tokens, labels)


def _method_that_calls(register: Callable[[nn.Module, str], None]) -> None:
    options: Any
    for options in options_of_strategies():
        reference = _Learner()
        net = shard(copy.deepcopy(reference), **options)
        register(net, "learn")
        train_both(_Method(reference), _Method(net), num_steps=2)
        batch = batches(1)[0]
        _Method(reference)(*batch).backward()
        _Method(net)(*mine(batch)).backward()
        assert_same_grads(net, reference)
        assert net._fsdp_unit().is_resting
        outer = _Outer()
        sharded = copy.deepcopy(outer)
        shard(sharded.inner, **options)
        register(sharded.inner, "learn")
        fully_shard(sharded, **options)
        outer(*batch).backward()
        sharded(*mine(batch)).backward()
        assert_same_grads(sharded, outer)


@pytest.mark.parametrize(
    ("register", "num_ranks"),
    [(register_fsdp_forward_method, 4), (torch_fsdp.register_fsdp_forward_method, 2)],
)
def test_a_registered_method_may_call_the_forward(
    ranks: Ranks, register: Callable[[nn.Module, str], None], num_ranks: int
) -> None:
    """The parameters that it reads afterwards are still full, of the root and of an inner unit."""
    ranks(num_ranks).run(_method_that_calls, register)


class _Tree(nn.Module):
    """Calls itself for its branches; a leaf may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.leaf, self.join = nn.Linear(6, 6), nn.Linear(12, 6)
        self.fails = False

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        """Return the value of a tree of a depth."""
        if depth == 0:
            if self.fails:
                raise ValueError("a leaf fails")
            return self.leaf(x).tanh()
        try:
            branches = [self(factor * x, depth - 1) for factor in (0.5, 2.0)]
        except ValueError:
            branches = [x, x]
        return self.join(torch.cat(branches, dim=-1)).tanh() + self.leaf(x)


def _recursive() -> None:
    torch.manual_seed(0)
    choices: list[dict[str, Any]]
    choices = [{}, {"strategy": "no_shard"}, {"reshard_after_forward": True}]
    x = torch.randn(2, 3, 6)
    for options, is_root in itertools.product(choices, (False, True)):
        plain_tree = _Tree()
        plain = plain_tree if is_root else nn.Sequential(nn.Linear(6, 6), plain_tree)
        net: Any = copy.deepcopy(plain)
        tree = net if is_root else fully_shard(net[1], **options)
        fully_shard(net, **options)
        for fails in (False, True):
            plain_tree.fails = tree.fails = fails
            for model in (plain, net):
                model.zero_grad()
            plain(x).square().mean().backward()
            net(x[dist.get_rank()]).square().mean().backward()
            assert_same_grads(net, plain)
            assert tree._fsdp_unit().is_resting


def test_a_unit_may_call_itself(ranks: Ranks) -> None:
    """As recursive networks do, also where an inner call fails and the outer one goes on."""
    ranks(2).run(_recursive)


class _ReadsByMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(12, 12))

    def transposed(self) -> torch.Tensor:
        return self.weight.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.transposed()


def _views_by_method() -> None:
    net = fully_shard(_ReadsByMethod())
    register_fsdp_forward_method(net, "transposed")
    unsharded = net._fsdp_unit().groups[0].parameters[0].unsharded
    numbers = []
    for _ in range(3):
        net(torch.ones(2, 12)).sum().backward()
        numbers.append(num_gradient_hooks(unsharded))
    assert numbers == numbers[:1] * 3


def test_a_method_within_the_forward_may_return_a_view_of_a_parameter(ranks: Ranks) -> None:
    """The parameter gains no hooks by it."""
    ranks(2).run(_views_by_method)
