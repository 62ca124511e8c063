"""SIGTERM and SIGINT as a request that all ranks honour together, at the next safe moment."""

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
    """Remember that a signal asked for the end of the run.

    Ranks get signals at different moments, or only some of them do, so a rank acts on
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
        """Return whether this rank got a signal; other ranks may not have."""
        return self._is_requested

    @property
    def is_agreed(self) -> bool:
        """Return what the ranks last agreed on; the same on all ranks."""
        return self._is_agreed

    def request(self, *unused: object) -> None:
        """Ask for the end of the run."""
        self._is_requested = True

    def record_agreement(self, num_requests: float) -> None:
        """Take over an agreement made elsewhere: how many ranks have a request, on all ranks."""
        self._is_agreed = self._is_agreed or num_requests > 0

    def agreed(self) -> bool:
        """Return whether any rank got a signal; one small collective, called by all ranks."""
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
