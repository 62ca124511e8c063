"""Compiled kernels at every instruction set and number of threads against the naive formulas."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megafsdp._native import native_module
from megafsdp.quantize import input_formats, kernels
from megafsdp.quantize.elements import E2M1, E4M3, E5M2, Element
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.input_formats import InputFormat, QuantizedInput
from megafsdp.quantize.scales import Fp32Scaling
from megafsdp.quantize.tiles import Fragment, TileCoding
from tests.native import compiled
from tests.quantize.quantized import (
    BY_NAME,
    FORMATS,
    SHAPES,
    Quantized,
    assert_guard_holds,
    dequantize,
    fragments_of,
    guarded,
    quantize,
    randn,
    same_values,
)
from tests.quantize.test_elements import borders

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SOURCES = [(FP32, None), (FP32, BF16), (FP32, FP16), (BF16, None), (FP16, None)]
INPUTS = [
    input_formats.TENSOR_E4M3,
    input_formats.TENSOR_E5M2,
    input_formats.BLOCK_E4M3,
    input_formats.MX_E4M3,
    input_formats.NV_E2M1,
]
# Beyond what one thread takes, and no multiple of its ranges.
BIG_SHAPE = (736, 160)


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """Turn native code off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAFSDP_NATIVE", "0")
        yield


@contextlib.contextmanager
def threads(number: int) -> Iterator[None]:
    """Set the number of threads of this thread's calls."""
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def all_magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """Return finite values of all exponents and signs: every pattern of 16 bits."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype == FP32:
        # The low half decides at the middle between two bf16 values.
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
        values = ((bits << 16) | low[bits % 6]).view(FP32)
    else:
        values = bits.to(torch.int16).view(dtype)
    return torch.where(values.isfinite(), values, 0)


def shapes_of(weight_format: WeightFormat) -> list[tuple[int, ...]]:
    """Return shapes with one tile and many, with panels cut short, and odd ones where they may."""
    rows, cols = SHAPES[weight_format.name]
    shapes: list[tuple[int, ...]] = [(rows, cols), (3, 32, 64), (32, 32), (32, 8256)]
    if weight_format.multiple == 1:
        shapes += [(1, 1), (1, 300), (300, 1), (5, 7), (2, 129, 131), (129, 5000)]
    return shapes


def assert_same_quantized(
    weight_format: WeightFormat, values: torch.Tensor, through: torch.dtype | None, cut: int
) -> None:
    """Assert that all bytes of a tensor, cut into two, are those of the naive formula."""
    found = quantize(weight_format, values, cuts=(cut,), through=through)
    with in_torch():
        wanted = quantize(weight_format, values, cuts=(cut,), through=through)
    assert torch.equal(found.maxima, wanted.maxima)
    assert torch.equal(found.table, wanted.table)
    assert torch.equal(found.codes, wanted.codes)
    for dtype in (FP32, BF16, FP16):
        with in_torch():
            decoded = dequantize(weight_format, wanted, values.shape, dtype)
        assert same_values(dequantize(weight_format, found, values.shape, dtype), decoded)


@pytest.mark.parametrize(("dtype", "through"), SOURCES, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_every_format_has_the_bits_of_the_naive_formula(
    level: str, weight_format: WeightFormat, dtype: torch.dtype, through: torch.dtype | None
) -> None:
    """Maxima, tables, codes and values, of matrices and stacks with edges, cut in the middle."""
    for shape in shapes_of(weight_format):
        values = randn(*shape).to(dtype)
        num_rows = math.prod(shape[:-1])
        assert_same_quantized(weight_format, values, through, num_rows // 3)


@pytest.mark.parametrize(("dtype", "through"), SOURCES, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_values_of_all_exponents_have_the_bits_of_the_naive_formula(
    level: str, weight_format: WeightFormat, dtype: torch.dtype, through: torch.dtype | None
) -> None:
    """Also where maxima are subnormal, or the largest there are, and where one is not finite."""
    values = all_magnitudes(dtype)
    mixed = values[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    broken = mixed.clone()
    broken[5000], broken[20000], broken[60000] = math.inf, math.nan, -math.inf
    for given in (values, mixed, broken, values * 2.0**-110):
        assert_same_quantized(weight_format, given.view(512, 128), through, 200)


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda e: e.name)
def test_values_beside_every_border_have_the_bits_of_the_naive_formula(
    level: str, element: Element
) -> None:
    """With a factor of 1: middles between codes, an ulp beside them, and all bytes decoded."""
    coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), None)
    values = borders(element)
    values = values[: values.numel() // 2 * 2]
    fragment = Fragment(values, (1, values.numel()), 0)
    maximum = torch.tensor([element.max_value]).view(torch.int32)
    found = guarded(values.numel() // element.codes_per_byte, torch.uint8)
    wanted = torch.empty_like(found)
    kernels.encode(coding, [fragment], [maximum], [found], None)
    assert_guard_holds(found)
    with in_torch():
        kernels.encode(coding, [fragment], [maximum], [wanted], None)
    assert torch.equal(found, wanted)
    codes, table = torch.arange(256, dtype=torch.uint8), torch.ones(1).view(torch.uint8)
    for dtype in (FP32, BF16, FP16):
        shape = (1, 256 * element.codes_per_byte)
        out, naive = (torch.empty(shape, dtype=dtype) for _ in range(2))
        kernels.decode(coding, codes, table, shape, out)
        with in_torch():
            kernels.decode(coding, codes, table, shape, naive)
        assert same_values(out, naive)


@pytest.mark.parametrize(("dtype", "through"), SOURCES, ids=str)
@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_values_above_a_given_maximum_have_the_bits_of_the_naive_formula(
    level: str, weight_format: WeightFormat, dtype: torch.dtype, through: torch.dtype | None
) -> None:
    """Those of earlier steps: the largest code, but NaN's for what is not finite, or becomes so."""
    shape = (96, 160)
    values = randn(*shape)
    values.view(-1)[::7] = torch.tensor([math.inf, -math.inf, math.nan, 7e4, 1e3]).repeat(439)
    fragment = fragments_of(values.to(dtype), ())[0]
    maxima = torch.ones(weight_format.num_maxima(shape)).view(torch.int32)
    found = guarded(values.numel() // weight_format.codes_per_byte, torch.uint8)
    wanted = torch.empty_like(found)
    weight_format.encode([fragment], [maxima], [found], through=through)
    assert_guard_holds(found)
    with in_torch():
        weight_format.encode([fragment], [maxima], [wanted], through=through)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("tile", [None, (8, 32)], ids=str)
@pytest.mark.parametrize("through", [None, BF16, FP16], ids=str)
@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=lambda e: e.name)
def test_one_value_alone_makes_a_row_unusual(
    level: str, element: Element, through: torch.dtype | None, tile: tuple[int, int] | None
) -> None:
    """Beside the border above which codes are clamped, infinite, or a NaN that rounding changes."""
    coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), tile)
    largest = torch.tensor(element.max_value).view(torch.int32).item()
    half_step = 1 << (22 - int(element.name[-1]))
    bits = [largest + half_step * k // 2 + ulp for k in range(5) for ulp in (-1, 0, 1)]
    bits += [0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F808000, 0x7FC00000, 0x7FFFFFFF]
    special = torch.tensor(bits, dtype=torch.int32).view(FP32)
    special = torch.cat((special, -special))
    # Whole groups of rows, and some over.
    values = randn(8 * special.numel() - 2, 2112).clamp(-element.max_value, element.max_value)
    for i, value in enumerate(special):
        values[8 * i + i % 6, 37 * i % 2112] = value
    fragment = Fragment(values.view(-1), tuple(values.shape), 0)
    num_tiles = coding.grid(tuple(values.shape)).num_tiles
    given = torch.full((num_tiles,), largest, dtype=torch.int32)
    codes = guarded(values.numel() // element.codes_per_byte, torch.uint8)
    maxima = torch.zeros_like(given)
    kernels.encode(coding, [fragment], [given], [codes], through)
    kernels.add_maxima(coding, [fragment], [maxima], through)
    assert_guard_holds(codes)
    wanted, wanted_maxima = torch.empty_like(codes), torch.zeros_like(given)
    with in_torch():
        kernels.encode(coding, [fragment], [given], [wanted], through)
        kernels.add_maxima(coding, [fragment], [wanted_maxima], through)
    assert torch.equal(codes, wanted)
    assert torch.equal(maxima, wanted_maxima)


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_threads_do_not_show(level: str, weight_format: WeightFormat) -> None:
    """One, two, three and more than there is work for give the same bytes."""
    values = randn(*BIG_SHAPE)
    with in_torch():
        wanted = quantize(weight_format, values, cuts=(77,))
        decoded = dequantize(weight_format, wanted, values.shape, BF16)
    for number in (1, 2, 3, 64):
        with threads(number):
            assert quantize(weight_format, values, cuts=(77,)).equals(wanted)
            found = dequantize(weight_format, wanted, values.shape, BF16)
            assert torch.equal(found, decoded)


@pytest.mark.parametrize("element", [E4M3, E2M1], ids=lambda e: e.name)
def test_codes_beyond_the_caches_equal_those_within(level: str, element: Element) -> None:
    """A matrix too large for any cache takes the other kind of store, where lines allow it."""
    coding = TileCoding(element, Fp32Scaling(is_power_of_two=False), (32, 32))
    shape, numel = (2049, 4096), 2049 * 4096
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    maxima = torch.zeros(coding.grid(shape).num_tiles, dtype=torch.int32)
    kernels.add_maxima(coding, [Fragment(values, shape, 0)], [maxima], None)
    # Pieces of rows with these are written twice.
    values[:: 4096 * 100 + 1] = 1e6
    num_codes = numel // element.codes_per_byte
    wanted, found = (torch.zeros(num_codes + 64, dtype=torch.uint8) for _ in range(2))
    for first_row, end_row in ((0, 1024), (1024, 2049)):
        start, end = first_row * shape[1], end_row * shape[1]
        codes = wanted[start // element.codes_per_byte : end // element.codes_per_byte]
        kernels.encode(
            coding, [Fragment(values[start:end], shape, first_row)], [maxima], [codes], None
        )
    for offset in (0, 1, 64):
        found.zero_()
        codes = found[offset : offset + num_codes]
        kernels.encode(coding, [Fragment(values, shape, 0)], [maxima], [codes], None)
        assert torch.equal(codes, wanted[:num_codes])
        assert not found[:offset].any() and not found[offset + num_codes :].any()


def _same_input(left: QuantizedInput, right: QuantizedInput) -> bool:
    return torch.equal(left.codes, right.codes) and torch.equal(left.scales, right.scales)


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("input_format", INPUTS, ids=lambda f: f.name)
def test_inputs_have_the_bits_of_the_naive_formula(
    level: str, input_format: InputFormat, along: int
) -> None:
    """Any dtype, blocks cut short, more columns than a panel has, all exponents; by threads."""
    shapes = [(1, 2), (33, 16), (130, 1300), (3, 5000), (736, 160)]
    for dtype, shape in itertools.product((FP32, BF16, FP16), shapes):
        all_values = all_magnitudes(dtype)[: math.prod(shape)]
        all_exponents = [all_values.view(shape)] if all_values.numel() == math.prod(shape) else []
        for values in (randn(*shape).to(dtype), *all_exponents):
            with in_torch():
                wanted = input_format.quantize(values, along=along)
                decoded = wanted.dequantize(BF16)
            for number in (1, 3):
                with threads(number):
                    found = input_format.quantize(values, along=along)
                    assert _same_input(found, wanted)
                    assert same_values(found.dequantize(BF16), decoded)


def test_noise_has_the_bits_of_the_naive_formula(level: str) -> None:
    """At the borders of being rounded up, too."""
    for shape in ((33, 16), (130, 1300)):
        values = randn(*shape).bfloat16()
        generator = torch.Generator().manual_seed(0)
        # Few bits, so that noise and remainder are often equal.
        noise = torch.randint(16, shape, generator=generator) / 16
        for along in (0, 1):
            found = input_formats.NV_E2M1.quantize(values, along=along, noise=noise)
            with in_torch():
                wanted = input_formats.NV_E2M1.quantize(values, along=along, noise=noise)
            assert _same_input(found, wanted)


@compiled
def test_a_whole_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tensors: one call of each kernel, and no torch formula."""
    calls: list[str] = []
    native = native_module()
    assert native is not None
    for name in ("add_tile_maxima", "fill_scale_tables", "encode_tiles"):
        kernel = getattr(native, name)

        def counted(*, name: str = name, kernel: Callable[..., None] = kernel, **rest: Any) -> None:
            calls.append(name)
            kernel(**rest)

        monkeypatch.setattr(native, name, counted)
    quantize(BY_NAME["mxfp8"], randn(4, 32, 64), cuts=(0, 5, 64, 100))
    assert calls == ["add_tile_maxima", "fill_scale_tables", "encode_tiles"]


def _memory() -> dict[str, torch.Tensor]:
    return {
        "values": torch.zeros(64 * 32),
        "maxima": torch.zeros(2, dtype=torch.int32),
        "table": torch.zeros(16, dtype=torch.uint8),
        "codes": torch.zeros(64 * 32, dtype=torch.uint8),
        "out": torch.zeros(64 * 32),
    }


def _calls(memory: dict[str, torch.Tensor], **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the arguments of every kernel over a (64, 32) tensor, some of them changed."""
    buffers = {name: (t.data_ptr(), t.numel()) for name, t in memory.items()}
    buffers |= {name: changes.pop(name) for name in list(changes) if name in buffers}
    shape, first_row = changes.pop("shape", (1, 64, 32)), changes.pop("first_row", 0)
    values, maxima, codes = (buffers[name] for name in ("values", "maxima", "codes"))
    batch = [(values, first_row, shape, maxima, codes)]
    usual = {"coding": ("e4m3", "e8m0", 32, 32), "num_threads": 1}
    source = {"dtype": "float32", "through": ""}
    calls = {
        "add_tile_maxima": {"fragments": batch, **source},
        "encode_tiles": {"fragments": batch, **source, "noise": (0, 0)},
        "fill_scale_tables": {"tables": [(shape, maxima, buffers["table"])]},
        "decode_tiles": {"shape": shape, "out_dtype": "float32"}
        | {name: buffers[name] for name in ("codes", "table", "out")},
        "encode_blocks": {"shape": shape, "dtype": "float32", "coding": ("e4m3", "e8m0", 32, 1)}
        | {"table": (memory["out"].data_ptr(), 64)}
        | {name: buffers[name] for name in ("values", "codes")},
    }
    return {
        name: usual | own | {k: v for k, v in changes.items() if k in usual | own}
        for name, own in calls.items()
    }


def _wrong() -> list[tuple[str, str, dict[str, Any]]]:
    """Return a kernel, what its message names, and the change that it is about."""
    every = ("add_tile_maxima", "encode_tiles", "fill_scale_tables", "decode_tiles")
    of_rows = every[:2]
    wrong = []
    for name in (*every, "encode_blocks"):
        wrong += [
            (name, "element", {"coding": ("e3m4", "e8m0", 32, 32)}),
            (name, "scaling", {"coding": ("e4m3", "e9m0", 32, 32)}),
            (name, "tile", {"coding": ("e4m3", "e8m0", 32, 0)}),
            (name, "tile", {"coding": ("e4m3", "e8m0", 32, 24)}),
            (name, "shape", {"shape": (1, 0, 32)}),
            (name, "shape", {"shape": (1 << 40, 1 << 40, 32)}),
            (name, "num_threads", {"num_threads": 0}),
        ]
    for name in of_rows:
        wrong += [
            (name, "dtype", {"dtype": "float64"}),
            (name, "through", {"through": "int8"}),
            (name, "through", {"dtype": "bfloat16", "through": "float16"}),
            (name, "first_row", {"first_row": -1}),
            (name, "first_row", {"first_row": 1}),
            (name, "values: expected whole rows", {"values": (64, 33)}),
            (name, "values", {"values": (0, 2048)}),
            (name, "values", {"values": (6, 2048)}),
            (name, "maxima: expected 2 elements, got 3", {"maxima": (64, 3)}),
            (name, "maxima", {"maxima": (66, 2)}),
        ]
    return [
        *wrong,
        ("encode_tiles", "codes: expected 2048", {"codes": (64, 2047)}),
        (
            "encode_tiles",
            "shape.*even",
            {"coding": ("e2m1", "two_level", 0, 0), "shape": (1, 9, 3)},
        ),
        ("encode_tiles", "noise: .*8-bit", {"noise": (64, 2048)}),
        ("fill_scale_tables", "table: expected 2 bytes", {"table": (64, 1)}),
        ("fill_scale_tables", "table: expected 2 bytes", {"table": (64, 18)}),
        ("fill_scale_tables", "table", {"coding": ("e4m3", "fp32", 32, 32), "table": (65, 16)}),
        ("decode_tiles", "out_dtype", {"out_dtype": "uint8"}),
        ("decode_tiles", "out: expected 2048", {"out": (64, 2049)}),
        ("decode_tiles", "codes", {"codes": (64, 2049)}),
        ("encode_blocks", "scaling", {"coding": ("e4m3", "two_level", 32, 1)}),
        ("encode_blocks", "element", {"coding": ("e2m1", "e8m0", 32, 1)}),
        ("encode_blocks", "tile", {"coding": ("e4m3", "e8m0", 32, 32)}),
        ("encode_blocks", "tile", {"coding": ("e4m3", "e8m0", 0, 0)}),
        ("encode_blocks", "tile: expected one row", {"coding": ("e4m3", "e8m0", 1, 2048)}),
        ("encode_blocks", "tile: expected one row", {"coding": ("e4m3", "e8m0", 2048, 1)}),
        ("encode_blocks", "dtype", {"dtype": "float64"}),
    ]


@compiled
@pytest.mark.parametrize(("name", "message", "change"), _wrong(), ids=str)
def test_kernels_name_a_wrong_argument(name: str, message: str, change: dict[str, Any]) -> None:
    """Before anything is written; the unchanged arguments are right."""
    memory = _memory()
    native = native_module()
    assert native is not None
    getattr(native, name)(**_calls(memory)[name])
    before = {n: t.clone() for n, t in memory.items()}
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(native, name)(**_calls(memory, **change)[name])
    assert all(torch.equal(memory[n], before[n]) for n in memory)


@compiled
def test_kernels_name_what_overlaps() -> None:
    """What is written may be nothing else's memory; maxima of one tensor may be given twice."""
    native = native_module()
    assert native is not None
    memory = torch.zeros(1 << 14, dtype=torch.uint8)
    at = memory.data_ptr()
    shape, coding = (1, 32, 32), {"coding": ("e4m3", "e8m0", 32, 32), "num_threads": 1}
    source = {"dtype": "float32", "through": ""}
    values, maxima, codes = (at, 1024), (at + 4096, 1), (at + 4112, 1024)
    encode = functools.partial(native.encode_tiles, **coding, **source, noise=(0, 0))
    encode(fragments=[(values, 0, shape, maxima, codes)])
    for buffers, argument in (
        ((values, (at + 4092, 1), codes), "maxima|values"),
        ((values, maxima, (at + 4095, 1024)), "codes|maxima"),
        ((values, maxima, (at, 1024)), "codes|values"),
    ):
        wrong_values, wrong_maxima, wrong_codes = buffers
        if argument.startswith("maxima"):
            call = functools.partial(native.add_tile_maxima, **coding, **source)
        else:
            call = encode
        with pytest.raises(ValueError, match=f"^({argument}): expected memory that overlaps"):
            call(fragments=[(wrong_values, 0, shape, wrong_maxima, wrong_codes)])
    two = [(values, 0, shape, maxima, codes), (values, 0, shape, maxima, codes)]
    native.add_tile_maxima(**coding, **source, fragments=two)
    with pytest.raises(ValueError, match=r"^codes: expected memory that overlaps"):
        encode(fragments=two)
    with pytest.raises(ValueError, match=r"^table: expected memory that overlaps"):
        native.fill_scale_tables(**coding, tables=[(shape, maxima, (at + 4096, 16))])
    with pytest.raises(ValueError, match=r"^(out|codes): expected memory that overlaps"):
        native.decode_tiles(
            **coding,
            shape=shape,
            codes=codes,
            table=(at + 8192, 16),
            out=(at + 4096, 1024),
            out_dtype="float32",
        )


@pytest.mark.native
@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"maxima": torch.zeros(6)}, "maxima"),
        ({"codes": torch.zeros(96 * 64, dtype=torch.int8)}, "codes"),
        ({"codes": torch.zeros(96 * 128, dtype=torch.uint8)[::2]}, "codes"),
        ({"table": torch.zeros(16, dtype=torch.int8)}, "table"),
        ({"codes": torch.zeros(96 * 64, dtype=torch.uint8, device="meta")}, "codes"),
    ],
)
def test_wrong_buffers_are_named(change: dict[str, torch.Tensor], argument: str) -> None:
    """By the compiled kernels' callers and by the naive formulas alike."""
    weight_format, values = BY_NAME["mxfp8"], randn(96, 64)
    right = quantize(weight_format, values)
    given = vars(dataclasses.replace(right, **change))
    fragment = fragments_of(values, ())[0]
    with pytest.raises(ValueError, match=f"argument '{argument}'"):
        if argument == "maxima":
            weight_format.add_maxima([fragment], [given["maxima"]])
        elif argument == "codes":
            weight_format.encode([fragment], [given["maxima"]], [given["codes"]])
        else:
            weight_format.fill_tables([(96, 64)], [given["maxima"]], [given["table"]])


@compiled
@pytest.mark.parametrize("name", list(_calls(_memory())))
def test_kernels_let_other_python_threads_run(name: str) -> None:
    """A thread that waits for the interpreter's lock gets it from a call, and from nothing else."""
    native = native_module()
    # A tile an element, so that tables take long too: a short call ends before a thread wakes.
    numel = 1 << 18
    memory = {
        "values": torch.zeros(numel),
        "maxima": torch.zeros(numel, dtype=torch.int32),
        "table": torch.zeros(numel, dtype=torch.uint8),
        "codes": torch.zeros(numel, dtype=torch.uint8),
        "out": torch.zeros(numel),
    }
    arguments = _calls(memory, shape=(1, 256, 1024), coding=("e4m3", "e8m0", 1, 1))[name]
    if name == "encode_blocks":
        arguments["table"] = (memory["table"].data_ptr(), numel)
    call = functools.partial(getattr(native, name), **arguments)
    gate, has_run = threading.Lock(), list[bool]()
    gate.acquire()

    def waits() -> None:
        with gate:
            has_run.append(True)

    thread = threading.Thread(target=waits, daemon=True)
    interval_s = sys.getswitchinterval()
    # The lock changes hands where it is let go of, never because time is up.
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        gate.release()
        for _ in range(20_000):
            call()
            if has_run:
                break
        was_let = bool(has_run)
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert was_let


def test_a_subclass_is_quantized_by_the_naive_formula() -> None:
    """Its memory is not what its address says."""

    class Other(torch.Tensor):
        pass

    # Of tiny values the factors are limited.
    for name, scale in (("mxfp8", 1.0), ("nvfp4", 1e-38), ("fp8_block", 1e-38)):
        values = scale * randn(96, 64)
        wanted = quantize(BY_NAME[name], values)
        found = quantize(BY_NAME[name], values.as_subclass(Other))
        assert isinstance(found, Quantized) and torch.equal(found.codes, wanted.codes)
    batches = kernels._batches([values.as_subclass(Other), values], None)
    chosen = {index: module for module, _, indices in batches for index in indices}
    assert chosen == {0: None, 1: kernels.native_module()}
