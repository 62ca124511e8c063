"""List what works on this machine, and what is lost where something does not.

Printed by `megafsdp doctor`. Nothing is changed or installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megafsdp._native import (
    HOW_TO_BUILD,
    cuda_module,
    native_module,
    why_cuda_missing,
    why_missing,
)

_OPTIONAL = (
    ("numba", "sample indices are built in numpy, several times slower"),
    ("wandb", "logging.wandb cannot be set"),
    ("tensorboard", "logging.tensorboard cannot be set"),
    ("tokenizers", "only the byte tokenizer can be used"),
    ("safetensors", "Hugging Face weight files cannot be read or written"),
    ("huggingface_hub", "models cannot be exported to Hugging Face files"),
    ("zstandard", "megafsdp prep cannot read zstd files"),
    ("pyarrow", "megafsdp prep cannot read Parquet files"),
    ("datasets", "megafsdp prep cannot read folders of datasets"),
    ("vl_convert", "megafsdp report and --html cannot draw; pip install 'megafsdp[report]'"),
    ("transformers", "models are not compared with Hugging Face's in the tests"),
)

# Packages that are installed under another name than they are imported by.
_DISTRIBUTIONS = {"vl_convert": "vl-convert-python"}

# The name to import, the name to install, and what is lost without it.
_OPTIONAL_ON_GPUS = (
    ("fla", "fla-core", "the gated delta rule of linear attention runs in torch, slower"),
    ("causal_conv1d", "causal-conv1d", "the convolution of linear attention runs in torch, slower"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was examined.

    Attributes:
        name: What.
        state: What was found.
        loss: What cannot be done without it; empty if it works.
    """

    name: str
    state: str
    loss: str = ""

    def describe(self) -> str:
        """Return the finding on one line."""
        mark = "lost" if self.loss else "ok"
        return f"{mark:<5} {self.name:<14} {self.state}" + (f": {self.loss}" if self.loss else "")


def examine() -> list[Finding]:
    """Examine everything that megafsdp can use; local, changes nothing."""
    return [
        Finding("python", f"{platform.python_version()} on {platform.machine()}"),
        Finding("torch", f"{torch.__version__}, {os.cpu_count()} CPU cores"),
        *_backends(),
        *_gpus(),
        _compiler(),
        _native(),
        _native_cuda(),
        *_packages(),
    ]


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name without files cannot."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _backends() -> Iterator[Finding]:
    for name, is_available, loss in (
        ("gloo", dist.is_gloo_available(), "no training on CPU ranks"),
        ("nccl", dist.is_nccl_available(), "no training on GPUs"),
    ):
        yield (
            Finding(name, "available")
            if is_available
            else Finding(name, "missing in this torch", loss)
        )


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPUs", "none", "training runs on CPU")
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    yield from _links(torch.cuda.device_count())


def _links(num_gpus: int) -> Iterator[Finding]:
    """Say which neighbours cannot share out layers fast: tp exchanges activations in each layer."""
    pairs = [(index, index + 1) for index in range(num_gpus - 1)]
    apart = [f"{a} and {b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if apart:
        loss = "parallel.tp across them is slow; keep it within GPUs that reach each other"
        yield Finding("GPU links", f"no direct access between GPUs {', '.join(apart)}", loss)
    elif pairs:
        yield Finding("GPU links", "neighbours reach each other directly")


def _compiler() -> Finding:
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((path for c in candidates if c and (path := shutil.which(c))), None)
    if found is None:
        return Finding("compiler", "none", "native modules cannot be built here")
    nvcc = shutil.which("nvcc")
    return Finding("compiler", found + (f" and {nvcc}" if nvcc else ", no nvcc"))


def _native() -> Finding:
    if native_module() is not None:
        return Finding("native", "megafsdp._csrc is built")
    loss = f"gradient sums on CPU run in torch, slower but equal. {HOW_TO_BUILD}"
    return Finding("native", f"megafsdp._csrc is not used ({why_missing()})", loss)


def _native_cuda() -> Finding:
    module = cuda_module()
    if module is not None:
        return Finding("native CUDA", f"megafsdp._cuda is built for {module.ARCHS}")
    loss = f"steps of FusedAdam on GPUs run in torch, slower. Install nvcc. {HOW_TO_BUILD}"
    has_loss = torch.cuda.is_available()
    state = f"megafsdp._cuda is not used ({why_cuda_missing()})"
    return Finding("native CUDA", state, loss if has_loss else "")


def _packages() -> Iterator[Finding]:
    for package, loss in _OPTIONAL:
        if is_installed(package):
            yield Finding(package, _version(_DISTRIBUTIONS.get(package, package)))
        else:
            yield Finding(package, "not installed", loss)
    for package, distribution, loss in _OPTIONAL_ON_GPUS:
        if is_installed(package):
            yield Finding(package, _version(distribution))
        else:
            yield Finding(package, "not installed", loss if torch.cuda.is_available() else "")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "found, of a version that no metadata names"  # A checkout on the path.
