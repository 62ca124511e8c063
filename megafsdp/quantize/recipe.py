"""Recipes: the buffers of a compute weight, and how they are made from the main weight.

A compute weight is a tuple of named buffers that are gathered together: one buffer for a plain
cast, codes and scales for a quantized format. A recipe says how many elements each has for a row of
the main weight, whether forward, backward or both need it, and how to fill and to read it. The
engine moves the buffers; formats are defined by recipes alone.

Making a compute weight has two phases, so that a statistic over a whole tensor costs one collective
for all parameters of a model: each rank computes partial statistics of its rows, the engine takes
their maximum over ranks, then each rank encodes its rows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

WHOLE_ROW = 0


class Use(Enum):
    """When a buffer must be there in full."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """One named buffer of a compute weight.

    Attributes:
        name: Its name within the recipe.
        dtype: Its element type.
        block: Main weight elements of a row that share one element: 1 for codes, 2 for packed 4-bit
            codes, 32 for MX scales; ``WHOLE_ROW`` for one element a row.
        use: When it must be gathered.
    """

    name: str
    dtype: torch.dtype
    block: int = 1
    use: Use = Use.BOTH

    def is_needed(self, *, in_backward: bool) -> bool:
        """Return whether the buffer must be there in forward, or in backward."""
        return self.use is Use.BOTH or (self.use is Use.BACKWARD) == in_backward


class Recipe(Protocol):
    """How the compute weights of one parameter group are made and read.

    Attributes:
        is_elementwise: True if ``encode`` may be called once on whole flat buffers, gaps included.
        num_statistics: Statistics a tensor, combined over ranks by maximum; 0 for none.
    """

    @property
    def is_elementwise(self) -> bool: ...  # noqa: D102

    @property
    def num_statistics(self) -> int: ...  # noqa: D102

    @property
    def specs(self) -> tuple[BufferSpec, ...]:
        """Return the buffers."""

    def statistics(self, main: torch.Tensor) -> torch.Tensor:
        """Return ``(num_statistics,)`` fp32 of a tensor's local elements, 1-D and perhaps none."""

    def encode(
        self,
        main: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        statistics: torch.Tensor | None,
    ) -> None:
        """Fill the local 1-D buffers from the local 1-D main weight."""

    def assemble(self, shape: torch.Size, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the compute weight as a tensor, or tensor subclass, over the full 1-D buffers.

        Called once a parameter; the result must alias the buffers, which are refilled in place.
        """


@dataclass(frozen=True)
class CastRecipe:
    """The compute weight is the main weight in another dtype.

    Attributes:
        dtype: The compute dtype.
    """

    dtype: torch.dtype
    is_elementwise: bool = True
    num_statistics: int = 0

    @functools.cached_property
    def specs(self) -> tuple[BufferSpec, ...]:  # type: ignore[override]
        """Return the one buffer."""
        return (BufferSpec("weight", self.dtype),)

    def statistics(self, main: torch.Tensor) -> torch.Tensor:
        """Return nothing."""
        return main.new_zeros(0, dtype=torch.float32)

    def encode(
        self,
        main: torch.Tensor,
        outputs: Mapping[str, torch.Tensor],
        statistics: torch.Tensor | None,
    ) -> None:
        """Copy with a cast."""
        outputs["weight"].copy_(main)

    def assemble(self, shape: torch.Size, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the buffer in the parameter's shape."""
        return buffers["weight"].view(shape)
