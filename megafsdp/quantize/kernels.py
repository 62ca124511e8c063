"""Maxima, scales, codes and values: compiled where possible, else in torch.

Both ways, every instruction set and every number of threads give the same bits, but for those of a
decoded NaN. tiles.py defines the arithmetic. One call takes a whole batch of fragments, so that the
hot path has no loop of torch operations over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from megafsdp._native import native_module
from megafsdp.errors import expected
from megafsdp.quantize.elements import E2M1, E4M3, E5M2
from megafsdp.quantize.scales import E8M0Scaling, Fp32Scaling, TwoLevelScaling
from megafsdp.quantize.tiles import (
    SOURCE_DTYPES,
    Fragment,
    TileCoding,
    add_maxima_in_torch,
    decode_in_torch,
    encode_in_torch,
    fill_table_in_torch,
)

_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in SOURCE_DTYPES}
_ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1)}
_SCALINGS = {
    scaling.name: scaling
    for scaling in (Fp32Scaling(False), Fp32Scaling(True), E8M0Scaling(), TwoLevelScaling())
}
_NO_BUFFER = (0, 0)

Buffer = tuple[int, int]


@torch.no_grad()
def add_maxima(
    coding: TileCoding,
    fragments: Sequence[Fragment],
    maxima: Sequence[torch.Tensor],
    through: torch.dtype | None,
) -> None:
    """Raise the maxima of tiles to those of fragments; see :meth:`WeightFormat.add_maxima`.

    Raises:
        ValueError: A tensor has the wrong dtype, size, strides or device, or overlaps another.
    """
    for module, dtype, chosen in _batches([f.values for f in fragments], through):
        if module is None:
            for i in chosen:
                _check_buffers(fragments[i].values, maxima=(maxima[i], torch.int32))
                add_maxima_in_torch(coding, fragments[i], maxima[i], through)
            continue
        module.add_tile_maxima(
            coding=_native_coding(coding),
            fragments=[_native_fragment(fragments[i], maxima[i], None) for i in chosen],
            dtype=_DTYPE_NAMES[dtype],
            through="" if through is None else _DTYPE_NAMES[through],
            num_threads=torch.get_num_threads(),
        )


@torch.no_grad()
def encode(
    coding: TileCoding,
    fragments: Sequence[Fragment],
    maxima: Sequence[torch.Tensor],
    codes: Sequence[torch.Tensor],
    through: torch.dtype | None,
    noise: torch.Tensor | None = None,
) -> None:
    """Write the codes of fragments; see :meth:`WeightFormat.encode`.

    Args:
        coding: What codes and scales are.
        fragments: The rows; a single one beside noise.
        maxima: Of all tiles.
        codes: Written in place.
        through: Round to this dtype first.
        noise: fp32 in ``[0, 1)``, one a value.

    Raises:
        ValueError: As :func:`add_maxima`.
    """
    for module, dtype, chosen in _batches([f.values for f in fragments], through):
        if module is None:
            for i in chosen:
                buffers = {"maxima": (maxima[i], torch.int32), "codes": (codes[i], torch.uint8)}
                _check_buffers(fragments[i].values, **buffers)
                encode_in_torch(coding, fragments[i], maxima[i], codes[i], through, noise)
            continue
        batch = [_native_fragment(fragments[i], maxima[i], codes[i]) for i in chosen]
        module.encode_tiles(
            coding=_native_coding(coding),
            fragments=batch,
            dtype=_DTYPE_NAMES[dtype],
            through="" if through is None else _DTYPE_NAMES[through],
            noise=_NO_BUFFER if noise is None else _buffer("noise", noise, torch.float32),
            num_threads=torch.get_num_threads(),
        )


@torch.no_grad()
def fill_tables(
    coding: TileCoding,
    shapes: Sequence[tuple[int, ...]],
    maxima: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
) -> None:
    """Write tables of scales; see :meth:`WeightFormat.fill_tables`.

    Raises:
        ValueError: As :func:`add_maxima`.
    """
    for module, _, chosen in _batches(maxima, None):
        if module is None:
            for i in chosen:
                _check_buffers(
                    maxima[i], maxima=(maxima[i], torch.int32), table=(tables[i], torch.uint8)
                )
                fill_table_in_torch(coding, shapes[i], maxima[i], tables[i])
            continue
        module.fill_scale_tables(
            coding=_native_coding(coding),
            tables=[
                (
                    _stack(shapes[i]),
                    _buffer("maxima", maxima[i], torch.int32),
                    _buffer("table", tables[i], torch.uint8),
                )
                for i in chosen
            ],
            num_threads=torch.get_num_threads(),
        )


@torch.no_grad()
def decode(
    coding: TileCoding,
    codes: torch.Tensor,
    table: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor,
) -> None:
    """Write the values of all codes of a tensor; see :meth:`WeightFormat.decode`.

    Raises:
        ValueError: As :func:`add_maxima`.
    """
    module = _module_for(codes)
    if module is None or out.dtype not in _DTYPE_NAMES or 0 in shape:
        _check_buffers(codes, codes=(codes, torch.uint8), table=(table, torch.uint8))
        decode_in_torch(coding, codes, table, shape, out)
        return
    module.decode_tiles(
        coding=_native_coding(coding),
        shape=_stack(shape),
        codes=_buffer("codes", codes, torch.uint8),
        table=_buffer("table", table, torch.uint8),
        out=_buffer("out", out, out.dtype),
        out_dtype=_DTYPE_NAMES[out.dtype],
        num_threads=torch.get_num_threads(),
    )


@torch.no_grad()
def quantize(
    coding: TileCoding,
    values: torch.Tensor,
    maximum: torch.Tensor | None,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and table of a whole matrix that no other rank has a part of; allocates them.

    Args:
        coding: What codes and scales are.
        values: ``(rows, cols)`` contiguous.
        maximum: ``(1,)`` fp32 or int32 bits of one, in place of that of the values; for a tile that
            is the whole matrix.
        noise: As of :func:`encode`.
    """
    rows, cols = values.shape
    device = values.device
    num_bytes = cols // coding.element.codes_per_byte
    codes = torch.empty((rows, num_bytes), dtype=torch.uint8, device=device)
    table = torch.empty(coding.table_nbytes((rows, cols)), dtype=torch.uint8, device=device)
    if values.numel() == 0:
        return codes, table.zero_()
    module = _module_for(values)
    if module is not None and noise is None and _is_one_pass(coding):
        # A block's maximum is its own alone, so what was read for it is encoded from the cache.
        module.encode_blocks(
            coding=_native_coding(coding),
            shape=(1, rows, cols),
            values=_buffer("values", values, values.dtype),
            dtype=_DTYPE_NAMES[values.dtype],
            table=_buffer("table", table, torch.uint8),
            codes=_buffer("codes", codes, torch.uint8),
            num_threads=torch.get_num_threads(),
        )
        return codes, table
    shape = (rows, cols)
    fragment = Fragment(values.view(-1), shape, 0)
    if maximum is None:
        maxima = torch.zeros(coding.grid(shape).num_tiles, dtype=torch.int32, device=device)
        add_maxima(coding, [fragment], [maxima], None)
    else:
        maxima = maximum.reshape(1).view(torch.int32)
    fill_tables(coding, [shape], [maxima], [table])
    encode(coding, [fragment], [maxima], [codes.view(-1)], None, noise)
    return codes, table


def _is_one_pass(coding: TileCoding) -> bool:
    """Return whether the compiled kernels for blocks take a coding."""
    has_one_level = not isinstance(coding.scaling, TwoLevelScaling)
    return coding.tile is not None and has_one_level and coding.element.codes_per_byte == 1


def _module_for(tensor: torch.Tensor) -> ModuleType | None:
    """Return the compiled kernels that take a tensor; None if there are none."""
    # Subclasses have no memory of their own that an address could name.
    if type(tensor) is not torch.Tensor or tensor.device.type != "cpu":
        return None
    return native_module()


def _batches(
    tensors: Sequence[torch.Tensor], through: torch.dtype | None
) -> list[tuple[ModuleType | None, torch.dtype, list[int]]]:
    """Return the indices of tensors by kernels and dtype: one call for each."""
    found: dict[tuple[ModuleType | None, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(tensors):
        module = _module_for(tensor)
        # Only fp32 is rounded to another dtype by the compiled kernels.
        if through not in (None, tensor.dtype) and tensor.dtype != torch.float32:
            module = None
        found.setdefault((module, tensor.dtype), []).append(i)
    return [(module, dtype, chosen) for (module, dtype), chosen in found.items()]


def _native_coding(coding: TileCoding) -> tuple[str, str, int, int]:
    return (coding.element.name, coding.scaling.name, *(coding.tile or (0, 0)))


def _native_fragment(
    fragment: Fragment, maxima: torch.Tensor, codes: torch.Tensor | None
) -> tuple[Buffer, int, tuple[int, int, int], Buffer, Buffer]:
    values = fragment.values
    return (
        (values.data_ptr(), values.numel()),
        fragment.first_row,
        _stack(fragment.shape),
        _buffer("maxima", maxima, torch.int32),
        _NO_BUFFER if codes is None else _buffer("codes", codes, torch.uint8),
    )


def _stack(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return matrices, rows and columns."""
    return shape if len(shape) == 3 else (1, *shape)  # type: ignore[return-value]


def _buffer(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Buffer:
    """Return address and size; the kernels get bare addresses and can check no dtype."""
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(_wrong_buffer(name, tensor, dtype, torch.device("cpu")))
    return tensor.data_ptr(), tensor.numel()


def _check_buffers(beside: torch.Tensor, **buffers: tuple[torch.Tensor, torch.dtype]) -> None:
    for name, (tensor, dtype) in buffers.items():
        is_there = tensor.device == beside.device
        if tensor.dtype != dtype or not is_there or not tensor.is_contiguous():
            raise ValueError(_wrong_buffer(name, tensor, dtype, beside.device))


def _wrong_buffer(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> str:
    return expected(
        f"contiguous {dtype} on {device}",
        f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}",
        where=f"argument '{name}' of a quantization kernel",
        hint="Give a buffer of that dtype beside the values",
    )


# What torch.compile puts into its graphs: it cannot see through addresses.
torch.library.define(
    "megafsdp::decode_tiles",
    "(Tensor codes, Tensor table, str element, str scaling, int[] tile, SymInt[] shape, "
    "ScalarType dtype) -> Tensor",
)
torch.library.define(
    "megafsdp::quantize_matrix",
    "(Tensor values, str element, str scaling, int[] tile, Tensor? maximum, Tensor? noise) "
    "-> (Tensor, Tensor)",
)


@torch.library.impl("megafsdp::decode_tiles", ("cpu", "cuda"))
def _decode_op(
    codes: torch.Tensor,
    table: torch.Tensor,
    element: str,
    scaling: str,
    tile: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    out = torch.empty(tuple(shape), dtype=dtype, device=codes.device)
    decode(_coding(element, scaling, tile), codes, table, tuple(shape), out)
    return out


def _decode_fake(
    codes: torch.Tensor,
    table: torch.Tensor,
    element: str,
    scaling: str,
    tile: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    return codes.new_empty(tuple(shape), dtype=dtype)


@torch.library.impl("megafsdp::quantize_matrix", ("cpu", "cuda"))
def _quantize_op(
    values: torch.Tensor,
    element: str,
    scaling: str,
    tile: Sequence[int],
    maximum: torch.Tensor | None,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize(_coding(element, scaling, tile), values, maximum, noise)


def _quantize_fake(
    values: torch.Tensor,
    element: str,
    scaling: str,
    tile: Sequence[int],
    maximum: torch.Tensor | None,
    noise: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    coding = _coding(element, scaling, tile)
    rows, cols = values.shape
    codes = values.new_empty((rows, cols // coding.element.codes_per_byte), dtype=torch.uint8)
    return codes, values.new_empty(coding.table_nbytes((rows, cols)), dtype=torch.uint8)


def _coding(element: str, scaling: str, tile: Sequence[int]) -> TileCoding:
    of_matrix = (tile[0], tile[1]) if tile else None
    return TileCoding(_ELEMENTS[element], _SCALINGS[scaling], of_matrix)


torch.library.register_fake("megafsdp::decode_tiles", _decode_fake)
torch.library.register_fake("megafsdp::quantize_matrix", _quantize_fake)
