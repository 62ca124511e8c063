"""Tiles: one grid over a whole matrix, and the rows of it that a rank has.

A tile has one scale. Grids are laid over whole matrices, whatever rows a rank has. A rank computes
the maxima of the parts of tiles within its rows, and the maximum over ranks is that of the tile. So
a cut between ranks may go through a tile.

            cols 0..31  32..63  64..95               tile (32, 32), rows 80
    rank 0: rows  0..49    maxima of tile rows 0, 1
    rank 1: rows 50..79    maxima of tile rows    1, 2 (rows 64..79: a short one)

The functions here are plain torch, and the reference for the compiled kernels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from megafsdp.errors import expected
from megafsdp.quantize.elements import Element, magnitude_bits, pack, unpack
from megafsdp.quantize.scales import Scaling

SOURCE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive rows of a matrix, or of a stack of matrices that lie one below the other.

    Attributes:
        values: ``(num_rows * cols,)`` fp32, bf16 or fp16, contiguous; may be empty.
        shape: ``(rows, cols)`` of the whole matrix, or ``(matrices, rows, cols)`` of the stack.
        first_row: Index of the first row, counted over the stack.
    """

    values: torch.Tensor
    shape: tuple[int, ...]
    first_row: int

    def __post_init__(self) -> None:
        """Check the rows.

        Raises:
            ValueError: Values have another dtype, are not whole rows or not contiguous, or rows lie
                outside the shape.
        """
        values, cols = self.values, self.shape[-1]
        total_rows = math.prod(self.shape[:-1])
        if values.dtype not in SOURCE_DTYPES:
            what, got = "values of fp32, bf16 or fp16", f"{values.dtype}"
        elif values.ndim != 1 or not values.is_contiguous():
            what, got = "1-D contiguous values", f"shape {tuple(values.shape)}"
        elif values.numel() % max(cols, 1) != 0:
            what, got = f"whole rows of {cols} values", f"{values.numel()} values"
        elif not 0 <= self.first_row <= total_rows - self.num_rows:
            end = self.first_row + self.num_rows
            what, got = f"first_row within {total_rows} rows", f"rows {self.first_row} to {end}"
        else:
            return
        raise ValueError(
            expected(
                what,
                got,
                where=f"a fragment of a tensor of shape {self.shape}",
                hint="Give the flat rows that this rank has, and where they begin",
            )
        )

    @property
    def num_rows(self) -> int:
        """Return the number of rows."""
        return self.values.numel() // max(self.shape[-1], 1)


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles over a stack of matrices; no tile spans two matrices.

    Tiles are numbered by matrix, row of tiles and column of tiles.

    Attributes:
        num_matrices: 1, or the number of matrices in the stack.
        rows: Rows of one matrix.
        cols: Columns of one matrix.
        tile_rows: Rows of a tile; the last one may be cut short.
        tile_cols: Columns of a tile, likewise.
    """

    num_matrices: int
    rows: int
    cols: int
    tile_rows: int
    tile_cols: int

    @classmethod
    def over(cls, shape: tuple[int, ...], tile: tuple[int, int] | None) -> TileGrid:
        """Lay tiles over a 2-D or 3-D shape; if ``tile`` is None, one tile per matrix."""
        rows, cols = shape[-2:]
        tile_rows, tile_cols = tile or (max(rows, 1), max(cols, 1))
        return cls(math.prod(shape[:-2]), rows, cols, tile_rows, tile_cols)

    @property
    def tiles_down(self) -> int:
        """Return the number of rows of tiles of one matrix."""
        return -(-self.rows // self.tile_rows)

    @property
    def tiles_across(self) -> int:
        """Return the number of columns of tiles."""
        return -(-self.cols // self.tile_cols)

    @property
    def tiles_per_matrix(self) -> int:
        """Return the number of tiles of one matrix."""
        return self.tiles_down * self.tiles_across

    @property
    def num_tiles(self) -> int:
        """Return the number of tiles of the stack."""
        return self.num_matrices * self.tiles_per_matrix

    def tile_row_of(self, first_row: int, num_rows: int, device: torch.device) -> torch.Tensor:
        """Return for each row its row of tiles, counted over the stack; int64."""
        row = torch.arange(first_row, first_row + num_rows, device=device)
        matrix = row // self.rows
        return matrix * self.tiles_down + (row - matrix * self.rows) // self.tile_rows

    def spread(self, of_tiles: torch.Tensor, first_row: int, num_rows: int) -> torch.Tensor:
        """Return the tiles' values expanded to each element of some rows, ``(num_rows, cols)``."""
        by_row = of_tiles.reshape(-1, self.tiles_across)
        by_row = by_row[self.tile_row_of(first_row, num_rows, of_tiles.device)]
        return by_row.repeat_interleave(self.tile_cols, dim=1)[:, : self.cols]


@dataclass(frozen=True)
class TileCoding:
    """How values become codes and a table of scales, and values again.

    Attributes:
        element: The code of one value.
        scaling: What a scale is.
        tile: ``(rows, cols)`` that share a scale; None for a whole matrix.
    """

    element: Element
    scaling: Scaling
    tile: tuple[int, int] | None

    @functools.cached_property
    def of_kernels(self) -> tuple[str, str, int, int]:
        """Return the coding as compiled kernels take it; a whole matrix has the tile (0, 0)."""
        return (self.element.name, self.scaling.name, *(self.tile or (0, 0)))

    def grid(self, shape: tuple[int, ...]) -> TileGrid:
        """Return the tiles of a tensor."""
        return TileGrid.over(shape, self.tile)

    def table_nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a table that hold scales; the rest is zero padding."""
        grid = self.grid(shape)
        return self.scaling.table_nbytes(grid.num_matrices, grid.tiles_per_matrix)


@torch.no_grad()
def add_maxima_in_torch(
    coding: TileCoding,
    fragment: Fragment,
    maxima: torch.Tensor,
    through: torch.dtype | None,
) -> None:
    """Raise the maxima of tiles to those of a fragment's rows.

    Args:
        coding: Has the tiles.
        fragment: The rows.
        maxima: ``(num_tiles,)`` int32 bits of fp32 magnitudes, changed in place.
        through: Round the values to this dtype first.
    """
    if fragment.values.numel() == 0:
        return
    grid = coding.grid(fragment.shape)
    bits = magnitude_bits(_read(fragment, through)).view(fragment.num_rows, grid.cols)
    width = grid.tiles_across * grid.tile_cols
    padded = functional.pad(bits, (0, width - grid.cols))
    by_row = padded.view(fragment.num_rows, grid.tiles_across, grid.tile_cols).amax(dim=2)
    tile_row = grid.tile_row_of(fragment.first_row, fragment.num_rows, bits.device)
    index = tile_row[:, None].expand_as(by_row)
    maxima.view(-1, grid.tiles_across).scatter_reduce_(0, index, by_row, "amax")


@torch.no_grad()
def fill_table_in_torch(
    coding: TileCoding, shape: tuple[int, ...], maxima: torch.Tensor, table: torch.Tensor
) -> None:
    """Write the scales of all tiles of a tensor; the rest of the table becomes zero."""
    nbytes = coding.table_nbytes(shape)
    by_matrix = maxima.view(coding.grid(shape).num_matrices, -1)
    coding.scaling.fill(by_matrix, coding.element, table[:nbytes])
    table[nbytes:].zero_()


@torch.no_grad()
def encode_in_torch(
    coding: TileCoding,
    fragment: Fragment,
    maxima: torch.Tensor,
    codes: torch.Tensor,
    through: torch.dtype | None,
    noise: torch.Tensor | None = None,
) -> None:
    """Write the codes of a fragment's rows.

    Args:
        coding: What codes and scales are.
        fragment: The rows.
        maxima: ``(num_tiles,)`` int32 of the whole tensor; values above them are clamped.
        codes: 1-D uint8, one byte per value or pair of values.
        through: Round the values to this dtype first.
        noise: fp32 in ``[0, 1)``, one per value, for stochastic rounding; None rounds to nearest.
    """
    if fragment.values.numel() == 0:
        return
    grid, element = coding.grid(fragment.shape), coding.element
    by_matrix = maxima.view(grid.num_matrices, -1)
    factors = coding.scaling.encode_factors(by_matrix, element)
    values = _read(fragment, through)
    scaled = values * grid.spread(factors, fragment.first_row, fragment.num_rows).flatten()
    # An infinite value under a finite (e.g. delayed) maximum must not become the largest code.
    scaled = torch.where(values.isfinite(), scaled, torch.nan)
    if noise is None:
        found = element.encode(scaled)
    else:
        found = element.encode_stochastically(scaled, noise.flatten())
    codes.copy_(pack(found) if element.codes_per_byte == 2 else found)


@torch.no_grad()
def decode_in_torch(
    coding: TileCoding,
    codes: torch.Tensor,
    table: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor,
) -> None:
    """Write the values of all codes of a tensor, rounded once from fp32 to the dtype of ``out``."""
    grid, element = coding.grid(shape), coding.element
    if out.numel() == 0:
        return
    scales = table[: coding.table_nbytes(shape)]
    factors = coding.scaling.decode_factors(scales, grid.num_matrices)
    num_rows = grid.num_matrices * grid.rows
    plain = unpack(codes) if element.codes_per_byte == 2 else codes
    values = element.decode(plain).view(num_rows, grid.cols)
    out.view(num_rows, grid.cols).copy_(values * grid.spread(factors, 0, num_rows))


def _read(fragment: Fragment, through: torch.dtype | None) -> torch.Tensor:
    """Return the values in fp32, rounded to another dtype first if asked."""
    values = fragment.values
    return (values if through is None else values.to(through)).float()
