"""Two checkouts are compared block by block, and only if they compute the same numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import trees
from benchmarks.record import CheckError

_ROOT = Path(__file__).parents[2]


class _Team:
    """Blocks of 3 ms here and 2 ms there, whose numbers may differ."""

    def __init__(self, tree: Path, wrong_blocks: tuple[int, ...]) -> None:
        self._is_this = tree == _ROOT
        self._wrong_blocks = wrong_blocks
        self._num_blocks = 0

    def wait_until_ready(self) -> None:
        """Return at once."""

    def block(self) -> tuple[dict[str, float], float]:
        """Return one figure and a number."""
        self._num_blocks += 1
        is_wrong = self._is_this and self._num_blocks in self._wrong_blocks
        return {"step": 3.0 if self._is_this else 2.0}, float(self._num_blocks + is_wrong)


def _run(monkeypatch: pytest.MonkeyPatch, *wrong_blocks: int) -> dict[str, object]:
    @contextmanager
    def team(tree: Path, job: str) -> Iterator[_Team]:
        yield _Team(tree, wrong_blocks)

    monkeypatch.setattr(trees, "_team", team)
    options = argparse.Namespace(
        other=_ROOT / "tests", jobs=["optimizer_step"], rounds=2, repeats=5
    )
    return trees.run(options)


def test_the_figure_is_the_median_ratio_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three milliseconds here over two there, in each of five pairs of two rounds."""
    results = _run(monkeypatch)
    case = results["jobs"]["optimizer_step"]["step"]  # type: ignore[index]
    assert (case["ratio"], case["this"]["count"], case["other"]["count"]) == (1.5, 10, 10)
    assert "step: 3.000 / 2.000, ratio 1.500" in trees.describe(results)


def test_no_figure_is_given_when_checkouts_compute_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One block of one checkout is enough."""
    with pytest.raises(CheckError, match="compute different numbers"):
        _run(monkeypatch, 4)


@pytest.mark.matrix("benchmarks")
@pytest.mark.parametrize("job", list(trees.tree_worker.JOBS))
def test_every_job_runs_beside_itself(job: str) -> None:
    """A checkout beside itself, in processes of their own."""
    results = trees.run(argparse.Namespace(other=_ROOT, jobs=[job], rounds=1, repeats=1))
    assert results["jobs"][job], "figures are there"  # type: ignore[index]


def test_a_process_that_ends_is_named() -> None:
    """A folder without the package is no checkout."""
    team = trees._team(_ROOT / "docs", "adam, one thread")
    message = r"'adam, one thread' in .*docs ended with code 1"
    with pytest.raises(RuntimeError, match=message), team as processes:
        processes.wait_until_ready()
