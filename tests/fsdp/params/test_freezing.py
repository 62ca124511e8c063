"""Parameters that are frozen in one forward and trained in another of the same backward."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.toy import Net, assert_same_grads, batches, mine, shard
from tests.pairwise import gate_of
from tests.ranks import Ranks

Batch = tuple[torch.Tensor, torch.Tensor]


def _toggled(net: Net) -> list[nn.Parameter]:
    """Return a part of one unit, all of another, and a part of the root."""
    return [net.blocks[0].up.weight, *net.blocks[1].parameters(), net.norm.weight]


def _train(net: Net, is_trained: bool) -> None:
    for parameter in _toggled(net):
        parameter.requires_grad_(is_trained)


def _loss(net: Net, batch: Batch, *, is_trained: bool) -> torch.Tensor:
    """Return the loss of a forward with the parameters trained or frozen, and train them after."""
    _train(net, is_trained)
    loss: torch.Tensor = net(*batch)
    _train(net, True)
    return loss


def _trained_then_frozen(net: Net, one: Batch, two: Batch) -> None:
    (_loss(net, one, is_trained=True) + 2 * _loss(net, two, is_trained=False)).backward()


def _frozen_then_trained(net: Net, one: Batch, two: Batch) -> None:
    (_loss(net, one, is_trained=False) + 2 * _loss(net, two, is_trained=True)).backward()


def _frozen_without_graph(net: Net, one: Batch, two: Batch) -> None:
    loss = _loss(net, one, is_trained=True)
    with torch.no_grad():
        _loss(net, two, is_trained=False)
    loss.backward()


def _frozen_in_its_own_backward(net: Net, one: Batch, two: Batch) -> None:
    trained, frozen = _loss(net, one, is_trained=True), _loss(net, two, is_trained=False)
    frozen.backward()
    trained.backward()


def _frozen_alone(net: Net, one: Batch, two: Batch) -> None:
    _loss(net, one, is_trained=False).backward()


def _frozen_for_good(net: Net, one: Batch, two: Batch) -> None:
    loss = _loss(net, one, is_trained=True) + _loss(net, two, is_trained=False)
    _train(net, False)
    loss.backward()
    _train(net, True)


CASES = (
    _trained_then_frozen,
    _frozen_then_trained,
    _frozen_without_graph,
    _frozen_in_its_own_backward,
    _frozen_alone,
    _frozen_for_good,
)


class Recomputing(Net):
    """The net, with blocks that are recomputed if asked: around each unit, or inside of it."""

    recomputes = "never"

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mean cross entropy."""
        assert labels is not None
        x = self.embedding(tokens)
        for block in self.blocks:
            is_around = self.recomputes == "around"
            x = checkpoint(block, x, use_reentrant=False) if is_around else block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _toggles(strategy: str, reshard: bool | None, recomputes: str) -> None:
    # Plain torch refuses to recompute what was frozen since: the oracle does not.
    twin = Recomputing()
    net = copy.deepcopy(twin)
    net.recomputes = recomputes
    shard(net, strategy=strategy, reshard_after_forward=reshard)
    for block in net.blocks if recomputes == "inside" else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    for case in CASES:
        one, two = batches(2)
        twin.zero_grad()
        net.zero_grad()
        case(twin, one, two)
        case(net, mine(one), mine(two))
        assert_same_grads(net, twin)


PRODUCT = list(
    itertools.product(
        ("optim_grads_params", "optim_grads", "optim", "no_shard"),
        (None, True, False),
        ("never", "around", "inside"),
    )
)


@pytest.mark.parametrize(("strategy", "reshard", "recomputes"), gate_of(PRODUCT, "freezing"))
def test_parameters_may_be_frozen_in_some_forwards_of_a_backward(
    ranks: Ranks, strategy: str, reshard: bool | None, recomputes: str
) -> None:
    """Those in which they were trained give them gradients, as in plain torch."""
    ranks(2).run(_toggles, strategy, reshard, recomputes)
