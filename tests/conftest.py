"""Fixtures and options of the whole suite: rank pools, poison, marks, the count of skips."""

from __future__ import annotations

import contextlib
import gc
import logging
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
_NUM_DESELECTED = pytest.StashKey[dict[str, int]]()
_HOW_TO_RUN = {
    "browser": "./test.sh -m browser",
    "ecosystem": "./test.sh -m ecosystem",
    "matrix": "./test.sh --full",
}
# Run only if they are named after -m: they need more than the suite installs.
_NAMED_MARKS = ("browser", "ecosystem")
_ALL_PRODUCTS = "all"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--full``."""
    parser.addoption(
        "--full",
        nargs="?",
        const=_ALL_PRODUCTS,
        metavar="NAME",
        help="also run the tests marked matrix; with a name run that product of cases alone",
    )


def pytest_configure() -> None:
    """Run the tests, and all processes that they start, as batch work."""
    # Many more threads than cores send each other short messages. Otherwise a thread that wakes
    # another may lose its core to it while it holds a lock, for which gloo spins: an all-reduce
    # between 4 ranks on 2 cores takes 6 ms in place of 1.5.
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select by ``--full`` and by marks after ``-m``; skip ``gpu`` tests without a GPU."""
    chosen = config.getoption("--full")
    left_out = config.stash[_NUM_DESELECTED] = dict.fromkeys(_HOW_TO_RUN, 0)
    products = {id(i): m.args[0] for i in items if (m := i.get_closest_marker("matrix"))}
    if chosen is None:
        selected = [item for item in items if id(item) not in products]
        left_out["matrix"] = len(items) - len(selected)
    elif chosen == _ALL_PRODUCTS:
        selected = list(items)
    else:
        selected = [item for item in items if products.get(id(item)) == chosen]
        if not selected:
            names = ", ".join(sorted(set(products.values())))
            raise pytest.UsageError(f"--full {chosen}: no such product of cases; there are {names}")
    for mark in _NAMED_MARKS:
        if mark not in config.option.markexpr:
            own = [item for item in selected if not item.get_closest_marker(mark)]
            left_out[mark] = len(selected) - len(own)
            selected = own
    kept = set(map(id, selected))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = selected
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fork the nursery: every test module is imported and no test has started a thread."""
    # Collections in tests and ranks then look at what these make, not at all of torch.
    gc.collect()
    gc.freeze()
    if any("ranks" in getattr(item, "fixturenames", ()) for item in session.items):
        session.config.stash[_NURSERY] = Nursery()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's counts of deselected tests to the process that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_deselected"] = session.config.stash.get(
            _NUM_DESELECTED, {}
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take over the counts of a worker; every worker collects the same tests."""
    if counts := getattr(node, "workeroutput", {}).get("num_deselected"):
        node.config.stash[_NUM_DESELECTED] = counts  # type: ignore[attr-defined]


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
    for mark, count in config.stash.get(_NUM_DESELECTED, {}).items():
        if count:
            terminalreporter.write_line(f"not run: {count} marked {mark} ({_HOW_TO_RUN[mark]})")


@pytest.fixture(autouse=True)
def _levels_of_loggers() -> Iterator[None]:
    """Set back what the command ``megafsdp`` sets for its process, where a test calls it here."""
    loggers = [logging.getLogger(name) for name in ("megafsdp", "megafsdp.training")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


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
