"""Other ways to quantize, for benchmarks/quantize.py: torch's eager operations, and torchao.

torch's sides are the plain formula over whole tiles, with the same bits as our kernels. torchao
takes part if it is installed and has the format: one scale a tensor, blocks of MX and of NVFP4.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megafsdp.quantize.elements import magnitude_bits, pack, unpack
from megafsdp.quantize.tiles import TileCoding

Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rival:
    """One way to quantize a matrix.

    Attributes:
        quantize: Returns codes, uint8 of the matrix's rows, and scales.
        decode: Returns bf16 values of what ``quantize`` returns.
    """

    quantize: Callable[[torch.Tensor], Tensors]
    decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def eager(coding: TileCoding, shape: tuple[int, int]) -> Rival:
    """Return the formula in torch's operations on whole tensors, for a matrix of whole tiles."""
    grid, element = coding.grid(shape), coding.element
    tiles = (grid.tiles_down, grid.tile_rows, grid.tiles_across, grid.tile_cols)

    def quantize(values: torch.Tensor) -> Tensors:
        blocks = values.view(tiles).float()
        maxima = magnitude_bits(blocks.abs().amax(dim=(1, 3))).view(1, -1)
        factors = coding.scaling.encode_factors(maxima, element).view(tiles[0], 1, tiles[2], 1)
        codes = element.encode(blocks * factors).view(shape)
        table = torch.empty(coding.table_nbytes(shape), dtype=torch.uint8)
        coding.scaling.fill(maxima, element, table)
        return (pack(codes) if element.codes_per_byte == 2 else codes), table

    def decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        plain = unpack(codes) if element.codes_per_byte == 2 else codes
        factors = coding.scaling.decode_factors(table, 1).view(tiles[0], 1, tiles[2], 1)
        return (element.decode(plain).view(tiles) * factors).bfloat16().view(shape)

    return Rival(quantize, decode)


def torchao(coding: TileCoding, *, along: int) -> Rival | None:
    """Return torchao's way; None if it is not installed or lacks the format."""
    if importlib.util.find_spec("torchao") is None:
        return None
    if coding.tile is None:
        return _tensor_wide()
    if along == 1 and coding.tile == (1, 32):
        return _mx()
    if along == 1 and coding.tile == (1, 16):
        return _nvfp4()
    return None


def _tensor_wide() -> Rival:
    scaling = _import("torchao.float8.float8_scaling_utils")
    config = _import("torchao.float8.float8_training_tensor")

    # One tensor has codes and scales; only the check takes it apart.
    def quantize(values: torch.Tensor) -> Tensors:
        found = scaling.hp_tensor_to_float8_dynamic(
            values, torch.float8_e4m3fn, config.LinearMMConfig()
        )
        return found._data.view(torch.uint8), found._scale

    def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (codes.view(torch.float8_e4m3fn).float() / scale).bfloat16()

    return Rival(quantize, decode)


def _mx() -> Rival:
    mx = _import("torchao.prototype.mx_formats.mx_tensor")

    def quantize(values: torch.Tensor) -> Tensors:
        mode = mx.ScaleCalculationMode.RCEIL
        scales, codes = mx.to_mx(values, torch.float8_e4m3fn, 32, mode)
        return codes.view(torch.uint8), scales

    def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = mx.to_dtype(
            codes.view(torch.float8_e4m3fn), scales, torch.float8_e4m3fn, 32, torch.bfloat16
        )
        return found

    return Rival(quantize, decode)


def _nvfp4() -> Rival:
    nvfp4 = _import("torchao.prototype.mx_formats.nvfp4_tensor")

    def quantize(values: torch.Tensor) -> Tensors:
        scale = values.abs().amax().float() / 2688
        scales, codes = nvfp4.nvfp4_quantize(values, 16, scale)
        return codes.view(torch.uint8), torch.stack([scale, *scales.float().flatten()[:1]])

    def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only quantizing is timed")

    return Rival(quantize, decode)


def _import(name: str) -> Any:
    with _quiet():
        return importlib.import_module(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drop logs, warnings and output of torchao's import."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
