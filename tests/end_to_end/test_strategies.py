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
from tests.pairwise import pairs_of
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


def _selected() -> list[Case]:
    """Return each engine on each mesh, and with each model, once, so that pairs differ the most."""
    waiting = set().union(*map(pairs_of, PRODUCT))
    selected: list[Case] = []
    for engine_and in (slice(0, 2), slice(0, 3, 2)):
        for values in dict.fromkeys(case[engine_and] for case in PRODUCT):
            if values not in (case[engine_and] for case in selected):
                cases = [case for case in PRODUCT if case[engine_and] == values]
                selected.append(max(cases, key=lambda case: len(pairs_of(case) & waiting)))
                waiting -= pairs_of(selected[-1])
    return selected


SELECTED = _selected()


def case_id(value: object) -> str:
    """Name a mesh 2x2."""
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(ranks: Ranks, case: Case, num_steps: int) -> None:
    name, shape, *rest = case
    engine = (ENGINES | MIXED_ENGINES)[name]
    ratios = ranks(math.prod(shape)).run(trajectory, engine, shape, *rest, num_steps)
    assert ratios == pytest.approx([1.0] * len(ratios), rel=1e-5)


@pytest.mark.parametrize(NAMES, SELECTED, ids=case_id)
def test_three_steps_equal_one_process(
    ranks: Ranks, engine: str, mesh: MeshShape, model: str, kind: str, num_microbatches: int
) -> None:
    """Gradients of step 1 with their norm, each loss, and the parameters after three steps."""
    _check(ranks, (engine, mesh, model, kind, num_microbatches), num_steps=3)


@pytest.mark.matrix("strategies")
@pytest.mark.parametrize(NAMES, PRODUCT, ids=case_id)
def test_ten_steps_of_the_whole_product_equal_one_process(
    ranks: Ranks, engine: str, mesh: MeshShape, model: str, kind: str, num_microbatches: int
) -> None:
    """Every case, those of the selection too."""
    _check(ranks, (engine, mesh, model, kind, num_microbatches), num_steps=10)


def test_the_selection_has_the_pairs_that_the_default_run_needs() -> None:
    """Each engine with each mesh and model, each manner of the loop with each model and count."""
    engine, mesh, model, kind, num_microbatches = range(5)
    wanted = {(engine, mesh), (engine, model), (mesh, model), (mesh, num_microbatches)}
    wanted |= {(model, kind), (model, num_microbatches), (kind, num_microbatches)}
    asked = set().union(*map(pairs_of, PRODUCT)) - set().union(*map(pairs_of, SELECTED))
    assert not {pair for pair in asked if (pair[0], pair[2]) in wanted}
    assert len(SELECTED) < len(PRODUCT) / 3
