"""What a parameter group must know of an optimizer that works beside the calling thread.

Only what the group asks for; who does the work, and how, is the optimizer's business.
"""

from __future__ import annotations

from typing import Protocol

import torch


class StepInFlight(Protocol):
    """A step that changes a main weight beside the calling thread."""

    def wait(self) -> None:
        """Return when the main weight and its copy on the device are those after the step.

        Raises:
            RuntimeError: The step failed.
        """


class WorkAhead(Protocol):
    """Who steps a group's main weight and may begin before the optimizer is told to step."""

    def grads_are_final(self, grads: torch.Tensor) -> None:
        """Begin: all gradients are shown, and nothing is added to them before the step.

        Args:
            grads: The flat main gradient, like the main weight.
        """

    def grads_will_change(self) -> None:
        """Let go of gradients that are read, since another sum is to be added to them."""

    def call_off(self) -> None:
        """Drop what was begun: the main weight is read or written by others."""
