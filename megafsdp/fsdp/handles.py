"""The handles of collectives that a user has begun: a gather, and the end of an iteration."""

from __future__ import annotations

from typing import Any

from torch.distributed import fsdp

from megafsdp.fsdp.runtime.schedule import FSDPContext
from megafsdp.fsdp.runtime.unit import FSDPUnit

# torch 2.15 has it.
_TorchGradientReductionHandle: Any = getattr(fsdp, "GradientReductionHandle", object)


class UnshardHandle(fsdp.UnshardHandle):
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


class GradientReductionHandle(_TorchGradientReductionHandle):
    """The end of an iteration under way, returned by :meth:`FSDPModule.finalize_backward`.

    Args:
        context: The units that it ends; None if there is nothing to wait for.
    """

    def __init__(self, context: FSDPContext | None) -> None:
        self._begun = None if context is None else (context, context.start_finalizing())

    def wait(self) -> None:
        """Finish the reductions, and show the gradients; collective. Later calls return at once.

        Raises:
            RuntimeError: The gradients were dropped, by ``zero_grad()``, ``reset_iter_state()`` or
                after an exception.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            context, end = begun
            context.finish_finalizing(end)
