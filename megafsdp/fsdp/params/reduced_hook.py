"""A function of the user's on each new sum of a group's gradients, before it becomes ``.grad``.

It is how sums go over ranks that no mesh names, such as replicas that come and go. On CUDA it runs
on a stream of its own beside the next unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megafsdp.device.streams import DeviceHandle


class ReducedHook:
    """Calls a function on one flat sum at a time.

    Args:
        function: Changes a sum in place: 1-D, cut as the main weight is, of the main gradients'
            dtype, already scaled.
        device: The device of the sums.
        stream: The stream that the function's work is queued on; None for one that all hooks share.
    """

    def __init__(
        self,
        function: Callable[[torch.Tensor], None],
        device: torch.device,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._function, self._handle = function, DeviceHandle(device)
        self._stream = stream or self._handle.shared_stream("hooks on sums")
        self._event: torch.cuda.Event | None = None

    @property
    def runs_beside(self) -> bool:
        """Return whether work goes on after :meth:`start`, until :meth:`finish`."""
        return self._handle.is_asynchronous

    def start(self, flat: torch.Tensor) -> None:
        """Call the function on a sum that is complete on the current stream."""
        with torch.no_grad(), self._handle.behind_current(self._stream):
            self._function(flat)
            self._event = self._handle.record_event(self._stream)

    def finish(self) -> None:
        """Make the current stream wait for the function's work; the sum may be read then."""
        event, self._event = self._event, None
        self._handle.wait_event(event)
