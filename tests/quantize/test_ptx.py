"""The PTX of the CUDA kernels of quantization: the loads, stores and arithmetic nvcc makes.

As tests/optimizer/kernels/test_ptx.py: what is counted here a GPU moves in whole vectors; how fast
needs one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parents[2] / "megafsdp" / "csrc" / "cuda" / "quantize.cu"
_NVCC = shutil.which(os.environ.get("NVCC", "nvcc"))
needs_nvcc = pytest.mark.skipif(_NVCC is None, reason="no nvcc")

# Eight values of a thread's row are two vectors of 16 bytes in fp32 and one in 16 bits; their codes
# one of 8 bytes, or a word in 4 bits. Four rows are on their way together.
ROWS = 4
# What is moved in vectors of 16 and of 8 bytes: loads, stores. f is fp32, t 16 bits.
VECTORS = {
    "maxima_kernel f": ((2 * ROWS, 0), (0, 0)),
    "maxima_kernel t": ((ROWS, 0), (0, 0)),
    "encode_kernel E4M3 f": ((2 * ROWS, 0), (0, ROWS)),
    "encode_kernel E4M3 t": ((ROWS, 0), (0, ROWS)),
    "encode_kernel E5M2 f": ((2 * ROWS, 0), (0, ROWS)),
    "encode_kernel E5M2 t": ((ROWS, 0), (0, ROWS)),
    # Noise is fp32 beside the values.
    "encode_kernel E2M1 f": ((4 * ROWS, 0), (0, 0)),
    "encode_kernel E2M1 t": ((3 * ROWS, 0), (0, 0)),
    "decode_kernel E4M3 f": ((0, ROWS), (2 * ROWS, 0)),
    "decode_kernel E4M3 t": ((0, ROWS), (ROWS, 0)),
    "decode_kernel E5M2 f": ((0, ROWS), (2 * ROWS, 0)),
    "decode_kernel E5M2 t": ((0, ROWS), (ROWS, 0)),
    "decode_kernel E2M1 f": ((0, 0), (2 * ROWS, 0)),
    "decode_kernel E2M1 t": ((0, 0), (ROWS, 0)),
    "blocks_kernel E4M3 f": ((2 * ROWS, 0), (0, ROWS)),
    "blocks_kernel E4M3 t": ((ROWS, 0), (0, ROWS)),
    "blocks_kernel E5M2 f": ((2 * ROWS, 0), (0, ROWS)),
    "blocks_kernel E5M2 t": ((ROWS, 0), (0, ROWS)),
    # The store of 16 bytes is of the transpose.
    "encode_transposed_kernel E4M3 f": ((2 * ROWS, 0), (1, ROWS)),
    "encode_transposed_kernel E4M3 t": ((ROWS, 0), (1, ROWS)),
    "encode_transposed_kernel E5M2 f": ((2 * ROWS, 0), (1, ROWS)),
    "encode_transposed_kernel E5M2 t": ((ROWS, 0), (1, ROWS)),
    "transpose_kernel 1": ((ROWS, 0), (1, 0)),
    "transpose_kernel 2": ((0, ROWS), (0, 1)),
}
OTHERS = {"largest_kernel", "fill_kernel E4M3", "fill_kernel E5M2", "fill_kernel E2M1"}
_NAME = re.compile(
    r"\d((?:maxima|encode|decode|blocks|encode_transposed|transpose|largest|fill)_kernel)"
    r"(?:I(?:NS_\d(E\dM\d)E)?(?:([ft])?E|Li(\d)E))?"
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile quantize.cu; return the PTX of each kernel by its name and types."""
    path = tmp_path_factory.mktemp("ptx") / "quantize.ptx"
    options = ["-std=c++17", "-O3", "-fmad=false", "-arch=compute_90", "-ptx"]
    subprocess.run([str(_NVCC), *options, str(_SOURCE), "-o", str(path)], check=True, timeout=300)
    found = {}
    for body in path.read_text().split(".entry ")[1:]:
        match = _NAME.search(body)
        assert match is not None, body.splitlines()[0]
        found[" ".join(filter(None, match.groups()))] = body
    return found


@needs_nvcc
def test_there_is_a_kernel_for_each_combination(kernels: dict[str, str]) -> None:
    """Elements, and 16 or 32 bits a value."""
    assert set(kernels) == VECTORS.keys() | OTHERS


@needs_nvcc
@pytest.mark.parametrize("name", VECTORS)
def test_vectors_are_moved_whole(kernels: dict[str, str], name: str) -> None:
    """Every load and store of neighbours, and nothing lies in local memory."""
    body = kernels[name]
    wanted_loads, wanted_stores = VECTORS[name]
    loads = Counter(re.findall(r"\bld\.global(?:\.cs|\.nc)*\.(v\d)", body))
    stores = Counter(re.findall(r"\bst\.global\.(v\d)", body))
    assert (loads["v4"], loads["v2"]) == wanted_loads
    assert (stores["v4"], stores["v2"]) == wanted_stores
    # Between two branches are all loads of a thread: behind a branch each they would be waited for
    # one by one, where what lies there is too much for predicates.
    if name.startswith(("blocks", "encode_transposed", "transpose")):
        parts = re.split(r"^\$L\w+:|\bbra\b", body, flags=re.MULTILINE)
        together = [len(re.findall(r"\bld\.global[.\w]*\.v[24]", part)) for part in parts]
        assert max(together) == sum(wanted_loads)
    # An array that is indexed at run time, or a register that is spilled, lies in local memory.
    assert not re.findall(r"\b(?:ld|st)\.local|\.local \.align", body)


@needs_nvcc
@pytest.mark.parametrize("name", sorted(VECTORS.keys() | OTHERS))
def test_arithmetic_rounds_once(kernels: dict[str, str], name: str) -> None:
    """No contraction, no flushing of subnormal numbers, no approximate quotient."""
    assert not re.findall(r"\bfma\.|\.ftz|\.approx|div\.full", kernels[name])


@needs_nvcc
@pytest.mark.parametrize("element", ["E4M3", "E5M2"])
def test_codes_of_8_bits_are_converted_in_pairs(kernels: dict[str, str], element: str) -> None:
    """By the instructions that GPUs have for them, saturating."""
    encode = kernels[f"encode_kernel {element} f"]
    assert f"cvt.rn.satfinite.{element.lower()}x2.f32" in encode
    assert f"cvt.rn.f16x2.{element.lower()}x2" in kernels[f"decode_kernel {element} t"]
