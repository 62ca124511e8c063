"""Training with quantized compute weights, against one process that quantizes whole weights."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.fsdp.quantized import (
    OPERANDS,
    RECIPES,
    Net,
    assert_equal,
    options_of,
    policy_for,
    recipe_for,
    shard,
    train,
    trained_alone,
)
from tests.pairwise import gate_of
from tests.ranks import Ranks

PRODUCT = "quantized"
NUM_STEPS = 3
# Sums over two ranks do not depend on their order.
ON_TWO = (
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero3 free",
    "zero3 keep",
    "hsdp 2x1",
    "hsdp 1x2",
    "hfsdp 2x1",
    "hfsdp 1x2",
)
ON_FOUR = ("hsdp 2x2", "hfsdp 2x2", "zero3 neighbours")


def _trained(
    layout: str, name: str, operands: str, num_steps: int, num_microbatches: int
) -> dict[str, torch.Tensor]:
    policy = policy_for(recipe_for(name, operands))
    net = shard(Net(), policy, **options_of(layout))
    return train(net, num_steps, num_microbatches)


@pytest.mark.parametrize(
    ("layout", "name", "operands", "num_microbatches"),
    gate_of(list(itertools.product(ON_TWO, RECIPES, OPERANDS, (1, 3))), PRODUCT),
)
def test_two_ranks_train_as_one_process_that_quantizes_whole_weights(
    ranks: Ranks, layout: str, name: str, operands: str, num_microbatches: int
) -> None:
    """Main weights are equal bit by bit, whatever is gathered, kept or divided."""
    wanted = trained_alone(name, operands, NUM_STEPS, 2, num_microbatches)
    for found in ranks(2).run(_trained, layout, name, operands, NUM_STEPS, num_microbatches):
        assert_equal(found, wanted)
