"""Every strategy on every mesh, in every manner of the loop, trains as one process does."""

from __future__ import annotations

import math

import pytest

from tests.end_to_end.strategy_cases import (
    ENGINES,
    LOOPS,
    MIXED_ENGINES,
    MODELS,
    MeshShape,
    trajectory,
)
from tests.pairwise import pairs_of, pairwise
from tests.ranks import Ranks

Case = tuple[str, MeshShape, str, str, int]
NAMES = ("engine", "mesh", "model", "kind", "num_microbatches")


PRODUCT: list[Case] = [
    (name, shape, model, *loop)
    for name, engine in (ENGINES | MIXED_ENGINES).items()
    for shape in engine.meshes
    for model in MODELS
    for loop in LOOPS
]
PAIRWISE = pairwise(PRODUCT)


def case_id(value: object) -> str:
    """Name a mesh 2x2."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(ranks: Ranks, case: Case, num_steps: int) -> None:
    name, shape, *rest = case
    engine = (ENGINES | MIXED_ENGINES)[name]
    ratios = ranks(math.prod(shape)).run(trajectory, engine, shape, *rest, num_steps)
    assert ratios == pytest.approx([1.0] * len(ratios), rel=1e-5)


@pytest.mark.parametrize(NAMES, PAIRWISE, ids=case_id)
def test_two_steps_equal_one_process(
    ranks: Ranks, engine: str, mesh: MeshShape, model: str, kind: str, num_microbatches: int
) -> None:
    """Gradients of step 1 with their norm, each loss, and the parameters after two steps."""
    _check(ranks, (engine, mesh, model, kind, num_microbatches), num_steps=2)


@pytest.mark.matrix("strategies")
@pytest.mark.parametrize(NAMES, PRODUCT, ids=case_id)
def test_ten_steps_of_the_whole_product_equal_one_process(
    ranks: Ranks, engine: str, mesh: MeshShape, model: str, kind: str, num_microbatches: int
) -> None:
    """Every case, those of the pairwise selection too."""
    _check(ranks, (engine, mesh, model, kind, num_microbatches), num_steps=10)


def test_the_selection_has_every_pair_that_the_product_has() -> None:
    """No pair of engine, mesh, model and loop is left to --full alone."""
    selected = set().union(*(pairs_of(case) for case in PAIRWISE))
    assert selected == set().union(*(pairs_of(case) for case in PRODUCT))
    assert len(PAIRWISE) < len(PRODUCT) / 3
