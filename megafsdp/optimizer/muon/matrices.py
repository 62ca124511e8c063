"""The matrices that Muon steps: a 2-D parameter, each matrix of a stack, and their fused parts.

If a model axis cuts a matrix, Muon still steps the whole matrix. It is sent in the order (rank of
the axis, row, column), in which each rank's elements are one range, and its owner joins it.
Example: for a (2, 4) matrix with rows A and B, whose columns tp cuts, the message is
``A0 A1 B0 B1 A2 A3 B2 B3``.

This file finds a matrix in its parameter, and replaces a whole matrix by its update; it calls no
collective.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.mesh.annotation import FusedParts, annotation_of
from megafsdp.mesh.dtensor import group_of_axes, shard_axes
from megafsdp.mesh.model_part import ModelPart
from megafsdp.optimizer.muon.exchange import CutMatrix
from megafsdp.optimizer.muon.newton_schulz import lr_ratio, orthogonalize, part_shapes, part_views

SPLITS = ("parts", "groups", "none")


@dataclass(eq=False, slots=True)
class Matrix:
    """One matrix of a parameter: the parameter itself, or one of a stack.

    Attributes:
        parameter: The parameter, sharded or not.
        param_group: Its options.
        offset: First element within the parameter, or within this rank's model part of it.
        shape: Rows and columns.
        fused: Logical matrices inside it; None means that it is a single one.
        fused_dim: The dimension, 0 or 1, that joins them.
        part: This rank's part of the matrix if a model axis cuts it, else None.
    """

    parameter: torch.Tensor
    param_group: dict[str, Any]
    offset: int
    shape: tuple[int, int]
    fused: FusedParts | None
    fused_dim: int
    part: ModelPart | None

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    @property
    def by_group(self) -> bool:
        """Return whether the pieces of a fused part in each group are matrices of their own."""
        return self.param_group["split_fused"] == "groups"

    def cut(self) -> CutMatrix:
        """Return the ranges of the matrix on each rank, and the cost for its owner.

        If a model axis cuts the matrix, only this rank's range is known here.
        """
        shapes = part_shapes(self.shape, self.fused, self.fused_dim, by_group=self.by_group)
        # Products over the shorter side take nearly all of the time; the cost is that of one.
        cost = float(sum(r * c * min(r, c) for r, c in shapes))
        if not isinstance(self.parameter, UnevenDTensor):
            return CutMatrix(self.numel, cost, ((0, self.numel),))
        layout = self.parameter.uneven_layout
        shards = [layout.shard] if self.part is not None else self.parameter.shards_by_rank()
        # The layout gives the ranges of all shards of this rank's part, without communication.
        ranges = map(layout.element_range, shards)
        cuts = ((self._within(start), self._within(stop)) for start, stop in ranges)
        return CutMatrix(self.numel, cost, tuple(cuts))

    def _within(self, element: int) -> int:
        numel = self.numel if self.part is None else self.part.local_numel
        return self._first + min(max(element - self.offset, 0), numel)

    @property
    def _first(self) -> int:
        """Return where this rank's part starts in a message."""
        if self.part is None:
            return 0
        return sum(self.part.of_rank(rank).local_numel for rank in range(self.part.rank))

    def local_range(self, start: int, stop: int) -> slice:
        """Return the place of elements [start, stop) of the matrix in this rank's flat rows.

        ``start`` and ``stop`` count in the order of a message.
        """
        first = self._first
        # A rank's rows may begin in an earlier matrix of the stack, or inside this one.
        if isinstance(self.parameter, UnevenDTensor):
            first += self.parameter.uneven_layout.element_range()[0]
        return slice(self.offset + start - first, self.offset + stop - first)

    def orthogonalize_(self, message: torch.Tensor) -> None:
        """Replace a whole matrix, in the order of a message, by its update."""
        if self.part is None:
            self.orthogonalize_parts_(message.view(self.shape))
            return
        parts = [self.part.of_rank(rank) for rank in range(self.part.num_ranks)]
        pieces = message.split([part.local_numel for part in parts])
        by_rank = [piece.view(p.local_shape) for piece, p in zip(pieces, parts, strict=True)]
        whole = self.part.join(by_rank)
        self.orthogonalize_parts_(whole)
        for part, piece in zip(parts, by_rank, strict=True):
            piece.copy_(part.cut(whole))

    def orthogonalize_parts_(self, whole: torch.Tensor) -> None:
        """Replace each logical matrix by its update, scaled for the rate of the whole matrix."""
        options, dim = self.param_group, self.fused_dim
        for part in part_views(whole, self.fused, dim, by_group=self.by_group):
            flat = part.flatten(dim, dim + 1)
            update = orthogonalize(
                flat, options["ns_coefficients"], options["ns_steps"], options["eps"]
            )
            # The caller applies the rate for the whole shape; a part's shape has another ratio.
            if self.fused is not None:
                rule = options["adjust_lr_fn"]
                update = update * (lr_ratio(rule, *flat.shape) / lr_ratio(rule, *self.shape))
            part.copy_(update.unflatten(dim, (part.size(dim), -1)))


@contextlib.contextmanager
def flat_elements(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in row-major order, whatever its strides, to be changed in place.

    If the tensor is not contiguous, this is a copy that is written back at the end.
    """
    flat = tensor.reshape(-1)
    yield flat
    # reshape() has made a copy: write it back.
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def is_for_muon(parameter: torch.Tensor, group: dict[str, Any]) -> bool:
    """Return whether Muon steps a parameter of a group; otherwise AdamW does."""
    return group["use_muon"] and parameter.ndim > 1


def matrices_of(parameter: torch.Tensor, group: dict[str, Any]) -> list[Matrix]:
    """Return the matrices of a parameter that Muon steps, in order."""
    fused = annotation_of(parameter).fused if group["split_fused"] != "none" else None
    dim = 0 if fused is None else fused.dim - (parameter.ndim - 2)
    # Parts along the stack's dimension consist of whole matrices.
    if dim < 0:
        fused, dim = None, 0
    shape, local = (parameter.shape[-2], parameter.shape[-1]), tuple(parameter.shape)
    part = None
    if isinstance(parameter, UnevenDTensor):
        part, local = parameter.uneven_layout.part, parameter.uneven_layout.part.local_shape
        if _is_within_a_rank(part):
            part = None
        elif part.dim is not None and parameter.ndim == 3:
            part = replace(part, shape=shape, dim=part.dim - 1)
    # An empty matrix needs no step.
    num_matrices = (local[0] if parameter.ndim == 3 else 1) if math.prod(shape) else 0
    numel = local[-2] * local[-1]
    offsets = [index * numel for index in range(num_matrices)]
    return [Matrix(parameter, group, o, shape, fused, dim, part) for o in offsets]


def _is_within_a_rank(part: ModelPart) -> bool:
    """Return whether no matrix is on several ranks of the model axis."""
    return part.is_whole or (part.dim == 0 and len(part.shape) == 3)


def ranks_that_divide(parameter: torch.Tensor) -> dist.ProcessGroup | None:
    """Return the ranks that divide each matrix of a parameter; None if each rank has all of it.

    Collective over all ranks of the job on first use with several axes.
    """
    if not isinstance(parameter, UnevenDTensor):
        return None
    mesh, layout = parameter.device_mesh, parameter.uneven_layout
    axes = shard_axes(parameter.placements, layout.num_model_axes)
    if not _is_within_a_rank(layout.part):
        axes.append(mesh.ndim - 1)
    return group_of_axes(mesh, axes) if axes else None
