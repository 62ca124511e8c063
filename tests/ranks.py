"""Rank pools: run one function on N ranks of a process group, many times, in about 50 ms a call.

``ranks(4).run(fn, *args)`` calls ``fn(*args)`` on 4 forked gloo processes and returns each rank's
value. Each call has a fresh default process group, no mesh or DTensor cache of an earlier call,
seed 0, and the caller's ``MEGAFSDP_*`` environment and warning filters. A pool whose call failed is
buried and remade.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any

from tests import rank_process
from tests.rank_process import Answer, BuryRanks, Call, ForkRanks

# Far more than a call takes: on a machine with other work the ranks wait for a processor.
DEFAULT_TIMEOUT_S = 180.0
# After a first failure the other ranks may hang in a collective that will never be completed.
GRACE_S = 3.0
_LOG_TAIL_CHARACTERS = 6000


class RanksError(RuntimeError):
    """Report that a call failed on some rank or did not answer in time.

    Attributes:
        failures: Traceback or last words of each failed rank, the first failure first.
    """

    def __init__(self, function_name: str, failures: dict[int, str]) -> None:
        self.failures = failures
        reports = "\n".join(f"---- rank {r} ----\n{text}" for r, text in failures.items())
        super().__init__(f"{function_name} failed on rank(s) {list(failures)}:\n{reports}")


class Nursery:
    """A child process with one thread and no CUDA context, from which all ranks are forked.

    Each pytest process has one, made before any test runs; :meth:`close` ends it and all ranks.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self._requests, theirs = context.Pipe()
        with warnings.catch_warnings():
            # A pytest-xdist worker has one more thread, which reads its pipe and holds no lock that
            # a rank could want; Python 3.12 warns of any second thread.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            self._process_id = os.fork()
        if self._process_id == 0:
            self._requests.close()
            rank_process.serve_nursery(theirs)
        theirs.close()
        self._directory = Path(tempfile.mkdtemp(prefix="megafsdp-ranks-"))
        self._pools: dict[tuple[int, str], RankPool] = {}

    def pool(self, world_size: int, backend: str = "gloo") -> RankPool:
        """Return the pool of a world size and backend, making it on first use.

        Args:
            world_size: Number of ranks.
            backend: Backend string of the process groups; with NCCL, rank r uses GPU r.
        """
        key = (world_size, backend)
        if key not in self._pools:
            self._pools[key] = RankPool(self, world_size, backend)
        return self._pools[key]

    def fork(self, world_size: int) -> tuple[list[connection.Connection], list[int], Path]:
        """Fork ranks; return each one's connection and process id, and the folder of their logs."""
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        with connection.Listener(str(directory / "socket"), family="AF_UNIX", backlog=64) as door:
            process_ids = self._ask(
                ForkRanks(world_size, str(directory / "socket"), str(directory))
            )
            by_rank = {}
            for _ in range(world_size):
                rank_connection = door.accept()
                by_rank[rank_connection.recv()] = rank_connection
        return [by_rank[rank] for rank in range(world_size)], process_ids, directory

    def bury(self, process_ids: list[int]) -> list[int]:
        """Kill ranks, wait for them, and return their exit codes."""
        return self._ask(BuryRanks(tuple(process_ids)))

    def close(self) -> None:
        """End every pool and the nursery itself."""
        for pool in self._pools.values():
            pool.close()
        self._requests.close()
        os.waitpid(self._process_id, 0)
        shutil.rmtree(self._directory)

    def _ask(self, request: ForkRanks | BuryRanks) -> list[int]:
        self._requests.send(request)
        return self._requests.recv()


class RankPool:
    """Ranks 0 to N-1, alive between calls; get one from the ``ranks`` fixture."""

    def __init__(self, nursery: Nursery, world_size: int, backend: str) -> None:
        self._nursery = nursery
        self._world_size = world_size
        self._backend = backend
        self._connections: list[connection.Connection] = []
        self._process_ids: list[int] = []
        self._directory = Path()
        self._num_calls = 0

    @property
    def process_ids(self) -> list[int]:
        """Return the process id of each rank; empty before the first call and after a failure."""
        return list(self._process_ids)

    def run(
        self, fn: Callable[..., Any], *args: object, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """Call a function on every rank and return the value of each.

        Args:
            fn: A module-level function, or a ``functools.partial`` of one.
            *args: Its arguments, the same on every rank.
            timeout_s: Time for all ranks to answer.

        Raises:
            RanksError: A rank raised or died, or did not answer in time; names the function and the
                ranks, shows the traceback of each and where a stuck one stood.
        """
        if not self._connections:
            self._connections, self._process_ids, self._directory = self._nursery.fork(
                self._world_size
            )
        call = self._pickled_call(fn, args, timeout_s)
        try:
            for rank_connection in self._connections:
                rank_connection.send_bytes(call)
            answers, stuck = self._collect(timeout_s)
            failures = self._failures(answers, stuck, timeout_s)
        except BaseException:
            self.close()
            raise
        if failures:
            self.close()
            raise RanksError(_name_of(fn), failures)
        return [pickle.loads(answers[rank].value or b"") for rank in range(self._world_size)]

    def close(self) -> None:
        """Kill the ranks by their ids and wait for them; the next call forks new ones."""
        for rank_connection in self._connections:
            rank_connection.close()
        if self._process_ids:
            self._nursery.bury(self._process_ids)
        self._connections, self._process_ids = [], []

    def _pickled_call(
        self, fn: Callable[..., Any], args: tuple[object, ...], timeout_s: float
    ) -> bytes:
        self._num_calls += 1
        # Plain pickle: multiprocessing's own would pass tensors by file descriptor.
        return pickle.dumps(
            Call(
                function=pickle.dumps(fn),
                arguments=pickle.dumps(args),
                backend=self._backend,
                store_path=str(self._directory / f"store{self._num_calls}"),
                # Later than the pool's own limit, which says more about who is stuck where.
                timeout_s=timeout_s + 10 * GRACE_S,
                environment=rank_process.caller_environment(),
                warning_filters=list(warnings.filters),
            )
        )

    def _collect(self, timeout_s: float) -> tuple[dict[int, Answer], list[int]]:
        """Wait for answers; return those that came and the ranks that gave none in time."""
        waiting: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections)}
        answers: dict[int, Answer] = {}
        deadline_s = time.monotonic() + timeout_s
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for ready in connection.wait(list(waiting), left_s):
                rank = waiting.pop(ready)
                answers[rank] = self._receive(ready, rank)
                if answers[rank].failure is not None:
                    deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        return answers, sorted(waiting.values())

    def _receive(self, ready: Any, rank: int) -> Answer:
        try:
            return ready.recv()
        except (EOFError, ConnectionResetError):
            died_at_s = time.monotonic()
            return Answer(
                failure=f"The process died.\n{self._log_tail(rank)}", failed_at_s=died_at_s
            )

    def _failures(
        self, answers: dict[int, Answer], stuck: list[int], timeout_s: float
    ) -> dict[int, str]:
        failed = [(a.failed_at_s, rank, a.failure) for rank, a in answers.items() if a.failure]
        failures = {rank: failure for _, rank, failure in sorted(failed)}
        for rank in stuck:
            os.kill(self._process_ids[rank], signal.SIGUSR1)
        if stuck:
            time.sleep(0.2)  # Time for the signal handlers to write the stacks.
        limit = (
            f"{GRACE_S:g} s after rank {next(iter(failures))} failed"
            if failures
            else f"{timeout_s:g} s"
        )
        for rank in stuck:
            failures[rank] = f"No answer in {limit}; the rank was here:\n{self._log_tail(rank)}"
        return failures

    def _log_tail(self, rank: int) -> str:
        return (self._directory / f"rank{rank}.log").read_text(errors="replace")[
            -_LOG_TAIL_CHARACTERS:
        ]


Ranks = Callable[..., RankPool]


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{fn.__module__}.{fn.__qualname__}"
