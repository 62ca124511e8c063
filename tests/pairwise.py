"""A fixed selection from a product of cases in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[Hashable, ...])


def pairs_of(case: tuple[Hashable, ...]) -> set[tuple[int, Hashable, int, Hashable]]:
    """Return the pairs of values at two places of a case."""
    return {(i, case[i], j, case[j]) for i, j in combinations(range(len(case)), 2)}


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Return few of the cases such that every pair of values of any two places occurs in one.

    Greedy and without chance: each time the first case that adds the most pairs is taken. Pairs
    that no case has, because the product leaves them out, are not asked for.
    """
    waiting = set().union(*(pairs_of(case) for case in cases))
    selected = []
    while waiting:
        best = max(cases, key=lambda case: len(pairs_of(case) & waiting))
        selected.append(best)
        waiting -= pairs_of(best)
    return selected
