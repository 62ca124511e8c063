"""Print |g| / |g of one process| of every strategy, mesh and loop as the table of docs/design.

    python -m tests.end_to_end.gradient_norms

Takes about a minute. A ratio that is not 1 within 1e-5 ends it with an error and no table.
"""

from __future__ import annotations

import math
import sys

from tests.end_to_end.strategy_cases import ENGINES, LOOPS, MODELS, gradient_ratio
from tests.ranks import Nursery

TOLERANCE = 1e-5


def ratio_of(nursery: Nursery, engine_name: str, shape: tuple[int, ...], loop: tuple) -> float:
    """Return the ratio furthest from 1 among the models and ranks.

    Raises:
        ValueError: It is off by more than the tolerance.
    """
    ratios = [
        ratio
        for model in MODELS
        for ratio in nursery.pool(math.prod(shape)).run(
            gradient_ratio, ENGINES[engine_name], shape, model, *loop
        )
    ]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    if not abs(worst - 1) <= TOLERANCE:
        raise ValueError(f"{engine_name} on {shape}, {loop}: ratio {worst}")
    return worst


def table(nursery: Nursery) -> str:
    """Return the table in Markdown, one row for each strategy and mesh."""
    heads = [f"{kind}, {m}" for kind, m in LOOPS]
    rows = ["| strategy | ranks | " + " | ".join(heads) + " |", "|---" * (2 + len(heads)) + "|"]
    for name, engine in ENGINES.items():
        for shape in engine.meshes:
            cells = [f"{ratio_of(nursery, name, shape, loop):.5f}" for loop in LOOPS]
            ranks = " x ".join(map(str, shape))
            rows.append(f"| `{name}` | {ranks} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    opened = Nursery()
    try:
        sys.stdout.write(table(opened) + "\n")
    finally:
        opened.close()
