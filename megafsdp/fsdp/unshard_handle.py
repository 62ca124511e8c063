"""The handle of a gather that a user has begun, as ``unshard(async_op=True)`` returns it."""

from __future__ import annotations

from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from megafsdp.fsdp.runtime.unit import FSDPUnit


class UnshardHandle(TorchUnshardHandle):
    """A gather under way, returned by :meth:`FSDPModule.unshard`."""

    def __init__(self, unit: FSDPUnit) -> None:
        self._unit: FSDPUnit | None = unit
        self._num_rests = unit.num_rests

    def wait(self) -> None:
        """Wait for the gather and show the unsharded parameters; later calls return at once.

        Nothing is shown if a forward, a backward or ``reshard()`` has meanwhile brought the unit to
        rest.
        """
        unit, self._unit = self._unit, None
        if unit is not None and unit.num_rests == self._num_rests:
            unit.finish_unshard()
            unit.show_unsharded()
