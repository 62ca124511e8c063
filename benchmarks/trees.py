"""Two checkouts of megafsdp beside each other: is this one slower than another?

For each job (a training step, the host's work in hooks, optimizer steps, Adam's kernel,
checkpoints, offload on a simulated device) every checkout has processes of its own. They are alive
at the same time and take turns: one block here, one block there, the next pair in the other order.
Both must compute the same numbers. The placement of memory in a process can change times by more
than the differences to be found, so a job is run in several rounds of fresh processes. The figure
is the median over all pairs of the ratio, this checkout over the other. The other checkout needs
its native libraries built.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import tree_worker
from benchmarks.record import CheckError, spread

_THIS = Path(__file__).parents[1]
_WARM_UP_PAIRS = 2
SIDES = ("this", "other")

Figures = dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--jobs", nargs="+", choices=tree_worker.JOBS, default=[*tree_worker.JOBS])
    parser.add_argument("--rounds", type=int, default=3, help="times each job gets new processes")
    parser.add_argument("--repeats", type=int, default=20, help="pairs of blocks of a round")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run every job on both checkouts in turn; return the results.

    Raises:
        CheckError: The checkouts compute different numbers; no figure is given then.
        RuntimeError: A process of a job ended; its output is above.
    """
    commits = {"this": _commit(_THIS), "other": _commit(options.other)}
    jobs = {
        job: _measure(job, options.other, options.rounds, options.repeats) for job in options.jobs
    }
    return {
        "commits": commits,
        "rounds": options.rounds,
        "repeats": options.repeats,
        "jobs": jobs,
    }


def describe(results: dict[str, Any]) -> str:
    """Return the results as lines for people."""
    this, other = (results["commits"][side][:8] for side in SIDES)
    num_pairs = results["rounds"] * results["repeats"]
    lines = [f"ms of {this} / {other}, median ratio of {num_pairs} pairs of blocks"]
    for job, figures in results["jobs"].items():
        lines.append(job)
        for name, case in figures.items():
            low, high = case["ratio_quartiles"]
            lines.append(
                f"    {name}: {case['this']['median']:.3f} / {case['other']['median']:.3f}, ratio "
                f"{case['ratio']:.3f} (half of them {low:.3f} to {high:.3f})"
            )
    return "\n".join(lines)


def _commit(tree: Path) -> str:
    command = ["git", "-C", str(tree), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _measure(job: str, other: Path, rounds: int, repeats: int) -> dict[str, Any]:
    """Time blocks of both checkouts in turn; return the figures by name."""
    found: dict[str, list[Figures]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side, figures in _run_round(job, other, repeats).items():
            found[side] += figures
    names = [name for name in found["this"][0] if name in found["other"][0]]
    return {name: _compare(*([f[name] for f in found[side]] for side in SIDES)) for name in names}


def _run_round(job: str, other: Path, repeats: int) -> dict[str, list[Figures]]:
    """Start processes of both checkouts and time their blocks; return the figures by side.

    Raises:
        CheckError: The checkouts compute different numbers.
    """
    found: dict[str, list[Figures]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        teams = {
            side: stack.enter_context(_team(tree, job))
            for side, tree in zip(SIDES, (_THIS, other), strict=True)
        }
        for team in teams.values():
            team.wait_until_ready()
        for pair in range(_WARM_UP_PAIRS + repeats):
            checks = {}
            for side in SIDES if pair % 2 else reversed(SIDES):
                figures, checks[side] = teams[side].block()
                if pair >= _WARM_UP_PAIRS:
                    found[side].append(figures)
            if checks["this"] != checks["other"]:
                raise CheckError(f"{job}: the checkouts compute different numbers, {checks}")
    return found


def _compare(this: list[float], other: list[float]) -> dict[str, Any]:
    ratios = sorted(a / b for a, b in zip(this, other, strict=True))
    return {
        "this": spread(this),
        "other": spread(other),
        "ratio": statistics.median(ratios),
        "ratio_of_medians": statistics.median(this) / statistics.median(other),
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]],
    }


class _Team:
    """The ranks of one job on one checkout; rank 0 answers."""

    def __init__(self, ranks: list[subprocess.Popen[str]], what: str) -> None:
        self._ranks = ranks
        self._what = what

    def wait_until_ready(self) -> None:
        """Wait until every rank has built its job."""
        for rank in self._ranks:
            self._read(rank)

    def block(self) -> tuple[Figures, float]:
        """Run one block on all ranks; return rank 0's figures and its number to compare."""
        for rank in self._ranks:
            assert rank.stdin is not None
            print(file=rank.stdin, flush=True)
        answers = [json.loads(self._read(rank)) for rank in self._ranks]
        figures, check = answers[0]
        return figures, check

    def _read(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        if line := rank.stdout.readline():
            return line
        raise RuntimeError(f"A process of {self._what} ended with code {rank.wait()}.")


@contextmanager
def _team(tree: Path, job: str) -> Iterator[_Team]:
    """Start the ranks of a job on a checkout; end them by end of file on their input."""
    num_ranks, _ = tree_worker.JOBS[job]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        program = [sys.executable, tree_worker.__file__, str(tree), job]
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [*program, str(rank), f"{folder}/store"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tree,
                    env=environment,
                )
            )
            for rank in range(num_ranks)
        ]
        try:
            yield _Team(ranks, f"'{job}' in {tree}")
        except BaseException:
            # Other ranks may wait for one that has ended.
            for rank in ranks:
                rank.kill()
            raise
