"""How the ranks of a benchmark start in tests."""

from __future__ import annotations

import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork ranks from one process that has imported torch: spawned, each takes seconds for it."""
    multiprocessing.set_forkserver_preload(["tests.benchmarks.imported"])
    monkeypatch.setattr("benchmarks.launch.START_METHOD", "forkserver")
