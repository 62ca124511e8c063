"""A background thread that runs jobs: of those that can begin, the most urgent one first.

The file does not handle errors of jobs: a job must not raise, and its owner reads its error.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

_LOGGER = logging.getLogger("megafsdp.device")


class Job(Protocol):
    """Work that a :class:`BackgroundThread` can run."""

    @property
    def urgency(self) -> int:
        """Return a number: of the jobs that can begin, the one with the smallest runs first."""

    @property
    def can_begin(self) -> bool:
        """Return whether the job would begin at once, without waiting for something else."""

    def run(self) -> None:
        """Do the work, without raising."""


class _Queue:
    """Jobs that wait for the thread, in the order in which they were given."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._is_closed = False
        self._has_changed = threading.Condition()

    def put(self, job: Job) -> None:
        with self._has_changed:
            self._jobs.append(job)
            self._has_changed.notify()

    def close(self) -> None:
        with self._has_changed:
            self._is_closed = True
            self._has_changed.notify()

    def __len__(self) -> int:
        return len(self._jobs)

    def take(self) -> Job | None:
        """Wait for a job and return it; return None once the queue is closed and empty."""
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._jobs or self._is_closed)
            if not self._jobs:
                return None
            by_urgency = sorted(self._jobs, key=lambda job: job.urgency)
            # If no job can begin, take the oldest: what it waits for was probably issued first.
            chosen = next((job for job in by_urgency if _can_begin(job)), self._jobs[0])
            self._jobs.remove(chosen)
            return chosen


def _can_begin(job: Job) -> bool:
    try:
        return job.can_begin
    except Exception:
        # The job raises this again inside run(), which records it.
        return True


class BackgroundThread:
    """One thread, which the first job starts and :meth:`close` ends.

    Jobs of equal urgency that can begin run in the order in which they were given.

    Args:
        name: The thread's name.
        patience_s: How long :meth:`close` waits for one job.
        begin: Called at the start of the thread, for example to choose its device.
    """

    def __init__(
        self, name: str, *, patience_s: float = 10.0, begin: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._begin = begin
        self._patience_s = patience_s
        self._queue = _Queue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Queue a job; local, returns at once."""
        if self._thread is None:
            # The thread refers only to the queue, so this object can be deleted and closed.
            self._thread = threading.Thread(
                target=_serve, args=(self._queue, self._begin), name=self._name, daemon=True
            )
            self._thread.start()
        self._queue.put(job)

    def close(self) -> None:
        """Take no more jobs, and wait until all are done and the thread has ended.

        A job that does not end in time is left behind with a warning, and the thread with it. It
        may wait for something that never comes, such as a collective that another rank does not
        enter, and the process must still end.
        """
        self._queue.close()
        thread, self._thread = self._thread, None
        # A garbage collection that runs in the thread itself may call this.
        if thread is None or thread is threading.current_thread():
            return
        num_left = -1
        while thread.is_alive() and len(self._queue) != num_left:
            num_left = len(self._queue)
            thread.join(self._patience_s)
        if thread.is_alive():
            _LOGGER.warning(
                "A job of the thread '%s' has not ended in %g s and is left behind.",
                self._name,
                self._patience_s,
            )


def _serve(jobs: _Queue, begin: Callable[[], None] | None) -> None:
    if begin is not None:
        begin()
    while (job := jobs.take()) is not None:
        job.run()
        # Otherwise the job's tensors would live until the next job.
        del job
