"""The PTX of the CUDA kernels: which loads and stores nvcc makes of them, and for which GPUs.

A GPU is fast where each thread moves 16 bytes at once, and a warp whole sectors. The compiler may
take a vector apart without a word, so the instructions are counted here; how they run needs a GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from megafsdp._native import cuda_module

_SOURCE = Path(__file__).parents[3] / "megafsdp" / "csrc" / "cuda" / "adam.cu"
_NVCC = shutil.which(os.environ.get("NVCC", "nvcc"))
needs_nvcc = pytest.mark.skipif(_NVCC is None, reason="no nvcc")

# Gradient, states and weight: f is fp32, t 16 bits; a weight of 16 bits has a remainder beside it,
# one of fp32 may have a cast. A thread takes 16 bytes of the widest type, so a vector of 16-bit
# elements beside fp32 has 8 bytes. How wide the gradient is read, and how many of the four stores,
# which are two moments, the weight, and its remainder or cast, are of 16 and of 8 bytes:
VECTORS = {
    "fff": ("v4", 3, 1),
    "fft": ("v4", 2, 2),
    "ftf": ("v4", 1, 3),
    "ftt": ("v4", 0, 4),
    "tff": ("v2", 3, 1),
    "tft": ("v2", 2, 2),
    "ttf": ("v2", 1, 3),
    "ttt": ("v4", 4, 0),
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Compile adam.cu; return the PTX of each kernel by its arithmetic and types."""
    path = tmp_path_factory.mktemp("ptx") / "adam.ptx"
    options = ["-std=c++17", "-O3", "-fmad=false", "-arch=compute_90", "-ptx"]
    subprocess.run([str(_NVCC), *options, str(_SOURCE), "-o", str(path)], check=True, timeout=300)
    bodies = path.read_text().split(".entry ")[1:]
    names = [re.match(r"\w*adam_kernel\w*?(Flushing|Keeping)\w*?E([ft]{3})E", b) for b in bodies]
    return {(n[1], n[2]): b for n, b in zip(names, bodies, strict=True) if n is not None}


@needs_nvcc
def test_there_is_a_kernel_for_each_combination(kernels: dict[tuple[str, str], str]) -> None:
    """Subnormal numbers flushed or kept, and three types of 16 or 32 bits."""
    assert set(kernels) == {(math, types) for math in ("Flushing", "Keeping") for types in VECTORS}


@needs_nvcc
@pytest.mark.parametrize("types", VECTORS)
@pytest.mark.parametrize("math", ["Flushing", "Keeping"])
def test_vectors_are_moved_whole(
    kernels: dict[tuple[str, str], str], math: str, types: str
) -> None:
    """One store a vector and buffer, one more for single elements; a gradient leaves no trace."""
    body = kernels[math, types]
    width, num_v4, num_v2 = VECTORS[types]
    stores = Counter(re.findall(r"\bst\.global(?:\.(v\d))?", body))
    assert stores == Counter({"v4": num_v4, "v2": num_v2, "": 4})
    # Evict first, and never again: the other vectors have loads of their own.
    assert re.findall(r"\bld\.global\.cs\.(v\d)", body) == [width]
    # An array that is indexed at run time, or a register that is spilled, lies in local memory.
    assert not re.findall(r"\b(?:ld|st)\.local|\.local \.align", body)


@needs_nvcc
@pytest.mark.skipif("MEGAFSDP_CUDA_ARCHS" in os.environ, reason="architectures were chosen")
def test_kernels_are_compiled_for_three_architectures() -> None:
    """The build reports a failure in a line; where there is a compiler it must not."""
    module = cuda_module()
    if module is None and os.environ.get("MEGAFSDP_NATIVE") == "0":
        pytest.skip("native code is off")
    assert module is not None and module.ARCHS == "80;90;100f"
