"""The shard sum: native kernels at every instruction set and the torch fallback against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megafsdp._native import native_module
from megafsdp.buffer.comm.gloo import sum_shards
from tests.native import compiled

pytestmark = pytest.mark.native

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Below, at and beside vector widths; below, at and beyond the kernel's block of 1024.
NUMELS = (1, 3, 15, 16, 17, 63, 1023, 1024, 1025, 2500)
# 1/3 is not representable: the kernel and torch must round the factor alike before they multiply.
SCALES = (1.0, 1.0 / 3.0)


def _ways() -> list[str]:
    """Return every way the sum can run on this machine."""
    native = native_module()
    return ["torch", *(native.simd_levels() if native else [])]


@pytest.fixture(params=_ways())
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Force one way for the length of a test."""
    if request.param == "torch":
        monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    else:
        monkeypatch.setenv("MEGAFSDP_SIMD", request.param)
    return request.param


def _random(numel: int, dtype: torch.dtype, seed: int, start: int = 0) -> torch.Tensor:
    """Return values of very different size, ``start`` elements after an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-8, 8, (numel + start,), generator=generator)
    values = torch.randn(numel + start, generator=generator, dtype=torch.float64) * 2.0**exponents
    return values.to(dtype)[start:]


def _naive(
    shards: list[torch.Tensor], out: torch.Tensor, scale: float, accumulate: bool
) -> torch.Tensor:
    """Add one rank after the other in numpy, each operation rounded to the accumulation dtype."""
    dtype = torch.float64 if torch.float64 in (shards[0].dtype, out.dtype) else torch.float32
    total = shards[0].to(dtype).numpy().copy()
    for shard in shards[1:]:
        total = total + shard.to(dtype).numpy()
    total = total * total.dtype.type(scale)
    if accumulate:
        total = total + out.to(dtype).numpy()
    return torch.from_numpy(total).to(out.dtype)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy()


def _assert_sum_is_exact(
    num_shards: int, numel: int, dtypes: tuple[torch.dtype, torch.dtype], start: int = 0
) -> None:
    shards = [_random(numel, dtypes[0], seed, start) for seed in range(num_shards)]
    for scale in SCALES:
        for accumulate in (False, True):
            out = _random(numel, dtypes[1], seed=99, start=start)
            wanted = _naive(shards, out, scale, accumulate)
            sum_shards(shards, out, scale=scale, accumulate=accumulate)
            assert np.array_equal(_bits(out), _bits(wanted)), (scale, accumulate)


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("shard_dtype", DTYPES)
def test_every_dtype_pair_equals_naive_loop(
    way: str, shard_dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    """Sums equal the numpy loop bit by bit, for every pair of dtypes and number of shards."""
    for num_shards in range(1, 6):
        _assert_sum_is_exact(num_shards, 129, (shard_dtype, out_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_and_start_equals_naive_loop(way: str, dtype: torch.dtype) -> None:
    """Tails and starts off any vector boundary change no bit and touch no neighbour."""
    for numel in NUMELS:
        for start in (0, 1, 3):
            _assert_sum_is_exact(3, numel, (dtype, dtype), start)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_of_output_stay(way: str, dtype: torch.dtype) -> None:
    """Nothing before or after the output is written."""
    whole = torch.full((41,), 7.0, dtype=dtype)
    sum_shards([torch.ones(37, dtype=dtype)] * 2, whole[2:39])
    assert whole.tolist() == [7.0] * 2 + [2.0] * 37 + [7.0] * 2


def test_low_precision_shards_accumulate_in_fp32(way: str) -> None:
    """256 + 1 + 1 is 258 in fp32 and 256 in bf16."""
    shards = [torch.full((5,), v, dtype=torch.bfloat16) for v in (256.0, 1.0, 1.0)]
    out = torch.empty(5, dtype=torch.bfloat16)
    sum_shards(shards, out)
    assert out.tolist() == [258.0] * 5


def test_output_may_be_one_of_the_shards(way: str) -> None:
    """A rank can sum into its own chunk."""
    shards = [_random(2500, torch.float32, seed) for seed in range(3)]
    wanted = _naive(shards, shards[1], 0.5, accumulate=False)
    sum_shards(shards, shards[1], scale=0.5)
    assert torch.equal(shards[1], wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_survives(way: str, dtype: torch.dtype) -> None:
    """All 65536 bit patterns convert to fp32 and back: subnormals, infinities and NaN included."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype)
    wide, narrow = torch.empty(65536), torch.empty(65536, dtype=dtype)
    sum_shards([values], wide)
    sum_shards([wide], narrow)
    torch.testing.assert_close(wide, values.float(), rtol=0, atol=0, equal_nan=True)
    numbers = ~values.isnan()
    assert torch.equal(narrow.view(torch.int16)[numbers], values.view(torch.int16)[numbers])
    assert narrow[~numbers].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_16_bits_is_to_nearest_even(way: str, dtype: torch.dtype) -> None:
    """The middle of two values, and what lies just beside it, round as torch rounds."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    values = values[values.isfinite()]
    middles = (values + torch.roll(values, 1)) / 2
    inputs = torch.cat([middles, middles.nextafter(values), middles.nextafter(-values)])
    out = torch.empty(inputs.numel(), dtype=dtype)
    sum_shards([inputs], out)
    assert np.array_equal(_bits(out), _bits(inputs.to(dtype)))


def test_no_elements_is_no_work(way: str) -> None:
    """Empty shards are accepted."""
    sum_shards([torch.empty(0)] * 2, torch.empty(0))


@pytest.mark.parametrize(
    ("shards", "out", "message"),
    [
        ([], torch.zeros(4), "at least one shard"),
        (
            [torch.zeros(4), torch.zeros(5)],
            torch.zeros(4),
            r"shards\[1\].*\(5,\)|\(5,\).*shards\[1\]",
        ),
        ([torch.zeros(4), torch.zeros(4).half()], torch.zeros(4), "float16"),
        ([torch.zeros(2, 2)], torch.zeros(4), r"\(2, 2\)"),
        ([torch.zeros(4)], torch.zeros(8)[::2], r"strides \(2,\)"),
        ([torch.zeros(4).int()], torch.zeros(4), "int32"),
        ([torch.zeros(4)], torch.zeros(4).int(), "int32"),
        ([torch.zeros(4)], torch.zeros(4, device="meta"), "meta"),
    ],
)
def test_wrong_tensors_are_named(
    shards: list[torch.Tensor], out: torch.Tensor, message: str
) -> None:
    """A tensor that cannot be summed is named with what is wrong about it."""
    with pytest.raises(ValueError, match=message):
        sum_shards(shards, out)


@compiled
def test_unknown_instruction_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEGAFSDP_SIMD must name a level that the processor has."""
    monkeypatch.setenv("MEGAFSDP_SIMD", "avx1024")
    with pytest.raises(ValueError, match="MEGAFSDP_SIMD"):
        sum_shards([torch.zeros(4)], torch.zeros(4))


@compiled
@pytest.mark.parametrize(
    ("argument", "value"),
    [("shards", []), ("shards", [0]), ("out", 3), ("numel", 0), ("out_dtype", "int8")],
)
def test_kernel_names_a_wrong_argument(argument: str, value: object) -> None:
    """The native entry checks every argument that it can."""
    tensor = torch.zeros(4)
    arguments = {
        "shards": [tensor.data_ptr()],
        "out": tensor.data_ptr(),
        "numel": 4,
        "shard_dtype": "float32",
        "out_dtype": "float32",
        "scale": 1.0,
        "accumulate": False,
    }
    native = native_module()
    assert native is not None
    with pytest.raises(ValueError, match=argument):
        native.sum_shards(**(arguments | {argument: value}))
