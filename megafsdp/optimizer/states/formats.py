"""Formats of optimizer states: fp32, bf16, and fp16 or FP8 with one scale per block.

A *scaled* state divides each row of a tensor into blocks of 128 elements, the last one shorter, and
keeps ``absmax / largest`` of each block as an fp32 scale, where ``largest`` is the largest value
that the format is used for. Rows are never cut between ranks, so values do not depend on the mesh.
A block of zeros has scale 0 and stays zero.

A step divides by the root of second moments, so those that the format would round to 0 are rounded
up: the step is then too short instead of unbounded. An infinite second moment (the square of a
large gradient) stays infinite, as in fp32; the others of its block become so large that their steps
are almost zero. A first moment whose magnitude falls in a step is stored with a smaller magnitude,
if need be by one code: if it were rounded back each time, it would stay while the second moment
falls, and steps would be unbounded.

1-D parameters, whose elements may be cut anywhere, keep fp32 states. So do parameters whose rows a
model axis cuts, as tensor parallelism does along input columns.

This file encodes and decodes tensors; store.py decides which parameter has which state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafsdp.errors import expected

BLOCK_NUMEL = 128

# Half of the largest fp16 leaves room for a sum of two; e4m3 has no infinities to overflow to.
_LARGEST = {torch.float16: 32752.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9}
# Replaces an infinite absmax: the largest code decodes to infinity in fp32, but no other code does.
_OVERFLOW = 2.0**128 * (1 + 2.0**-22)
PLAIN_DTYPES = (torch.float32, torch.bfloat16)
STATE_DTYPES = (*PLAIN_DTYPES, *_LARGEST)


def check_state_dtype(name: str, dtype: torch.dtype) -> None:
    """Check the dtype of a state.

    Raises:
        ValueError: States cannot have this dtype.
    """
    if dtype not in STATE_DTYPES:
        raise ValueError(
            expected(
                f"one of {[str(d) for d in STATE_DTYPES]}",
                dtype,
                where=f"{name} of FusedAdam",
                hint="Use torch.float32, or torch.bfloat16 for half of the memory",
            )
        )


def dtype_for(shape: torch.Size, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a state: the given one, or fp32 if the parameter has no rows to scale.

    Args:
        shape: Global shape of the parameter.
        dtype: The dtype that the user chose for such states.
    """
    return torch.float32 if dtype in _LARGEST and len(shape) < 2 else dtype


def is_scaled(dtype: torch.dtype) -> bool:
    """Return whether a state of this dtype has scales."""
    return dtype in _LARGEST


@dataclass(slots=True)
class ScaledState:
    """A state of some rows in a narrow format.

    Attributes:
        codes: ``(rows, columns)`` fp16 or FP8 (e4m3); aliases the state that the optimizer shows.
        scales: ``(rows, blocks)`` fp32.
        keeps_positive: For second moments: round no positive value to 0, unless its whole block is
            as good as zero, and keep infinite values.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    keeps_positive: bool = False

    @classmethod
    def zeros(
        cls,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        keeps_positive: bool = False,
    ) -> ScaledState:
        """Make a state of zeros."""
        num_blocks = -(-columns // BLOCK_NUMEL)
        return cls(
            torch.zeros(rows, columns, dtype=dtype, device=device),
            torch.zeros(rows, num_blocks, dtype=torch.float32, device=device),
            keeps_positive,
        )

    def clear(self) -> None:
        """Make all values zero."""
        self.codes.zero_()
        self.scales.zero_()

    def decode(self) -> torch.Tensor:
        """Return the values, ``(rows, columns)`` fp32."""
        columns = self.codes.shape[1]
        factors = self.scales.repeat_interleave(BLOCK_NUMEL, dim=1)[:, :columns]
        return self.codes.float().mul_(factors)

    def encode(self, values: torch.Tensor, *, is_step: bool = False) -> None:
        """Store values; to store decoded values changes nothing.

        Args:
            values: ``(rows, columns)`` fp32.
            is_step: The values are a step's update of the stored ones: a magnitude that fell is
                stored as a smaller one, unless ``keeps_positive``.
        """
        before = self.decode().abs_() if is_step and not self.keeps_positive else None
        rows, columns = values.shape
        num_blocks = self.scales.shape[1]
        # Padding with zeros does not change the largest value of the last block.
        padded = torch.nn.functional.pad(values, (0, num_blocks * BLOCK_NUMEL - columns))
        blocks = padded.view(rows, num_blocks, BLOCK_NUMEL)
        largest = _LARGEST[self.codes.dtype]
        scales = blocks.abs().amax(dim=2).div_(largest)
        if self.keeps_positive:
            # An infinite scale would turn the whole block to zeros.
            scales = torch.where(scales.isinf(), _OVERFLOW / largest, scales)
            blocks.clamp_(max=torch.finfo(torch.float32).max)
        inverse = torch.where(scales > 0, 1.0 / scales, torch.zeros_like(scales))
        # A scale far below the normal range has an infinite inverse: the block is as good as zero.
        inverse = torch.where(inverse.isinf(), torch.zeros_like(inverse), inverse)
        # Multiply by the reciprocal, on every device: a division would round differently.
        codes = blocks * inverse.unsqueeze(2)
        if self.keeps_positive:
            smallest = _SMALLEST[self.codes.dtype]
            is_kept = (blocks > 0) & (inverse > 0).unsqueeze(2)
            codes = torch.where(is_kept, codes.clamp_min(smallest), codes)
        codes = codes.flatten(1)[:, :columns]
        # In place: the codes alias the state that the optimizer shows.
        self.scales.copy_(torch.where(inverse > 0, scales, torch.zeros_like(scales)))
        self.codes.copy_(codes.to(self.codes.dtype))
        if before is not None:
            is_as_large = (values.abs() < before) & (self.decode().abs_() >= before)
            # Codes are sign and magnitude: the next one towards zero has bits one less.
            bits = self.codes.view(torch.int8 if self.codes.itemsize == 1 else torch.int16)
            bits.sub_(is_as_large.to(bits.dtype))
