"""Weights without memory of their own, such as torchao's, are stored as their inner tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp import checkpoint, fully_shard
from tests.fsdp.composed import Codes
from tests.ranks import Ranks

# As values of fp32, more than a record that is made by a copy.
SIZE = 512


class Net(nn.Module):
    """A frozen weight of codes with two names, whose scales are codes too, and a linear."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        codes = torch.randint(-128, 128, (2, SIZE, SIZE), dtype=torch.int8)
        weight = Codes(codes[0].clone(), Codes(codes[1].clone(), torch.rand(())))
        self.frozen = self.again = nn.Parameter(weight, requires_grad=False)
        self.linear = nn.Linear(3, 3)


def _inner(net: Net) -> list[torch.Tensor]:
    outer = net.frozen
    return [outer.codes, outer.scale.codes, outer.scale.scale, net.linear.weight]


def _round_trip(directory: Path) -> None:
    for name, save in (("save", checkpoint.save), ("async_save", checkpoint.async_save)):
        net, other = Net(0), Net(1)
        for each in (net, other):
            fully_shard(each, ignored_params={each.frozen})
        pending = save(directory / name, step=1, model=net)
        if not isinstance(pending, Path):
            pending.result()
        # In place, for what is derived from them.
        before = _inner(other)
        checkpoint.load(directory / name, model=other)
        for found, same, wanted in zip(_inner(other), before, _inner(net), strict=True):
            assert found is same
            if found is other.linear.weight:
                found, wanted = found.full_tensor(), wanted.full_tensor()
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_inner_tensors_are_saved_and_loaded(ranks: Ranks, num_ranks: int, tmp_path: Path) -> None:
    """By either save; copies of such a weight, which it may not have, are never needed."""
    ranks(num_ranks).run(_round_trip, tmp_path)
