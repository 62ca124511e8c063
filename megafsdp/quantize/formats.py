"""The weight formats; each is an element code and a tile.

A format is a frozen value without tensors, groups or state, so it can be compared, kept on tensors
and read from a checkpoint. Its scales are a pure function of the maxima of tiles: first each rank
finds partial maxima over its rows, then these are maximized over ranks, and then all ranks make the
table of scales, and each makes the codes of its rows. Tiles are square, so transposed codes and
scales are those of the transposed weight, and one set of codes serves forward and backward.

| format | element | tile | scale | table |
|---|---|---|---|---|
| fp8_current, fp8_delayed | e4m3 | the matrix | fp32 | 4 bytes per matrix |
| fp8_block | e4m3 | 128 x 128 | a power of two in fp32 | 4 bytes per tile |
| mxfp8 | e4m3 | 32 x 32 | a power of two, its exponent, rounded up | 1 byte per tile |
| nvfp4 | e2m1 | 16 x 16 | e4m3, times one fp32 per matrix | 1 byte per tile, 4 per matrix |
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
        own: Scales of only these rows, ``(rows of tiles, columns of tiles)`` or
            ``(matrices, ...)`` each.
        shared: Scales that other rows of the tensor depend on too.
    """

    def cut(self, dim: int, first: int, end: int) -> ScalesOfRows:
        """Return the scales of a range of rows or columns of tiles, or of matrices; aliases."""
        own = [each.narrow(dim, first, end - first) for each in self.own]
        return ScalesOfRows(own, self.shared)

    own: list[torch.Tensor]
    shared: list[torch.Tensor]

    def copy_(self, source: ScalesOfRows) -> None:
        """Copy the scales of as many rows of another table of the format; in place."""
        pairs = zip((*self.own, *self.shared), (*source.own, *source.shared), strict=True)
        for target, values in pairs:
            target.copy_(values)


@dataclass(frozen=True)
class WeightFormat:
    """How a weight is quantized: local arithmetic, no collective.

    Methods that take sequences handle a batch of tensors, of any shapes, in one call.

    Attributes:
        name: ``"fp8_current"``, ``"fp8_delayed"``, ``"fp8_block"``, ``"mxfp8"`` or ``"nvfp4"``.
        element: The code of one value.
        scaling: What a scale is.
        tile: ``(rows, cols)`` that share a scale; None for a whole matrix.
        multiple: Rows and columns must be multiples of it; 1 allows any shape.
    """

    name: str
    element: Element
    scaling: Scaling
    tile: tuple[int, int] | None
    multiple: int

    @property
    def codes_per_byte(self) -> int:
        """Return 1; 2 for 4-bit codes, with the even column in the low half."""
        return self.element.codes_per_byte

    @property
    def is_per_tensor(self) -> bool:
        """Return whether a whole matrix has one scale, even if several ranks have parts of it."""
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
        """Return the number of tiles; they are ordered by matrix, row and column of tiles."""
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
            through: Round the values to this dtype first; None does not round.
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
            shapes: Shapes of the tensors.
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
                are clamped; if a maximum is not finite, all values of the tile become NaN.
            codes: 1-D uint8 for each, ``codes_per_byte`` values per byte; written in place.
            through: As for :meth:`add_maxima`.
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
            out: Contiguous tensor of that shape and dtype to write to; None allocates one.
            in_backward: Whether backward decodes. In a graph of forward and backward this makes it
                a different operator: otherwise forward's decoded values would be kept for backward.
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
            index: Index of the matrix.

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
        """Return the number of which cuts along a dimension must be multiples; None forbids cuts.

        A stack may be cut between any matrices, and a matrix of one scale at any row.
        """
        if len(shape) == 3:
            return 1 if dim == 0 else None
        if self.tile is not None:
            return self.tile[dim]
        return 1 if dim == 0 else self.codes_per_byte

    def has_shared_scale(self, shape: Sequence[int]) -> bool:
        """Return whether all rows depend on one scale, as in a matrix (not a stack) may be."""
        return len(shape) == 2 and (self.tile is None or isinstance(self.scaling, TwoLevelScaling))

    def scales_of_rows(
        self, table: torch.Tensor, shape: Sequence[int], start: int, stop: int
    ) -> ScalesOfRows:
        """Return the scales in a table that decode some rows, or matrices of a stack; aliases.

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
            start: As for :meth:`scales_of_rows`.
            stop: Likewise.

        Returns:
            Codes, an alias, and a copy of the part of the table, in the form of the table of a
            tensor of only these rows.
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

        In a stack the rows of tiles of its matrices follow each other. The scales are fp32; in
        mxfp8 they are uint8 codes of e8m0, in nvfp4 of e4m3.
        """
        grid = self.coding.grid(tuple(shape))
        nbytes = self.coding.table_nbytes(tuple(shape))
        scales = self.scaling.tile_scales(table[:nbytes], grid.num_matrices)
        return scales.reshape(-1, grid.tiles_across)


def _count_writes(buffers: Sequence[torch.Tensor]) -> None:
    """Count a write to each buffer: compiled kernels write by address, unseen by autograd."""
    torch.autograd.graph.increment_version(buffers)


FP8_CURRENT = WeightFormat("fp8_current", E4M3, Fp32Scaling(is_power_of_two=False), None, 16)
FP8_DELAYED = WeightFormat("fp8_delayed", E4M3, Fp32Scaling(is_power_of_two=False), None, 16)
FP8_BLOCK = WeightFormat("fp8_block", E4M3, Fp32Scaling(is_power_of_two=True), (128, 128), 1)
MXFP8 = WeightFormat("mxfp8", E4M3, E8M0Scaling(), (32, 32), 32)
NVFP4 = WeightFormat("nvfp4", E2M1, TwoLevelScaling(), (16, 16), 16)
