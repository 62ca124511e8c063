"""Which units are offloaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafsdp.optimizer.offload.hybrid import HybridDeviceOptimizer
from megafsdp.optimizer.offload.placement import first_offloaded, num_kept_on_device


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


@pytest.mark.parametrize("fraction", [-0.1, 1.5, True, "half", float("nan")])
def test_a_fraction_without_meaning_is_refused(fraction: object) -> None:
    """A number from 0 to 1 it must be."""
    parameter = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match="offload_fraction"):
        HybridDeviceOptimizer([parameter], offload_fraction=fraction)  # type: ignore[arg-type]
