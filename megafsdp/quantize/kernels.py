"""Maxima, scales, codes and values: by compiled kernels if possible, else in torch.

Both give the same bits, on every instruction set and with every number of threads, except for the
bits of a decoded NaN. tiles.py defines the arithmetic. One call takes a whole batch of fragments,
so that the hot path has no loop of torch operations over tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from megafsdp._native import native_module
from megafsdp.errors import expected
from megafsdp.quantize.cuda_kernels import CudaKernels, MatrixBuffers, kernels_on
from megafsdp.quantize.elements import E2M1, E4M3, E5M2, Element, pack, unpack
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
# The compiled module for CPUs has functions of the same names.
Kernels = ModuleType | CudaKernels


# torch's operators on up to this many elements run in the calling thread.
_SERIAL_NUMEL = 32768


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
            coding=coding.of_kernels,
            fragments=[_native_fragment(fragments[i], maxima[i], None) for i in chosen],
            dtype=_DTYPE_NAMES[dtype],
            through="" if through is None else _DTYPE_NAMES[through],
            num_threads=torch.get_num_threads(),
        )


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
        fragments: The rows; a single fragment if there is noise.
        maxima: Maxima of all tiles.
        codes: Written in place.
        through: Round to this dtype first.
        noise: fp32 in ``[0, 1)``, one per value.

    Raises:
        ValueError: As for :func:`add_maxima`.
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
            coding=coding.of_kernels,
            fragments=batch,
            dtype=_DTYPE_NAMES[dtype],
            through="" if through is None else _DTYPE_NAMES[through],
            noise=_NO_BUFFER
            if noise is None
            else _buffer("noise", noise, torch.float32, fragments[0].values.device),
            num_threads=torch.get_num_threads(),
        )


def clear_maxima(maxima: torch.Tensor) -> None:
    """Write zeros; on a CPU only in this thread.

    Threads of torch that an operator has woken spin for milliseconds after it, on the cores that
    the kernels' threads need next.
    """
    is_whole = maxima.is_cuda or maxima.numel() <= _SERIAL_NUMEL
    for piece in (maxima,) if is_whole else maxima.split(_SERIAL_NUMEL):
        piece.zero_()


def fill_tables(
    coding: TileCoding,
    shapes: Sequence[tuple[int, ...]],
    maxima: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
) -> None:
    """Write tables of scales; see :meth:`WeightFormat.fill_tables`.

    Raises:
        ValueError: As for :func:`add_maxima`.
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
            coding=coding.of_kernels,
            tables=[
                (
                    _stack(shapes[i]),
                    _buffer("maxima", maxima[i], torch.int32, maxima[i].device),
                    _buffer("table", tables[i], torch.uint8, maxima[i].device),
                )
                for i in chosen
            ],
            num_threads=torch.get_num_threads(),
        )


def decode(
    coding: TileCoding,
    codes: torch.Tensor,
    table: torch.Tensor,
    shape: tuple[int, ...],
    out: torch.Tensor,
) -> None:
    """Write the values of all codes of a tensor; see :meth:`WeightFormat.decode`.

    Raises:
        ValueError: As for :func:`add_maxima`.
    """
    module = _module_for(codes)
    if module is None or out.dtype not in _DTYPE_NAMES or 0 in shape:
        _check_buffers(codes, codes=(codes, torch.uint8), table=(table, torch.uint8))
        decode_in_torch(coding, codes, table, shape, out)
        return
    module.decode_tiles(
        coding=coding.of_kernels,
        shape=_stack(shape),
        codes=_buffer("codes", codes, torch.uint8, codes.device),
        table=_buffer("table", table, torch.uint8, codes.device),
        out=_buffer("out", out, out.dtype, codes.device),
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
    """Return codes and table of a matrix that this rank has whole; allocates them.

    Args:
        coding: What codes and scales are.
        values: ``(rows, cols)`` contiguous.
        maximum: ``(1,)`` fp32, or its bits in int32, to use instead of the values' own; only if the
            tile is the whole matrix.
        noise: As for :func:`encode`.
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
        # A block depends only on its own maximum, so it is encoded while it is still in the cache.
        module.encode_blocks(
            coding=coding.of_kernels,
            shape=(1, rows, cols),
            values=_buffer("values", values, values.dtype, device),
            dtype=_DTYPE_NAMES[values.dtype],
            table=_buffer("table", table, torch.uint8, device),
            codes=_buffer("codes", codes, torch.uint8, device),
            num_threads=torch.get_num_threads(),
        )
        return codes, table
    shape = (rows, cols)
    fragment = Fragment(values.view(-1), shape, 0)
    maxima = _maxima_of(coding, values, maximum)
    fill_tables(coding, [shape], [maxima], [table])
    encode(coding, [fragment], [maxima], [codes.view(-1)], None, noise)
    return codes, table


@torch.no_grad()
def quantize_transposed(
    coding: TileCoding,
    values: torch.Tensor,
    maximum: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    *,
    has_codes: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return codes, their transpose and the table of a matrix; allocates them.

    On a GPU, 8-bit codes with one scale per matrix or blocks along columns are written transposed
    in the same pass over the values.

    Args:
        coding: As for :func:`quantize`, like the next three.
        values: ``(rows, cols)`` contiguous.
        maximum: Used instead of the values' own.
        noise: For stochastic rounding.
        has_codes: Whether codes in the order of the values are wanted too; else they are None.

    Returns:
        Codes ``(rows, cols / codes_per_byte)``, ``(cols, rows / codes_per_byte)``, and the table.
    """
    module, shape = _module_for(values), (values.shape[0], values.shape[1])
    if (
        not isinstance(module, CudaKernels)
        or noise is not None
        or not values.numel()
        or not _is_transposed_on_its_way(coding, module)
    ):
        plain, table = quantize(coding, values, maximum, noise)
        return plain if has_codes else None, transpose_codes(plain, coding.element), table
    device = values.device
    transposed = torch.empty(shape[::-1], dtype=torch.uint8, device=device)
    codes = torch.empty(shape, dtype=torch.uint8, device=device) if has_codes else None
    table = torch.empty(coding.table_nbytes(shape), dtype=torch.uint8, device=device)
    bits = None
    if coding.tile is None:
        bits = _maxima_of(coding, values, maximum)
        fill_tables(coding, [shape], [bits], [table])
    module.encode_matrix(
        coding=coding.of_kernels,
        shape=(1, *shape),
        values=_buffer("values", values, values.dtype, device),
        dtype=_DTYPE_NAMES[values.dtype],
        beside=MatrixBuffers(
            codes=_NO_BUFFER if codes is None else (codes.data_ptr(), codes.numel()),
            transposed=(transposed.data_ptr(), transposed.numel()),
            maximum=_NO_BUFFER if bits is None else (bits.data_ptr(), 1),
            table=(table.data_ptr(), table.numel()) if bits is None else _NO_BUFFER,
        ),
    )
    return codes, transposed, table


def _is_transposed_on_its_way(coding: TileCoding, module: CudaKernels) -> bool:
    if coding.tile is None:
        return coding.element.codes_per_byte == 1 and not isinstance(
            coding.scaling, TwoLevelScaling
        )
    return coding.tile[1] == 1 and bool(module.module.is_one_pass(coding.of_kernels))


def _maxima_of(
    coding: TileCoding, values: torch.Tensor, maximum: torch.Tensor | None
) -> torch.Tensor:
    """Return the maxima of a whole matrix, or the given one, as int32 bits."""
    if maximum is not None:
        return maximum.reshape(1).view(torch.int32)
    shape = tuple(values.shape)
    maxima = torch.zeros(coding.grid(shape).num_tiles, dtype=torch.int32, device=values.device)
    add_maxima(coding, [Fragment(values.view(-1), shape, 0)], [maxima], None)
    return maxima


@torch.no_grad()
def transpose_codes(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the transposed codes of a matrix, or of each matrix of a stack; allocates.

    Args:
        codes: ``(..., rows, cols / codes_per_byte)`` uint8, contiguous, of at most three
            dimensions; rows are even for e2m1.
        element: What a code is.
    """
    per_byte = element.codes_per_byte
    *matrices, rows, nbytes = codes.shape
    module = _module_for(codes)
    if not isinstance(module, CudaKernels) or codes.numel() == 0:
        plain = unpack(codes) if per_byte == 2 else codes
        transposed = plain.transpose(-2, -1).contiguous()
        return pack(transposed) if per_byte == 2 else transposed
    cols = nbytes * per_byte
    transposed = codes.new_empty((*matrices, cols, rows // per_byte))
    module.transpose_codes(
        element=element.name,
        shape=_stack((*matrices, rows, cols)),
        codes=_buffer("codes", codes, torch.uint8, codes.device),
        transposed=_buffer("transposed", transposed, torch.uint8, codes.device),
    )
    return transposed


def _is_one_pass(coding: TileCoding) -> bool:
    """Return whether the compiled one-pass kernels for blocks support a coding."""
    has_one_level = not isinstance(coding.scaling, TwoLevelScaling)
    return coding.tile is not None and has_one_level and coding.element.codes_per_byte == 1


def _module_for(tensor: torch.Tensor) -> Kernels | None:
    """Return the compiled kernels for a tensor; None if there are none."""
    # Subclasses may have no memory of their own, so no address.
    if type(tensor) is not torch.Tensor:
        return None
    if tensor.is_cuda:
        return kernels_on(tensor.device)
    return native_module() if tensor.is_cpu else None


def _batches(
    tensors: Sequence[torch.Tensor], through: torch.dtype | None
) -> list[tuple[Kernels | None, torch.dtype, list[int]]]:
    """Return the indices of tensors grouped by kernels and dtype, for one call per group."""
    found: dict[tuple[Kernels | None, torch.dtype], list[int]] = {}
    # Looked up once per kind of tensor, as a lookup reads the environment.
    modules: dict[tuple[type, torch.device], Kernels | None] = {}
    for i, tensor in enumerate(tensors):
        kind = (type(tensor), tensor.device)
        if kind not in modules:
            modules[kind] = _module_for(tensor)
        module = modules[kind]
        # The compiled kernels round only fp32 to another dtype.
        if through not in (None, tensor.dtype) and tensor.dtype != torch.float32:
            module = None
        found.setdefault((module, tensor.dtype), []).append(i)
    return [(module, dtype, chosen) for (module, dtype), chosen in found.items()]


def _native_fragment(
    fragment: Fragment, maxima: torch.Tensor, codes: torch.Tensor | None
) -> tuple[Buffer, int, tuple[int, int, int], Buffer, Buffer]:
    values = fragment.values
    return (
        (values.data_ptr(), values.numel()),
        fragment.first_row,
        _stack(fragment.shape),
        _buffer("maxima", maxima, torch.int32, values.device),
        _NO_BUFFER if codes is None else _buffer("codes", codes, torch.uint8, values.device),
    )


def _stack(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return matrices, rows and columns."""
    return shape if len(shape) == 3 else (1, *shape)  # type: ignore[return-value]


def _buffer(name: str, tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Buffer:
    """Check a buffer and return address and size; the kernels themselves cannot check addresses."""
    if tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(_wrong_buffer(name, tensor, dtype, device))
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


# Operators for torch.compile's graphs, as it cannot trace calls that pass addresses.
torch.library.define(
    "megafsdp::decode_tiles",
    "(Tensor codes, Tensor table, str element, str scaling, int[] tile, SymInt[] shape, "
    "ScalarType dtype, bool in_backward) -> Tensor",
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
    in_backward: bool,
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
    in_backward: bool,
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
