"""Weight formats: parts against the whole, transposes, and values that are not finite."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megafsdp.quantize.formats import WeightFormat
from tests.quantize.quantized import (
    BY_NAME,
    FORMATS,
    SHAPES,
    dequantize,
    fragments_of,
    quantize,
    randn,
    same_values,
)

NUM_CUTS = 400
THROUGH = [None, torch.bfloat16, torch.float16]
each_format = pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the norm of the difference over that of the second."""
    return ((left - right).norm() / right.norm()).item()


@pytest.mark.native
@each_format
def test_decoded_values_are_near(weight_format: WeightFormat) -> None:
    """As near as rounding to the codes leaves them, and not nearer; stacks too."""
    values = randn(3, *SHAPES[weight_format.name])
    decoded = dequantize(weight_format, quantize(weight_format, values), values.shape)
    # Half a step of 3 bits of mantissa is at most 1/16 of a value, of 1 bit 1/4; on average less.
    low, high = (0.06, 0.13) if weight_format.name == "nvfp4" else (0.015, 0.035)
    assert low < distance(decoded, values) < high


@pytest.mark.native
@each_format
def test_parts_cut_anywhere_equal_the_whole(weight_format: WeightFormat) -> None:
    """Random cuts of matrices and stacks: through tiles, with empty parts and single rows."""
    drawn = random.Random(0)
    for number in range(NUM_CUTS):
        rows, cols = SHAPES[weight_format.name]
        shape = (rows, cols) if number % 2 else (2, rows // 2 // 16 * 16, cols)
        if weight_format.name == "mxfp8" and number % 2 == 0:
            shape = (2, 32, cols)
        values = randn(*shape, seed=number)
        through = THROUGH[number % 3]
        total_rows = math.prod(shape[:-1])
        cuts = [drawn.randint(0, total_rows) for _ in range(drawn.randint(1, 5))]
        whole = quantize(weight_format, values, through=through)
        cuts += [cuts[0], min(cuts[0] + 1, total_rows)]
        assert whole.equals(quantize(weight_format, values, cuts=cuts, through=through)), cuts


@pytest.mark.native
@each_format
def test_a_stack_is_its_matrices(weight_format: WeightFormat) -> None:
    """No tile spans two: each is quantized as it would be alone."""
    values = randn(3, *SHAPES[weight_format.name]) * torch.tensor([1.0, 1e-3, 50.0]).view(3, 1, 1)
    together = dequantize(weight_format, quantize(weight_format, values), values.shape)
    for matrix, of_stack in zip(values, together, strict=True):
        alone = quantize(weight_format, matrix)
        assert torch.equal(dequantize(weight_format, alone, matrix.shape), of_stack)


@pytest.mark.native
@each_format
def test_the_transpose_of_codes_is_the_quantized_transpose(weight_format: WeightFormat) -> None:
    """Tiles are square, so the values serve the product with the transpose too."""
    values = randn(*SHAPES[weight_format.name])
    found = dequantize(weight_format, quantize(weight_format, values), values.shape)
    transposed = values.T.contiguous()
    of_transpose = quantize(weight_format, transposed)
    assert torch.equal(dequantize(weight_format, of_transpose, transposed.shape), found.T)


@pytest.mark.native
@each_format
def test_decoded_values_are_decoded_to_themselves(weight_format: WeightFormat) -> None:
    """Quantizing again loses nothing, where scales are powers of two; else an ulp of fp32."""
    values = randn(*SHAPES[weight_format.name])
    once = dequantize(weight_format, quantize(weight_format, values), values.shape)
    twice = dequantize(weight_format, quantize(weight_format, once), values.shape)
    if weight_format.name in ("fp8_block", "mxfp8"):
        assert torch.equal(twice, once)
    else:
        # The factor is made of a maximum that was itself rounded, in up to four operations.
        torch.testing.assert_close(twice, once, rtol=2.0**-20, atol=0.0)


@pytest.mark.native
@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
@each_format
def test_a_value_that_is_not_finite_makes_its_tile_nan(
    weight_format: WeightFormat, wrong: float
) -> None:
    """Whichever part has it; other tiles of formats with one level of scales are as they were."""
    values = randn(*SHAPES[weight_format.name])
    rows, cols = values.shape
    right = dequantize(weight_format, quantize(weight_format, values), values.shape)
    tile_rows, tile_cols = weight_format.tile or (rows, cols)
    if weight_format.name == "nvfp4":
        # The maximum of the matrix is in the scale of every tile.
        tile_rows, tile_cols = rows, cols
    for row, col in ((0, 0), (rows - 1, cols - 1), (rows // 2, 3)):
        broken = values.clone()
        broken[row, col] = wrong
        is_hit = torch.zeros(rows, cols, dtype=torch.bool)
        top, left = row // tile_rows * tile_rows, col // tile_cols * tile_cols
        is_hit[top : top + tile_rows, left : left + tile_cols] = True
        for cuts in ((), (row,), (row + 1,)):
            found = quantize(weight_format, broken, cuts=cuts)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                decoded = dequantize(weight_format, found, values.shape, dtype)
                assert torch.equal(decoded.isnan(), is_hit)
                assert torch.equal(decoded[~is_hit], right[~is_hit].to(dtype))


@pytest.mark.native
def test_under_an_older_maximum_what_is_too_large_is_clamped_and_the_infinite_is_nan() -> None:
    """Delayed scaling knows no maximum of this step."""
    delayed = BY_NAME["fp8_delayed"]
    values = torch.tensor([[1.0, -2.0, 3.0, torch.inf, -torch.inf, torch.nan, 1e38, 0.0]])
    codes, maxima = torch.zeros(8, dtype=torch.uint8), torch.tensor([2.0]).view(torch.int32)
    table = torch.zeros(16, dtype=torch.uint8)
    delayed.encode(fragments_of(values, ()), [maxima], [codes])
    delayed.fill_tables([(1, 8)], [maxima], [table])
    decoded = delayed.decode(codes, table, (1, 8), torch.float32)
    nan = math.nan
    assert same_values(decoded, torch.tensor([[1.0, -2.0, 2.0, nan, nan, nan, 2.0, 0.0]]))


@pytest.mark.native
@each_format
def test_values_are_decoded_to_any_dtype(weight_format: WeightFormat) -> None:
    """In fp64 they are those of fp32."""
    values = randn(*SHAPES[weight_format.name])
    found, shape = quantize(weight_format, values), tuple(values.shape)
    wide, narrow = (
        weight_format.decode(found.codes, found.table, shape, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert wide.dtype == torch.float64 and torch.equal(wide, narrow.double())


@pytest.mark.native
@each_format
def test_values_go_through_another_dtype(weight_format: WeightFormat) -> None:
    """As if they had been cast before; what a cast makes infinite makes its tile NaN."""
    values = randn(*SHAPES[weight_format.name])
    for through in (torch.bfloat16, torch.float16):
        found = quantize(weight_format, values, through=through)
        assert found.equals(quantize(weight_format, values.to(through).float()))
        assert found.equals(quantize(weight_format, values.to(through)))
        assert found.equals(quantize(weight_format, values.to(through), through=through))
        assert not found.equals(quantize(weight_format, values))
    values[3, 5] = 7e4
    found = quantize(weight_format, values, through=torch.float16)
    assert dequantize(weight_format, found, values.shape)[3, 5].isnan()
    bf16 = values.bfloat16()
    crossed = quantize(weight_format, bf16, through=torch.float16)
    assert crossed.equals(quantize(weight_format, bf16.half()))


@pytest.mark.native
@each_format
def test_a_batch_is_its_tensors(weight_format: WeightFormat) -> None:
    """Tensors of several shapes and dtypes in one call, one of them without a row here."""
    rows, cols = SHAPES[weight_format.name]
    tensors = [randn(rows, cols), randn(2, 32, 64), randn(rows, cols, seed=1).bfloat16()]
    tensors.append(randn(rows, cols, seed=2).half())
    alone = [quantize(weight_format, tensor) for tensor in tensors]
    fragments = [fragments_of(tensor, ())[0] for tensor in tensors]
    fragments.append(fragments_of(tensors[0], (0,))[0])
    assert fragments[-1].num_rows == 0
    maxima = [torch.zeros(weight_format.num_maxima(f.shape), dtype=torch.int32) for f in fragments]
    tables = [
        torch.zeros(weight_format.table_nbytes(f.shape), dtype=torch.uint8) for f in fragments
    ]
    codes = [
        torch.zeros(f.values.numel() // weight_format.codes_per_byte, dtype=torch.uint8)
        for f in fragments
    ]
    weight_format.add_maxima(fragments, maxima, through=torch.float32)
    weight_format.fill_tables([f.shape for f in fragments], maxima, tables)
    weight_format.encode(fragments, maxima, codes, through=torch.float32)
    for i, wanted in enumerate(alone):
        assert torch.equal(maxima[i], wanted.maxima)
        assert torch.equal(tables[i], wanted.table)
        assert torch.equal(codes[i], wanted.codes)
    assert not maxima[-1].any()


def test_shapes_that_a_format_cannot_take_are_named() -> None:
    """Vectors, empty tensors, and sides that are no multiples; fp8_block takes any matrix."""
    for name, multiple in (("fp8_current", 16), ("fp8_delayed", 16), ("mxfp8", 32), ("nvfp4", 16)):
        weight_format = BY_NAME[name]
        assert weight_format.reason_against((multiple, 3 * multiple)) is None
        assert weight_format.reason_against((4, multiple, multiple)) is None
        for shape in ((multiple + 1, multiple), (multiple, multiple // 2), (2, 8, multiple)):
            reason = weight_format.reason_against(shape)
            assert reason is not None and f"multiples of {multiple}" in reason
    block = BY_NAME["fp8_block"]
    assert block.reason_against((1, 7)) is None
    for weight_format in FORMATS:
        for shape in ((64,), (1, 1, 64, 64)):
            assert "matrices" in (weight_format.reason_against(shape) or "")
        assert "empty" in (weight_format.reason_against((64, 0)) or "")


@pytest.mark.parametrize(
    ("name", "nbytes", "num_maxima"),
    [
        ("fp8_current", 16, 2),
        ("fp8_delayed", 16, 2),
        ("fp8_block", 4 * 2 * 2 * 3, 2 * 2 * 3),
        ("mxfp8", 2 * 5 * 9 + 6, 2 * 5 * 9),
        ("nvfp4", 2 * (4 + 10 * 18), 2 * 10 * 18),
    ],
)
def test_tables_and_maxima_have_the_sizes_of_the_formula(
    name: str, nbytes: int, num_maxima: int
) -> None:
    """Of two matrices of 160 rows and 288 columns."""
    weight_format, shape = BY_NAME[name], (2, 160, 288)
    assert weight_format.num_maxima(shape) == num_maxima
    assert weight_format.table_nbytes(shape) == -(-nbytes // 16) * 16
    found = quantize(weight_format, randn(*shape))
    assert found.table.numel() == weight_format.table_nbytes(shape)
    assert not found.table[nbytes:].any()
    assert found.codes.numel() == 2 * 160 * 288 // weight_format.codes_per_byte


def test_scales_can_be_looked_at_by_tile() -> None:
    """They alias the table."""
    values = randn(2, 64, 96)
    for name, dtype, size in (
        ("fp8_current", torch.float32, (2, 1)),
        ("fp8_block", torch.float32, (2, 1)),
        ("mxfp8", torch.uint8, (4, 3)),
        ("nvfp4", torch.uint8, (8, 6)),
    ):
        found = quantize(BY_NAME[name], values)
        scales = BY_NAME[name].tile_scales(found.table, values.shape)
        assert scales.dtype == dtype and tuple(scales.shape) == size
        before = found.table.clone()
        scales.view(torch.uint8).add_(1)
        assert not torch.equal(found.table, before)


@pytest.mark.parametrize(
    ("values", "first_row", "message"),
    [
        (torch.zeros(8, dtype=torch.float64), 0, "float64"),
        (torch.zeros(2, 4), 0, r"1-D contiguous.*\(2, 4\)"),
        (torch.zeros(16)[::2], 0, "contiguous"),
        (torch.zeros(7), 0, "whole rows of 4.*7"),
        (torch.zeros(8), -1, "rows -1 to 1"),
        (torch.zeros(8), 5, "within 6 rows.*rows 5 to 7"),
    ],
)
def test_rows_outside_of_the_tensor_are_named(
    values: torch.Tensor, first_row: int, message: str
) -> None:
    """A fragment that cannot be right says why."""
    weight_format = BY_NAME["fp8_block"]
    with pytest.raises(ValueError, match=message):
        type(fragments_of(torch.zeros(6, 4), ())[0])(values, (2, 3, 4), first_row)
    assert weight_format.num_maxima((2, 3, 4)) == 2


@each_format
def test_a_compiled_graph_decodes(weight_format: WeightFormat) -> None:
    """The graph has one call, and gives the values of an eager one."""
    values = randn(*SHAPES[weight_format.name])
    found, shape = quantize(weight_format, values), tuple(values.shape)

    def decode(codes: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return weight_format.decode(codes, table, shape, torch.bfloat16)

    # Graphs of other formats, and tests, count against the limit of one function's.
    torch.compiler.reset()
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(decode, backend=backend, fullgraph=True)
        assert torch.equal(compiled(found.codes, found.table), decode(found.codes, found.table))
