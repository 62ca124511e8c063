"""Formats of inputs and gradients: blocks both ways, given maxima, stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch

from megafsdp.quantize.input_formats import (
    BLOCK_E4M3,
    MX_E4M3,
    NV_E2M1,
    TENSOR_E4M3,
    TENSOR_E5M2,
    InputFormat,
    add_maximum,
)
from tests.quantize.quantized import BY_NAME, quantize, randn, same_values

FORMATS = [TENSOR_E4M3, TENSOR_E5M2, BLOCK_E4M3, MX_E4M3, NV_E2M1]
BLOCKS = [BLOCK_E4M3, MX_E4M3, NV_E2M1]
each_format = pytest.mark.parametrize("input_format", FORMATS, ids=lambda f: f.name)
# Half a step is at most 1/16 of a value for e4m3, 1/8 for e5m2, 1/4 for e2m1; on average less.
BANDS = {"e4m3": (0.015, 0.035), "e5m2": (0.03, 0.07), "e2m1": (0.06, 0.13)}


@pytest.mark.native
@pytest.mark.parametrize("along", [0, 1])
@each_format
def test_decoded_values_are_near(input_format: InputFormat, along: int) -> None:
    """With blocks cut short at the end, in any dtype; the codes take a byte or half of one."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = randn(150, 170).to(dtype)
        found = input_format.quantize(values, along=along)
        low, high = BANDS[input_format.element.name]
        distance = (found.dequantize(torch.float32) - values.float()).norm() / values.float().norm()
        assert low < distance.item() < high
        assert found.codes.shape == (150, 170 // input_format.element.codes_per_byte)
        wanted = found.dequantize(torch.float32)
        for out in (torch.bfloat16, torch.float16):
            assert torch.equal(found.dequantize(out), wanted.to(out))


@pytest.mark.native
@pytest.mark.parametrize("input_format", BLOCKS, ids=lambda f: f.name)
def test_blocks_along_tokens_are_blocks_of_the_transpose(input_format: InputFormat) -> None:
    """Decoded values are each other's transpose."""
    values = randn(96, 130)
    found = input_format.quantize(values, along=0).dequantize(torch.float32)
    of_transpose = input_format.quantize(values.T, along=1)
    assert torch.equal(of_transpose.dequantize(torch.float32), found.T)


@pytest.mark.native
@pytest.mark.parametrize("along", [0, 1])
@each_format
def test_transposed_codes_mean_the_same(input_format: InputFormat, along: int) -> None:
    """In the order of the transpose, beside the same scales; both ways at once where one can."""
    values = randn(130, 96)
    wanted = input_format.quantize(values, along=along)
    found = [input_format.quantize(values, along=along, is_transposed=True)]
    if input_format.block is None:
        found += input_format.quantize_both_ways(values)
        assert torch.equal(found[1].codes, wanted.codes)
        assert [way.is_transposed for way in found] == [True, False, True]
    for way in found:
        assert torch.equal(way.scales, wanted.scales)
        decoded = way.dequantize(torch.float32)
        assert torch.equal(decoded, wanted.dequantize(torch.float32))
    if input_format.element.codes_per_byte == 1:
        assert torch.equal(found[0].codes, wanted.codes.T)


@pytest.mark.native
@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("input_format", [BLOCK_E4M3, MX_E4M3], ids=lambda f: f.name)
def test_a_block_depends_on_its_values_alone(input_format: InputFormat, along: int) -> None:
    """What is done to a block changes no other, and each has a scale of its own."""
    assert input_format.block is not None
    values = randn(200, 260)
    before = input_format.quantize(values, along=along)
    first = [slice(0, 1), slice(0, 1)]
    first[along] = slice(0, input_format.block)
    values[first[0], first[1]] *= 1000
    after = input_format.quantize(values, along=along)
    is_changed = after.tile_scales() != before.tile_scales()
    assert is_changed.sum() == 1 and is_changed[0, 0]
    after.codes[first[0], first[1]] = before.codes[first[0], first[1]]
    assert torch.equal(after.codes, before.codes)
    size = (200, -(-260 // input_format.block)) if along else (-(-200 // input_format.block), 260)
    assert tuple(before.tile_scales().shape) == size


@pytest.mark.native
def test_a_tensor_wide_format_is_that_of_weights() -> None:
    """The same bytes as the whole matrix as a weight."""
    values = randn(32, 48)
    found = TENSOR_E4M3.quantize(values, along=1)
    wanted = quantize(BY_NAME["fp8_current"], values)
    assert torch.equal(found.codes.flatten(), wanted.codes)
    assert torch.equal(found.scales, wanted.table[:4])


@pytest.mark.native
@pytest.mark.parametrize("input_format", [TENSOR_E4M3, TENSOR_E5M2], ids=lambda f: f.name)
def test_a_given_maximum_scales(input_format: InputFormat) -> None:
    """As fp32 or as bits; its own maximum gives what no maximum does, a smaller one clamps."""
    values = randn(20, 30)
    wanted = input_format.quantize(values, along=1)
    maximum = values.abs().amax().reshape(1)
    for given in (maximum, maximum.view(torch.int32), maximum[0]):
        found = input_format.quantize(values, along=1, maximum=given)
        assert torch.equal(found.codes, wanted.codes)
        assert torch.equal(found.scales, wanted.scales)
    clamped = input_format.quantize(values, along=1, maximum=torch.ones(1))
    decoded = clamped.dequantize(torch.float32)
    assert decoded.abs().amax() == 1.0
    with pytest.raises(ValueError, match="no maximum beside blocks"):
        MX_E4M3.quantize(values, along=1, maximum=maximum)


@pytest.mark.native
@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize("along", [0, 1])
@each_format
def test_a_value_that_is_not_finite_makes_its_block_nan(
    input_format: InputFormat, along: int, wrong: float
) -> None:
    """Never a finite code; of a tensor-wide scale, and in the format of two levels, all is NaN."""
    values = randn(150, 260)
    values[140, 259] = wrong
    found = input_format.quantize(values, along=along).dequantize(torch.bfloat16)
    is_hit = torch.zeros(150, 260, dtype=torch.bool)
    if input_format.block is None or input_format is NV_E2M1:
        is_hit[:] = True
    else:
        start = (259 if along else 140) // input_format.block * input_format.block
        is_hit[(140, slice(start, None)) if along else (slice(start, None), 259)] = True
    assert torch.equal(found.isnan(), is_hit)
    if input_format.block is None:
        older = input_format.quantize(values, along=along, maximum=torch.ones(1))
        assert older.dequantize(torch.float32).isnan().sum() == 1


@pytest.mark.native
def test_noise_rounds_up_and_down() -> None:
    """The mean of many draws is the value; no noise rounds to nearest."""
    values = randn(16, 64)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(16, 64)
    for _ in range(400):
        noise = torch.rand(16, 64, generator=generator)
        total += NV_E2M1.quantize(values, along=1, noise=noise).dequantize(torch.float32)
    nearest = NV_E2M1.quantize(values, along=1)
    # Steps are up to a third of a block's maximum, 3: 400 draws have a deviation below 0.025 of
    # that, and 4.5 deviations of 1024 values are exceeded once in 150.
    assert (total / 400 - values).abs().amax() < 0.15
    assert (nearest.dequantize(torch.float32) - values).abs().amax() > 0.15
    # Scales of blocks have 3 bits of mantissa, so the largest value may be clamped.
    up = NV_E2M1.quantize(values, along=1, noise=torch.zeros(16, 64)).dequantize(torch.float32)
    assert (up.abs() >= values.abs() * (1 - 1 / 16)).all()


@pytest.mark.native
@each_format
def test_no_tokens_and_few_tokens(input_format: InputFormat) -> None:
    """A microbatch may be empty, or shorter than a block."""
    for along in (0, 1):
        empty = input_format.quantize(torch.zeros(0, 64), along=along)
        assert empty.codes.shape[0] == 0
        assert empty.dequantize(torch.bfloat16).shape == (0, 64)
        one = randn(1, 64)
        decoded = input_format.quantize(one, along=along).dequantize(torch.float32)
        assert 0 < (decoded - one).norm() / one.norm() < 0.15 or along == 0


@pytest.mark.native
def test_a_running_maximum_takes_the_largest() -> None:
    """Of all calls, any shape and dtype; a NaN is above all."""
    maximum = torch.zeros(1, dtype=torch.int32)
    largest = 0.0
    for values in (randn(5, 7, 3), randn(9).bfloat16() * 3, randn(4, 4).half(), torch.zeros(0, 8)):
        add_maximum(values, maximum)
        largest = max([largest, *values.abs().flatten().tolist()])
        assert maximum.view(torch.float32).item() == largest
    add_maximum(randn(4, 6).T, maximum)
    add_maximum(torch.tensor([torch.inf]), maximum)
    assert maximum.view(torch.float32).isinf()
    add_maximum(torch.tensor([-torch.nan, 1.0]), maximum)
    assert maximum.item() == 0x7FC00000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.zeros(3), r"shape \(3,\)"),
        (torch.zeros(3, 4, dtype=torch.float64), "float64"),
        (torch.zeros(3, 5), "even number of features, got 5"),
    ],
)
def test_what_cannot_be_quantized_is_named(values: torch.Tensor, message: str) -> None:
    """With the name of the format."""
    with pytest.raises(ValueError, match=f"{message}.*nv16_e2m1"):
        NV_E2M1.quantize(values, along=1)


@each_format
def test_a_compiled_graph_quantizes(input_format: InputFormat) -> None:
    """And decodes: the values of eager calls."""
    values = randn(40, 64)

    def there_and_back(given: torch.Tensor) -> torch.Tensor:
        return input_format.quantize(given, along=0).dequantize(torch.float32)

    # Graphs of other formats, and tests, count against the limit of one function's.
    torch.compiler.reset()
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(there_and_back, backend=backend, fullgraph=True)
        assert same_values(compiled(values), there_and_back(values))


def test_the_maximum_of_an_expanded_tensor_is_found() -> None:
    """As the gradient of a sum is: one number in memory."""
    maximum = torch.zeros(1, dtype=torch.int32)
    add_maximum(torch.full((1, 1), -3.0).expand(4, 8), maximum)
    assert maximum.view(torch.float32).item() == 3.0
