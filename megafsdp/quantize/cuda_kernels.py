"""Launches of the compiled CUDA kernels on the caller's current stream.

They have the signatures of the CPU kernels, so that kernels.py need not tell them apart. This file
chooses device and stream, and allocates what a launch needs besides its buffers; nothing here waits
for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from megafsdp._native import current_stream, usable_cuda_module

# Counted for maxima and codes of fp32 values rounded through bf16, with one scale per tensor.
_COST = (
    "quantizing is 52 torch operators that move 136 bytes an element instead of kernels that move 9"
)
_TWO_LEVEL = "two_level"
_NO_BUFFER = (0, 0)

Buffer = tuple[int, int]
Coding = tuple[str, str, int, int]
Stack = tuple[int, int, int]
# Values, first row, shape, maxima and codes of a fragment; shape, maxima and table of a tensor.
FragmentBuffers = tuple[Buffer, int, Stack, Buffer, Buffer]
TableBuffers = tuple[Stack, Buffer, Buffer]


@dataclass(frozen=True, slots=True)
class MatrixBuffers:
    """What the encoding of a matrix reads and writes beside its values; null if absent.

    Attributes:
        codes: One code per value, in the order of the values.
        transposed: The same codes, transposed.
        maximum: Maximum of all values, to scale by; without it each block has its own.
        table: The scales of blocks.
    """

    codes: Buffer = _NO_BUFFER
    transposed: Buffer = _NO_BUFFER
    maximum: Buffer = _NO_BUFFER
    table: Buffer = _NO_BUFFER


def kernels_on(device: torch.device) -> CudaKernels | None:
    """Return the kernels for a device; None if they are not built or do not run there."""
    module = usable_cuda_module(device, "megafsdp.quantize", _COST)
    return None if module is None else CudaKernels(module, device)


@dataclass(frozen=True, slots=True)
class CudaKernels:
    """The functions of the compiled module for one device.

    What a call allocates is freed at its return, before the kernels run; only later work of the
    same stream reuses the memory.

    Attributes:
        module: The compiled module.
        device: Where all buffers are.
    """

    module: ModuleType
    device: torch.device

    def add_tile_maxima(self, *, num_threads: int, **given: object) -> None:
        """Raise the maxima of tiles to those of a batch of fragments."""
        self._launch("add_tile_maxima", given)

    def encode_tiles(
        self,
        *,
        coding: Coding,
        fragments: Sequence[FragmentBuffers],
        num_threads: int,
        **given: object,
    ) -> None:
        """Write the codes of a batch of fragments."""
        largest = self._room_for_largest(coding, [shape for _, _, shape, _, _ in fragments])
        given |= {"coding": coding, "fragments": fragments, "largest": _buffer(largest)}
        self._launch("encode_tiles", given)

    def fill_scale_tables(
        self, *, coding: Coding, tables: Sequence[TableBuffers], num_threads: int
    ) -> None:
        """Write a batch of tables of scales from maxima."""
        largest = self._room_for_largest(coding, [shape for shape, _, _ in tables])
        given = {"coding": coding, "tables": tables, "largest": _buffer(largest)}
        self._launch("fill_scale_tables", given)

    def decode_tiles(self, *, num_threads: int, **given: object) -> None:
        """Write the values of a tensor's codes."""
        self._launch("decode_tiles", given)

    def encode_blocks(
        self,
        *,
        coding: Coding,
        shape: Stack,
        values: Buffer,
        dtype: str,
        table: Buffer,
        codes: Buffer,
        num_threads: int,
    ) -> None:
        """Write scales of blocks and codes of a matrix, in one pass if there is a kernel for it."""
        matrices, rows, cols = shape
        if self.module.is_one_pass(coding) and (coding[2] == 1 or matrices == 1):
            beside = MatrixBuffers(codes=codes, table=table)
            self.encode_matrix(
                coding=coding, shape=shape, values=values, dtype=dtype, beside=beside
            )
            return
        num_tiles = matrices * -(-rows // coding[2]) * -(-cols // coding[3])
        maxima = torch.zeros(num_tiles, dtype=torch.int32, device=self.device)
        of_batch: dict[str, Any] = {
            "coding": coding,
            "fragments": [(values, 0, shape, _buffer(maxima), codes)],
            "dtype": dtype,
            "through": "",
            "num_threads": num_threads,
        }
        self.add_tile_maxima(**of_batch)
        self.fill_scale_tables(
            coding=coding, tables=[(shape, _buffer(maxima), table)], num_threads=num_threads
        )
        self.encode_tiles(**of_batch, noise=_NO_BUFFER)

    def encode_matrix(
        self, *, coding: Coding, shape: Stack, values: Buffer, dtype: str, beside: MatrixBuffers
    ) -> None:
        """Write a matrix's codes, transposed codes, or both, in one pass."""
        given = {"coding": coding, "shape": shape, "values": values, "dtype": dtype}
        self._launch("encode_matrix", given | dataclasses.asdict(beside))

    def transpose_codes(
        self, *, element: str, shape: Stack, codes: Buffer, transposed: Buffer
    ) -> None:
        """Write the transposed codes of matrices."""
        given = {"element": element, "shape": shape, "codes": codes, "transposed": transposed}
        self._launch("transpose_codes", given)

    def _room_for_largest(self, coding: Coding, shapes: Sequence[Stack]) -> torch.Tensor:
        """Return zeros for the largest maximum of each matrix; empty unless two-level."""
        numel = sum(matrices for matrices, _, _ in shapes) if coding[1] == _TWO_LEVEL else 0
        return torch.zeros(numel, dtype=torch.int32, device=self.device)

    def _launch(self, function: str, given: Mapping[str, object]) -> None:
        with current_stream(self.device) as stream:
            getattr(self.module, function)(**given, device=self.device.index, stream=stream)


def _buffer(tensor: torch.Tensor) -> Buffer:
    return (tensor.data_ptr(), tensor.numel()) if tensor.numel() else _NO_BUFFER
