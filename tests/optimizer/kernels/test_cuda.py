"""CUDA kernels against the bits of a CPU: on a GPU, and their threads in turn on the host.

The host runs cuda/adam_tile.h as it stands, with the host's arithmetic: which elements a thread
loads and stores, segments, conversions and the flushing of subnormal numbers, deferred and not; and
the lanes of cuda/square_lane.h. What a GPU's instructions round to, sums across threads and
launches need one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from megafsdp import _native
from megafsdp._native import cuda_module
from megafsdp.optimizer.kernels import cuda as cuda_kernels
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.adam_kernel import (
    AdamBuffers,
    AdamSegment,
    adam_step,
)
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper
from megafsdp.optimizer.kernels.square_sum import device_sum_of_squares, sum_of_squares
from tests.optimizer.adam.flat_buffers import (
    ALIGNED_GUARD,
    BF16,
    FP16,
    FP32,
    GUARD,
    HYPER,
    L2_HYPER,
    LAYOUTS,
    assert_guards_hold,
    assert_same_bits,
    copy_of,
    guarded,
    make_buffers,
    spread_subnormals,
    values_of,
)
from tests.optimizer.kernels.emulated_cuda import emulated_cuda

TILE_NUMEL = 1024
# Segments and constants that travel with a launch; more of either take more launches.
MOST_ROWS, MOST_CONSTANTS = 80, 32

# Buffers on a CPU, segments or hyperparameters, step, factor of the gradient, whether to flush, and
# the guard; returns the buffers after the step.
Step = Callable[..., AdamBuffers]

needs_module = pytest.mark.skipif(cuda_module() is None, reason="CUDA kernels are off or not built")
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPU")


def _emulated(library: Path) -> Step:
    def step(
        buffers: AdamBuffers,
        hyper: AdamHyper | Sequence[AdamSegment],
        *,
        guard: int = GUARD,
        **options: object,
    ) -> AdamBuffers:
        result = copy_of(buffers, guard)
        options = {"step": 2, "grad_scale": 1 / 3} | options
        with emulated_cuda(library) as module:
            adam_step(result, hyper, **options)  # type: ignore[arg-type]
        assert module.was_aligned == (guard == ALIGNED_GUARD)
        assert_guards_hold(result, guard)
        return result

    return step


def _on_cuda(
    buffers: AdamBuffers,
    hyper: AdamHyper | Sequence[AdamSegment],
    *,
    guard: int = GUARD,
    **options: object,
) -> AdamBuffers:
    device = torch.device("cuda", 0)
    assert cuda_kernels.usable_module(device) is not None, "the fallback would prove nothing"
    result = copy_of(buffers, guard, device)
    options = {"step": 2, "grad_scale": 1 / 3} | options
    adam_step(result, hyper, **options)  # type: ignore[arg-type]
    assert_guards_hold(result, guard)
    return copy_of(result, device=torch.device("cpu"))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_module])])
def run(request: pytest.FixtureRequest) -> Step:
    """Return a step of the kernel: emulated, or on a GPU."""
    if request.param == "cuda":
        return _on_cuda
    return _emulated(request.getfixturevalue("emulation"))


def _on_cpu(
    buffers: AdamBuffers, hyper: AdamHyper | Sequence[AdamSegment], **options: object
) -> AdamBuffers:
    result = copy_of(buffers)
    options = {"step": 2, "grad_scale": 1 / 3} | options
    adam_step(result, hyper, **options)  # type: ignore[arg-type]
    return result


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1:]}"[6:])
def test_every_layout_has_the_bits_of_a_cpu(
    run: Step, layout: tuple[torch.dtype, torch.dtype, str]
) -> None:
    """Any dtypes, AdamW and L2, whole vectors or not: equal bytes, and the weights did move."""
    buffers = make_buffers(3 * TILE_NUMEL + 5, layout)
    for hyper, step in ((HYPER, 1), (HYPER, 1000), (L2_HYPER, 2)):
        wanted = _on_cpu(buffers, hyper, step=step)
        for guard in (GUARD, ALIGNED_GUARD):
            assert_same_bits(run(buffers, hyper, step=step, guard=guard), wanted)
    assert not torch.equal(wanted.weight, buffers.weight)


@pytest.mark.parametrize("master", ["fp32 to bf16", "halves"])
def test_every_length_has_the_bits_of_a_cpu(run: Step, master: str) -> None:
    """Tails of vectors and of tiles read and write nothing beyond the end."""
    around = [n * TILE_NUMEL + d for n in (1, 2, 5) for d in (-4, -1, 0, 1, 3, 4)]
    for numel in (*range(1, 19), 255, *around, 10_007):
        buffers = make_buffers(numel, (BF16, FP32, master))
        wanted = _on_cpu(buffers, HYPER)
        for guard in (GUARD, ALIGNED_GUARD):
            assert_same_bits(run(buffers, HYPER, guard=guard), wanted)


@pytest.mark.parametrize("numel", [MOST_CONSTANTS, MOST_CONSTANTS + 1, 700])
def test_segments_have_their_own_hyperparameters(run: Step, numel: int) -> None:
    """Many segments, of one element or many tiles, with gaps, empty ones and shared vectors."""
    generator = torch.Generator().manual_seed(numel)
    segments, end = [], 0
    for i in range(numel):
        gap, length = torch.randint(0, 7, (2,), generator=generator).tolist()
        start, stop = end + gap // 3, end + gap // 3 + length
        stop += 5 * TILE_NUMEL + 3 if i == numel // 2 else 0
        hyper = dataclasses.replace(L2_HYPER if i % 2 else HYPER, lr=1e-2 / (i + 1))
        segments.append(AdamSegment(start, stop, hyper))
        end = stop
    buffers = make_buffers(end + 2 * TILE_NUMEL, (BF16, FP32, "fp32 to bf16"))
    wanted = _on_cpu(buffers, segments)
    for guard in (GUARD, ALIGNED_GUARD):
        assert_same_bits(run(buffers, segments, guard=guard), wanted)
    assert torch.equal(wanted.weight[end:], buffers.weight[end:])
    for segment in segments:
        piece = slice(segment.start, segment.stop)
        is_empty = segment.start == segment.stop
        assert torch.equal(wanted.exp_avg[piece], buffers.exp_avg[piece]) == is_empty


@pytest.mark.parametrize(
    ("num_segments", "num_hypers", "num_launches"),
    [(MOST_ROWS, 2, 1), (MOST_ROWS + 1, 2, 2), (MOST_CONSTANTS + 1, MOST_CONSTANTS + 1, 2)],
)
def test_a_launch_takes_a_table(
    emulation: Path, num_segments: int, num_hypers: int, num_launches: int
) -> None:
    """Many segments of few hyperparameters, nothing being copied to the device before."""
    hypers = [dataclasses.replace(HYPER, lr=1e-2 / (i + 1)) for i in range(num_hypers)]
    segments = [AdamSegment(i, i + 1, hypers[i % num_hypers]) for i in range(num_segments)]
    with emulated_cuda(emulation) as module:
        adam_step(make_buffers(num_segments), segments, step=1)
    assert module.launches == [("adam_step", num_launches)]


@pytest.mark.parametrize("layout", [(FP32, FP32, "fp32 to fp16"), (BF16, BF16, "halves")])
@pytest.mark.parametrize("flush_denormals", [True, False])
def test_subnormal_numbers_have_the_bits_of_a_cpu(
    run: Step, flush_denormals: bool, layout: tuple[torch.dtype, torch.dtype, str]
) -> None:
    """Subnormal values, constants and factors are kept or count as zero as on a CPU."""
    buffers = make_buffers(4096, layout)
    spread_subnormals(buffers)
    gentle = AdamHyper(1e-3, eps=1e-30, weight_decay=0.5)
    tiny = AdamHyper(1e-40, eps=1e-40, weight_decay=1e-40, adam_w_mode=False)
    for hyper, grad_scale in ((gentle, 1 / 3), (L2_HYPER, 2.0**20), (tiny, 1.0), (HYPER, 1e-40)):
        options = {"grad_scale": grad_scale, "flush_denormals": flush_denormals}
        wanted = _on_cpu(buffers, hyper, **options)
        assert_same_bits(run(buffers, hyper, guard=ALIGNED_GUARD, **options), wanted)


def _at_the_border(numel: int, c: AdamConstants, seed: int) -> np.ndarray:
    """Return weights, gradients and moments whose step rounds up to the smallest normal number.

    In turn, an element apart from the next: the decayed weight, the first moment, the second one,
    and the quotient, which is the new weight where the old one is zero.
    """
    generator = np.random.default_rng(seed)
    border, kind = 2.0**-126, np.arange(numel) % 4
    near = border * (1 + generator.integers(-3, 4, numel) * 2.0**-24)
    weight = np.where(kind == 0, near / c.decay, 0.0)
    # Of two parts that nearly cancel: the second has more bits below the border than the first.
    exp_avg = np.where(kind == 1, border * generator.uniform(1, 2, numel), 0.0).astype(np.float32)
    grad = np.where(kind == 1, exp_avg + (near - exp_avg) / c.lerp, 0.0)
    grad = np.where(kind == 2, np.sqrt(near / c.square), grad)
    exp_avg = np.where(kind == 3, 2 * near / c.step_size / (1 - c.lerp), exp_avg)
    exp_avg_sq = np.where(kind == 3, c.root**2 / c.beta2, 0.0)
    return np.stack([weight, grad, exp_avg, exp_avg_sq]).astype(np.float32)


def test_results_at_the_border_are_settled_amid_a_step(run: Step) -> None:
    """Where rounding alone makes a number normal it counts as zero, in each of four results."""
    numel, segments, values = 1024, [], []
    for i in range(16):
        # A quotient comes that near only where its divisor is a power of two, here 2.
        hyper = AdamHyper(0.3 + i / 100, (0.7, 0.9 - i / 100), 1.0, 1.0)
        if i == 0:
            hyper = AdamHyper(1.0, (0.5, 0.5), 1.0, 0.25, bias_correction=False)
        segments.append(AdamSegment(i * numel, (i + 1) * numel, hyper))
        values.append(_at_the_border(numel, AdamConstants.rounded(hyper, 2), seed=i))
    buffers = AdamBuffers(*torch.from_numpy(np.concatenate(values, axis=1)))
    wanted = _on_cpu(buffers, segments, grad_scale=1.0)
    kept = _on_cpu(buffers, segments, grad_scale=1.0, flush_denormals=False)
    for kind, name in enumerate(("weight", "exp_avg", "exp_avg_sq", "weight")):
        flushed, normal = getattr(wanted, name) == 0, getattr(kept, name).abs() == 2.0**-126
        assert (flushed & normal)[kind::4].sum() > 20, (kind, name)
    for guard in (GUARD, ALIGNED_GUARD):
        assert_same_bits(run(buffers, segments, grad_scale=1.0, guard=guard), wanted)


def test_rows_of_zeros_have_the_bits_of_a_cpu(run: Step) -> None:
    """Zero over zero is no number, zero over what is infinite is zero, whatever its sign."""
    numel = 4096
    for eps in (1e-8, 0.0):
        buffers = make_buffers(numel)
        buffers.grad.zero_()
        buffers.exp_avg[1024:].copy_(torch.tensor([0.0, -0.0]).repeat(1536))
        for i, root in enumerate((0.0, math.inf, -1.0, math.nan)):
            buffers.exp_avg_sq[i::8].fill_(root)
        wanted = _on_cpu(buffers, dataclasses.replace(HYPER, eps=eps))
        result = run(buffers, dataclasses.replace(HYPER, eps=eps), guard=ALIGNED_GUARD)
        assert_same_bits(result, wanted)
        assert bool(wanted.weight[1024::8].isnan().any()) == (eps == 0.0)
        assert not torch.equal(wanted.weight, buffers.weight)


@pytest.mark.parametrize("master", ["fp32 to bf16", "fp32 to fp16", "halves"])
def test_what_is_not_finite_spreads_to_its_own_element(run: Step, master: str) -> None:
    """NaN and infinite gradients spoil their weights alone; no copy turns NaN into a number."""
    buffers = make_buffers(3000, (FP32, FP32, master))
    bad = torch.tensor([0, 17, 1500, 2999])
    buffers.grad[bad] = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    buffers.grad[3:4] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(FP32)
    result = run(buffers, HYPER, guard=ALIGNED_GUARD)
    assert_same_bits(result, _on_cpu(buffers, HYPER))
    is_bad = torch.zeros(3000, dtype=torch.bool)
    is_bad[bad] = is_bad[3] = True
    assert torch.equal(result.weight.isnan(), is_bad)


def test_flushing_has_the_bits_of_the_processor(emulation: Path) -> None:
    """Results around the smallest normal number, at once and deferred: zero where x86 has zero."""
    count = 200_000
    generator = np.random.default_rng(0)
    border = 2.0**-126 - generator.integers(-4, 8, count) * 2.0**-152
    signs = generator.choice([-1.0, 1.0], (3, count))
    b = generator.uniform(1, 2, count) * 2.0 ** generator.integers(-20, 20, count)
    b = b.astype(np.float32).astype(np.float64)
    kinds = (
        border / b,  # Products.
        border * b,  # Quotients.
        2.0**-126 * generator.uniform(-4, 4, count),
    )
    triples = []
    for a in kinds:
        a = a.astype(np.float32).astype(np.float64)
        c = border - a * b
        triples.append(np.stack([signs[0] * a, signs[1] * b, signs[0] * signs[1] * c], axis=1))
    # Sums so little beside what x86 takes for subnormal that double rounds them to it: 2**-126 less
    # a product that is 2**-151 but for its last bits.
    left = np.arange(2**23, 2**23 + 100_000)
    for right in (2**47 // left, -(-(2**47) // left)):
        is_near = abs(left * right - 2**47) < 2**18
        a, b = (factor[is_near] * 2.0**-99 for factor in (left, right))
        triples.append(np.stack([a, -b, np.full(len(a), 2.0**-126)], axis=1))
    numbers = np.ascontiguousarray(np.concatenate(triples), dtype=np.float32)
    at_border, in_doubt = ctypes.c_int64(0), ctypes.c_int64(0)
    library = ctypes.CDLL(str(emulation))
    library.count_flushing_differences.restype = ctypes.c_int64
    num_differences = library.count_flushing_differences(
        numbers.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(len(numbers)),
        ctypes.byref(at_border),
        ctypes.byref(in_doubt),
    )
    if num_differences < 0:
        pytest.skip("no processor with x86's mode for subnormal numbers")
    assert num_differences == 0
    assert at_border.value > 1000, "results that only rounding makes normal"
    assert at_border.value <= in_doubt.value < 5 * len(numbers) / 4, "few are done again"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_native", [True, False])
def test_scalars_on_the_device_scale_and_skip(
    monkeypatch: pytest.MonkeyPatch, device: str, is_native: bool
) -> None:
    """A factor in a tensor equals the number; a found infinity leaves every byte as it was."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    buffers = make_buffers(3000, (BF16, FP32, "fp32 to bf16"))

    def step(**scalars: float) -> AdamBuffers:
        result = copy_of(buffers, device=where)
        tensors = {name: torch.tensor(s, device=where) for name, s in scalars.items()}
        adam_step(result, HYPER, step=2, **tensors)
        return copy_of(result, device=torch.device("cpu"))

    wanted = _on_cpu(buffers, HYPER)
    assert_same_bits(step(grad_scale=1 / 3), wanted)
    assert_same_bits(step(grad_scale=1 / 3, found_inf=0.0), wanted)
    for found in (1.0, math.inf, math.nan):
        assert_same_bits(step(grad_scale=1 / 3, found_inf=found), buffers)


@pytest.mark.parametrize(
    "scalar", [torch.ones(1), torch.ones((), dtype=torch.float64), torch.ones((), device="meta")]
)
@pytest.mark.parametrize("name", ["grad_scale", "found_inf"])
def test_wrong_scalars_are_refused(name: str, scalar: torch.Tensor) -> None:
    """A tensor that a kernel would misread is named."""
    with pytest.raises(ValueError, match=f"scalar tensor.*{name} of adam_step"):
        adam_step(make_buffers(4), HYPER, step=1, **{name: scalar})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_sum_of_squares_has_the_bits_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, device: str, is_native: bool, dtype: torch.dtype
) -> None:
    """Lengths around lanes, blocks and runs of blocks give equal bits, again and again."""
    where = torch.device(device, 0) if device == "cuda" else torch.device(device)
    # Values so far apart that hardly a sum of squares is exact, and its order shows.
    spread = 8 if dtype == FP16 else 24
    for numel in (0, 1, 15, 17, 4095, 4097, 16 * 4096 + 1, 256 * 4096, 700 * 4096 + 5):
        values = values_of(numel, dtype, seed=numel, spread=spread)
        monkeypatch.delenv("MEGAFSDP_NATIVE", raising=False)
        wanted = sum_of_squares(values)
        monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
        for guard in (GUARD, ALIGNED_GUARD):
            there = guarded(values, guard, where)
            sums = [device_sum_of_squares(there) for _ in range(2)]
            assert all(s.device == where and s.shape == () for s in sums)
            assert [s.item() for s in sums] == [wanted] * 2
            assert sum_of_squares(there) == wanted


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=[pytest.mark.gpu, needs_module])])
def sums_device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Return where the compiled kernels add squares: on a CPU that emulates them, or on a GPU."""
    if request.param == "cuda":
        yield torch.device("cuda", 0)
        return
    with emulated_cuda(request.getfixturevalue("emulation")):
        yield torch.device("cpu")


def test_sums_of_many_buffers_have_the_bits_of_a_cpu(sums_device: torch.device) -> None:
    """Buffers of all dtypes share blocks and levels of runs; each lane reads inside its values."""
    numels = (1, 15, 17, 255, 256, 4095, 4096, 4097, 3 * 4096 + 241, 257 * 4096 + 5, 3)
    for shift in range(3):
        kinds = [(FP32, BF16, FP16)[(i + shift) % 3] for i in range(len(numels))]
        buffers = [
            guarded(values_of(numel, dtype, seed=numel, spread=8 if dtype == FP16 else 24))
            for numel, dtype in zip(numels, kinds, strict=True)
        ]
        module = cuda_kernels.usable_module(sums_device)
        assert module is not None
        there = [guarded(values, GUARD, sums_device) for values in buffers]
        sums = cuda_kernels.launch_sums_of_squares(module, there)
        assert sums.tolist() == [reference.sum_of_squares(values).item() for values in buffers]


@pytest.mark.gpu
@needs_module
def test_a_large_buffer_has_the_bits_of_a_cpu() -> None:
    """More tiles than blocks run at once, on a stream other than the default one."""
    numel = (1 << 24) + 5
    buffers = make_buffers(numel, (BF16, FP32, "fp32 to bf16"))
    with torch.cuda.stream(torch.cuda.Stream()):
        result = _on_cuda(buffers, HYPER, guard=ALIGNED_GUARD)
        total = device_sum_of_squares(buffers.weight.cuda())
    assert_same_bits(result, _on_cpu(buffers, HYPER))
    assert total.item() == sum_of_squares(buffers.weight)


@pytest.mark.gpu
@needs_module
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_steps_wait_for_nothing() -> None:
    """No launch, with scalars on the device and a long table, makes the host wait."""
    buffers = copy_of(make_buffers(5000), device=torch.device("cuda", 0))
    one = torch.ones((), device="cuda")
    segments = [AdamSegment(i, i + 1, HYPER) for i in range(5000)]
    adam_step(buffers, segments, step=1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adam_step(buffers, segments, step=2, grad_scale=one, found_inf=one * 0)
        device_sum_of_squares(buffers.grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_are_near_torchs_fused_adamw(device: str) -> None:
    """Ten steps end within a few units in the last place of the weights that torch reaches."""
    numel = 32 * 1000
    buffers = copy_of(make_buffers(numel), ALIGNED_GUARD, torch.device(device))
    buffers.exp_avg.zero_()
    buffers.exp_avg_sq.zero_()
    # Of one binade, so that a unit in the last place is one number.
    buffers.weight.copy_(buffers.weight.abs() % 1 * 0.5 + 1.25)
    start = buffers.weight.clone()
    hyper = dataclasses.replace(HYPER, lr=1e-3, eps=1e-5)
    parameter = torch.nn.Parameter(buffers.weight.clone())
    options = {"lr": hyper.lr, "betas": hyper.betas, "eps": hyper.eps, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW([parameter], fused=True, **options)  # type: ignore[arg-type]
    for step in range(1, 11):
        buffers.grad.copy_(values_of(numel, FP32, seed=step))
        parameter.grad = buffers.grad.clone()
        adam_step(buffers, hyper, step=step)
        optimizer.step()
    distance = (buffers.weight - parameter.detach()).abs().max().item() / 2.0**-23
    # On a CPU the bits are torch's; its CUDA kernel contracts and divides in an order of its own,
    # each step a rounding of the weight and of a step of 1e-3 apart.
    assert distance <= (0 if device == "cpu" else 10 * 2)
    assert not torch.equal(buffers.weight, start)


# Addresses of a count and a rate, the rate, betas and decay, AdamW and bias correction.
LATE = (64, 0, (0.1, 0.9, 0.95, 0.0), (True, True))


def _arguments(**changes: object) -> dict[str, object]:
    tensor = torch.zeros(64)
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "copy_out", "found_inf")
    segments = [(0, 4, (0.0,) * 8)]
    names += ("device_grad_scale", "late_constants")
    right = dict.fromkeys(names, tensor.data_ptr()) | {
        "remainder": 0,
        "numel": 4,
        "grad_dtype": "float32",
        "state_dtype": "float32",
        "copy_out_dtype": "bfloat16",
        "segments": segments,
        "grad_scale": 1.0,
        "flush_denormals": True,
        "late": [LATE],
        "device": 0,
        "stream": 0,
    }
    return right | changes


@needs_module
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[(name, 0) for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "numel")],
        *[(name, 3) for name in ("weight", "grad", "remainder", "found_inf", "device_grad_scale")],
        *[(name, "int8") for name in ("grad_dtype", "state_dtype", "copy_out_dtype")],
        ("segments", [(0, 5, (0.0,) * 8)]),
        ("late", [LATE, LATE]),
        ("late step", [(2, *LATE[1:])]),
        ("late lr", [(LATE[0], 4, *LATE[2:])]),
        ("late_constants", 0),
        ("device", -1),
    ],
)
def test_a_launch_names_a_wrong_argument(argument: str, value: object) -> None:
    """The native entry checks what it can before it asks CUDA for anything."""
    module = cuda_module()
    assert module is not None
    changes = {"late" if argument.startswith("late ") else argument: value}
    with pytest.raises(ValueError, match=argument):
        module.adam_step(**_arguments(**changes))


@needs_module
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("values", [(0, 4, "float32")]),
        ("values", [(2, 4, "float32")]),
        ("numel", [(64, 0, "float32")]),
        ("dtype", [(64, 4, "float32"), (64, 4, "int8")]),
        ("buffers", []),
        ("sums", 4),
        ("scratch", 0),
        ("device", -1),
    ],
)
def test_a_sum_names_a_wrong_argument(argument: str, value: object) -> None:
    """So does the sum of squares."""
    module = cuda_module()
    assert module is not None
    right = {"buffers": [(64, 4, "float32")], "sums": 64, "scratch": 64, "device": 0, "stream": 0}
    name = "buffers" if isinstance(value, list) else argument
    with pytest.raises(ValueError, match=argument):
        module.sums_of_squares(**(right | {name: value}))


@needs_module
@needs_no_gpu
def test_without_a_gpu_launches_say_so(caplog: pytest.LogCaptureFixture) -> None:
    """The module imports; a launch raises what CUDA says; the choice of kernels reports it once."""
    module = cuda_module()
    assert module is not None
    assert module.device_count()[0] == 0
    with pytest.raises(RuntimeError, match=r"adam_step\(\) to launch.*CUDA"):
        module.adam_step(**_arguments())
    with pytest.raises(RuntimeError, match=r"sums_of_squares\(\) to launch.*CUDA"):
        address = torch.zeros(8).data_ptr()
        module.sums_of_squares(
            buffers=[(address, 4, "float32")], sums=address, scratch=address, device=0, stream=0
        )
    for _ in range(2):
        assert cuda_kernels.usable_module(torch.device("cuda", 99)) is None
    assert caplog.text.count("cuda:99") == 1
    assert cuda_kernels.usable_module(torch.device("cpu")) is None


def test_kernels_that_are_not_built_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the cost and the cure; not to users who turn them off, nor for a CPU."""
    reason = "No module named 'megafsdp._cuda', says a test"
    monkeypatch.delenv("MEGAFSDP_NATIVE", raising=False)
    monkeypatch.setattr(_native, "_CUDA", None)
    monkeypatch.setattr(_native, "_WHY_CUDA_MISSING", reason)
    assert cuda_kernels.usable_module(torch.device("cpu")) is None
    assert not caplog.text
    for index in range(2):
        assert cuda_kernels.usable_module(torch.device("cuda", index)) is None
    assert caplog.text.count(reason) == 1
    assert "900 bytes an element instead of" in caplog.text and "Install nvcc" in caplog.text
    caplog.clear()
    monkeypatch.setattr(_native, "_CUDA", pytest)
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    assert cuda_kernels.usable_module(torch.device("cuda", 0)) is None
    assert not caplog.text


def test_asking_a_device_leaves_the_threads_device_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first use of another GPU would else move all that follows there."""
    current = [0]

    class Asking:
        def why_not_on(self, index: int) -> str:
            current[-1] = index
            return ""

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(_native, "cuda_module", Asking)
    assert isinstance(cuda_kernels.usable_module(torch.device("cuda", 98)), Asking)
    assert current == [0]


def test_cuda_kernels_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """MEGAFSDP_NATIVE=0 hides this module too, and the reason says so."""
    monkeypatch.setattr(_native, "_CUDA", pytest)
    monkeypatch.delenv("MEGAFSDP_NATIVE", raising=False)
    assert _native.cuda_module() is pytest
    assert _native.why_cuda_missing() == ""
    monkeypatch.setenv("MEGAFSDP_NATIVE", "0")
    assert _native.cuda_module() is None
    assert _native.why_cuda_missing() == "MEGAFSDP_NATIVE=0"
