"""What the schedule must be able to ask of a unit, real or rehearsed; nothing is done here."""

from __future__ import annotations

from typing import Protocol

from megafsdp.fsdp.params.gradient_reducer import GradientReducer
from megafsdp.fsdp.params.parameter_group import ParameterGroup


class ScheduledUnit(Protocol):
    """What the schedule must be able to ask of a unit."""

    prefetch: int
    reshard_after_forward: bool | int | None
    reshard_after_backward: bool
    requires_gradient_sync: bool
    requires_all_reduce: bool
    reducers: list[GradientReducer]

    @property
    def is_unsharded(self) -> bool:
        """Tell whether full storage is allocated."""

    @property
    def groups(self) -> list[ParameterGroup]:
        """Return the unit's parameter groups."""

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Issue the gathers of the unit."""

    def finish_unshard(self) -> None:
        """Wait for the gathers of the unit."""

    def release(self) -> None:
        """Free the full storage unless the unit is at work."""

    def finish_backward(self) -> None:
        """End the unit's backward if it is in one."""

    def leave_rest_out(self) -> None:
        """End a forward in which some of the unit's modules did not run."""

    def forget_forwards(self) -> None:
        """Stop waiting for the gradients of forwards so far."""

    @property
    def is_at_work(self) -> bool:
        """Tell whether a forward or backward has begun and not ended."""

    def abandon(self, *, keeps_sums: bool) -> None:
        """Return to rest after an exception, with or without the sums of earlier microbatches."""

    def prefetch_override(self, *, is_backward: bool) -> list[ScheduledUnit] | None:
        """Return the units the user chose to prefetch after this one."""
