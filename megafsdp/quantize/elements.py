"""Element codes: 8-bit and 4-bit floats, and powers of two, as bytes.

This is plain torch, and the reference for the compiled kernels. All rounding is to nearest even,
values beyond the largest are clamped before they are cast, and a NaN has one code, whatever its
sign. Codes are uint8: a 4-bit code has a byte of its own until :func:`pack` puts two into one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NAN_CODE = 0x7F
_INFINITE_BITS = 0x7F80_0000
_NAN_BITS = 0x7FC0_0000
_MANTISSA_BITS = 0x7F_FFFF
_SMALLEST_SCALE_BITS = 0x40_0000
_NAN_SCALE = 0xFF
# Upper ends of the values that round to a code of e2m1, and whether they belong to that code: ties
# go to the even code.
_E2M1_ENDS = (
    (0.25, True),
    (0.75, False),
    (1.25, True),
    (1.75, False),
    (2.5, True),
    (3.5, False),
    (5.0, True),
)
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# For steps of one and two between neighbours: the first value, the step, and from there on the
# code minus the value in steps.
_E2M1_STEPS = ((2.0, 1.0, 2), (4.0, 2.0, 4))


@dataclass(frozen=True, slots=True)
class Element:
    """A small float format of at most 8 bits.

    Attributes:
        name: ``"e4m3"``, ``"e5m2"`` or ``"e2m1"``: bits of exponent and mantissa.
        max_value: The largest finite value.
        codes_per_byte: 1; 2 for e2m1.
    """

    name: str
    max_value: float
    codes_per_byte: int

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the codes of fp32 values, uint8 of the same shape; allocates.

        Values beyond the largest become the largest, also infinite ones. NaN becomes ``0x7F`` in 8
        bits. In 4 bits, where no code means NaN, it becomes 0: the scale must carry the NaN.
        """
        clamped = values.clamp(-self.max_value, self.max_value)
        if self.name == "e2m1":
            return torch.where(clamped.isnan(), 0, _with_sign(_nearest_e2m1(clamped.abs()), values))
        codes = clamped.to(_FLOAT8[self.name]).view(torch.uint8)
        return torch.where(clamped.isnan(), NAN_CODE, codes)

    def encode_stochastically(self, values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return codes of fp32 values, each rounded up with the probability of its remainder.

        Args:
            values: Any shape, fp32.
            noise: The same shape, fp32, uniform in ``[0, 1)``. A magnitude is rounded up if the
                noise is less than its distance from the code below, measured in local steps.

        Raises:
            NotImplementedError: The element is not e2m1: 8-bit codes are rounded to nearest.
        """
        if self.name != "e2m1":
            raise NotImplementedError("8-bit elements are rounded to nearest")
        magnitude = values.clamp(-self.max_value, self.max_value).abs()
        step, offset = torch.full_like(magnitude, 0.5), torch.zeros_like(magnitude)
        for start, wider, shift in _E2M1_STEPS:
            is_beyond = magnitude >= start
            step = torch.where(is_beyond, wider, step)
            offset = torch.where(is_beyond, float(shift), offset)
        # Steps are powers of two, so the division and the remainder are exact.
        in_steps = magnitude / step
        below = in_steps.floor()
        codes = below + (noise < in_steps - below) + offset
        codes = torch.where(magnitude.isnan(), 0.0, codes).to(torch.uint8)
        return torch.where(magnitude.isnan(), 0, _with_sign(codes, values))

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the fp32 values of codes, of the same shape; allocates."""
        if self.name == "e2m1":
            table = torch.tensor(
                [*_E2M1_VALUES, *(-v for v in _E2M1_VALUES)],
                dtype=torch.float32,
                device=codes.device,
            )
            return table[codes.long()]
        return codes.view(_FLOAT8[self.name]).float()


E4M3 = Element("e4m3", 448.0, 1)
E5M2 = Element("e5m2", 57344.0, 1)
E2M1 = Element("e2m1", 6.0, 2)
_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Put pairs of 4-bit codes into one byte, the even one into the low half; allocates."""
    pairs = codes.view(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """Return the 4-bit codes of bytes, twice as many in the last dimension; allocates."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def encode_e8m0(values: torch.Tensor) -> torch.Tensor:
    """Return the exponent codes of non-negative fp32 values, rounded up; uint8.

    Code ``e`` means ``2**(e - 127)``, and 255 means NaN. Values up to ``2**-127`` become 0, values
    above ``2**127`` become 254, infinite ones and NaN become 255.
    """
    bits = values.view(torch.int32)
    exponent, mantissa = bits >> 23 & 0xFF, bits & _MANTISSA_BITS
    is_least = (exponent == 0) & (mantissa <= _SMALLEST_SCALE_BITS)
    is_up = (mantissa > 0) & (exponent < 254) & ~is_least
    return (exponent + is_up).to(torch.uint8)


def decode_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 powers of two of exponent codes; code 0 gives a subnormal number."""
    bits = codes.to(torch.int32) << 23
    bits = torch.where(codes == 0, _SMALLEST_SCALE_BITS, bits)
    return torch.where(codes == _NAN_SCALE, _NAN_BITS, bits).view(torch.float32)


def magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of ``|values|`` in fp32 as int32; they are ordered as the values are.

    Every NaN has the same pattern, which is above all others.
    """
    bits = values.float().view(torch.int32) & 0x7FFF_FFFF
    return torch.where(bits > _INFINITE_BITS, _NAN_BITS, bits)


def _nearest_e2m1(magnitude: torch.Tensor) -> torch.Tensor:
    codes = torch.zeros_like(magnitude, dtype=torch.uint8)
    for end, is_inside in _E2M1_ENDS:
        codes += magnitude > end if is_inside else magnitude >= end
    return codes


def _with_sign(codes: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return codes | (values.signbit().to(torch.uint8) << 3)
