"""The weight formats: an element code and a tile each.

A format is a frozen value without tensors, groups or state, so it can be compared, kept on tensors
and read from a checkpoint. Its scales are a pure function of the maxima of tiles: partial maxima of
each rank's rows, their maximum over ranks, then tables of scales on all ranks and codes of each
rank's rows. Tiles are square, so the transpose of codes and scales is the quantized transpose, and
one set of codes serves forward and backward.

| format | element | tile | scale | table |
|---|---|---|---|---|
| fp8_current, fp8_delayed | e4m3 | the matrix | fp32 | 4 bytes a matrix |
| fp8_block | e4m3 | 128 x 128 | a power of two in fp32 | 4 bytes a tile |
| mxfp8 | e4m3 | 32 x 32 | a power of two, its exponent, rounded up | 1 byte a tile |
| nvfp4 | e2m1 | 16 x 16 | e4m3, in units of an fp32 a matrix | 1 byte a tile, 4 a matrix |
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megafsdp.device.torch_private import is_tracing
from megafsdp.quantize import kernels
from megafsdp.quantize.elements import E2M1, E4M3, Element
from megafsdp.quantize.scales import E8M0Scaling, Fp32Scaling, Scaling, TwoLevelScaling
from megafsdp.quantize.tiles import Fragment, TileCoding

_TABLE_ALIGNMENT_NBYTES = 16


@dataclass(frozen=True, slots=True)
class ScalesOfRows:
    """Parts of a table; they alias it.

    Attributes:
        own: Scales of these rows alone, ``(rows of tiles, columns of tiles)`` or
            ``(matrices, ...)`` each.
        shared: Scales that the other rows of the tensor depend on too.
    """

    def cut(self, dim: int, first: int, end: int) -> ScalesOfRows:
        """Return those of fewer rows or columns of tiles, or matrices; they alias the table."""
        own = [each.narrow(dim, first, end - first) for each in self.own]
        return ScalesOfRows(own, self.shared)

    own: list[torch.Tensor]
    shared: list[torch.Tensor]

    def copy_(self, source: ScalesOfRows) -> None:
        """Copy the bytes of as many rows of another table of the format; in place."""
        pairs = zip((*self.own, *self.shared), (*source.own, *source.shared), strict=True)
        for target, values in pairs:
            target.copy_(values)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is quantized: local arithmetic, no collective.

    Methods that take sequences handle all tensors of a batch in one call; they may be of any
    shapes.

    Attributes:
        name: ``"fp8_current"``, ``"fp8_delayed"``, ``"fp8_block"``, ``"mxfp8"`` or ``"nvfp4"``.
        element: The code of one value.
        scaling: What a scale is.
        tile: ``(rows, cols)`` that share a scale; None for a whole matrix.
        multiple: What rows and columns must be multiples of; 1 for any shape.
    """

    name: str
    element: Element
    scaling: Scaling
    tile: tuple[int, int] | None
    multiple: int

    @property
    def codes_per_byte(self) -> int:
        """Return 1; 2 for 4-bit codes, of which the even column is in the low half."""
        return self.element.codes_per_byte

    @property
    def is_per_tensor(self) -> bool:
        """Return whether a whole matrix has one scale, also where several ranks have parts."""
        return self.tile is None

    @functools.cached_property
    def coding(self) -> TileCoding:
        """Return element, scaling and tile."""
        return TileCoding(self.element, self.scaling, self.tile)

    def reason_against(self, shape: Sequence[int]) -> str | None:
        """Return why a tensor of this shape cannot be quantized; None if it can."""
        if len(shape) not in (2, 3):
            return f"{self.name} takes matrices and stacks of them"
        if 0 in shape:
            return f"{self.name} takes no empty tensors"
        if shape[-1] % self.multiple or shape[-2] % self.multiple:
            return f"{self.name} takes rows and columns that are multiples of {self.multiple}"
        return None

    def num_maxima(self, shape: Sequence[int]) -> int:
        """Return the tiles of a tensor: by matrix, row of tiles and column of tiles."""
        return self.coding.grid(tuple(shape)).num_tiles

    def table_nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a tensor's table of scales, a multiple of 16."""
        nbytes = self.coding.table_nbytes(tuple(shape))
        return -(-nbytes // _TABLE_ALIGNMENT_NBYTES) * _TABLE_ALIGNMENT_NBYTES

    def add_maxima(
        self,
        fragments: Sequence[Fragment],
        maxima: Sequence[torch.Tensor],
        *,
        through: torch.dtype | None = None,
    ) -> None:
        """Raise the maxima of tiles to those of the values of fragments.

        Args:
            fragments: The rows that this rank has.
            maxima: ``(num_maxima,)`` int32 for each, bits of fp32 magnitudes; zero at first,
                changed in place. Bits are ordered as magnitudes are, and a NaN is above all.
            through: Round the values to this dtype first; None: as they are.
        """
        kernels.add_maxima(self.coding, fragments, maxima, through)

    def fill_tables(
        self,
        shapes: Sequence[tuple[int, ...]],
        maxima: Sequence[torch.Tensor],
        tables: Sequence[torch.Tensor],
    ) -> None:
        """Write the tables of scales of whole tensors, from the maxima over all ranks.

        Args:
            shapes: Of the tensors.
            maxima: ``(num_maxima,)`` int32 for each.
            tables: ``(table_nbytes,)`` uint8 for each, written in place; aligned to 4 bytes.
        """
        kernels.fill_tables(self.coding, shapes, maxima, tables)
        _count_writes(tables)

    def encode(
        self,
        fragments: Sequence[Fragment],
        maxima: Sequence[torch.Tensor],
        codes: Sequence[torch.Tensor],
        *,
        through: torch.dtype | None = None,
    ) -> None:
        """Write the codes of fragments.

        Args:
            fragments: The rows that this rank has.
            maxima: ``(num_maxima,)`` int32 for each, over all ranks. Values above a tile's maximum
                are clamped, and where a maximum is not finite all values of the tile become NaN.
            codes: 1-D uint8 for each, ``codes_per_byte`` values a byte; written in place.
            through: As of :meth:`add_maxima`.
        """
        kernels.encode(self.coding, fragments, maxima, codes, through)
        _count_writes(codes)

    def decode(
        self,
        codes: torch.Tensor,
        table: torch.Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
        *,
        in_backward: bool = False,
    ) -> torch.Tensor:
        """Return a whole tensor's values.

        Args:
            codes: 1-D uint8 of the whole tensor.
            table: Its ``(table_nbytes,)`` uint8.
            shape: Its shape.
            dtype: fp32, bf16 or fp16; products of codes and scales are rounded to it once.
            out: What to write to, of that shape and dtype and contiguous; None: allocate.
            in_backward: Whether backward decodes. In a graph of forward and backward it is another
                operator than forward's: as one, values would be kept from the one to the other.
        """
        if is_tracing():
            found: torch.Tensor = torch.ops.megafsdp.decode_tiles(
                codes,
                table,
                self.element.name,
                self.scaling.name,
                self.tile or (),
                shape,
                dtype,
                in_backward,
            )
            return found if out is None else out.copy_(found)
        if out is None:
            out = torch.empty(tuple(shape), dtype=dtype, device=codes.device)
        kernels.decode(self.coding, codes, table, tuple(shape), out)
        return out

    def matrix_of(
        self, codes: torch.Tensor, table: torch.Tensor, shape: Sequence[int], index: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the table of one matrix of a stack.

        Args:
            codes: 1-D uint8 of the whole stack.
            table: Its ``(table_nbytes,)`` uint8.
            shape: ``(matrices, rows, cols)``.
            index: Which matrix.

        Returns:
            Its codes, an alias, and a copy of its part of the table.
        """
        num_matrices = shape[0]
        own = table.new_zeros(self.table_nbytes(shape[1:]))
        found = self.scaling.of_matrix(
            table[: self.coding.table_nbytes(tuple(shape))], num_matrices, index
        )
        own[: found.numel()] = found
        return codes.view(num_matrices, -1)[index], own

    def cut_multiple(self, shape: Sequence[int], dim: int = 0) -> int | None:
        """Return what a cut along a dimension must be a multiple of; None: there can be none.

        Matrices of a stack may be cut anywhere between them, and a matrix of one scale at any row.
        """
        if len(shape) == 3:
            return 1 if dim == 0 else None
        if self.tile is not None:
            return self.tile[dim]
        return 1 if dim == 0 else self.codes_per_byte

    def has_shared_scale(self, shape: Sequence[int]) -> bool:
        """Return whether all rows of a tensor depend on one scale: of a matrix, not of a stack."""
        return len(shape) == 2 and (self.tile is None or isinstance(self.scaling, TwoLevelScaling))

    def scales_of_rows(
        self, table: torch.Tensor, shape: Sequence[int], start: int, stop: int
    ) -> ScalesOfRows:
        """Return the scales in a table that rows, or matrices of a stack, are decoded by; aliases.

        Args:
            table: The ``(table_nbytes,)`` uint8 of the whole tensor.
            shape: Its shape.
            start: The first index of dimension 0, a multiple of :meth:`cut_multiple`.
            stop: The end, a multiple or the extent of the dimension.
        """
        shape = tuple(shape)
        used = table[: self.coding.table_nbytes(shape)]
        grid = self.coding.grid(shape)
        scales = self.scaling.tile_scales(used, grid.num_matrices)
        levels = []
        if isinstance(self.scaling, TwoLevelScaling):
            levels.append(self.scaling.matrix_maxima(used, grid.num_matrices))
        if len(shape) == 3:
            return ScalesOfRows([each[start:stop] for each in (*levels, scales)], [])
        if self.tile is None:
            return ScalesOfRows([], [*levels, scales])
        first, end = start // self.tile[0], -(-stop // self.tile[0])
        return ScalesOfRows([scales.view(-1, grid.tiles_across)[first:end]], levels)

    def rows_of(
        self,
        codes: torch.Tensor,
        table: torch.Tensor,
        shape: Sequence[int],
        start: int,
        stop: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes and the table of rows of a matrix, or of matrices of a stack.

        Args:
            codes: 1-D uint8 of the whole tensor.
            table: Its ``(table_nbytes,)`` uint8.
            shape: Its shape.
            start: As of :meth:`scales_of_rows`.
            stop: Likewise.

        Returns:
            Codes, an alias, and a copy of the part of the table, as a tensor of these rows alone
            has it.
        """
        own_shape = (stop - start, *shape[1:])
        own = table.new_zeros(self.table_nbytes(own_shape))
        if stop > start:
            target = self.scales_of_rows(own, own_shape, 0, stop - start)
            target.copy_(self.scales_of_rows(table, shape, start, stop))
        elif self.tile is None and len(shape) == 2:
            own = table.clone()
        return codes.view(shape[0], -1)[start:stop].reshape(-1), own

    def tile_scales(self, table: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the scales in a table as ``(rows of tiles, columns of tiles)``; aliases it.

        In a stack the rows of tiles of its matrices follow each other. The scales are fp32, or
        uint8 of e8m0 in mxfp8 and of e4m3 in nvfp4.
        """
        grid = self.coding.grid(tuple(shape))
        nbytes = self.coding.table_nbytes(tuple(shape))
        scales = self.scaling.tile_scales(table[:nbytes], grid.num_matrices)
        return scales.reshape(-1, grid.tiles_across)


def _count_writes(buffers: Sequence[torch.Tensor]) -> None:
    """Count a write to each: compiled kernels get addresses, and autograd does not see them."""
    torch.autograd.graph.increment_version(buffers)


FP8_CURRENT = WeightFormat("fp8_current", E4M3, Fp32Scaling(is_power_of_two=False), None, 16)
FP8_DELAYED = WeightFormat("fp8_delayed", E4M3, Fp32Scaling(is_power_of_two=False), None, 16)
FP8_BLOCK = WeightFormat("fp8_block", E4M3, Fp32Scaling(is_power_of_two=True), (128, 128), 1)
MXFP8 = WeightFormat("mxfp8", E4M3, E8M0Scaling(), (32, 32), 32)
NVFP4 = WeightFormat("nvfp4", E2M1, TwoLevelScaling(), (16, 16), 16)
