"""Quantization's kernels on a CPU beside torch's eager formula and torchao.

Weights, fp32: maxima and codes together, each alone, and bf16 values from codes. Inputs, bf16:
blocks along features and along tokens. Our side runs at every instruction set of the processor
except the scalar one. Sides take turns in every repeat, and the second of two calls in a row is
timed. A copy of fp32 values from one array to another takes its turn too, and bandwidths are shown
beside its own. Last comes the refresh of a shard, through bf16, beside the step of Adam that comes
before it, at the same instruction set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.adam import time_ms
from benchmarks.quantize_rivals import Rival, eager, torchao
from benchmarks.record import CheckError, spread
from megafsdp._native import require_native_module
from megafsdp.optimizer.kernels.adam_kernel import AdamBuffers, adam_step
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.quantize.formats import FP8_BLOCK, FP8_CURRENT, MXFP8, NVFP4, WeightFormat
from megafsdp.quantize.input_formats import BLOCK_E4M3, MX_E4M3, NV_E2M1, TENSOR_E4M3, InputFormat
from megafsdp.quantize.kernels import clear_maxima
from megafsdp.quantize.tiles import Fragment

_CPU = torch.device("cpu")
_WARM_UP_REPEATS = 2
# Short calls are repeated more often than asked for, up to this factor.
_MOST_TIMES_THE_REPEATS = 5
_WEIGHTS = (FP8_CURRENT, FP8_BLOCK, MXFP8, NVFP4)
_INPUTS = (TENSOR_E4M3, BLOCK_E4M3, MX_E4M3, NV_E2M1)
_PROBE = "probe"
_TORCH, _TORCHAO, _ADAM = "torch", "torchao", "adam"
_HYPER = AdamHyper(1e-3, (0.9, 0.95), 1e-8, 0.1)
# torchao's scales of NVFP4 have a floor, and its bf16 maxima are rounded.
_NEAR_SHARE = {"nvfp4": 0.98, "nv16_e2m1": 0.98}

Times = dict[str, list[float]]
Calls = dict[str, Callable[[], object]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--side", type=int, nargs="+", default=[1024, 4096], help="of a matrix")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)


def run(options: argparse.Namespace) -> dict[str, object]:
    """Check the sides against each other, then time every job.

    Raises:
        CheckError: Our bits are not those of torch's formula, or torchao's codes are not near; no
            figure is given then.
        RuntimeError: The kernels are not compiled.
    """
    native = require_native_module()
    levels = native.simd_levels()[1:] or native.simd_levels()
    results: dict[str, object] = {"levels": levels}
    _check(min(options.side))
    for side in options.side:
        factor = min((max(options.side) // side) ** 2, _MOST_TIMES_THE_REPEATS)
        for num_threads in options.threads:
            with _threads(num_threads):
                timed = _measure(side, options.repeats * factor, levels)
            results[f"{side * side} elements, threads {num_threads}"] = timed
    return results


@contextlib.contextmanager
def _threads(number: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class OurWeight:
    """A matrix under our kernels, with buffers made once, as in the engine."""

    def __init__(self, weight_format: WeightFormat, values: torch.Tensor) -> None:
        """Allocate what is written."""
        self.format, self.shape = weight_format, tuple(values.shape)
        self.fragments = [Fragment(values.view(-1), self.shape, 0)]
        self.maxima = [torch.zeros(weight_format.num_maxima(self.shape), dtype=torch.int32)]
        self.tables = [torch.zeros(weight_format.table_nbytes(self.shape), dtype=torch.uint8)]
        num_codes = values.numel() // weight_format.codes_per_byte
        self.codes = [torch.zeros(num_codes, dtype=torch.uint8)]
        self.out = torch.zeros(self.shape, dtype=torch.bfloat16)

    def add_maxima(self, through: torch.dtype | None = None) -> None:
        """Find the maxima."""
        clear_maxima(self.maxima[0])
        self.format.add_maxima(self.fragments, self.maxima, through=through)

    def encode(self, through: torch.dtype | None = None) -> None:
        """Write the codes."""
        self.format.encode(self.fragments, self.maxima, self.codes, through=through)

    def quantize(self, through: torch.dtype | None = None) -> None:
        """Find maxima, write table and codes."""
        self.add_maxima(through)
        self.format.fill_tables([self.shape], self.maxima, self.tables)
        self.encode(through)

    def decode(self) -> torch.Tensor:
        """Write the values."""
        return self.format.decode(
            self.codes[0], self.tables[0], self.shape, torch.bfloat16, self.out
        )


def _check(side: int) -> None:
    values = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    for weight_format in _WEIGHTS:
        ours = OurWeight(weight_format, values)
        ours.quantize()
        codes = ours.codes[0].view(side, -1)
        plain = eager(weight_format.coding, (side, side))
        _check_bits(weight_format.name, codes, ours.decode(), plain, values)
        _check_near(weight_format.name, codes, torchao(weight_format.coding, along=1), values)
    narrow = values.bfloat16()
    for input_format in _INPUTS:
        for along in (0, 1):
            name, coding = input_format.name, input_format.coding(along=along)
            found = input_format.quantize(narrow, along=along)
            plain = eager(coding, (side, side))
            _check_bits(name, found.codes, found.dequantize(torch.bfloat16), plain, narrow)
            _check_near(name, found.codes, torchao(coding, along=along), narrow)


def _check_bits(
    name: str, codes: torch.Tensor, decoded: torch.Tensor, rival: Rival, values: torch.Tensor
) -> None:
    wanted, table = rival.quantize(values)
    if not torch.equal(codes, wanted):
        raise CheckError(f"{name}: codes differ from those of torch's formula")
    if not torch.equal(decoded, rival.decode(wanted, table)):
        raise CheckError(f"{name}: values differ from those of torch's formula")
    if not 0 < (decoded.float() - values).norm() < 0.15 * values.float().norm():
        raise CheckError(f"{name}: decoded values are not near the values")


def _check_near(name: str, codes: torch.Tensor, rival: Rival | None, values: torch.Tensor) -> None:
    if rival is None:
        return
    theirs, _ = rival.quantize(values)
    share = (theirs.view(codes.shape) == codes).float().mean().item()
    if share < _NEAR_SHARE.get(name, 1.0):
        raise CheckError(f"{name}: {1 - share:.1%} of the codes differ from torchao's")


def _measure(side: int, repeats: int, levels: list[str]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(side, side, generator=generator)
    results: dict[str, object] = {}
    for weight_format in _WEIGHTS:
        ours, jobs = OurWeight(weight_format, values), {}
        ours.quantize()
        rivals = _rivals(weight_format.coding, (side, side), along=1)
        made = {name: rival.quantize(values) for name, rival in rivals.items()}
        code_nbytes = 1 / weight_format.codes_per_byte
        calls = {name: _bound(rival.quantize, values) for name, rival in rivals.items()}
        jobs["maxima and encode"] = (ours.quantize, calls, 8 + code_nbytes)
        jobs["maxima"] = (ours.add_maxima, {}, 4)
        jobs["encode"] = (ours.encode, {}, 4 + code_nbytes)
        calls = {name: _bound(r.decode, *made[name]) for name, r in rivals.items()}
        jobs["decode"] = (ours.decode, calls, code_nbytes + 2)
        for job, (call, others, nbytes) in jobs.items():
            timed = _times_ms(call, others, values, repeats, levels)
            results[f"{weight_format.name}, {job}"] = _summary(timed, nbytes, values.numel())
    narrow = values.bfloat16()
    for input_format in _INPUTS:
        for along, where in ((1, "features"), (0, "tokens")):
            timed = _input_times_ms(input_format, narrow, values, along, repeats, levels)
            nbytes = 2 + 1 / input_format.element.codes_per_byte
            # A scale that is not a block's own needs a pass over all values first.
            nbytes += 2 * (input_format in (TENSOR_E4M3, NV_E2M1))
            name = f"{input_format.name}, along {where}"
            results[name] = _summary(timed, nbytes, values.numel())
    results |= _refreshes(values, repeats, levels)
    return results


def _rivals(coding: Any, shape: tuple[int, int], *, along: int) -> dict[str, Rival]:
    found = {_TORCH: eager(coding, shape), _TORCHAO: torchao(coding, along=along)}
    return {name: rival for name, rival in found.items() if rival is not None}


def _bound(call: Callable[..., object], *arguments: object) -> Callable[[], object]:
    return lambda: call(*arguments)


def _input_times_ms(
    input_format: InputFormat,
    narrow: torch.Tensor,
    values: torch.Tensor,
    along: int,
    repeats: int,
    levels: list[str],
) -> Times:
    coding = input_format.coding(along=along)
    rivals = _rivals(coding, (narrow.shape[0], narrow.shape[1]), along=along)
    return _times_ms(
        lambda: input_format.quantize(narrow, along=along),
        {name: _bound(rival.quantize, narrow) for name, rival in rivals.items()},
        values,
        repeats,
        levels,
    )


def _refreshes(values: torch.Tensor, repeats: int, levels: list[str]) -> dict[str, object]:
    """Return the refresh of every format beside Adam's step on the same fp32 shard."""
    numel, results = values.numel(), {}
    buffers = AdamBuffers(*(torch.full((numel,), 1e-3) for _ in range(4)))
    calls: Calls = {_ADAM: lambda: adam_step(buffers, _HYPER, step=2)}
    for weight_format in _WEIGHTS:
        refresh = _bound(OurWeight(weight_format, values).quantize, torch.bfloat16)
        nbytes = 8 + 1 / weight_format.codes_per_byte
        for level in levels:
            timed = _times_ms(refresh, calls, values, repeats, [level], level_of_others=level)
            results[f"{weight_format.name}, refresh, {level}"] = _summary(timed, nbytes, numel)
    return results


def _times_ms(
    ours: Callable[[], object],
    others: Calls,
    values: torch.Tensor,
    repeats: int,
    levels: list[str],
    level_of_others: str = "",
) -> Times:
    """Return the times of all sides, ours by level, and of the probe; sides take turns."""
    to = torch.empty_like(values)
    calls: Calls = {level: ours for level in levels} | others
    calls[_PROBE] = lambda: to.copy_(values)
    times_ms: Times = {name: [] for name in calls}
    usual = os.environ.get("MEGAFSDP_SIMD", "")
    try:
        for repeat in range(_WARM_UP_REPEATS + repeats):
            for name, call in calls.items():
                os.environ["MEGAFSDP_SIMD"] = name if name in levels else level_of_others
                # The first call refills the caches that others have used, and wakes threads.
                time_ms(call, _CPU)
                start_s = time.perf_counter()
                call()
                elapsed_ms = 1e3 * (time.perf_counter() - start_s)
                if repeat >= _WARM_UP_REPEATS:
                    times_ms[name].append(elapsed_ms)
    finally:
        os.environ["MEGAFSDP_SIMD"] = usual
    return times_ms


def _summary(times_ms: Times, nbytes_per_element: float, numel: int) -> dict[str, Any]:
    medians = {name: statistics.median(times) for name, times in times_ms.items()}
    rivals = [name for name in times_ms if name in (_TORCH, _TORCHAO, _ADAM)]
    levels = [name for name in times_ms if name not in (*rivals, _PROBE)]
    probe = 8 * numel / medians[_PROBE] / 1e6
    achieved = {name: nbytes_per_element * numel / medians[name] / 1e6 for name in levels}
    return {
        "ms": {name: spread(times) for name, times in times_ms.items()},
        # Theirs over ours, of the times in each round, as other load of the machine slows both.
        "times_faster": {
            level: {
                rival: statistics.median(
                    b / a for a, b in zip(times_ms[level], times_ms[rival], strict=True)
                )
                for rival in rivals
            }
            for level in levels
        },
        "gb_per_s": achieved,
        "probe_gb_per_s": probe,
        "share_of_probe": {
            level: statistics.median(
                nbytes_per_element / 8 * b / a
                for a, b in zip(times_ms[level], times_ms[_PROBE], strict=True)
            )
            for level in levels
        },
    }


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = ["Quantization on CPU: ms, times faster than others, and share of a copy's bytes a s"]
    for name, jobs in results.items():
        if not isinstance(jobs, dict):
            continue
        for job, case in jobs.items():
            parts = []
            for level, faster in case["times_faster"].items():
                others = "".join(f", {ratio:.1f} x {rival}" for rival, ratio in faster.items())
                parts.append(
                    f"{level} {case['ms'][level]['median']:.2f}{others}, "
                    f"{case['share_of_probe'][level]:.0%}"
                )
            lines.append(f"{name}, {job}: {'; '.join(parts)}")
    return "\n".join(lines)
