"""Turn SIGTERM and SIGINT into a request to stop, which all ranks follow at the same step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

from megafsdp.buffer.comm.collectives import all_reduce

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        """Ask for the end of the run."""
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
        """Take SIGTERM and SIGINT as requests inside the context; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.request()
