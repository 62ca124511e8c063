"""Scales: what each maximum gives. torchao is the oracle of MX blocks and of a GEMM's order."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megafsdp.quantize.elements import E4M3
from megafsdp.quantize.input_formats import MX_E4M3
from megafsdp.quantize.scales import to_128x4_blocks
from tests.quantize.quantized import BY_NAME, dequantize, quantize, randn

FLT_MAX = torch.finfo(torch.float32).max
SUBNORMAL = 2.0**-149
# What torchao writes when it is imported, and the warnings it registers, stay in a process of its
# own.
_ORACLE = """
import sys, torch
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.utils import to_blocked
given = torch.load(sys.argv[1])
mode = ScaleCalculationMode.RCEIL
found = {"mx": [], "blocked": [to_blocked(scales) for scales in given["scales"]]}
for values in given["values"]:
    scales, codes = to_mx(values, torch.float8_e4m3fn, 32, mode)
    found["mx"].append((scales.view(torch.uint8), codes.view(torch.uint8)))
torch.save(found, sys.argv[2])
"""


def of_one_value(name: str, value: float) -> tuple[float, float]:
    """Return the value that a matrix of one value decodes to, and a quarter of it beside."""
    values = torch.full((32, 32), value)
    values[0, 0] = value / 4
    decoded = dequantize(BY_NAME[name], quantize(BY_NAME[name], values), values.shape)
    return decoded[1, 1].item(), decoded[0, 0].item()


@pytest.mark.native
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
def test_a_zero_matrix_has_zero_codes(name: str) -> None:
    """And decodes to zeros, with their signs."""
    found = quantize(BY_NAME[name], torch.zeros(32, 32))
    assert not found.codes.any()
    assert not dequantize(BY_NAME[name], found, (32, 32)).any()
    negative = dequantize(BY_NAME[name], quantize(BY_NAME[name], -torch.zeros(32, 32)), (32, 32))
    assert negative.signbit().all()


@pytest.mark.native
@pytest.mark.parametrize("value", [447.99, 448.0, 448.01, 1e-30, 1e30])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8"])
def test_maxima_are_encoded_within_a_step(name: str, value: float) -> None:
    """Beside the largest value of the element, and far from it."""
    largest, quarter = of_one_value(name, value)
    # Half a step of 3 bits of mantissa.
    assert abs(largest - value) <= value / 16
    assert abs(quarter - value / 4) <= value / 4 / 16


@pytest.mark.native
def test_scales_are_those_of_the_formula() -> None:
    """Maximum, table entry and largest code for maxima at the edges of what scales can be."""

    def entry(name: str, value: float) -> tuple[float, int]:
        values = torch.full((32, 32), value)
        found = quantize(BY_NAME[name], values)
        scales = BY_NAME[name].tile_scales(found.table, (32, 32))
        return scales[0, 0].item(), int(found.codes[0])

    assert entry("fp8_current", 0.0) == (1.0, 0)
    assert entry("fp8_current", 448.0) == (1.0, 0x7E)
    assert entry("fp8_current", 224.0) == (0.5, 0x7E)
    # 448 over it is beyond fp32: the factor is the largest there is.
    one, largest = torch.tensor(1.0), torch.tensor(FLT_MAX)
    assert entry("fp8_current", SUBNORMAL)[0] == (one / largest).item()
    # Two divisions of tensors, each rounded once: a number over a tensor is rounded twice.
    scale = one / (torch.tensor(448.0) / largest)
    assert entry("fp8_current", FLT_MAX) == (scale.item(), 0x7E)
    # The factor is rounded down to a power of two, so the scale is rounded up.
    assert entry("fp8_block", 0.0) == (1.0, 0)
    assert entry("fp8_block", 448.0) == (1.0, 0x7E)
    assert entry("fp8_block", 448.01)[0] == 2.0
    assert entry("fp8_block", 447.99)[0] == 1.0
    assert entry("fp8_block", SUBNORMAL) == (2.0**-127, 0)
    assert entry("fp8_block", FLT_MAX)[0] == 2.0**120
    assert entry("mxfp8", 0.0) == (0, 0)
    assert entry("mxfp8", 448.0) == (127, 0x7E)
    assert entry("mxfp8", 448.01)[0] == 128
    assert entry("mxfp8", SUBNORMAL) == (0, 0)
    assert entry("mxfp8", FLT_MAX)[0] == 127 + 120
    assert entry("mxfp8", 448 * 2.0**-127)[0] == 0
    # The largest tile of a matrix has the largest scale.
    for value in (448.0, 1e-3, 1e30):
        assert entry("nvfp4", value) == (0x7E, 0x77)
    assert entry("nvfp4", 0.0) == (0, 0)
    for name, nan in (("fp8_current", math.nan), ("fp8_block", math.nan), ("mxfp8", 255)):
        for value in (math.inf, math.nan):
            scale, code = entry(name, value)
            assert (math.isnan(scale) if math.isnan(nan) else scale == nan) and code == 0x7F
    assert entry("nvfp4", math.inf) == (0x7F, 0)


@pytest.mark.native
def test_the_second_level_of_scales_is_a_code_of_its_own() -> None:
    """Tiles below the largest have scales in proportion, down to zero, where values vanish."""
    values = torch.ones(16, 64)
    values[:, 16:32] = 1 / 3
    values[:, 32:48] = 2.0**-18
    values[:, 48:] = 0
    found = quantize(BY_NAME["nvfp4"], values)
    scales = BY_NAME["nvfp4"].tile_scales(found.table, (16, 64))
    assert E4M3.decode(scales)[0].tolist() == [448.0, 144.0, 0.001953125, 0.0]
    assert found.table[:4].view(torch.float32).item() == 1.0
    decoded = dequantize(BY_NAME["nvfp4"], found, (16, 64))
    assert decoded[0, 0] == 1.0
    assert decoded[0, 16].item() == pytest.approx(1 / 3, rel=0.04)
    assert not decoded[:, 48:].any()


@pytest.fixture(scope="module")
def given() -> dict[str, list[torch.Tensor]]:
    """Return what the oracle is asked about."""
    wide = randn(64, 128) * 2.0 ** randn(64, 128, seed=1).mul(30).round()
    edges = torch.tensor([447.99, 448.0, 448.01, 1.0, 2.0**-100, 0.0, FLT_MAX / 2, 3.0])
    values = [randn(96, 256), randn(64, 64).bfloat16(), wide, edges.repeat(32).view(8, 32)]
    generator = torch.Generator().manual_seed(0)
    scales = [
        torch.randint(256, shape, generator=generator).to(torch.uint8)
        for shape in ((128, 4), (256, 8), (1, 1), (130, 7), (384, 20))
    ]
    return {"values": values, "scales": scales}


@pytest.fixture(scope="module")
def oracle(
    given: dict[str, list[torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list]:
    """Return torchao's codes and scales."""
    folder: Path = tmp_path_factory.mktemp("torchao")
    torch.save(given, folder / "given.pt")
    command = [sys.executable, "-c", _ORACLE, folder / "given.pt", folder / "found.pt"]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    found: dict[str, list] = torch.load(folder / "found.pt")
    return found


@pytest.mark.native
def test_mx_blocks_are_those_of_torchao(
    given: dict[str, list[torch.Tensor]], oracle: dict[str, list]
) -> None:
    """Codes and scales bit for bit, rounded up, over the whole range of exponents."""
    for values, (scales, codes) in zip(given["values"], oracle["mx"], strict=True):
        found = MX_E4M3.quantize(values, along=1)
        assert torch.equal(found.tile_scales(), scales.view(found.tile_scales().shape))
        assert torch.equal(found.codes, codes)
        # Blocks along tokens are those of the transpose.
        transposed = values.T.contiguous()
        along_tokens = MX_E4M3.quantize(transposed, along=0)
        assert torch.equal(along_tokens.codes, codes.T)
        assert torch.equal(along_tokens.tile_scales(), found.tile_scales().T)


def test_scales_for_a_gemm_are_those_of_torchao(
    given: dict[str, list[torch.Tensor]], oracle: dict[str, list]
) -> None:
    """Edges of the 128 x 4 blocks are filled with zeros."""
    for scales, blocked in zip(given["scales"], oracle["blocked"], strict=True):
        assert torch.equal(to_128x4_blocks(scales), blocked)
