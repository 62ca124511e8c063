"""A fixed selection from a product of cases in which every pair of values occurs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

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


def each_value(cases: Sequence[Case]) -> list[Case]:
    """Return fewer still: every value of any one place occurs, with many pairs among them.

    For products whose pairs other tests of the gate have.
    """
    waiting = {(i, value) for case in cases for i, value in enumerate(case)}
    new_pairs = set().union(*(pairs_of(case) for case in cases))
    selected = []
    while waiting:
        best = max(
            cases,
            key=lambda case: (len(waiting & set(enumerate(case))), len(new_pairs & pairs_of(case))),
        )
        selected.append(best)
        waiting -= set(enumerate(best))
        new_pairs -= pairs_of(best)
    return selected


def gate_of(
    product: Sequence[tuple[Any, ...]],
    name: str,
    selected: Collection[tuple[Any, ...]] | None = None,
) -> list[Any]:
    """Return the cases of a product for ``pytest.mark.parametrize``; most run with --full alone.

    Args:
        product: All cases.
        name: The product's name for --full.
        selected: Cases that always run; by default a pairwise selection.
    """
    always = pairwise(product) if selected is None else selected
    rest = pytest.mark.matrix(name)
    return [pytest.param(*case, marks=() if case in always else rest) for case in product]
