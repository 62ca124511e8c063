"""Views of all parameters in any buffer that lies like the main weight, in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors


class LocalRows:
    """Where the rows of each parameter that this rank holds lie in a flat buffer.

    Args:
        rows: The rows of each parameter in one such buffer, in local shapes.
        flat: That buffer, 1-D.
    """

    def __init__(self, rows: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        # What torch cuts leaves no gap: gaps are rows of nobody. Of the shapes only sizes are read.
        self._shapes: list[torch.Tensor] = []
        self._places = [0] * len(rows)
        starts = [int(own.storage_offset() - flat.storage_offset()) for own in rows]
        end = 0
        for index in sorted(range(len(rows)), key=starts.__getitem__):
            own = rows[index]
            if own.numel():
                self._append((starts[index] - end,))
                end = starts[index] + own.numel()
            self._places[index] = len(self._shapes)
            self._append(own.shape)

    def _append(self, shape: Sequence[int]) -> None:
        self._shapes.append(torch.empty((), device="meta").expand(shape))

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return what a buffer holds of each parameter, in local shapes; they alias the buffer."""
        views = _unflatten_dense_tensors(flat, self._shapes)
        # torch makes what has no elements elsewhere.
        return [
            view if view.numel() else flat.narrow(0, 0, 0).view(view.shape)
            for view in (views[place] for place in self._places)
        ]
