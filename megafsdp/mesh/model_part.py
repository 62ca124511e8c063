"""The part of a tensor on one rank of a model axis, in coordinates of the whole tensor.

Tensor parallelism gives a rank some columns or rows of a weight, expert parallelism some matrices
of a stack. Everything that leaves a rank (checkpoints, full tensors, norms) uses coordinates of the
whole tensor, which do not depend on the degree. This file is only arithmetic. How a part's rows lie
over data-parallel shards is in buffer/dtensor/uneven_layout.py, which meshes a part is on in
dtensor.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megafsdp.errors import expected
from megafsdp.mesh.fused_parts import FusedParts


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The part of a tensor on one rank of a model axis.

    Make it with :func:`part_of`. Example: [gate; up] of 2 x 6 rows on 2 tp ranks, each of the two
    cut separately; ``part_of((12, 4), 0, 2, rank, FusedParts(("gate", "up"), (6, 6)))``::

        rows of the whole     0 1 2 | 3 4 5 | 6 7 8 | 9 10 11
                              gate  | gate  | up    | up
        tp rank               0     | 1     | 0     | 1

        rank 1: pieces ((3, 3), (9, 3)), local shape (6, 4)

    Attributes:
        shape: Shape of the whole tensor.
        dim: Dimension that the axis cuts; None if every rank of the axis has the whole tensor.
        num_ranks: Size of the model axis.
        rank: This rank's coordinate on it.
        fused_sizes: Sizes along ``dim`` that are cut separately, as ``torch.chunk`` cuts: one for a
            single tensor, otherwise one for each fused tensor; empty if nothing is cut.
    """

    shape: tuple[int, ...]
    dim: int | None
    num_ranks: int
    rank: int
    fused_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that the fields belong together."""
        assert 0 <= self.rank < self.num_ranks, "the coordinate lies on the axis"
        extent = 0 if self.dim is None else self.shape[self.dim]
        assert sum(self.fused_sizes) == extent, "the fused sizes fill the dimension"

    @property
    def is_whole(self) -> bool:
        """Return whether this rank has all of the tensor."""
        return self.dim is None or self.num_ranks == 1

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Return (first index, length) along ``dim`` of each piece of the rank, in local order."""
        if self.dim is None:
            return ()
        if self.num_ranks == 1:
            return ((0, self.shape[self.dim]),)
        found, base = [], 0
        for size in self.fused_sizes:
            chunk = -(-size // self.num_ranks)
            # If the ranks do not divide the size, the last ranks have less or nothing.
            first = min(self.rank * chunk, size)
            if length := min(chunk, size - first):
                found.append((base + first, length))
            base += size
        return tuple(found)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of the rank's part."""
        if self.dim is None:
            return self.shape
        extent = sum(length for _, length in self.pieces)
        return (*self.shape[: self.dim], extent, *self.shape[self.dim + 1 :])

    @property
    def local_numel(self) -> int:
        """Return the number of elements that the rank has."""
        return math.prod(self.local_shape)

    def of_rank(self, rank: int) -> ModelPart:
        """Return the part of another rank of the axis."""
        return replace(self, rank=rank)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a whole tensor; a view if it is one piece."""
        if self.dim is None:
            return whole
        views = [whole.narrow(self.dim, *piece) for piece in self.pieces]
        if len(views) == 1:
            return views[0]
        return torch.cat(views, self.dim) if views else whole.narrow(self.dim, 0, 0)

    def join(self, locals_by_rank: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor, joined from the parts of all ranks in their order.

        If the rank has the whole tensor, this is the given tensor itself; otherwise it allocates.
        """
        if self.dim is None or self.num_ranks == 1:
            return locals_by_rank[self.rank]
        whole = locals_by_rank[0].new_empty(self.shape)
        for rank, local in enumerate(locals_by_rank):
            start = 0
            for first, length in self.of_rank(rank).pieces:
                whole.narrow(self.dim, first, length).copy_(local.narrow(self.dim, start, length))
                start += length
        return whole


def part_of(
    shape: tuple[int, ...],
    dim: int | None,
    num_ranks: int,
    rank: int,
    fused: FusedParts | None = None,
) -> ModelPart:
    """Return the part of a tensor on one rank of a model axis.

    Args:
        shape: Shape of the whole tensor.
        dim: Dimension that the axis cuts; None if every rank of the axis has the whole tensor.
        num_ranks: Size of the axis.
        rank: Coordinate on the axis.
        fused: Logical tensors in the tensor. If they lie along ``dim`` in one group, each of them
            is cut separately; if in several groups, each rank gets the same number of whole groups.
            Parts along another dimension change nothing.

    Raises:
        ValueError: The ranks do not divide the groups.
        NotImplementedError: Fused tensors are cut separately along the last of several dims.
    """
    if dim is None:
        return ModelPart(shape, None, num_ranks, rank, ())
    if fused is None or fused.dim != dim or len(fused.names) == 1 or num_ranks == 1:
        return ModelPart(shape, dim, num_ranks, rank, (shape[dim],))
    where = f"the fused parts {fused.names} of a tensor of shape {shape}"
    if fused.num_groups > 1:
        if fused.num_groups % num_ranks:
            raise ValueError(
                expected(
                    f"a number of groups that {num_ranks} ranks divide",
                    f"{fused.num_groups} groups",
                    where=where,
                    hint="Choose a tensor-parallel degree that divides the query groups",
                )
            )
        # The ranks divide the groups, so chunks of the whole dimension end between two groups.
        return ModelPart(shape, dim, num_ranks, rank, (shape[dim],))
    if dim == len(shape) - 1 > 0:
        # A row would have several pieces, so that no range of rows is one region of the whole.
        raise NotImplementedError(
            expected(
                "fused parts along dim 0, or between the matrices and the columns of a stack",
                f"parts along dim {dim}, which a model axis of {num_ranks} ranks cuts",
                where=where,
                hint="Lay the parts along another dim, or cut another one",
            )
        )
    return ModelPart(shape, dim, num_ranks, rank, fused.sizes)


def whole_part(shape: tuple[int, ...]) -> ModelPart:
    """Return the part of a tensor that no model axis cuts: all of it."""
    return ModelPart(shape, None, 1, 0, ())
