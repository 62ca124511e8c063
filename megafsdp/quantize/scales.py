"""Scales of tiles: the factors that encode and decode values, from the maxima of tiles.

A scale is a pure function of maxima, so every rank that has the maxima has the scales. Each family
of scales is a class. It gives the factors by which values are multiplied before they are encoded,
the table of bytes that is kept, and the factors that decode. The order of operations is part of the
format, as another order gives other bits. A non-finite maximum makes all of these NaN.

Maxima are int32 bit patterns of fp32 values, ``(num_matrices, num_tiles)``: the MAX of patterns is
exact in any order, and NaN is the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from megafsdp.quantize.elements import (
    E4M3,
    NAN_CODE,
    Element,
    decode_e8m0,
    encode_e8m0,
)

_FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT_BITS = 0x7F80_0000
# The largest of e4m3 times the largest of e2m1.
_TWO_LEVEL_MAX = E4M3.max_value * 6.0


@dataclass(frozen=True, slots=True)
class Fp32Scaling:
    """One fp32 factor per tile: the largest value of the element over the tile's maximum.

    The table has the factors' reciprocals in fp32. A tile of zeros has the factor 1.

    Attributes:
        is_power_of_two: Round the factor down to a power of two.
    """

    is_power_of_two: bool

    @property
    def name(self) -> str:
        """Return the name of the family in compiled kernels."""
        return "power_of_two" if self.is_power_of_two else "fp32"

    def encode_factors(self, maxima: torch.Tensor, element: Element) -> torch.Tensor:
        """Return fp32 factors in the shape of the maxima."""
        values = maxima.view(torch.float32)
        # A tensor, as torch computes number / tensor by a reciprocal, which rounds twice.
        factors = torch.div(torch.full_like(values, element.max_value), values)
        factors = factors.clamp(max=_FLT_MAX)
        if self.is_power_of_two:
            factors = (factors.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        factors = torch.where(values == 0, 1.0, factors)
        return torch.where(values.isfinite(), factors, torch.nan)

    def table_nbytes(self, num_matrices: int, num_tiles: int) -> int:
        """Return the bytes of the scales of matrices with ``num_tiles`` tiles each."""
        return 4 * num_matrices * num_tiles

    def fill(self, maxima: torch.Tensor, element: Element, table: torch.Tensor) -> None:
        """Write the decoding factors of the tiles."""
        factors = self.encode_factors(maxima, element)
        scales = torch.div(torch.ones_like(factors), factors)
        self.tile_scales(table, maxima.shape[0]).copy_(scales)

    def tile_scales(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return the scales in a table, ``(num_matrices, num_tiles)`` fp32; aliases it."""
        return table.view(torch.float32).view(num_matrices, -1)

    def decode_factors(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return fp32 factors, ``(num_matrices, num_tiles)``."""
        return self.tile_scales(table, num_matrices)

    def of_matrix(self, table: torch.Tensor, num_matrices: int, index: int) -> torch.Tensor:
        """Return the bytes of one matrix, in the form of its own table; aliases."""
        return self.tile_scales(table, num_matrices)[index].view(torch.uint8)


@dataclass(frozen=True, slots=True)
class E8M0Scaling:
    """One power of two per tile, rounded up, stored as its exponent in a byte: MX formats.

    Factors are in [2**-127, 2**127]; a tile of zeros has 2**127.
    """

    @property
    def name(self) -> str:
        """Return the name of the family in compiled kernels."""
        return "e8m0"

    def encode_factors(self, maxima: torch.Tensor, element: Element) -> torch.Tensor:
        """Return fp32 factors in the shape of the maxima."""
        codes = self._codes(maxima, element)
        return torch.where(codes == 255, torch.nan, decode_e8m0(254 - codes))

    def table_nbytes(self, num_matrices: int, num_tiles: int) -> int:
        """Return the bytes of the scales of matrices with ``num_tiles`` tiles each."""
        return num_matrices * num_tiles

    def fill(self, maxima: torch.Tensor, element: Element, table: torch.Tensor) -> None:
        """Write the exponents of the tiles."""
        self.tile_scales(table, maxima.shape[0]).copy_(self._codes(maxima, element))

    def tile_scales(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return the exponents in a table, ``(num_matrices, num_tiles)`` uint8; aliases it."""
        return table.view(num_matrices, -1)

    def decode_factors(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return fp32 factors, ``(num_matrices, num_tiles)``."""
        return decode_e8m0(self.tile_scales(table, num_matrices))

    def of_matrix(self, table: torch.Tensor, num_matrices: int, index: int) -> torch.Tensor:
        """Return the bytes of one matrix, in the form of its own table; aliases."""
        return self.tile_scales(table, num_matrices)[index]

    def _codes(self, maxima: torch.Tensor, element: Element) -> torch.Tensor:
        # The scalar is rounded to fp32, then the product; its exponent is then rounded up.
        return encode_e8m0(maxima.view(torch.float32) * (1 / element.max_value))


@dataclass(frozen=True, slots=True)
class TwoLevelScaling:
    """One e4m3 scale per tile, in units of one fp32 maximum per matrix: NVFP4.

    The table has the matrices' maxima in fp32, then the tiles' scales, a byte each. A matrix whose
    maximum is beyond the largest fp32 over 448 decodes to infinities. A matrix whose maximum is
    below 7.9e-36 decodes to values that are too small, since factors are at most the largest fp32:
    at 1e-37 to 1 % of the true ones.
    """

    @property
    def name(self) -> str:
        """Return the name of the family in compiled kernels."""
        return "two_level"

    def encode_factors(self, maxima: torch.Tensor, element: Element) -> torch.Tensor:
        """Return fp32 factors in the shape of the maxima."""
        of_matrix = self._of_matrices(maxima)
        scales = E4M3.decode(self._codes(maxima, element))
        one = torch.ones_like(of_matrix)
        product = scales * torch.div(one, of_matrix)
        factors = torch.div(torch.ones_like(product), product)
        return factors.clamp(max=_FLT_MAX)

    def table_nbytes(self, num_matrices: int, num_tiles: int) -> int:
        """Return the bytes of the scales of matrices with ``num_tiles`` tiles each."""
        return num_matrices * (4 + num_tiles)

    def fill(self, maxima: torch.Tensor, element: Element, table: torch.Tensor) -> None:
        """Write the maxima of the matrices and the scales of the tiles."""
        num_matrices = maxima.shape[0]
        largest = _largest(maxima)
        finite = torch.where(largest.isfinite(), largest, torch.nan)
        self.matrix_maxima(table, num_matrices).copy_(finite)
        self.tile_scales(table, num_matrices).copy_(self._codes(maxima, element))

    def matrix_maxima(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return the maxima in a table, ``(num_matrices, 1)`` fp32; aliases it."""
        return table[: 4 * num_matrices].view(torch.float32).view(num_matrices, 1)

    def tile_scales(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return the scales in a table, ``(num_matrices, num_tiles)`` uint8; aliases it."""
        return table[4 * num_matrices :].view(num_matrices, -1)

    def decode_factors(self, table: torch.Tensor, num_matrices: int) -> torch.Tensor:
        """Return fp32 factors, ``(num_matrices, num_tiles)``."""
        scales = E4M3.decode(self.tile_scales(table, num_matrices))
        return scales * self.matrix_maxima(table, num_matrices) * (1 / _TWO_LEVEL_MAX)

    def of_matrix(self, table: torch.Tensor, num_matrices: int, index: int) -> torch.Tensor:
        """Return the bytes of one matrix, in the form of its own table; allocates."""
        maximum = self.matrix_maxima(table, num_matrices)[index].view(torch.uint8)
        return torch.cat((maximum, self.tile_scales(table, num_matrices)[index]))

    def _of_matrices(self, maxima: torch.Tensor) -> torch.Tensor:
        """Return the factor of each matrix, ``(num_matrices, 1)`` fp32."""
        largest = _largest(maxima)
        factors = torch.div(torch.full_like(largest, _TWO_LEVEL_MAX), largest).clamp(max=_FLT_MAX)
        factors = torch.where(largest == 0, 1.0, factors)
        return torch.where(largest.isfinite(), factors, torch.nan)

    def _codes(self, maxima: torch.Tensor, element: Element) -> torch.Tensor:
        of_matrix = self._of_matrices(maxima)
        scales = maxima.view(torch.float32) * (of_matrix * (1 / element.max_value))
        codes = E4M3.encode(scales.clamp(max=_FLT_MAX))
        # For all tiles, as one may have a finite maximum although the matrix's is not.
        return torch.where(of_matrix.isnan(), NAN_CODE, codes)


Scaling = Fp32Scaling | E8M0Scaling | TwoLevelScaling


def _largest(maxima: torch.Tensor) -> torch.Tensor:
    """Return the largest maximum of each matrix, ``(num_matrices, 1)`` fp32."""
    return maxima.amax(dim=1, keepdim=True).view(torch.float32)


def to_128x4_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in the order that GEMMs on NVIDIA's tensor cores read; allocates.

    Scales are kept, gathered and saved in rows; this order is made for a GEMM call. Scale
    ``(row, col)`` goes to block ``(row // 128, col // 4)``, in row-major order of blocks, and
    within the block to ``(row % 32) * 16 + (row % 128 // 32) * 4 + col % 4``. Zeros fill the blocks
    at the edges.

    Args:
        scales: ``(rows, cols)`` uint8.

    Returns:
        1-D uint8, 512 per block.
    """
    rows, cols = scales.shape
    padded = functional.pad(scales, (0, -cols % 4, 0, -rows % 128))
    blocks = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return blocks.permute(0, 3, 2, 1, 4).flatten()
