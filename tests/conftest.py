"""Fixtures and options of the whole suite: rank pools, poison, marks, the count of skips."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

# Threads that libraries start on import would be alive when ranks are forked.
os.environ["OMP_NUM_THREADS"] = "1"
# Asking the CUDA runtime whether there is a GPU would make it unusable in forked ranks, NVML not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import hypothesis
import pytest
import torch

from megafsdp.device.memory import set_poison
from tests.ranks import Nursery, Ranks

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("ci")

_NURSERY = pytest.StashKey[Nursery]()
_NUM_MATRIX_DESELECTED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption("--full", action="store_true", help="also run the tests marked matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect ``matrix`` tests without ``--full``; skip ``gpu`` tests without a GPU."""
    if not config.getoption("--full"):
        matrix = [item for item in items if item.get_closest_marker("matrix")]
        items[:] = [item for item in items if not item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=matrix)
        config.stash[_NUM_MATRIX_DESELECTED] = len(matrix)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery: every test module is imported and no test has started a thread."""
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_NURSERY] = Nursery()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the nursery and with it every rank."""
    if _NURSERY in config.stash:
        config.stash[_NURSERY].close()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Count what did not run, by reason."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"not run: {count} skipped ({reason})")
    if num_matrix := config.stash.get(_NUM_MATRIX_DESELECTED, 0):
        terminalreporter.write_line(f"not run: {num_matrix} marked matrix (./test.sh --full)")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Return ``ranks(world_size, backend="gloo")``, a pool with ``run(fn, *args)``."""
    return request.config.stash[_NURSERY].pool


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fill fresh megafsdp memory with NaN or 0x7F, in this process and in every rank it calls."""
    set_poison(True)
    yield
    set_poison(False)
