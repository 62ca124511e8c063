"""Coverage: how often regions meet each element of a tensor, without an array of its elements.

The bounds of the regions cut the tensor into a grid of cells, each of which lies wholly inside or
wholly outside of every region; counting is done by cell. What a gap or an overlap means is the
caller's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megafsdp.checkpoint.format.regions import Region


def odd_cells(shape: tuple[int, ...], regions: Sequence[Region]) -> list[tuple[Region, int]]:
    """List the cells that regions do not meet exactly once, with how often they do.

    Example: regions [0:2] and [1:3] of a tensor of 4 elements have the cells [0:1], [1:2], [2:3]
    and [3:4]; ``[1:2]`` is met twice and ``[3:4]`` never.

    Args:
        shape: The tensor's.
        regions: Parts of it; the part of a region that lies outside of the tensor is a cell too.
    """
    covered = [region for region in regions if region.numel]
    bounds = [
        sorted(
            {0, extent}
            | {region.offsets[dim] for region in covered}
            | {region.offsets[dim] + region.sizes[dim] for region in covered}
        )
        for dim, extent in enumerate(shape)
    ]
    index = [{bound: i for i, bound in enumerate(of_dim)} for of_dim in bounds]
    counts = np.zeros([len(of_dim) - 1 for of_dim in bounds], dtype=np.int32)
    for region in covered:
        cells = tuple(
            slice(of_dim[start], of_dim[start + size])
            for of_dim, start, size in zip(index, region.offsets, region.sizes, strict=True)
        )
        counts[cells] += 1
    wanted = np.zeros_like(counts)
    wanted[tuple(slice(of_dim[0], of_dim[n]) for of_dim, n in zip(index, shape, strict=True))] = 1
    odd = []
    for cell in zip(*np.nonzero(counts != wanted), strict=True) if shape else _odd_scalar(counts):
        starts = tuple(of_dim[i] for of_dim, i in zip(bounds, cell, strict=True))
        ends = tuple(of_dim[i + 1] for of_dim, i in zip(bounds, cell, strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        odd.append((Region(starts, sizes), int(counts[cell])))
    return odd


def is_filled(region: Region, pieces: Sequence[Region]) -> bool:
    """Return whether pieces inside a region meet each of its elements exactly once."""
    if len(pieces) == 1:
        return pieces[0] == region
    offsets = region.offsets
    moved = [
        Region(tuple(at - by for at, by in zip(piece.offsets, offsets, strict=True)), piece.sizes)
        for piece in pieces
    ]
    return not odd_cells(region.sizes, moved)


def _odd_scalar(counts: np.ndarray) -> list[tuple[()]]:
    """Return the one cell of a 0-d tensor if it is not met once; numpy has no indices for it."""
    return [] if int(counts) == 1 else [()]
