"""The matrices of a parameter that Muon steps: itself, each of a stack, and their fused parts.

This file finds a matrix in its parameter and makes it an update once it is whole; it calls no
collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.mesh.annotation import FusedParts, annotation_of
from megafsdp.optimizer.muon.exchange import CutMatrix
from megafsdp.optimizer.muon.newton_schulz import lr_ratio, orthogonalize, part_shapes, part_views

SPLITS = ("parts", "groups", "none")


@dataclass(eq=False, slots=True)
class Matrix:
    """One matrix of a parameter: the parameter itself, or one of a stack.

    Attributes:
        parameter: The parameter, sharded or not.
        param_group: Its options.
        offset: First element within the parameter.
        shape: Rows and columns.
        fused: Logical matrices inside it; None means it is one.
        fused_dim: Dimension, 0 or 1, along which they lie.
    """

    parameter: torch.Tensor
    param_group: dict[str, Any]
    offset: int
    shape: tuple[int, int]
    fused: FusedParts | None
    fused_dim: int

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def by_group(self) -> bool:
        """Return whether every repetition of a fused part is a matrix of its own."""
        return self.param_group["split_fused"] == "groups"

    def cut(self) -> CutMatrix:
        """Return the ranges of the matrix on each rank, and the cost of its owner."""
        shapes = part_shapes(self.shape, self.fused, self.fused_dim, by_group=self.by_group)
        # Products with the shorter side take nearly all of the time; one of them is counted.
        cost = float(sum(r * c * min(r, c) for r, c in shapes))
        if not isinstance(self.parameter, UnevenDTensor):
            return CutMatrix(self.numel, cost, ((0, self.numel),))
        layout = self.parameter.uneven_layout
        # The layout gives the ranges of all ranks, so nothing is communicated.
        ranges = (layout.element_range(shard) for shard in self.parameter.shards_by_rank())
        cuts = ((self._within(start), self._within(stop)) for start, stop in ranges)
        return CutMatrix(self.numel, cost, tuple(cuts))

    def _within(self, element: int) -> int:
        return min(max(element - self.offset, 0), self.numel)

    def local_range(self, start: int, stop: int) -> slice:
        """Return where elements [start, stop) of the matrix lie in this rank's flat rows."""
        first = 0
        # A rank's rows may begin in an earlier matrix of the stack, or inside this one.
        if isinstance(self.parameter, UnevenDTensor):
            first = self.parameter.uneven_layout.element_range()[0]
        return slice(self.offset + start - first, self.offset + stop - first)

    def orthogonalize_parts_(self, whole: torch.Tensor) -> None:
        """Replace each logical matrix by its update, to be applied with the whole's rate."""
        options, dim = self.param_group, self.fused_dim
        for part in part_views(whole, self.fused, dim, by_group=self.by_group):
            flat = part.flatten(dim, dim + 1)
            update = orthogonalize(
                flat, options["ns_coefficients"], options["ns_steps"], options["eps"]
            )
            # The caller applies one rate, that of the whole shape; a part has another ratio.
            if self.fused is not None:
                rule = options["adjust_lr_fn"]
                update = update * (lr_ratio(rule, *flat.shape) / lr_ratio(rule, *self.shape))
            part.copy_(update.unflatten(dim, (part.size(dim), -1)))


@contextlib.contextmanager
def flat_elements(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, whatever its strides, to be changed in place.

    Allocates a copy for the time of the change where the tensor is not contiguous.
    """
    flat = tensor.reshape(-1)
    yield flat
    # reshape() has made a copy: what was changed in it must come back.
    if not tensor.is_contiguous() and flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def is_for_muon(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Return whether Muon steps a parameter of a group; AdamW does otherwise."""
    return group["use_muon"] and parameter.ndim > 1


def matrices_of(parameter: torch.Tensor, group: dict[str, Any]) -> list[Matrix]:
    """Return the matrices of a parameter that Muon steps, in order."""
    fused = annotation_of(parameter).fused if group["split_fused"] != "none" else None
    dim = 0 if fused is None else fused.dim - (parameter.ndim - 2)
    # Parts along the dimension of the stack are whole matrices.
    if dim < 0:
        fused, dim = None, 0
    rows, cols = parameter.shape[-2:]
    offsets = range(0, parameter.numel(), max(rows * cols, 1))
    return [Matrix(parameter, group, o, (rows, cols), fused, dim) for o in offsets]
