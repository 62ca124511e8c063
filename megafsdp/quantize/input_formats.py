"""The formats of a linear's inputs and of the gradients of its outputs: local, no collective.

Blocks of consecutive elements share a scale: along features for products that sum over features,
along tokens for the weight gradient, which sums over tokens. The same values are quantized once for
each: blocks, unlike the square tiles of weights, do not serve both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafsdp.device.torch_private import is_tracing
from megafsdp.errors import expected
from megafsdp.quantize import kernels
from megafsdp.quantize.elements import E2M1, E4M3, E5M2, Element
from megafsdp.quantize.scales import E8M0Scaling, Fp32Scaling, Scaling, TwoLevelScaling
from megafsdp.quantize.tiles import SOURCE_DTYPES, Fragment, TileCoding

ALONG_TOKENS, ALONG_FEATURES = 0, 1
# The widest block whose maximum the compiled kernels find in one piece.
_MAX_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class InputFormat:
    """How inputs and gradients of a linear are quantized.

    Attributes:
        name: Name in errors and logs.
        element: The code of one value.
        scaling: What a scale is.
        block: Number of consecutive elements that share a scale, a power of two up to 1024; None
            means all elements of a tensor.
    """

    name: str
    element: Element
    scaling: Scaling
    block: int | None

    def __post_init__(self) -> None:
        """Check that kernels support the block.

        Raises:
            ValueError: They do not.
        """
        if self.block is not None and (self.block < 1 or _MAX_BLOCK % self.block):
            raise ValueError(
                expected(
                    f"a block of a power of two up to {_MAX_BLOCK} elements, or None",
                    self.block,
                    where=f"input format {self.name}",
                    hint="Use 16, 32 or 128 as formats of the field do",
                )
            )

    def coding(self, *, along: int) -> TileCoding:
        """Return element, scaling and tile: a part of a row, or of a column if along tokens."""
        if self.block is None:
            return TileCoding(self.element, self.scaling, None)
        tile = (1, self.block) if along == ALONG_FEATURES else (self.block, 1)
        return TileCoding(self.element, self.scaling, tile)

    def quantize(
        self,
        values: torch.Tensor,
        *,
        along: int,
        maximum: torch.Tensor | None = None,
        noise: torch.Tensor | None = None,
        is_transposed: bool = False,
    ) -> QuantizedInput:
        """Return codes and scales of values; allocates both, and keeps no reference to the values.

        Args:
            values: ``(tokens, features)`` fp32, bf16 or fp16; features are even for e2m1.
            along: 1 for blocks along features, 0 for blocks along tokens. Either way the codes are
                in the order of the values.
            maximum: ``(1,)`` fp32, or its bits in int32: the maximum to scale by, for tensor-wide
                formats. None means the largest magnitude of the values.
            noise: ``(tokens, features)`` fp32 in ``[0, 1)``, to round e2m1 stochastically.
            is_transposed: Write the codes in the order of the transpose; not in a graph.

        Raises:
            ValueError: Values are not 2-D or of another dtype, features are odd for e2m1, or a
                maximum is given for blocks.
        """
        self._check(values, maximum)
        tokens, features = values.shape
        values = values.contiguous()
        if is_tracing():
            codes, scales = torch.ops.megafsdp.quantize_matrix(
                values,
                self.element.name,
                self.scaling.name,
                self.coding(along=along).tile or (),
                maximum,
                noise,
            )
        elif is_transposed:
            coding = self.coding(along=along)
            _, codes, scales = kernels.quantize_transposed(coding, values, maximum, noise)
        else:
            codes, scales = kernels.quantize(self.coding(along=along), values, maximum, noise)
        return QuantizedInput(codes, scales, self, (tokens, features), along, is_transposed)

    def quantize_both_ways(
        self, values: torch.Tensor, *, maximum: torch.Tensor | None = None
    ) -> tuple[QuantizedInput, QuantizedInput]:
        """Return the result of :meth:`quantize`, plain and transposed; they share the scale.

        The format must have one scale per tensor.

        Args:
            values: As for :meth:`quantize`.
            maximum: As for :meth:`quantize`.
        """
        assert self.block is None, "blocks lie along one of both dimensions"
        self._check(values, maximum)
        shape = (values.shape[0], values.shape[1])
        coding = self.coding(along=ALONG_TOKENS)
        codes, transposed, scales = kernels.quantize_transposed(
            coding, values.contiguous(), maximum, has_codes=True
        )
        assert codes is not None, "they were asked for"
        return (
            QuantizedInput(codes, scales, self, shape, ALONG_FEATURES),
            QuantizedInput(transposed, scales, self, shape, ALONG_TOKENS, is_transposed=True),
        )

    def _check(self, values: torch.Tensor, maximum: torch.Tensor | None) -> None:
        if values.ndim != 2 or values.dtype not in SOURCE_DTYPES:
            what = "(tokens, features) in fp32, bf16 or fp16"
            got = f"shape {tuple(values.shape)} in {values.dtype}"
        elif values.shape[1] % self.element.codes_per_byte:
            what, got = "an even number of features", f"{values.shape[1]}"
        elif maximum is not None and self.block is not None:
            what, got = "no maximum beside blocks", f"one of shape {tuple(maximum.shape)}"
        else:
            return
        raise ValueError(
            expected(
                what,
                got,
                where=f"input format {self.name}",
                hint="Flatten all dimensions before the last, and quantize what the format takes",
            )
        )


@dataclass(frozen=True, slots=True)
class QuantizedInput:
    """Codes and scales of one tensor; autograd saves them of an input.

    Attributes:
        codes: ``(tokens, features / codes_per_byte)`` uint8, or those of the transpose.
        scales: 1-D uint8, the table of the format's scales.
        format: The format.
        shape: ``(tokens, features)``.
        along: The dimension of blocks.
        is_transposed: Whether codes are ``(features, tokens / codes_per_byte)``. Scales are not.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: InputFormat
    shape: tuple[int, int]
    along: int
    is_transposed: bool = False

    def dequantize(self, dtype: torch.dtype, *, in_backward: bool = False) -> torch.Tensor:
        """Return ``(tokens, features)`` values in fp32, bf16 or fp16; allocates.

        Args:
            dtype: Dtype of the values.
            in_backward: Whether backward decodes what forward has quantized, as for
                :meth:`WeightFormat.decode`.
        """
        coding, codes = self.format.coding(along=self.along), self.codes
        if self.is_transposed:
            codes = kernels.transpose_codes(codes, coding.element)
        codes = codes.view(-1)
        if is_tracing():
            found: torch.Tensor = torch.ops.megafsdp.decode_tiles(
                codes,
                self.scales,
                coding.element.name,
                coding.scaling.name,
                coding.tile or (),
                self.shape,
                dtype,
                in_backward,
            )
            return found
        out = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        kernels.decode(coding, codes, self.scales, self.shape, out)
        return out

    def tile_scales(self) -> torch.Tensor:
        """Return the scales by block: fp32, or uint8 codes of e8m0 or e4m3; aliases them.

        ``(tokens, blocks)`` along features, ``(blocks, features)`` along tokens, ``(1, 1)`` for a
        tensor-wide format.
        """
        grid = self.format.coding(along=self.along).grid(self.shape)
        return self.format.scaling.tile_scales(self.scales, 1).reshape(-1, grid.tiles_across)


def add_maximum(values: torch.Tensor, maximum: torch.Tensor) -> None:
    """Raise a running maximum to the largest magnitude of values; local, in place.

    Args:
        values: Any shape, fp32, bf16 or fp16.
        maximum: ``(1,)`` int32 bits of fp32, zero at first; a NaN is above all.
    """
    if values.numel():
        # contiguous(): the gradient of a sum is one number that is expanded.
        flat = values.detach().reshape(1, -1).contiguous()
        coding = TENSOR_E4M3.coding(along=ALONG_FEATURES)
        kernels.add_maxima(coding, [Fragment(flat[0], tuple(flat.shape), 0)], [maximum], None)


TENSOR_E4M3 = InputFormat("tensor_e4m3", E4M3, Fp32Scaling(is_power_of_two=False), None)
TENSOR_E5M2 = InputFormat("tensor_e5m2", E5M2, Fp32Scaling(is_power_of_two=False), None)
BLOCK_E4M3 = InputFormat("block128_e4m3", E4M3, Fp32Scaling(is_power_of_two=True), 128)
MX_E4M3 = InputFormat("mx32_e4m3", E4M3, E8M0Scaling(), 32)
NV_E2M1 = InputFormat("nv16_e2m1", E2M1, TwoLevelScaling(), 16)
