"""CUDA kernels of quantized weights and inputs against the formulas in torch.

On a GPU, and thread by thread on the host, where the code of the threads runs as it stands: which
elements they load and store, tiles, tails, tables and transpositions. What lanes of a warp and
threads of a block do at once, a GPU's conversions and launches need one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp import _native
from megafsdp._native import cuda_module
from megafsdp.quantize import input_formats, kernels
from megafsdp.quantize.cuda_kernels import kernels_on
from megafsdp.quantize.elements import E2M1, E4M3, E5M2, Element, pack, unpack
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.input_formats import ALONG_FEATURES, ALONG_TOKENS, InputFormat
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.scales import E8M0Scaling, Fp32Scaling
from megafsdp.quantize.tiles import (
    Fragment,
    TileCoding,
    add_maxima_in_torch,
    decode_in_torch,
    encode_in_torch,
    fill_table_in_torch,
)
from tests.optimizer.adam.flat_buffers import guarded
from tests.quantize.emulated_cuda import emulated_cuda
from tests.ranks import Ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FORMATS = [recipe_of(name).weight for name in RECIPE_NAMES]
# Source, and what it is rounded to first.
SOURCES = [(FP32, None), (FP32, BF16), (FP32, FP16), (BF16, None), (FP16, None)]
INPUTS = [
    input_formats.TENSOR_E4M3,
    input_formats.TENSOR_E5M2,
    input_formats.BLOCK_E4M3,
    input_formats.MX_E4M3,
    input_formats.NV_E2M1,
]
# Elements before a buffer: vectors may begin there, or not. For codes these are bytes.
ALIGNED, MISALIGNED = 64, 3
MOST_FRAGMENTS = 32

needs_module = pytest.mark.skipif(cuda_module() is None, reason="CUDA kernels are off or not built")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPU")


@dataclasses.dataclass
class Place:
    """Where the kernels run.

    Attributes:
        device: Where tensors must be.
        launches: Of each call its function and number of launches; None on a GPU.
        were_aligned: Whether calls moved vectors; None on a GPU.
    """

    device: torch.device
    launches: list[tuple[str, int]] | None = None
    were_aligned: list[bool] | None = None

    def put(self, tensor: torch.Tensor, guard: int = ALIGNED) -> torch.Tensor:
        """Return a flat copy of a tensor there, with poison on both sides."""
        return guarded(tensor.flatten(), guard, self.device)


def _places() -> list[Any]:
    return ["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_module])]


@pytest.fixture(params=_places())
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Give the kernels of a GPU, or their threads on the host."""
    if request.param == "cuda":
        device = torch.device("cuda", 0)
        assert kernels_on(device) is not None, "the fallback would prove nothing"
        yield Place(device)
        return
    with emulated_cuda(request.getfixturevalue("emulation")) as module:
        yield Place(torch.device("cpu"), module.launches, module.were_aligned)


@dataclasses.dataclass
class Artifacts:
    """All that quantizing a tensor makes."""

    maxima: torch.Tensor
    table: torch.Tensor
    codes: torch.Tensor
    decoded: list[torch.Tensor]


def values_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-9, 5, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * 2.0**exponents).to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare bytes, but for NaN among decoded values, which has no one pattern."""
    left, right = left.cpu().flatten(), right.cpu().flatten()
    if left.dtype.is_floating_point:
        is_nan = right.isnan()
        if not torch.equal(left.isnan(), is_nan):
            return False
        left, right = left[~is_nan], right[~is_nan]
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def formula(
    coding: TileCoding, values: torch.Tensor, through: torch.dtype | None = None
) -> Artifacts:
    """Quantize a whole tensor in torch."""
    shape = tuple(values.shape)
    fragment = Fragment(values.flatten(), shape, 0)
    maxima = torch.zeros(coding.grid(shape).num_tiles, dtype=torch.int32)
    add_maxima_in_torch(coding, fragment, maxima, through)
    table = torch.empty(coding.table_nbytes(shape) + 12, dtype=torch.uint8)
    fill_table_in_torch(coding, shape, maxima, table)
    codes = torch.empty(values.numel() // coding.element.codes_per_byte, dtype=torch.uint8)
    encode_in_torch(coding, fragment, maxima, codes, through)
    decoded = []
    for dtype in (FP32, BF16, FP16):
        decoded.append(torch.empty(shape, dtype=dtype))
        decode_in_torch(coding, codes, table, shape, decoded[-1])
    return Artifacts(maxima, table, codes, decoded)


def by_kernels(
    place: Place,
    coding: TileCoding,
    values: torch.Tensor,
    through: torch.dtype | None = None,
    cuts: Sequence[int] = (),
    guard: int = ALIGNED,
    code_guard: int | None = None,
) -> Artifacts:
    """Quantize the fragments of a tensor, cut at some rows, each in buffers of its own."""
    code_guard = guard if code_guard is None else code_guard
    shape, cols = tuple(values.shape), values.shape[-1]
    num_rows, per_byte = values.numel() // cols, coding.element.codes_per_byte
    bounds = list(itertools.pairwise([0, *sorted(cuts), num_rows]))
    flat = values.flatten()
    fragments = [
        Fragment(place.put(flat[start * cols : stop * cols], guard), shape, start)
        for start, stop in bounds
    ]
    maxima = place.put(torch.zeros(coding.grid(shape).num_tiles, dtype=torch.int32), guard)
    table = place.put(torch.full((coding.table_nbytes(shape) + 12,), 0x55, dtype=torch.uint8))
    codes = [
        place.put(torch.full((f.values.numel() // per_byte,), 0x55, dtype=torch.uint8), code_guard)
        for f in fragments
    ]
    kernels.add_maxima(coding, fragments, [maxima] * len(fragments), through)
    kernels.fill_tables(coding, [shape], [maxima], [table])
    kernels.encode(coding, fragments, [maxima] * len(fragments), codes, through)
    whole = place.put(torch.cat([c.cpu() for c in codes]), code_guard)
    decoded = []
    for dtype in (FP32, BF16, FP16):
        decoded.append(place.put(torch.zeros(values.numel(), dtype=dtype), guard))
        kernels.decode(coding, whole, table, shape, decoded[-1].view(shape))
    for buffer in (maxima, table, *codes, *decoded):
        assert_guards_hold(buffer)
    return Artifacts(maxima, table, torch.cat([c.cpu() for c in codes]), decoded)


def assert_guards_hold(buffer: torch.Tensor) -> None:
    """Check that what lies around a guarded buffer is poison as it was."""
    storage = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
    start = buffer.storage_offset() * buffer.element_size()
    assert (storage[:start] == 0x7F).all() and start > 0
    assert (storage[start + buffer.nbytes :] == 0x7F).all()


def assert_same(found: Artifacts, wanted: Artifacts) -> None:
    """Compare all that was made."""
    assert same_bits(found.maxima, wanted.maxima), "maxima"
    assert same_bits(found.table, wanted.table), "table"
    assert same_bits(found.codes, wanted.codes), "codes"
    for left, right in zip(found.decoded, wanted.decoded, strict=True):
        assert same_bits(left, right), f"values in {right.dtype}"


@pytest.mark.parametrize(("dtype", "through"), SOURCES, ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_fragments_of_every_format_have_the_bits_of_the_formula(
    place: Place, form: WeightFormat, dtype: torch.dtype, through: torch.dtype | None
) -> None:
    """Cut at any row, empty too; a matrix and a stack; whole vectors and single elements."""
    for shape, cuts in (((160, 96), (1, 50, 50, 131)), ((3, 64, 32), (20, 70, 129))):
        values = values_of(shape, dtype)
        wanted = formula(form.coding, values, through)
        for guard in (ALIGNED, MISALIGNED):
            found = by_kernels(place, form.coding, values, through, cuts, guard)
            assert_same(found, wanted)
            if place.were_aligned is not None:
                assert set(place.were_aligned) == {guard == ALIGNED}
                place.were_aligned.clear()
    assert wanted.codes.unique().numel() > 10


# Rows shorter than a vector and longer than a panel of threads, and tiles that are cut short.
BLOCK_SHAPES = [(1, 1), (5, 13), (3, 8), (130, 20), (9, 2064), (2, 4104), (2, 150, 40)]


@pytest.mark.parametrize("shape", BLOCK_SHAPES, ids=str)
def test_tails_of_rows_have_the_bits_of_the_formula(place: Place, shape: tuple[int, ...]) -> None:
    """Of a format that takes any shape, in one tile a matrix too; nothing else is written."""
    values = values_of(shape, BF16)
    cuts = (math.prod(shape[:-1]) // 3,)
    for form in (FORMATS[RECIPE_NAMES.index("fp8_block")], FORMATS[0]):
        wanted = formula(form.coding, values)
        for guard, code_guard in ((ALIGNED, ALIGNED), (ALIGNED, MISALIGNED), (MISALIGNED, ALIGNED)):
            found = by_kernels(place, form.coding, values, None, cuts, guard, code_guard)
            assert_same(found, wanted)


def test_runs_of_any_length_have_the_bits_of_the_formula(place: Place) -> None:
    """A matrix of one tile is a run: only its last vector is moved by element."""
    coding = FORMATS[0].coding
    for numel in (1, 7, 8, 9, 2047, 2049, 8 * 2048 + 3):
        values = values_of((1, numel), FP32, seed=numel)
        assert_same(by_kernels(place, coding, values), formula(coding, values))
    if place.were_aligned is not None:
        assert all(place.were_aligned)


def test_random_cuts_equal_the_whole(place: Place) -> None:
    """Shapes, cuts and formats by chance."""
    generator = torch.Generator().manual_seed(0)

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=generator))

    for i in range(60):
        form = FORMATS[i % len(FORMATS)]
        shape = (form.multiple * (1 + draw(3)), form.multiple * (1 + draw(4)))
        shape = (1 + draw(3), *shape) if draw(2) else shape
        num_rows = math.prod(shape[:-1])
        cuts = [draw(num_rows + 1) for _ in range(draw(4))]
        dtype, through = SOURCES[draw(len(SOURCES))]
        values = values_of(shape, dtype, seed=i)
        found = by_kernels(place, form.coding, values, through, cuts)
        assert_same(found, formula(form.coding, values, through))


NEAR_448 = (447.99, 448.0, 448.01, 464.0, 480.0)
LARGEST, SMALLEST = torch.finfo(FP32).max, 2.0**-149


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_special_values_have_the_bits_of_the_formula(place: Place, form: WeightFormat) -> None:
    """Zeros, subnormal numbers, the largest, infinities and NaN, each in tiles of its own."""
    values = values_of((320, 128), FP32)
    for i, special in enumerate((0.0, -0.0, SMALLEST, -1e-40, *NEAR_448, LARGEST, -LARGEST)):
        values[:, i * 11 + 3] = special
    values[32:64] = 0.0
    values[64:96] = values[64:96].sign() * 1e-40
    values[128:160, 32:64] = LARGEST
    # The last two are NaN of other patterns than the one that maxima have.
    patterns = torch.tensor([0x7FFFFFFF, -0x3FFFFF], dtype=torch.int32).view(FP32)
    for special in (0.0, math.inf, -math.inf, math.nan, *patterns):
        values[300, 100] = special
        for through in (None, BF16):
            found = by_kernels(place, form.coding, values, through, cuts=(33, 301))
            assert_same(found, formula(form.coding, values, through))
        # Next to the largest fp32 all of a matrix may be infinite.
        if not math.isfinite(special):
            assert found.decoded[0].view(320, 128)[300, 96:104].isnan().all()


def test_values_above_a_given_maximum_are_clamped_and_infinite_ones_are_not(place: Place) -> None:
    """Maxima of earlier steps: the largest code, but NaN for what is infinite."""
    coding, shape = FORMATS[RECIPE_NAMES.index("fp8_delayed")].coding, (48, 64)
    values = values_of(shape, FP32)
    values[1, 2:5] = torch.tensor([math.inf, -math.inf, math.nan])
    maximum = torch.tensor([0.25]).view(torch.int32)
    fragment = Fragment(values.flatten(), shape, 0)
    wanted = torch.empty(values.numel(), dtype=torch.uint8)
    encode_in_torch(coding, fragment, maximum, wanted, None)
    codes = place.put(torch.zeros_like(wanted))
    there = Fragment(place.put(values), shape, 0)
    kernels.encode(coding, [there], [place.put(maximum)], [codes], None)
    assert same_bits(codes, wanted)
    assert (wanted == 0x7E).sum() > 20 and (wanted == 0x7F).sum() == 3


def test_codes_of_all_magnitudes_have_the_bits_of_the_formula(place: Place) -> None:
    """Ties and their neighbours among all codes: a maximum that makes the factor one."""
    for element in (E4M3, E5M2, E2M1):
        codes = torch.arange(0, 0x7F if element is E4M3 else 0x7C if element is E5M2 else 8)
        exact = element.decode(codes.to(torch.uint8)).double()
        middle = ((exact[1:] + exact[:-1]) / 2).float()
        near = torch.cat([exact.float(), middle])
        bits = near.view(torch.int32)
        near = torch.cat([near, (bits + 1).view(FP32), (bits - 1).clamp(min=0).view(FP32)])
        values = torch.cat([near, -near]).contiguous()
        values = torch.cat([values, values.new_zeros(-len(values) % 2)])[None]
        coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), None)
        maximum = torch.tensor([element.max_value]).view(torch.int32)
        shape = tuple(values.shape)
        wanted = torch.empty(values.numel() // element.codes_per_byte, dtype=torch.uint8)
        encode_in_torch(coding, Fragment(values[0], shape, 0), maximum, wanted, None)
        for guard in (ALIGNED, MISALIGNED):
            found = place.put(torch.zeros_like(wanted), guard)
            fragment = Fragment(place.put(values, guard), shape, 0)
            kernels.encode(coding, [fragment], [place.put(maximum)], [found], None)
            assert same_bits(found, wanted)


def test_all_codes_are_decoded_as_by_the_formula(place: Place) -> None:
    """Every byte of every element, in three dtypes."""
    for element in (E4M3, E5M2, E2M1):
        codes = torch.arange(256, dtype=torch.uint8)
        shape = (1, 256 * element.codes_per_byte)
        coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), None)
        table = torch.tensor([0.75]).view(torch.uint8)
        for dtype, guard in itertools.product((FP32, BF16, FP16), (ALIGNED, MISALIGNED)):
            wanted = torch.empty(shape, dtype=dtype)
            decode_in_torch(coding, codes, table, shape, wanted)
            found = place.put(torch.zeros_like(wanted), guard).view(shape)
            kernels.decode(coding, place.put(codes, guard), place.put(table), shape, found)
            assert same_bits(found, wanted)


@pytest.mark.parametrize("along", [ALONG_FEATURES, ALONG_TOKENS], ids=["features", "tokens"])
@pytest.mark.parametrize("form", INPUTS, ids=lambda form: form.name)
def test_inputs_have_the_bits_of_the_formula(place: Place, form: InputFormat, along: int) -> None:
    """Blocks along features and along tokens, cut short or not, of any dtype."""
    coding = form.coding(along=along)
    shapes = [(256, 192), (144, 80), (5, 40), (1, 2), (33, 150), (2, 2208)]
    for (shape, dtype), guard in itertools.product(
        zip(shapes, (FP32, BF16, FP16, BF16, FP32, BF16), strict=True), (ALIGNED, MISALIGNED)
    ):
        values = values_of(shape, dtype)
        values[shape[0] // 2, 1] = 300.0
        wanted = formula(coding, values)
        there = place.put(values, guard).view(shape)
        found = form.quantize(there, along=along)
        assert same_bits(found.codes, wanted.codes)
        assert same_bits(found.scales, wanted.table[: found.scales.numel()])
        assert same_bits(found.dequantize(BF16), wanted.decoded[1])
    if place.launches is not None:
        is_one_pass = form.block is not None and form.element is not E2M1
        functions = {function for function, _ in place.launches}
        assert ("encode_matrix" in functions) == is_one_pass
        assert ("encode_tiles" in functions) != is_one_pass


@pytest.mark.parametrize("special", [math.nan, math.inf, 0.0, SMALLEST, LARGEST])
def test_blocks_of_special_values_have_the_bits_of_the_formula(
    place: Place, special: float
) -> None:
    """A block that is not finite is NaN, and its neighbours are not."""
    for form, along in itertools.product(INPUTS[2:], (ALONG_FEATURES, ALONG_TOKENS)):
        coding = form.coding(along=along)
        values = values_of((160, 256), FP32)
        values[32:64, 64:96] = special
        values[:128, 200:208] = special
        values[140, :128] = special
        wanted = formula(coding, values)
        found = form.quantize(place.put(values).view(values.shape), along=along)
        assert same_bits(found.codes, wanted.codes)
        assert same_bits(found.scales, wanted.table[: found.scales.numel()])


def test_blocks_of_other_sizes_take_more_launches(place: Place) -> None:
    """What no kernel does in one pass has the same bits, by way of maxima."""
    for tile in ((1, 512), (64, 1), (8, 1), (1, 4), (2, 1)):
        coding = TileCoding(E4M3, E8M0Scaling(), tile)
        values = values_of((70, 1100), BF16)
        wanted = formula(coding, values)
        codes, table = kernels.quantize(coding, place.put(values).view(values.shape), None, None)
        assert same_bits(codes, wanted.codes)
        assert same_bits(table, wanted.table[: table.numel()])


@pytest.mark.parametrize("guard", [ALIGNED, MISALIGNED])
def test_noise_rounds_as_the_formula(place: Place, guard: int) -> None:
    """Of four-bit codes, by a number for each value."""
    form, shape = input_formats.NV_E2M1, (48, 72)
    values = values_of(shape, BF16)
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    coding = form.coding(along=ALONG_FEATURES)
    fragment = Fragment(values.flatten(), shape, 0)
    plain = formula(coding, values)
    wanted = torch.empty_like(plain.codes)
    encode_in_torch(coding, fragment, plain.maxima, wanted, None, noise)
    there = place.put(values, guard).view(shape)
    found = form.quantize(there, along=ALONG_FEATURES, noise=place.put(noise, guard).view(shape))
    assert same_bits(found.codes, wanted)
    assert not torch.equal(wanted, plain.codes)


TRANSPOSED_SHAPES = [(128, 64), (256, 144), (16, 16), (130, 70), (2, 4), (64, 200), (300, 8)]


def _transposed(codes: torch.Tensor, element: Element) -> torch.Tensor:
    plain = unpack(codes) if element is E2M1 else codes
    transposed = plain.transpose(-2, -1).contiguous()
    return pack(transposed) if element is E2M1 else transposed


@pytest.mark.parametrize("matrices", [(), (3,)], ids=["matrix", "stack"])
@pytest.mark.parametrize("element", [E4M3, E2M1], ids=["bytes", "nibbles"])
def test_codes_are_transposed(place: Place, element: Element, matrices: tuple[int, ...]) -> None:
    """Of a matrix and of each of a stack, whole vectors and tails."""
    generator = torch.Generator().manual_seed(0)
    for (rows, cols), guard in itertools.product(TRANSPOSED_SHAPES, (ALIGNED, MISALIGNED)):
        shape = (*matrices, rows, cols // element.codes_per_byte)
        codes = torch.randint(256, shape, generator=generator).to(torch.uint8)
        found = kernels.transpose_codes(place.put(codes, guard).view(shape), element)
        assert torch.equal(found.cpu(), _transposed(codes, element))
        if place.were_aligned is not None:
            is_aligned = guard == ALIGNED and rows % 16 == 0 and cols % 16 == 0
            assert place.were_aligned[-1] == is_aligned


@pytest.mark.parametrize("has_both", [False, True], ids=["transposed", "both ways"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_codes_are_transposed_on_their_way(
    place: Place, dtype: torch.dtype, has_both: bool
) -> None:
    """Of blocks along tokens, and of one scale a tensor: the codes of two passes in one."""
    codings = [
        input_formats.BLOCK_E4M3.coding(along=ALONG_TOKENS),
        input_formats.MX_E4M3.coding(along=ALONG_TOKENS),
        input_formats.TENSOR_E5M2.coding(along=ALONG_TOKENS),
        input_formats.NV_E2M1.coding(along=ALONG_TOKENS),
    ]
    for coding, (rows, cols), guard in itertools.product(
        codings, TRANSPOSED_SHAPES, (ALIGNED, MISALIGNED)
    ):
        values = values_of((rows, cols), dtype)
        wanted = formula(coding, values)
        there = place.put(values, guard).view(rows, cols)
        if place.launches is not None:
            place.launches.clear()
        codes, transposed, table = kernels.quantize_transposed(coding, there, has_codes=has_both)
        plain = wanted.codes.view(rows, cols // coding.element.codes_per_byte)
        assert same_bits(transposed, _transposed(plain, coding.element))
        assert same_bits(table, wanted.table[: table.numel()])
        assert (codes is not None) == has_both
        if codes is not None:
            assert same_bits(codes, plain)
        if place.launches is not None and coding.element is not E2M1:
            before = ["add_tile_maxima", "fill_scale_tables"] if coding.tile is None else []
            functions = [function for function, _ in place.launches]
            assert functions == [*before, "encode_matrix"]


def test_codes_are_transposed_by_a_given_maximum(place: Place) -> None:
    """That of earlier steps: larger values are clamped, and those that are not finite are NaN."""
    coding, shape = input_formats.TENSOR_E4M3.coding(along=ALONG_TOKENS), (144, 80)
    values, maximum = values_of(shape, BF16), torch.tensor([1.5])
    values[1, 2:5] = torch.tensor([math.inf, -math.inf, math.nan])
    wanted = torch.empty(values.numel(), dtype=torch.uint8)
    bits = maximum.view(torch.int32)
    encode_in_torch(coding, Fragment(values.flatten(), shape, 0), bits, wanted, None)
    there = place.put(values).view(shape)
    _, transposed, table = kernels.quantize_transposed(coding, there, place.put(maximum))
    assert same_bits(transposed, _transposed(wanted.view(shape), E4M3))
    assert table.view(FP32).item() == 1 / (torch.tensor(448.0) / 1.5)
    assert (wanted == 0x7E).any() and (wanted == 0x7F).sum() == 3


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_launch_takes_a_table_of_fragments(place: Place, form: WeightFormat) -> None:
    """Many tensors of several shapes, some without rows here, in one launch for each table."""
    count = MOST_FRAGMENTS + 8
    tensors = [values_of((32 * (1 + i % 3), 32 * (1 + i % 2)), BF16, seed=i) for i in range(count)]
    wanted = [formula(form.coding, values) for values in tensors]
    shapes = [tuple(values.shape) for values in tensors]
    # Every fifth has no rows here.
    held = [values[: 0 if i % 5 == 4 else None] for i, values in enumerate(tensors)]
    fragments = [Fragment(place.put(v), s, 0) for v, s in zip(held, shapes, strict=True)]
    maxima = [place.put(w.maxima) for w in wanted]
    tables = [place.put(torch.zeros_like(w.table)) for w in wanted]
    codes = [
        place.put(torch.zeros(v.numel() // form.codes_per_byte, dtype=torch.uint8)) for v in held
    ]
    form.add_maxima(fragments, maxima)
    form.fill_tables(shapes, maxima, tables)
    form.encode(fragments, maxima, codes)
    for i, artifacts in enumerate(wanted):
        assert same_bits(maxima[i], artifacts.maxima)
        assert same_bits(tables[i], artifacts.table)
        assert same_bits(codes[i], artifacts.codes[: codes[i].numel()])
    if place.launches is not None:
        num_held = sum(v.numel() > 0 for v in held)
        assert num_held == MOST_FRAGMENTS < count
        assert place.launches == [
            ("add_tile_maxima", 1),
            ("fill_scale_tables", 2),
            ("encode_tiles", 1),
        ]


def _between_forbidden_pages(nbytes: int, *, at_end: bool) -> tuple[mmap.mmap, int]:
    """Return memory and an address in it; before its first page and after its last are traps."""
    page = mmap.PAGESIZE
    pages = -(-nbytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for trap in (base, base + (pages + 1) * page):
        assert protect(ctypes.c_void_p(trap), ctypes.c_size_t(page), 0) == 0
    return memory, base + page + (pages * page - nbytes if at_end else 0)


def _run_between_traps(library: Path, numel: int) -> int:
    """Quantize with all buffers beside memory that nobody may touch; return the calls made."""
    kept = []

    def trapped(tensor: torch.Tensor, at_end: bool) -> torch.Tensor:
        memory, address = _between_forbidden_pages(tensor.nbytes, at_end=at_end)
        kept.append(memory)
        array = (ctypes.c_char * tensor.nbytes).from_address(address)
        copy = torch.frombuffer(array, dtype=tensor.dtype)
        copy.copy_(tensor.flatten())
        return copy.view(tensor.shape)

    with emulated_cuda(library) as module:
        for at_end, shape in itertools.product((False, True), ((48, 40), (33, 70), (1, numel))):
            values = trapped(values_of(shape, FP32), at_end)
            for coding in (FORMATS[0].coding, FORMATS[2].coding, FORMATS[4].coding):
                wanted = formula(coding, values)
                maxima = trapped(torch.zeros_like(wanted.maxima), at_end)
                num_bytes = -(-coding.table_nbytes(shape) // 16) * 16
                table = trapped(torch.zeros(num_bytes, dtype=torch.uint8), at_end)
                codes = trapped(torch.zeros_like(wanted.codes), at_end)
                out = trapped(torch.zeros(shape), at_end)
                fragment = Fragment(values.flatten(), shape, 0)
                kernels.add_maxima(coding, [fragment], [maxima], None)
                kernels.fill_tables(coding, [shape], [maxima], [table])
                kernels.encode(coding, [fragment], [maxima], [codes], None)
                kernels.decode(coding, codes, table, shape, out)
                assert same_bits(codes, wanted.codes) and same_bits(out, wanted.decoded[0])
            for along, form in itertools.product((0, 1), INPUTS[2:4]):
                form.quantize(values, along=along)
            kernels.quantize_transposed(INPUTS[2].coding(along=0), values)
            kernels.transpose_codes(trapped(values.to(torch.uint8), at_end), E4M3)
    return len(module.launches)


def test_nothing_is_read_or_written_outside_of_buffers(ranks: Ranks, emulation: Path) -> None:
    """A rank would die of a byte too far, on either side."""
    (num_calls,) = ranks(1).run(_run_between_traps, emulation, 2050)
    assert num_calls > 100


# What a call of the compiled module is given, right in itself.
SHAPE, CODING = (1, 32, 32), ("e4m3", "e8m0", 32, 32)


def _arguments(function: str) -> dict[str, Any]:
    address = 1 << 20
    buffers = {name: (address * (i + 1), 1024) for i, name in enumerate("vcto")}
    target = {"device": 0, "stream": 0}
    maxima, table = (address * 7, 1), (address * 8, 1)
    fragment = (buffers["v"], 0, SHAPE, maxima, buffers["c"])
    whole = {"coding": CODING, "shape": SHAPE}
    of_tiles = {"coding": CODING, "fragments": [fragment], "dtype": "float32", "through": ""}
    return (
        target
        | {
            "add_tile_maxima": of_tiles,
            "encode_tiles": of_tiles | {"noise": (0, 0), "largest": (0, 0)},
            "fill_scale_tables": {
                "coding": CODING,
                "tables": [(SHAPE, maxima, table)],
                "largest": (0, 0),
            },
            "decode_tiles": whole
            | {"codes": buffers["c"], "table": table, "out": buffers["o"], "out_dtype": "float32"},
            "encode_matrix": whole
            | {
                "coding": ("e4m3", "e8m0", 32, 1),
                "values": buffers["v"],
                "dtype": "float32",
                "codes": buffers["c"],
                "transposed": buffers["t"],
                "maximum": (0, 0),
                "table": (address * 8, 32),
            },
            "transpose_codes": {
                "element": "e4m3",
                "shape": SHAPE,
                "codes": buffers["c"],
                "transposed": buffers["t"],
            },
        }[function]
    )


FUNCTIONS = (
    "add_tile_maxima",
    "encode_tiles",
    "fill_scale_tables",
    "decode_tiles",
    "encode_matrix",
    "transpose_codes",
)
WRONG = [
    *[(function, "device", -1) for function in FUNCTIONS],
    ("add_tile_maxima", "dtype", "int8"),
    ("add_tile_maxima", "shape", [((64, 32), 0, (1, 1 << 32, 32), (1 << 40, 1 << 27), (0, 0))]),
    ("encode_tiles", "through", "int8"),
    ("encode_tiles", "codes", [((64, 1024), 0, SHAPE, (8192, 1), (0, 1024))]),
    ("encode_tiles", "largest", (64, 1)),
    ("encode_tiles", "noise", (64, 1024)),
    ("fill_scale_tables", "table", [(SHAPE, (64, 1), (128, 64))]),
    ("decode_tiles", "out_dtype", "int8"),
    ("decode_tiles", "out", (1 << 20, 1023)),
    ("encode_matrix", "element", ("e2m1", "e8m0", 32, 1)),
    ("encode_matrix", "scaling", ("e4m3", "two_level", 32, 1)),
    ("encode_matrix", "tile", ("e4m3", "e8m0", 24, 1)),
    ("encode_matrix", "transposed", ("e4m3", "e8m0", 1, 32)),
    ("encode_matrix", "codes", (0, 0)),
    ("encode_matrix", "table", (64, 31)),
    ("encode_matrix", "maximum", (64, 1)),
    ("encode_matrix", "values", (2 << 20, 1024)),
    ("transpose_codes", "element", "e3m4"),
    ("transpose_codes", "transposed", (2 << 20, 1024)),
    ("transpose_codes", "shape", (1, 33, 32)),
]
# The argument of the call that a wrong value replaces, where the message names another.
GIVEN_AS = {
    ("add_tile_maxima", "shape"): "fragments",
    ("encode_tiles", "codes"): "fragments",
    ("fill_scale_tables", "table"): "tables",
    ("encode_matrix", "element"): "coding",
    ("encode_matrix", "scaling"): "coding",
    ("encode_matrix", "tile"): "coding",
    ("encode_matrix", "transposed"): "coding",
}


@needs_module
@pytest.mark.parametrize(("function", "argument", "value"), WRONG)
def test_a_launch_names_a_wrong_argument(function: str, argument: str, value: object) -> None:
    """The native entry checks what it can before it asks CUDA for anything."""
    given = _arguments(function)
    changes: dict[str, Any] = {GIVEN_AS.get((function, argument), argument): value}
    if (function, argument) == ("encode_matrix", "codes"):
        changes["transposed"] = (0, 0)
    if (function, argument) == ("encode_matrix", "maximum"):
        argument = "tile"
    if (function, argument) == ("transpose_codes", "shape"):
        changes["element"] = "e2m1"
    with pytest.raises(ValueError, match=rf"^{argument}|, {argument}:"):
        getattr(cuda_module(), function)(**(given | changes))


@needs_module
@needs_no_gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_a_gpu_launches_say_so(function: str) -> None:
    """The module imports; a launch raises what CUDA says."""
    with pytest.raises(RuntimeError, match=rf"{function}\(\) to launch.*CUDA"):
        getattr(cuda_module(), function)(**_arguments(function))


@needs_module
@needs_no_gpu
def test_a_run_may_be_longer_than_rows_may_be() -> None:
    """A matrix that is one tile is laid out anew: only CUDA refuses it here."""
    shape, numel = (1, 1, 1 << 33), 1 << 33
    given = _arguments("add_tile_maxima")
    given["coding"] = ("e4m3", "fp32", 0, 0)
    given["fragments"] = [((1 << 20, numel), 0, shape, (1 << 50, 1), (0, 0))]
    with pytest.raises(RuntimeError, match="CUDA"):
        cuda_module().add_tile_maxima(**given)  # type: ignore[union-attr]


def test_kernels_that_are_not_built_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For a GPU, with the cost; not for a CPU."""
    reason = "No module named 'megafsdp._cuda', says a test of quantization"
    monkeypatch.delenv("MEGAFSDP_NATIVE", raising=False)
    monkeypatch.setattr(_native, "_CUDA", None)
    monkeypatch.setattr(_native, "_WHY_CUDA_MISSING", reason)
    assert kernels_on(torch.device("cpu")) is None and not caplog.text
    for index in range(2):
        assert kernels_on(torch.device("cuda", index)) is None
    assert caplog.text.count(reason) == 1 and "bytes an element instead of" in caplog.text


@pytest.mark.gpu
@needs_module
def test_a_gpus_conversions_have_the_bits_of_the_formula() -> None:
    """All patterns of the upper half of fp32 beside some of the lower, in both 8-bit elements."""
    device = torch.device("cuda", 0)
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (upper[:, None] | lower).flatten()
    values = (bits - ((bits >> 31) << 32)).to(torch.int32).view(FP32)[None]
    shape = tuple(values.shape)
    for element in (E4M3, E5M2, E2M1):
        coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), None)
        maximum = torch.tensor([element.max_value]).view(torch.int32)
        wanted = torch.empty(values.numel() // element.codes_per_byte, dtype=torch.uint8)
        encode_in_torch(coding, Fragment(values[0], shape, 0), maximum, wanted, None)
        codes = torch.empty_like(wanted, device=device)
        fragment = Fragment(values[0].to(device), shape, 0)
        kernels.encode(coding, [fragment], [maximum.to(device)], [codes], None)
        assert torch.equal(codes.cpu(), wanted)


@pytest.mark.gpu
@needs_module
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_large_tensors_have_the_bits_of_a_cpu(form: WeightFormat) -> None:
    """More blocks than run at once, on a stream other than the default one."""
    device = torch.device("cuda", 0)
    values = values_of((4096, 2080), BF16)
    wanted = by_kernels(Place(torch.device("cpu")), form.coding, values)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(by_kernels(Place(device), form.coding, values, None, (1000, 1001)), wanted)


@pytest.mark.gpu
@needs_module
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launches_wait_for_nothing() -> None:
    """No call makes the host wait for the device."""
    device = torch.device("cuda", 0)
    values = torch.randn(256, 256, device=device)
    calls: list[Callable[[], object]] = [
        *[
            lambda f=form, a=along: f.quantize(values, along=a)
            for form, along in itertools.product(INPUTS, (0, 1))
        ],
        lambda: kernels.quantize_transposed(INPUTS[2].coding(along=0), values),
        lambda: kernels.transpose_codes(values.to(torch.uint8), E4M3),
    ]
    for mode in ("default", "error"):
        with contextlib.ExitStack() as stack:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
            torch.cuda.set_sync_debug_mode(mode)
            for call in calls:
                call()
