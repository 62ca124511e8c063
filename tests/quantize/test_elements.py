"""Element codes against ml_dtypes: all bytes, and values beside every border between two codes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from megafsdp.quantize.elements import (
    E2M1,
    E4M3,
    E5M2,
    Element,
    decode_e8m0,
    encode_e8m0,
    magnitude_bits,
    pack,
    unpack,
)
from tests.quantize.quantized import same_values

FLOATS = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
ELEMENTS = [E4M3, E5M2, E2M1]


def all_codes(element: Element) -> torch.Tensor:
    """Return every code once."""
    return torch.arange(16 if element.codes_per_byte == 2 else 256, dtype=torch.uint8)


def borders(element: Element) -> torch.Tensor:
    """Return all values, the middles between neighbours, and what lies one ulp beside each."""
    values = element.decode(all_codes(element))
    values = values[values.isfinite()].unique().double()
    values = values[values.abs() <= element.max_value]
    middles = (values[1:] + values[:-1]) / 2
    middle = torch.cat([values, middles, 1.25 * values, torch.tensor([1e-40])]).float()
    zero, infinity = torch.tensor(0.0), torch.tensor(torch.inf)
    found = torch.cat([middle, *(torch.nextafter(middle, e) for e in (-infinity, infinity))])
    return torch.cat([found, -found, zero[None], -zero[None]])


def by_ml_dtypes(element: Element, values: torch.Tensor) -> torch.Tensor:
    """Return the codes of values, which ml_dtypes does not clamp."""
    clamped = values.clamp(-element.max_value, element.max_value).numpy()
    return torch.from_numpy(clamped.astype(FLOATS[element.name]).view(np.uint8))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_code_has_the_value_of_ml_dtypes(element: Element) -> None:
    """NaN and the infinities of e5m2 too."""
    codes = all_codes(element)
    wanted = torch.from_numpy(codes.numpy().view(FLOATS[element.name]).astype(np.float32))
    assert same_values(element.decode(codes), wanted)
    assert torch.equal(element.decode(codes).signbit(), wanted.signbit())


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_values_beside_every_border_are_rounded_to_nearest_even(element: Element) -> None:
    """Zeros and what rounds to them keep their sign; what is too large becomes the largest."""
    values = borders(element)
    assert torch.equal(element.encode(values), by_ml_dtypes(element, values))
    codes = all_codes(element)
    finite = codes[element.decode(codes).isfinite()]
    assert torch.equal(element.encode(element.decode(finite)), finite)


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_infinities_are_clamped_and_nan_has_one_code(element: Element) -> None:
    """The sign of a NaN is not kept; in four bits no code means NaN."""
    largest = element.encode(torch.tensor([element.max_value]))
    infinite = element.encode(torch.tensor([torch.inf, -torch.inf]))
    assert infinite[0] == largest[0]
    assert element.decode(infinite)[1] == -element.max_value
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert element.encode(nan).tolist() == [0 if element is E2M1 else 0x7F] * 3


@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda e: e.name)
def test_values_are_clamped_before_they_are_cast(
    element: Element, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cast that does not saturate, as some versions of torch have, gives the same codes."""
    values = torch.tensor([element.max_value * 1.2, 1e30, -torch.inf])
    wanted = element.encode(values)
    usual = torch.Tensor.to

    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        assert dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        overflows = tensor.abs() > element.max_value
        return usual(torch.where(overflows, torch.nan, tensor), dtype)

    monkeypatch.setattr(torch.Tensor, "to", cast)
    assert torch.equal(element.encode(values), wanted)


def test_e2m1_is_rounded_up_as_often_as_a_remainder_says() -> None:
    """By noise of a thousand steps, for magnitudes in all steps of the codes; signs are kept."""
    noise = torch.arange(1000) / 1000
    for value, below, above, share in (
        (0.2, 0.0, 0.5, 0.4),
        (1.75, 1.5, 2.0, 0.5),
        (2.25, 2.0, 3.0, 0.25),
        (5.5, 4.0, 6.0, 0.75),
        (1.5, 1.5, 2.0, 0.0),
        (9.0, 6.0, 6.0, 1.0),
    ):
        for sign in (1.0, -1.0):
            codes = E2M1.encode_stochastically(torch.full((1000,), sign * value), noise)
            found = E2M1.decode(codes) * sign
            assert set(found.tolist()) <= {below, above}
            if below < above:
                assert (found == above).float().mean().item() == pytest.approx(share, abs=2e-3)
    assert E2M1.encode_stochastically(torch.tensor([torch.nan]), torch.zeros(1)).item() == 0
    with pytest.raises(NotImplementedError, match="8-bit"):
        E4M3.encode_stochastically(noise, noise)


def test_every_exponent_code_has_the_value_of_ml_dtypes() -> None:
    """From 2**-127, a subnormal number, to 2**127, and NaN; each rounds up to itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    wanted = torch.from_numpy(codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    assert same_values(decode_e8m0(codes).double(), wanted)
    assert torch.equal(encode_e8m0(decode_e8m0(codes)), codes)


def test_exponents_are_rounded_up() -> None:
    """One ulp above a power of two is the next; what no code reaches becomes the last finite."""
    powers = decode_e8m0(torch.arange(255, dtype=torch.uint8))
    infinity = torch.tensor(torch.inf)
    above, below = (torch.nextafter(powers, e) for e in (infinity, -infinity))
    codes = torch.arange(255)
    assert torch.equal(encode_e8m0(above).int(), (codes + 1).clamp(max=254).int())
    assert torch.equal(encode_e8m0(below).int(), codes.int())
    others = torch.tensor([0.0, 1e-45, torch.finfo(torch.float32).max, torch.inf, torch.nan])
    assert encode_e8m0(others).tolist() == [0, 0, 254, 255, 255]


def test_pairs_of_codes_have_the_even_one_in_the_low_half() -> None:
    """All pairs, there and back."""
    codes = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.uint8)
    packed = pack(codes.flatten())
    assert torch.equal(packed, codes[:, 0] + 16 * codes[:, 1])
    assert torch.equal(unpack(packed), codes.flatten())
    assert pack(codes.view(4, -1)).shape == (4, 64)


def test_bits_of_magnitudes_are_ordered_as_magnitudes_are() -> None:
    """Zeros are equal, a NaN is above infinity, and all NaN are one number."""
    values = torch.tensor([0.0, 1e-45, -1e-40, 0.5, -447.99, 448.0, -3e38, torch.inf, torch.nan])
    bits = magnitude_bits(values)
    assert torch.equal(bits, bits.sort().values)
    assert torch.equal(magnitude_bits(-values), bits)
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert magnitude_bits(signalling).item() == bits[-1].item() == 0x7FC00000
