"""Owners are balanced, rounds are bounded, and what is gathered comes back where it was."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.optimizer.muon.exchange import (
    CutMatrix,
    Round,
    choose_owners,
    choose_rounds,
    pieces,
)
from tests.optimizer.cases import for_each
from tests.ranks import Ranks


def _cut(numel: int, points: list[int], order: list[int]) -> CutMatrix:
    """Cut a matrix at points; rank r holds the piece ``order[r]``."""
    bounds = [0, *sorted(min(p, numel) for p in points), numel]
    ranges = list(itertools.pairwise(bounds))
    return CutMatrix(numel, float(numel) ** 1.5, tuple(ranges[i] for i in order))


def _matrices(num_ranks: int, seed: int, num: int = 12) -> list[CutMatrix]:
    """Return matrices that lie in shards of any order, some of them empty."""
    source = random.Random(seed)
    order = source.sample(range(num_ranks), num_ranks)
    numels = [source.choice([1, 6, 40, 300]) for _ in range(num)]
    return [_cut(n, [source.randrange(2 * n) for _ in range(num_ranks - 1)], order) for n in numels]


@given(num_ranks=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_loads_are_near_the_least_possible(num_ranks: int, seed: int) -> None:
    """No rank has more than the mean and one of the cheaper matrices, or the costliest alone."""
    matrices = _matrices(num_ranks, seed)
    owners = choose_owners(matrices, num_ranks)
    loads = [0.0] * num_ranks
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.cost
    costs = sorted((m.cost for m in matrices), reverse=True)
    # The last matrix of the fullest rank came when no rank had more than the mean, and unless it is
    # that rank's only one it is no costlier than number N + 1.
    later = costs[num_ranks] if len(costs) > num_ranks else 0.0
    assert max(loads) <= max(costs[0], sum(costs) / num_ranks + later) + 1e-6


def test_the_holder_owns_where_loads_are_equal() -> None:
    """Three equal matrices held by one rank each stay where they are."""
    matrices = [_cut(8, [8 * (r <= 0), 8 * (r <= 1)], [0, 1, 2]) for r in (2, 1, 0)]
    holders = [next(r for r, h in enumerate(m.ranges) if h[1] > h[0]) for m in matrices]
    assert sorted(holders) == [0, 1, 2]
    assert choose_owners(matrices, 3) == holders


@given(num_ranks=st.integers(1, 9), seed=st.integers(0, 10**6), bucket=st.integers(1, 800))
def test_rounds_are_bounded(num_ranks: int, seed: int, bucket: int) -> None:
    """Every matrix is in one round, which one more would make too large for some rank."""
    matrices = _matrices(num_ranks, seed)
    owners = choose_owners(matrices, num_ranks)
    rounds = choose_rounds(matrices, owners, num_ranks, bucket)
    assert sorted(i for each in rounds for i in each) == list(range(len(matrices)))
    limit = max(bucket, *(m.numel for m in matrices))

    def fits(indices: list[int], rank: int) -> bool:
        """Return whether a rank owns and holds no more of a round than it may."""
        held = [matrices[i].ranges[rank] for i in indices]
        owned = sum(matrices[i].numel for i in indices if owners[i] == rank)
        return owned <= limit and sum(stop - start for start, stop in held) <= 2 * limit

    for each in rounds:
        assert all(fits(each, rank) for rank in range(num_ranks))
    for each, (first, *_) in itertools.pairwise(rounds):
        assert not all(fits([*each, first], rank) for rank in range(num_ranks))


def test_large_matrices_of_many_owners_share_a_round() -> None:
    """Four matrices beyond the bucket, one a rank, are orthogonalised at the same time."""
    matrices = [_cut(100, [25, 50, 75], [0, 1, 2, 3]) for _ in range(4)]
    owners = choose_owners(matrices, 4)
    assert sorted(owners) == [0, 1, 2, 3]
    assert choose_rounds(matrices, owners, 4, 1) == [[0, 1, 2, 3]]


def _travels(seed: int, bucket: int) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    matrices = _matrices(world, seed)
    owners = choose_owners(matrices, world)
    values = [torch.arange(m.numel) + 1000.0 * i for i, m in enumerate(matrices)]
    for indices in choose_rounds(matrices, owners, world, bucket):
        each = Round(indices, matrices, owners, rank, dist.group.WORLD)
        held = [values[s.matrix][s.start : s.stop] for s in each.sends]
        source = torch.cat([torch.empty(0), *held])
        assert source.numel() == each.num_sent
        gathered = each.gather(source, "test")
        whole = {i: torch.full((matrices[i].numel,), torch.nan) for i in each.owned}
        assert all(owners[i] == rank for i in whole)
        for segment, piece in zip(each.receives, pieces(gathered, each.receives), strict=True):
            whole[segment.matrix][segment.start : segment.stop] = piece
        assert all(torch.equal(full, values[i]) for i, full in whole.items())
        assert torch.equal(each.scatter(-gathered, "test"), -source)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("bucket", [1, 200, 10**6])
def test_matrices_arrive_whole_and_return(ranks: Ranks, num_ranks: int, bucket: int) -> None:
    """Pieces of any length, none among them, from ranks whose shards are in any order."""
    ranks(num_ranks).run(for_each, _travels, [(seed, bucket) for seed in range(3)])
