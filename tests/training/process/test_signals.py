"""Requests to stop, and their agreement between ranks."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from megafsdp.training.process.signals import StopRequest, ending_on_signals
from tests.ranks import Ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_a_request_while_listening(number: int) -> None:
    """The process goes on, a second signal too, and the old handler comes back."""
    # The suite itself may run under nohup, which ignores SIGHUP.
    outer = signal.signal(number, signal.SIG_DFL)
    try:
        stop = StopRequest(CPU)
        with stop.listening():
            assert not stop.is_requested
            for _ in range(2):
                os.kill(os.getpid(), number)
            assert stop.is_requested
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, outer)


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    """Programs of nohup outlive their terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopRequest(CPU)
    try:
        with stop.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_requested
    finally:
        signal.signal(signal.SIGHUP, before)


def _agreements() -> list[bool]:
    stop = StopRequest(CPU)
    seen = [stop.agreed()]
    if dist.get_rank() == 1:
        stop.request()
    seen.append(stop.is_agreed)
    seen.append(stop.agreed())
    return [*seen, stop.is_agreed]


def test_request_of_one_rank_is_agreed_by_all(ranks: Ranks) -> None:
    """No rank acts on its own flag; after the collective all do."""
    assert ranks(3).run(_agreements) == [[False, False, True, True]] * 3


def test_agreement_made_elsewhere_holds() -> None:
    """What the training step learned with the loss counts, and is never taken back."""
    stop = StopRequest(CPU)
    stop.record_agreement(2.0)
    stop.record_agreement(0.0)
    assert stop.is_agreed
    assert stop.agreed()


def _wait_for_a_store() -> None:
    """Wait in native code, as a rank does whose first rank does not come."""
    dist.TCPStore("127.0.0.1", 9, is_master=False, timeout=datetime.timedelta(seconds=60))


def _wait_in_python() -> None:
    time.sleep(60)


def _ended_by(number: int, wait: Callable[[], None]) -> tuple[int, float, str]:
    """Send a signal to a forked process inside the context; return its code, time and output."""
    dist.destroy_process_group()
    reader, writer = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            os.dup2(writer, 2)
            sys.stderr = os.fdopen(2, "w")
            with ending_on_signals():
                os.write(writer, b"ready\n")
                wait()
        finally:
            os._exit(99)
    os.close(writer)
    with os.fdopen(reader) as output:
        assert output.readline() == "ready\n"
        time.sleep(0.3)
        started_s = time.monotonic()
        os.kill(process_id, number)
        code = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
        return code, time.monotonic() - started_s, output.read()


@pytest.mark.parametrize("wait", [_wait_for_a_store, _wait_in_python])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_before_the_ranks_have_met_ends_the_process(
    ranks: Ranks, number: signal.Signals, wait: Callable[[], None]
) -> None:
    """At once, with the shell's code and one message, whatever the main thread waits in."""
    ((code, took_s, output),) = ranks(1).run(_ended_by, number, wait)
    assert code == 128 + number
    assert took_s < 5
    assert f"megafsdp: {number.name} while the ranks met: nothing was trained" in output


def test_handlers_come_back_after_the_ranks_have_met() -> None:
    """And so does the descriptor that another library may have set."""
    handler, descriptor = signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    with ending_on_signals():
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(descriptor) == descriptor
