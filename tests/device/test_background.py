"""The thread runs jobs in order and ends with its owner, whatever a job waits for."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from megafsdp.device import background
from megafsdp.device.background import BackgroundThread


@dataclass
class _Call:
    """A job that calls a function."""

    function: Callable[[], object]
    urgency: int = 0
    can_begin: bool = True

    def run(self) -> None:
        """Call it."""
        self.function()


def _threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_jobs_run_in_order_and_closing_waits_for_them() -> None:
    """None is lost, though it takes them longer together than one may take."""
    ran: list[int] = []
    worker = BackgroundThread("in order", patience_s=0.5)
    for number in range(4):
        worker.submit(_Call(lambda: time.sleep(0.2)))
        worker.submit(_Call(lambda number=number: ran.append(number)))
    worker.close()
    assert ran == [0, 1, 2, 3]
    assert not _threads("in order")
    worker.close()


def test_a_thread_without_jobs_is_never_started() -> None:
    """Closing it is nothing."""
    worker = BackgroundThread("idle")
    worker.close()
    assert not _threads("idle")


def test_a_job_that_does_not_end_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """With a warning; it and those behind it still end when they can, and the thread with them."""
    gate, ran = threading.Event(), threading.Event()
    worker = BackgroundThread("stuck", patience_s=0.1)
    worker.submit(_Call(gate.wait))
    worker.submit(_Call(ran.set))
    try:
        started = time.monotonic()
        with caplog.at_level(logging.WARNING, "megafsdp.device"):
            worker.close()
        assert time.monotonic() - started < 10
        assert "'stuck'" in caplog.text
        (thread,) = _threads("stuck")
        assert not ran.is_set()
    finally:
        gate.set()
    thread.join(10)
    assert ran.is_set()
    assert not thread.is_alive()


class _Lost(_Call):
    """A job of a device that answers no question."""

    @property
    def can_begin(self) -> bool:
        raise RuntimeError("the device is lost")

    @can_begin.setter
    def can_begin(self, value: bool) -> None: ...


def test_a_job_that_cannot_say_whether_it_can_begin_runs() -> None:
    """It meets the error itself then, and the thread lives on."""
    ran: list[int] = []
    worker = BackgroundThread("lost")
    worker.submit(_Lost(lambda: ran.append(0)))
    worker.submit(_Call(lambda: ran.append(1)))
    worker.close()
    assert sorted(ran) == [0, 1]


def test_a_job_may_close_its_own_thread() -> None:
    """As it does when it frees the last reference to the thread's owner."""
    ended: list[object] = []
    worker = BackgroundThread("own")

    def close() -> None:
        try:
            ended.append(worker.close())
        except BaseException as error:
            ended.append(error)

    worker.submit(_Call(close))
    for thread in _threads("own"):
        thread.join(10)
    assert ended == [None]
    assert not _threads("own")


# The file by itself: a process of its own would take seconds to import torch.
_PROGRAM = """
import runpy, sys, threading, weakref

BackgroundThread = runpy.run_path(sys.argv[1])["BackgroundThread"]

class Blocked:
    urgency, can_begin = 0, True

    def run(self):
        threading.Event().wait()

class Owner:
    def __init__(self):
        worker = BackgroundThread("blocked", patience_s=0.1)
        weakref.finalize(self, worker.close)
        worker.submit(Blocked())

owner = Owner()
raise SystemExit(3)
"""


def test_a_blocked_job_does_not_hold_up_the_end_of_the_process() -> None:
    """Such as a copy behind a collective that another rank never enters."""
    arguments = [sys.executable, "-c", _PROGRAM, background.__file__]
    done = subprocess.run(arguments, capture_output=True, timeout=60)
    assert done.returncode == 3, done.stderr.decode()


def test_the_thread_begins_with_what_it_is_given() -> None:
    """Before the first job, for example to choose its device."""
    done: list[str] = []

    class Noting:
        urgency, can_begin = 0, True

        def run(self) -> None:
            done.append("job")

    thread = BackgroundThread("beginning", begin=lambda: done.append("begin"))
    assert not done
    thread.submit(Noting())
    thread.submit(Noting())
    thread.close()
    assert done == ["begin", "job", "job"]
