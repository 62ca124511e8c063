"""Which units are offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp import MixedPrecisionPolicy, fully_shard
from megafsdp.buffer.dtensor.uneven import local_tensor
from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import (
    first_offloaded,
    groups_of,
    groups_to_offload,
    num_kept_on_device,
)
from tests.ranks import Ranks


@pytest.mark.parametrize(
    ("numels", "fraction", "kept"),
    [
        ([30, 10, 10, 10], 0.5, 1),
        ([60, 10, 10, 10], 0.5, 1),
        ([10, 10, 10, 60], 0.5, 3),
        ([10, 10], 0.0, 2),
        ([10, 10], 1.0, 0),
        ([10, 10], 0.75, 0),
        ([], 0.5, 0),
    ],
)
def test_the_front_stays_on_the_device(numels: list[int], fraction: float, kept: int) -> None:
    """Of two boundaries equally near the one that offloads more is taken."""
    assert num_kept_on_device(numels, fraction) == kept


@pytest.mark.parametrize(
    ("movable", "other", "fraction", "first"),
    [
        ([10, 10, 10, 10], 0, 0.5, 2),
        ([10, 10, 10, 10], 40, 0.25, 2),
        ([10, 10], 20, 0.5, 0),
        ([10, 10], 20, 1.0, 0),
        ([10, 10], 0, 0.9, 0),
        ([10, 10], 20, 0.0, 2),
        ([], 20, 0.5, 0),
    ],
)
def test_what_cannot_move_counts_as_part_of_the_front(
    movable: list[int], other: int, fraction: float, first: int
) -> None:
    """A half of all is all that can move, where as much stays; 1.0 is all of it in any case."""
    assert first_offloaded(movable, other, fraction) == first


def _counts_all() -> None:
    narrow = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
    kept = fully_shard(nn.Linear(8, 24, bias=False), mp_policy=narrow)
    moved = fully_shard(nn.Linear(8, 8, bias=False))
    for others in (kept.parameters(), [nn.Parameter(torch.zeros(96))]):
        parameters = [*others, *moved.parameters()]
        for fraction in (0.25, 1.0):
            assert groups_to_offload(parameters, fraction) == groups_of(moved.parameters())
    shared = fully_shard(nn.Linear(8, 8))
    assert groups_to_offload([shared.weight, *moved.parameters()], 1.0) == groups_of([moved.weight])
    shared.bias.requires_grad_(False)
    assert groups_to_offload([shared.weight], 1.0) == groups_of([shared.weight])


def test_a_fraction_is_one_of_all_parameters(ranks: Ranks) -> None:
    """Of units that cannot be offloaded, such as one of which a part is not given, and of tensors.

    What is not given and frozen is no such part.
    """
    ranks(2).run(_counts_all)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, True, "half", float("nan")])
def test_a_fraction_without_meaning_is_refused(fraction: object) -> None:
    """A number from 0 to 1 it must be."""
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="offload_fraction"):
        HybridDeviceOptimizer([parameter], offload_fraction=fraction)  # type: ignore[arg-type]


def _offloaded_before() -> None:
    layers = [fully_shard(nn.Linear(8, 8)) for _ in range(3)]
    parameters = [p for layer in layers for p in layer.parameters()]
    HybridDeviceOptimizer(parameters[4:], offload_fraction=1.0)
    assert groups_to_offload(parameters, 0.0) == groups_of(parameters[4:])
    second = HybridDeviceOptimizer(parameters, lr=0.1, offload_fraction=0.0)
    before = [local_tensor(p.detach()).clone() for p in parameters]
    for layer in layers:
        layer(torch.ones(2, 8)).sum().backward()
    second.step()
    second.synchronize()
    # Adam's first step is the rate, whatever the gradient.
    for old, p in zip(before, parameters, strict=True):
        torch.testing.assert_close(local_tensor(p.detach()), old - 0.1)
    assert second.host_nbytes > 0


def test_what_is_on_the_host_stays_there(ranks: Ranks) -> None:
    """Another optimizer steps there what an earlier one has offloaded, whatever its fraction."""
    ranks(2).run(_offloaded_before)
