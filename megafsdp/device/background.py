"""A thread that runs jobs in the order in which they were given.

This file knows nothing of what the jobs do; a job keeps its own errors.
"""

from __future__ import annotations

import queue
import threading
from typing import Protocol


class Job(Protocol):
    """What can be given to a :class:`BackgroundThread`."""

    def run(self) -> None:
        """Do the work; raises nothing."""


class BackgroundThread:
    """One thread, started by the first job, which ends with :meth:`close`.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        """Run a job behind those that were given before."""
        if self._thread is None:
            # Of the queue alone: the thread must not keep alive whoever waits to close it.
            self._thread = threading.Thread(
                target=_serve, args=(self._jobs,), name=self._name, daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """Return when the jobs are done and the thread has ended; it takes no more."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        # What a job holds need not live until the next one comes.
        del job
