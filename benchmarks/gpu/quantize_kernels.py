"""Part 11: kernels of quantized weights and inputs: their bits, and bytes a second beside a copy.

The bits are compared with the definition in torch on a CPU; a rehearsal compares the CPU's kernels
with it. Each pass is timed beside a copy that moves as many bytes.
"""

from __future__ import annotations

import itertools
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from benchmarks.adam import time_ms
from benchmarks.gpu.part import Report, Size
from megafsdp.quantize import input_formats, kernels
from megafsdp.quantize.formats import WeightFormat
from megafsdp.quantize.input_formats import ALONG_FEATURES, ALONG_TOKENS, InputFormat
from megafsdp.quantize.recipes import recipe_of
from megafsdp.quantize.tiles import Fragment

# fp8_delayed has the format of fp8_current.
_RECIPES = ("fp8_current", "fp8_block", "mxfp8", "nvfp4")
_BLOCKS = (input_formats.BLOCK_E4M3, input_formats.MX_E4M3)
_WARM_UP_REPEATS, _REPEATS = 2, 7
_SHARE_OF_COPY = 0.80


@dataclass(frozen=True)
class Pass:
    """One call of a kernel.

    Attributes:
        name: Its name in reports.
        call: Runs it.
        nbytes: Bytes that it reads and writes, without tables and maxima, which are a hundredth.
    """

    name: str
    call: Callable[[], object]
    nbytes: int


def run(size: Size, report: Report) -> None:
    """Check bits, then measure."""
    device = torch.device(size.device_type)
    rows = size.either(512, 64)
    for name in _RECIPES:
        form = recipe_of(name).weight
        report.check(
            f"weights of {name} have the bits of a CPU", _has_equal_bits(form, rows, device)
        )
    for form, along in itertools.product(
        (*_BLOCKS, input_formats.NV_E2M1, input_formats.TENSOR_E5M2), (ALONG_FEATURES, ALONG_TOKENS)
    ):
        is_met = _has_equal_input_bits(form, along, rows, device)
        report.check(f"inputs of {form.name} along {along} have the bits of a CPU", is_met)
    # Tokens of a step of Qwen3-1.7B times its MLP width: also as many weights as its MLP has.
    shape = size.either((8192, 6144), (64, 128))
    copy_speeds: dict[int, float] = {}
    speeds, shares = {}, {}
    for one in _passes(shape, device):
        if one.nbytes not in copy_speeds:
            copy_speeds[one.nbytes] = _copy_speed(one.nbytes, device)
        speeds[one.name] = one.nbytes / _median_ms(one.call, device) / 1e6
        shares[one.name] = speeds[one.name] / copy_speeds[one.nbytes]
        report.figure("GB/s", speeds)
        report.figure("share of a copy", shares)
        report.mark(f"{one.name}, of a copy", shares[one.name], at_least=_SHARE_OF_COPY)


def _has_equal_bits(form: WeightFormat, rows: int, device: torch.device) -> bool:
    """Return whether maxima, table, codes and values equal those of the definition."""
    values = torch.randn(2, rows, rows, generator=torch.Generator().manual_seed(0))
    values[1, 3, 5] = float("inf")
    found = _artifacts(form, values.to(device))
    with mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"):
        wanted = _artifacts(form, values)
    return all(_equal(left, right) for left, right in zip(found, wanted, strict=True))


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left.cpu(), right, rtol=0, atol=0, equal_nan=True)


def _artifacts(form: WeightFormat, values: torch.Tensor) -> list[torch.Tensor]:
    shape, device = tuple(values.shape), values.device
    fragment = Fragment(values.flatten(), shape, 0)
    maxima = torch.zeros(form.num_maxima(shape), dtype=torch.int32, device=device)
    table = torch.empty(form.table_nbytes(shape), dtype=torch.uint8, device=device)
    codes = torch.empty(values.numel() // form.codes_per_byte, dtype=torch.uint8, device=device)
    form.add_maxima([fragment], [maxima], through=torch.bfloat16)
    form.fill_tables([shape], [maxima], [table])
    form.encode([fragment], [maxima], [codes], through=torch.bfloat16)
    return [maxima, table, codes, form.decode(codes, table, shape, torch.bfloat16)]


def _has_equal_input_bits(form: InputFormat, along: int, rows: int, device: torch.device) -> bool:
    values = torch.randn(rows, 2 * rows, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = form.quantize(values.to(device), along=along)
    coding = form.coding(along=along)
    transposed = kernels.quantize_transposed(coding, values.to(device), has_codes=True)
    with mock.patch.dict(os.environ, MEGAFSDP_NATIVE="0"):
        wanted = form.quantize(values, along=along)
        both = kernels.quantize_transposed(coding, values, has_codes=True)
    pairs = [(found.codes, wanted.codes), (found.scales, wanted.scales)]
    pairs += zip(transposed, both, strict=True)
    return all(
        left is not None and right is not None and torch.equal(left.cpu(), right)
        for left, right in pairs
    )


def _passes(shape: tuple[int, int], device: torch.device) -> Iterator[Pass]:
    """Make each call with its buffers, one after another."""
    numel = shape[0] * shape[1]
    weight = torch.randn(shape, device=device)
    for name in _RECIPES:
        yield from _weight_passes(recipe_of(name).weight, weight)
    values = weight.bfloat16()
    for form in _BLOCKS:
        for along, way in ((ALONG_FEATURES, "features"), (ALONG_TOKENS, "tokens")):
            yield Pass(
                f"{form.name}, blocks along {way}",
                lambda f=form, a=along: f.quantize(values, along=a),
                3 * numel,
            )
    block = input_formats.BLOCK_E4M3
    yield Pass(
        f"{block.name}, blocks along tokens, transposed",
        lambda: kernels.quantize_transposed(block.coding(along=ALONG_TOKENS), values),
        3 * numel,
    )
    whole = input_formats.TENSOR_E4M3
    maximum = values.abs().amax().float().reshape(1)
    yield Pass(
        f"{whole.name}, a given maximum",
        lambda: whole.quantize(values, along=ALONG_TOKENS, maximum=maximum),
        3 * numel,
    )
    yield Pass(
        f"{whole.name}, a given maximum, transposed",
        lambda: kernels.quantize_transposed(whole.coding(along=ALONG_TOKENS), values, maximum),
        3 * numel,
    )
    for element in (block.element, input_formats.NV_E2M1.element):
        codes = values.view(torch.uint8)[:, : shape[1] // element.codes_per_byte].contiguous()
        yield Pass(
            f"transposed codes of {element.name}",
            lambda c=codes, e=element: kernels.transpose_codes(c, e),
            2 * codes.numel(),
        )


def _weight_passes(form: WeightFormat, weight: torch.Tensor) -> Iterator[Pass]:
    """Make maxima and codes of an fp32 weight by way of bf16, and values in bf16."""
    shape, numel = tuple(weight.shape), weight.numel()
    maxima, table, codes, out = _artifacts(form, weight)
    fragment = Fragment(weight.view(-1), shape, 0)
    through = torch.bfloat16
    yield Pass(
        f"{form.name}, maxima",
        lambda: form.add_maxima([fragment], [maxima], through=through),
        4 * numel,
    )
    yield Pass(
        f"{form.name}, codes",
        lambda: form.encode([fragment], [maxima], [codes], through=through),
        4 * numel + codes.numel(),
    )
    yield Pass(
        f"{form.name}, values",
        lambda: form.decode(codes, table, shape, out.dtype, out),
        2 * numel + codes.numel(),
    )


def _copy_speed(nbytes: int, device: torch.device) -> float:
    """Return the gigabytes a second of a copy that reads and writes ``nbytes`` in total."""
    source = torch.ones(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return nbytes / _median_ms(lambda: target.copy_(source), device) / 1e6


def _median_ms(call: Callable[[], object], device: torch.device) -> float:
    times_ms = [time_ms(call, device) for _ in range(_WARM_UP_REPEATS + _REPEATS)]
    return statistics.median(times_ms[_WARM_UP_REPEATS:])
