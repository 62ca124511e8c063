"""Models built on the meta device get the values of the unsharded procedure, a unit at a time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp import full_state_dict, materialize
from tests.fsdp.toy import Net, batches, mine, shard
from tests.ranks import Ranks


def initialize(module: nn.Module) -> None:
    """Call ``reset_parameters()`` if there is one."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def meta_net(**options: object) -> Net:
    """Build the toy net on the meta device and shard it."""
    with torch.device("meta"):
        net = Net()
    return shard(net, **options)


def unsharded_net() -> Net:
    """Initialise the toy net as one process without sharding does."""
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    net.head.weight = net.embedding.weight
    torch.manual_seed(7)
    return net.apply(initialize)


def assert_equal_state(model: nn.Module, reference: nn.Module) -> None:
    """Assert that all parameters and buffers are equal, bit for bit."""
    state, wanted = full_state_dict(model), reference.state_dict()
    assert list(state) == list(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


def _equals_unsharded(strategy: str) -> None:
    reference = unsharded_net()
    net = meta_net(strategy=strategy)
    torch.manual_seed(7)
    assert materialize(net) is net
    after = torch.get_rng_state()
    assert_equal_state(net, reference)
    assert net.head.weight is net.embedding.weight
    unsharded_net()
    assert torch.equal(torch.get_rng_state(), after), "the walk draws what apply() draws"
    tokens, labels = mine(batches(1)[0])
    torch.testing.assert_close(net(tokens, labels), reference(tokens, labels))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "no_shard"])
def test_values_are_those_of_the_unsharded_procedure(
    ranks: Ranks, num_ranks: int, strategy: str
) -> None:
    """Bit for bit, whatever the number of ranks and what is divided among them."""
    ranks(num_ranks).run(_equals_unsharded, strategy)
