"""Turn SIGTERM, SIGINT and SIGHUP into a request to stop; all ranks stop at the same step.

Before the ranks have met there is no step to follow, and a signal ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from megafsdp.buffer.comm.collectives import all_reduce
from megafsdp.training.process.failure import report_failure

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """Record a request to end the run.

    Ranks receive signals at different moments, or only some of them do, so a rank acts on
    :meth:`agreed` alone. Further signals change nothing: launchers send several.

    Args:
        device: Where the ranks' flags are reduced.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_requested = False
        self._is_agreed = False

    @property
    def is_requested(self) -> bool:
        """Return whether this rank received a signal; other ranks may not have."""
        return self._is_requested

    @property
    def is_agreed(self) -> bool:
        """Return what the ranks last agreed on; the same on all ranks."""
        return self._is_agreed

    def request(self, *unused: object) -> None:
        """Ask for the end of the run; a handler of signals."""
        self._is_requested = True

    def record_agreement(self, num_requests: float) -> None:
        """Record the number of ranks with a request, which a collective elsewhere has summed."""
        self._is_agreed = self._is_agreed or num_requests > 0

    def agreed(self) -> bool:
        """Return whether any rank received a signal; one small collective, called by all ranks."""
        if not self._is_agreed:
            flag = torch.tensor(float(self._is_requested), device=self._device)
            all_reduce(flag, op="max", label="stop request")
            self.record_agreement(float(flag))
        return self._is_agreed

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals as requests inside the context; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.request) for number in _listened_to()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """End this process by a signal inside the context, with a message; main thread only.

    It ends at once even while the main thread waits in native code, where Python's own handlers
    would run only after the wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    # The interpreter writes the number of a signal there at the moment it arrives.
    previous_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _ignore) for number in _listened_to()}
    thread = threading.Thread(target=_end_by_signal, args=(reader,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_writer)
        # Closing the pipe ends the thread, once it has read the signals in it.
        os.close(writer)
        thread.join()
        os.close(reader)


def _listened_to() -> list[signal.Signals]:
    """Return the signals without SIGHUP, if that is ignored, as nohup has it for its programs."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not is_ignored]


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread at the pipe acts."""


def _end_by_signal(reader: int) -> None:
    while read := os.read(reader, 1):
        if read[0] in _SIGNALS:
            name = signal.Signals(read[0]).name
            report_failure(f"{name} while the ranks met: nothing was trained, nothing to save")
            # Not by an exception: the main thread may wait in native code for half an hour.
            os._exit(128 + read[0])
