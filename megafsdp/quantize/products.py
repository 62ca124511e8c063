"""The three products of a linear whose operands are codes.

    output         y  = x w^T       (tokens, outputs)
    input grad     gx = g w         (tokens, inputs)
    weight grad    gw = g^T x       (outputs, inputs)

On every device the operands can be decoded, each rounded once to the dtype of the product, and then
multiplied. GPUs with products of 8-bit floats take the codes directly: with tensor-wide scales on
compute capability 8.9 and above, with blocks of 128 on 9.0. The dimension that is summed over must
be last in both operands, so the input gradient transposes the weight's codes, and the weight
gradient those of both operands. The choice depends on the device, torch's version and the shapes,
so it is the same on all ranks.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from megafsdp.device.torch_private import is_tracing, scaled_product
from megafsdp.errors import expected
from megafsdp.quantize.input_formats import InputFormat, QuantizedInput
from megafsdp.quantize.kernels import transpose_codes
from megafsdp.quantize.recipes import QuantizationRecipe

_LOGGER = logging.getLogger("megafsdp.quantize")
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_SCALED_DTYPES = (torch.bfloat16, torch.float16)
# Kernels read rows of operands in pieces of this many bytes.
_STRIDE_NBYTES = 16
_BLOCK = 128
_TENSOR_CAPABILITY = (8, 9)
_BLOCK_CAPABILITY = (9, 0)
_BLOCK_CUDA_VERSION = (12, 9)
# Rows of a table of tiles begin at multiples of this many scales.
_TILE_ROW_SCALES = 4


class CodedMatrix(Protocol):
    """A weight as products take it: as codes or as decoded values."""

    codes: Tensor
    table: Tensor
    recipe: QuantizationRecipe
    stored_shape: tuple[int, ...]

    def decode(self, dtype: torch.dtype | None = None, *, in_backward: bool = False) -> Tensor:
        """Return the values in a dtype."""


def output(
    x: QuantizedInput, weight: CodedMatrix, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return ``(tokens, outputs)`` in a dtype."""
    if _is_on_gpu(x.codes) and _takes_codes(x, dtype, (*x.shape, weight.stored_shape[0])):
        y = _multiply(_by_tokens(x), _of_weight(weight), dtype, is_forward=True)
        # Not in place: selective checkpointing keeps the product for the recomputation.
        return y if bias is None else y + bias.to(dtype)
    return F.linear(x.dequantize(dtype), weight.decode(dtype), bias)


def input_grad(grad: QuantizedInput, weight: CodedMatrix, dtype: torch.dtype) -> Tensor:
    """Return ``(tokens, inputs)`` in a dtype."""
    if _is_on_gpu(grad.codes) and _takes_codes(grad, dtype, (*grad.shape, weight.stored_shape[1])):
        return _multiply(_by_tokens(grad), _of_weight(weight, is_transposed=True), dtype)
    return grad.dequantize(dtype).mm(weight.decode(dtype, in_backward=True))


def weight_grad(grad: QuantizedInput, x: QuantizedInput, dtype: torch.dtype) -> Tensor:
    """Return ``(outputs, inputs)`` in a dtype."""
    if _is_on_gpu(grad.codes) and _takes_codes(grad, dtype, (*grad.shape, x.shape[1])):
        return _multiply(_by_features(grad), _by_features(x), dtype)
    return grad.dequantize(dtype).t().mm(x.dequantize(dtype, in_backward=True))


def takes_transposed(rows: Tensor, grad_format: InputFormat, sizes: tuple[int, ...]) -> bool:
    """Return whether the weight gradient takes codes, with both operands transposed.

    Args:
        rows: An operand before it is quantized.
        grad_format: The format of output gradients.
        sizes: Tokens, outputs and inputs.
    """
    # Operators in graphs write no transposed codes: graphs transpose where a product needs it.
    if not _is_on_gpu(rows) or is_tracing():
        return False
    return reason_to_decode(rows.device, grad_format, rows.dtype, sizes) is None


class _Operand(NamedTuple):
    """One side of a product of codes.

    Attributes:
        codes: ``(rows, summed)`` 8-bit floats, contiguous.
        scales: ``(1, 1)``; or for blocks, with the first dimension contiguous: ``(rows, blocks)``,
            or ``(tiles over the summed dimension, rounded up to 4, tiles over rows)``.
        has_tiles: Whether blocks are square.
    """

    codes: Tensor
    scales: Tensor
    has_tiles: bool = False


def _multiply(a: _Operand, b: _Operand, dtype: torch.dtype, *, is_forward: bool = False) -> Tensor:
    """Return ``a b^T``, summed over the last dimension of both."""
    if a.scales.numel() == 1 and b.scales.numel() == 1:
        # Only the sums of forward may be slightly less exact, not those of gradients.
        return scaled_product(
            a.codes, b.codes.t(), a.scales, b.scales, out_dtype=dtype, use_fast_accum=is_forward
        )
    operands = (a.codes, a.scales, b.codes, b.scales, b.has_tiles, dtype)
    if is_tracing():
        product: Tensor = torch.ops.megafsdp.multiply_blocks(*operands)
        return product
    return _multiply_blocks(*operands)


def _multiply_blocks(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, has_tiles: bool, dtype: torch.dtype
) -> Tensor:
    kinds = F.ScalingType  # type: ignore[attr-defined]
    product: Tensor = F.scaled_mm(  # type: ignore[attr-defined]
        a,
        b.t(),
        a_scales,
        kinds.BlockWise1x128,
        b_scales,
        kinds.BlockWise128x128 if has_tiles else kinds.BlockWise1x128,
        output_dtype=dtype,
    )
    return product


def _multiply_blocks_fake(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, has_tiles: bool, dtype: torch.dtype
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


# Graphs hold an operator of ours, not torch's: the latter's shape rule for graphs takes multiples
# of 128 only, and inductor of 2.13 replaces it by one that wants the table of tiles without its
# padding. The kernel reads scales by the strides they are given in.
torch.library.define(
    "megafsdp::multiply_blocks",
    "(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, bool has_tiles, ScalarType dtype) "
    "-> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
torch.library.impl("megafsdp::multiply_blocks", ("cpu", "cuda"), _multiply_blocks)
torch.library.register_fake("megafsdp::multiply_blocks", _multiply_blocks_fake)


def _by_tokens(values: QuantizedInput) -> _Operand:
    """Return an operand that is summed over features."""
    codes = values.codes.view(_FLOAT8[values.format.element.name])
    return _Operand(codes, values.tile_scales().t().contiguous().t())


def _by_features(values: QuantizedInput) -> _Operand:
    """Return an operand that is summed over tokens; transposes codes unless they are already."""
    element, codes = values.format.element, values.codes
    if not values.is_transposed:
        codes = transpose_codes(codes, element)
    return _Operand(codes.view(_FLOAT8[element.name]), values.tile_scales().t())


def _of_weight(weight: CodedMatrix, *, is_transposed: bool = False) -> _Operand:
    """Return a weight as the second operand; transposed codes are allocated."""
    form = weight.recipe.weight
    codes, scales = weight.codes.view(weight.stored_shape), weight.table.view(torch.uint8)
    scales = form.tile_scales(scales, weight.stored_shape)
    if is_transposed:
        codes, scales = transpose_codes(codes, form.element), scales.t()
    codes = codes.view(_FLOAT8[form.element.name])
    if form.is_per_tensor:
        return _Operand(codes, scales)
    padded = F.pad(scales, (0, -scales.shape[1] % _TILE_ROW_SCALES))
    return _Operand(codes, padded.contiguous().t(), has_tiles=True)


def _is_on_gpu(values: Tensor) -> bool:
    """Return whether products of codes may exist; tests replace this to emulate a GPU."""
    return values.is_cuda


def _takes_codes(values: QuantizedInput, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    """Return whether a product on CUDA takes codes; if not, log each reason once."""
    reason = reason_to_decode(values.codes.device, values.format, dtype, sizes)
    if reason is not None:
        _log_decoding(reason)
    return reason is None


def reason_to_decode(
    device: torch.device, form: InputFormat, dtype: torch.dtype, sizes: tuple[int, ...]
) -> str | None:
    """Return why a product on CUDA cannot take codes; None if it can.

    Args:
        device: The GPU.
        form: The format of the first operand.
        dtype: Dtype of the product.
        sizes: Tokens, and the sizes of both other dimensions.
    """
    capability = _capability(device.index)
    if form.element.name not in _FLOAT8 or form.block not in (None, _BLOCK):
        return f"{form.name}, of which no product is built"
    if form.block is None and capability < _TENSOR_CAPABILITY:
        return f"compute capability {capability}; products of 8-bit floats begin at 8.9"
    if form.block is not None and (
        capability != _BLOCK_CAPABILITY
        or _cuda_version() < _BLOCK_CUDA_VERSION
        or not hasattr(F, "scaled_mm")
    ):
        return (
            f"compute capability {capability}, CUDA {torch.version.cuda} and torch "
            f"{torch.__version__}; blocks of {_BLOCK} need 9.0, 12.9 and 2.10"
        )
    if dtype not in _SCALED_DTYPES:
        return f"products in {dtype}"
    if any(size % _STRIDE_NBYTES for size in sizes):
        return f"sizes {sizes}, not all multiples of {_STRIDE_NBYTES}"
    return None


@functools.cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _cuda_version() -> tuple[int, ...]:
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


@functools.cache
def _log_decoding(reason: str) -> None:
    _LOGGER.warning(
        expected(
            "products that take codes as they are",
            reason,
            where="quantized linears; operands are decoded for the product, which saves memory "
            "and communication but no time",
            hint=f"Use fp8_current on GPUs of 8.9 and above, bf16, and multiples of "
            f"{_STRIDE_NBYTES} tokens, inputs and outputs",
        )
    )
