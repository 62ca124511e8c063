"""Compiled kernels at every instruction set and number of threads against the reference's bits."""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megafsdp._native import native_module
from megafsdp.optimizer.kernels import adam_kernel as kernels
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, AdamSegment, adam_step
from megafsdp.optimizer.kernels.hyper import AdamConstants, AdamHyper
from megafsdp.optimizer.kernels.square_sum import sum_of_squares
from tests.native import compiled
from tests.optimizer.adam.flat_buffers import (
    BF16,
    FP16,
    FP32,
    HYPER,
    L2_HYPER,
    LAYOUTS,
    assert_guards_hold,
    assert_same_bits,
    copy_of,
    guarded,
    make_buffers,
    spread_subnormals,
    tensors_of,
    values_of,
)
from tests.ranks import Ranks

# A multiple of nothing, beyond the smallest range of a thread and, with 28 bytes each, of tiles.
BIG_NUMEL = (1 << 18) + 1000 + 77


def _step(buffers: AdamBuffers, **options: object) -> AdamBuffers:
    """Run a step on a copy, with what a test asks for instead of the usual options."""
    result = copy_of(buffers)
    hyper = options.pop("hyper", HYPER)
    adam_step(result, hyper, **({"step": 2, "grad_scale": 1 / 3} | options))  # type: ignore[arg-type]
    return result


def _in_torch(buffers: AdamBuffers, **options: object) -> AdamBuffers:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGAFSDP_NATIVE", "0")
        return _step(buffers, **options)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1:]}"[6:])
def test_every_layout_has_the_bits_of_the_reference(
    level: str, layout: tuple[torch.dtype, torch.dtype, str]
) -> None:
    """Any dtypes, AdamW and L2, first and later steps: equal bytes, and the weights did move."""
    buffers = make_buffers(1000, layout)
    for hyper in (HYPER, L2_HYPER):
        for step in (1, 2, 1000):
            result = _step(buffers, hyper=hyper, step=step)
            assert_same_bits(result, _in_torch(buffers, hyper=hyper, step=step))
            assert_guards_hold(result)
            assert torch.equal(result.grad, buffers.grad)
    assert not torch.equal(result.weight, buffers.weight)


@pytest.mark.parametrize("betas", [(0.3, 0.25), (0.0, 0.0), (0.5, 0.999)])
def test_small_betas_have_the_bits_of_the_reference(level: str, betas: tuple[float, float]) -> None:
    """At beta1 up to a half the first moment is reached from the gradient."""
    hyper = dataclasses.replace(HYPER, betas=betas, bias_correction=False)
    assert_same_bits(
        _step(make_buffers(999), hyper=hyper), _in_torch(make_buffers(999), hyper=hyper)
    )


def test_sums_that_double_would_round_to_a_tie_round_once(level: str) -> None:
    """Where an exact sum lies just beside the middle of two fp32 values, double is not enough."""
    hyper = dataclasses.replace(L2_HYPER, betas=(0.0, 0.0), weight_decay=64 * (1 + 2.0**-15))
    buffers = AdamBuffers(*(torch.zeros(32) for _ in range(4)))
    signs = torch.tensor([1.0, -1.0]).repeat_interleave(8).repeat(2)
    buffers.weight.copy_(signs * (1 - 2.0**-15))
    buffers.grad.copy_(signs * (2.0**30 + 128))
    result = _step(buffers, hyper=hyper, grad_scale=1.0)
    # The product is 64 - 2**-24, a little less than half of what fp32 values are apart there.
    assert torch.equal(result.exp_avg, buffers.grad)
    assert_same_bits(result, _in_torch(buffers, hyper=hyper, grad_scale=1.0))


@pytest.mark.parametrize("master", ["fp32 to bf16", "halves"])
def test_every_length_has_the_bits_of_the_reference(level: str, master: str) -> None:
    """Tails of vectors and of tiles read and write nothing beyond the end."""
    for numel in (*range(71), 127, 128, 129, 257):
        buffers = make_buffers(numel, (BF16, FP32, master))
        result = _step(buffers)
        assert_same_bits(result, _in_torch(buffers))
        assert_guards_hold(result)


@pytest.mark.parametrize("master", ["fp32 to bf16", "halves"])
def test_threads_do_not_show(level: str, master: str) -> None:
    """One thread, two, three and more than there is work for give the same bytes."""
    buffers = make_buffers(BIG_NUMEL, (BF16, FP32, master))
    wanted = _in_torch(buffers)
    for num_threads in (1, 2, 3, 64):
        result = _step(buffers, num_threads=num_threads)
        assert_same_bits(result, wanted)
        assert_guards_hold(result)


def _forks() -> None:
    def step() -> torch.Tensor:
        tensors = [torch.full((1 << 20,), value) for value in (1.0, 2.0, 3.0, 4.0)]
        adam_step(AdamBuffers(*tensors), AdamHyper(), step=1, num_threads=2)
        return tensors[0]

    wanted = step()
    with warnings.catch_warnings():
        # Python 3.12 warns of the threads that are the point here.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            is_equal = torch.equal(step(), wanted)
            tasks = Path("/proc/self/task")
            has_threads = not tasks.is_dir() or len(list(tasks.iterdir())) == 2
            status = 0 if is_equal and has_threads else 1
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(step(), wanted)


@compiled
def test_a_forked_child_has_threads_of_its_own(ranks: Ranks) -> None:
    """Those that wait in the parent are not there: the child starts one, and steps the same."""
    ranks(1).run(_forks)


def _cores_of_workers(cores: set[int]) -> list[set[int]]:
    """Return where threads that a step with three threads makes may run, in a child on cores."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.sched_setaffinity(0, cores)
            tensors = [torch.full((1 << 20,), value) for value in (1.0, 2.0, 3.0, 4.0)]
            adam_step(AdamBuffers(*tensors), AdamHyper(), step=1, num_threads=3)
            # All but the thread that called, which a fork leaves alone.
            tasks = map(int, os.listdir("/proc/self/task"))
            found = [os.sched_getaffinity(task) for task in tasks if task != os.getpid()]
            os.write(writer, repr(found).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as answer:
        found: list[set[int]] = ast.literal_eval(answer.read())
    return found


@compiled
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores of threads: Linux")
@pytest.mark.parametrize("num_cores", [1, 2])
def test_workers_keep_off_the_core_of_the_caller(ranks: Ranks, num_cores: int) -> None:
    """Where it is not the only one; a scheduler that sees no common cache would wake them there."""
    cores = set(sorted(os.sched_getaffinity(0))[:num_cores])
    if len(cores) < num_cores:
        pytest.skip(f"{num_cores} cores")
    (found,) = ranks(1).run(_cores_of_workers, cores)
    assert len(found) == 2
    for allowed in found:
        assert allowed < cores if num_cores > 1 else allowed == cores
        assert len(allowed) == 1


def test_cuts_do_not_show(level: str) -> None:
    """A buffer updated in pieces of odd sizes equals the buffer updated at once."""
    buffers = make_buffers(1000, (BF16, FP32, "fp32 to bf16"))
    result = copy_of(buffers)
    for start, stop in ((0, 1), (1, 18), (18, 500), (500, 1000)):
        pieces = {name: tensor[start:stop] for name, tensor in tensors_of(result).items()}
        adam_step(AdamBuffers(**pieces), HYPER, step=2, grad_scale=1 / 3)
    assert_same_bits(result, _step(buffers))


@pytest.mark.parametrize("dtypes", [(BF16, FP32), (FP32, BF16)])
def test_moments_of_two_dtypes_pass_through_fp32(
    monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """In chunks, cut at the bounds of segments too, with the bits of the definition."""
    monkeypatch.setattr(kernels, "_WIDE_NUMEL", 300)
    for master in ("fp32 to bf16", "halves"):
        same = make_buffers(1000, (BF16, FP32, master))
        buffers = dataclasses.replace(
            same, exp_avg=same.exp_avg.to(dtypes[0]), exp_avg_sq=same.exp_avg_sq.to(dtypes[1])
        )
        segments = [AdamSegment(3, 650, HYPER), AdamSegment(650, 999, L2_HYPER)]
        result = _step(buffers, hyper=segments)
        assert_same_bits(result, _in_torch(buffers, hyper=segments))
        assert not torch.equal(result.exp_avg[3:999], buffers.exp_avg[3:999])
        assert torch.equal(result.exp_avg[:3], buffers.exp_avg[:3])


def test_streamed_copies_equal_cached_ones(level: str) -> None:
    """A buffer too large for any cache takes the other kind of store, at any address."""
    numel = (1 << 22) + 5
    buffers = AdamBuffers(
        weight=values_of(numel, FP32, seed=1),
        grad=values_of(numel, BF16, seed=2),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        copy_out=torch.zeros(numel + 1, dtype=BF16)[1:],
    )
    adam_step(buffers, HYPER, step=1)
    assert buffers.copy_out is not None
    assert torch.equal(buffers.copy_out, buffers.weight.bfloat16())


@pytest.mark.parametrize("is_native", [True, False])
def test_segments_have_their_own_hyperparameters(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Each segment equals a call of its own; elements of no segment stay as they are."""
    monkeypatch.setenv("MEGAFSDP_NATIVE", str(int(is_native)))
    buffers = make_buffers(BIG_NUMEL, (FP32, FP32, "fp32 to bf16"))
    ranges = ((0, 7, HYPER), (7, 140_000, L2_HYPER), (140_001, BIG_NUMEL - 1, AdamHyper(1.0)))
    segments = [AdamSegment(*r) for r in ranges]
    result = _step(buffers, hyper=segments, num_threads=2)
    wanted = copy_of(buffers)
    for start, stop, hyper in ranges:
        pieces = {name: tensor[start:stop] for name, tensor in tensors_of(wanted).items()}
        adam_step(AdamBuffers(**pieces), hyper, step=2, grad_scale=1 / 3)
    assert_same_bits(result, wanted)
    assert torch.equal(result.weight[[140_000, -1]], buffers.weight[[140_000, -1]])
    assert result.weight[140_002] != buffers.weight[140_002]


@pytest.mark.parametrize("layout", [(FP32, FP32, "fp32 to bf16"), (BF16, BF16, "halves")])
@pytest.mark.parametrize("flush_denormals", [True, False])
def test_denormals_have_the_bits_of_the_reference(
    level: str, flush_denormals: bool, layout: tuple[torch.dtype, torch.dtype, str]
) -> None:
    """Subnormal inputs and results are kept or become zero alike, at the borders too."""
    buffers = make_buffers(4096, layout)
    spread_subnormals(buffers)
    gentle = AdamHyper(1e-3, eps=1e-30, weight_decay=0.5)
    # A large scale makes normal numbers of subnormal gradients, unless those count as zero.
    # Constants that are subnormal themselves.
    tiny = AdamHyper(1e-40, eps=1e-40, weight_decay=1e-40, adam_w_mode=False)
    jobs = ((gentle, 1 / 3), (L2_HYPER, 1 / 3), (gentle, 2.0**20), (tiny, 1 / 3))
    for hyper, grad_scale in jobs:
        options = {"hyper": hyper, "grad_scale": grad_scale, "flush_denormals": flush_denormals}
        result = _step(buffers, **options)
        assert_same_bits(result, _in_torch(buffers, **options))
        bits = result.exp_avg.view(torch.int32 if layout[1] == FP32 else torch.int16)
        exponents = 0x7F800000 if layout[1] == FP32 else 0x7F80
        is_denormal = (bits & exponents == 0) & (result.exp_avg.signbit().logical_not())
        is_denormal &= bits != 0
        assert bool(is_denormal.any()) == (not flush_denormals)


@pytest.mark.parametrize("caller_flushes", [True, False])
def test_the_callers_mode_stays(level: str, caller_flushes: bool) -> None:
    """The caller's own mode for subnormal numbers neither changes nor shows in the result."""
    buffers = make_buffers(BIG_NUMEL)
    buffers.exp_avg.fill_(2.0**-130)
    wanted = _step(buffers, flush_denormals=False)
    torch.set_flush_denormal(caller_flushes)
    try:
        for flush_denormals in (True, False):
            result = _step(buffers, flush_denormals=flush_denormals, num_threads=2)
            small = torch.full((1,), 2.0**-120) * 2.0**-20
            assert (small == 0).item() == caller_flushes
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(result, wanted)


@pytest.mark.parametrize("master", ["fp32 to bf16", "fp32 to fp16", "halves"])
def test_what_is_not_finite_spreads_to_its_own_element(level: str, master: str) -> None:
    """NaN and infinite gradients spoil their weights alone; no copy turns NaN into a number."""
    buffers = make_buffers(1000, (FP32, FP32, master))
    bad = torch.tensor([0, 17, 500, 999])
    payload = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(FP32)
    buffers.grad[bad] = torch.tensor([math.nan, math.inf, -math.inf, payload.item()])
    buffers.grad[3:4] = payload
    result = _step(buffers)
    assert_same_bits(result, _in_torch(buffers))
    is_bad = torch.zeros(1000, dtype=torch.bool)
    is_bad[bad] = is_bad[3] = True
    assert torch.equal(result.weight.isnan(), is_bad)
    if result.copy_out is not None:
        assert torch.equal(result.copy_out.isnan(), is_bad)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_sum_of_squares_has_the_bits_of_the_reference(level: str, dtype: torch.dtype) -> None:
    """Any length, address and number of threads give the sum of the written order."""
    for numel in (0, 1, 15, 17, 4095, 4097, BIG_NUMEL):
        values = guarded(values_of(numel, dtype, seed=numel))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEGAFSDP_NATIVE", "0")
            wanted = sum_of_squares(values)
        for num_threads in (1, 2, 5):
            assert sum_of_squares(values, num_threads=num_threads) == wanted
        exact = math.fsum(v * v for v in values[:5000].tolist())
        assert sum_of_squares(values[:5000]) == pytest.approx(exact, rel=1e-13)


def test_sum_of_squares_tells_overflow_from_infinity(level: str) -> None:
    """The largest finite values have a finite sum; one infinity or NaN anywhere does not."""
    values = torch.full((9000,), torch.finfo(FP32).max)
    assert math.isfinite(sum_of_squares(values))
    for bad in (math.inf, -math.inf, math.nan):
        for index in (0, 4500, 8999):
            spoiled = values.clone()
            spoiled[index] = bad
            assert not math.isfinite(sum_of_squares(spoiled))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(4, dtype=BF16)}, "torch.bfloat16.*weight of AdamBuffers"),
        ({"grad": torch.zeros(5)}, r"\(5,\)"),
        ({"grad": torch.zeros(4, dtype=torch.float64)}, "float64"),
        ({"exp_avg": torch.zeros(4, dtype=FP16)}, "float16"),
        ({"exp_avg_sq": torch.zeros(4, dtype=torch.float16)}, "exp_avg_sq"),
        ({"remainder": torch.zeros(4, dtype=torch.int16)}, "weight of AdamBuffers"),
        ({"copy_out": torch.zeros(4)}, "copy_out"),
        ({"copy_out": torch.zeros(8, dtype=BF16)[::2]}, r"strides \(2,\)"),
        ({"grad": torch.zeros(4, device="meta")}, "meta"),
        (
            {
                "weight": torch.zeros(4, dtype=BF16),
                "remainder": torch.zeros(4, dtype=torch.int16),
                "copy_out": torch.zeros(4, dtype=BF16),
            },
            "None.*copy_out",
        ),
    ],
)
def test_wrong_buffers_are_named(changes: dict[str, torch.Tensor], message: str) -> None:
    """A tensor that cannot be right is named with what is wrong about it."""
    right = {name: torch.zeros(4) for name in ("weight", "grad", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=message):
        AdamBuffers(**(right | changes))


@pytest.mark.parametrize(
    ("ranges", "options", "message"),
    [
        ([(0, 5)], {}, "stop 5.*segment 0"),
        ([(0, 3), (2, 4)], {}, "segment 1"),
        ([(3, 2)], {}, "start 3, stop 2"),
        ([(0, 4)], {"step": 0}, "step"),
        ([(0, 4)], {"num_threads": 0}, "num_threads"),
    ],
)
def test_wrong_calls_are_refused(
    ranges: list[tuple[int, int]], options: dict[str, int], message: str
) -> None:
    """Segments out of order or bounds, a step before the first, no thread: nothing is written."""
    buffers = make_buffers(4)
    segments = [AdamSegment(start, stop, HYPER) for start, stop in ranges]
    before = copy_of(buffers)
    with pytest.raises(ValueError, match=message):
        adam_step(buffers, segments, **({"step": 1} | options))
    assert_same_bits(buffers, before)


@compiled
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[(name, 0) for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "numel")],
        *[(name, 3) for name in ("weight", "grad", "exp_avg", "exp_avg_sq", "remainder")],
        *[(name, "int8") for name in ("grad_dtype", "state_dtype", "copy_out_dtype")],
        ("copy_out", 3),
        ("num_threads", 0),
        ("segments", [(0, 5, (0.0,) * 8)]),
        ("segments", [(2, 3, (0.0,) * 8), (0, 1, (0.0,) * 8)]),
    ],
)
def test_kernel_names_a_wrong_argument(argument: str, value: object) -> None:
    """The native entry checks every argument that it can."""
    tensor = torch.zeros(4)
    names = ("weight", "grad", "exp_avg", "exp_avg_sq", "copy_out")
    arguments = dict.fromkeys(names, tensor.data_ptr()) | {
        "remainder": 0,
        "numel": 4,
        "grad_dtype": "float32",
        "state_dtype": "float32",
        "copy_out_dtype": "bfloat16",
        "segments": [],
        "grad_scale": 1.0,
        "flush_denormals": True,
        "num_threads": 1,
    }
    native = native_module()
    assert native is not None
    with pytest.raises(ValueError, match=argument):
        native.adam_step(**(arguments | {argument: value}))


def _calls_of_all_kernels(
    numel: int,
) -> tuple[dict[str, Callable[[], object]], list[torch.Tensor]]:
    """Return a call of each compiled kernel, in which nothing else happens, and their memory."""
    native = native_module()
    assert native is not None
    tensors = [torch.zeros(numel) for _ in range(4)]
    first, second, *_ = addresses = [tensor.data_ptr() for tensor in tensors]
    step = dict(zip(("weight", "grad", "exp_avg", "exp_avg_sq"), addresses, strict=True)) | {
        "remainder": 0,
        "copy_out": 0,
        "numel": numel,
        "grad_dtype": "float32",
        "state_dtype": "float32",
        "copy_out_dtype": "",
        "segments": [(0, numel, AdamConstants.rounded(HYPER, 1))],
        "grad_scale": 1.0,
        "flush_denormals": True,
        "num_threads": 1,
    }
    sums = {"shards": [first], "out": second, "scale": 1.0, "accumulate": False}
    sums |= {"numel": numel, "shard_dtype": "float32", "out_dtype": "float32"}
    squares = {"values": first, "numel": numel, "dtype": "float32", "num_threads": 1}
    arguments = {"adam_step": step, "sum_of_squares": squares, "sum_shards": sums}
    calls = {n: functools.partial(getattr(native, n), **own) for n, own in arguments.items()}
    # The tensors live as long as the calls.
    return calls, tensors


@compiled
@pytest.mark.parametrize("name", ["adam_step", "sum_of_squares", "sum_shards"])
def test_kernels_let_other_python_threads_run(name: str) -> None:
    """A thread that waits for the interpreter's lock gets it from a call, and from nothing else."""
    calls, _memory = _calls_of_all_kernels(1 << 18)
    call = calls[name]
    gate, has_run = threading.Lock(), list[bool]()
    gate.acquire()

    def waits() -> None:
        with gate:
            has_run.append(True)

    thread = threading.Thread(target=waits, daemon=True)
    interval_s = sys.getswitchinterval()
    # The lock changes hands where it is let go of, never because time is up: at the start, which
    # gives it back once the thread stands at the gate, and in the calls.
    sys.setswitchinterval(1000.0)
    try:
        thread.start()
        gate.release()
        # The thread may take longer to wake than a call lasts; one that keeps the lock never lets
        # it run, however many there are.
        for _ in range(20_000):
            call()
            if has_run:
                break
        was_let = bool(has_run)
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert was_let
