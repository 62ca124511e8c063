"""Kernels of other packages for linear attention on CUDA, if these are installed.

They are never required: the implementation in torch is the definition and computes the same. For
tensors on a CPU nothing is imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import re
from collections.abc import Callable

import torch
from torch import Tensor

from megafsdp.errors import expected

_LOGGER = logging.getLogger("megafsdp.models")

# The first release in which a key head may have several value heads. Releases up to 0.4.1 accept
# such values without an error, but read the wrong heads.
_GROUPED_VALUES = (0, 5)
# In fp32 the rule's kernel rounds products to fewer bits than torch does.
_RULE_DTYPES = (torch.bfloat16, torch.float16)
_CONVOLUTION_DTYPES = (*_RULE_DTYPES, torch.float32)
_CONVOLUTION_WIDTHS = (2, 3, 4)


def rule_kernel_for(v_BTNE: Tensor) -> Callable[..., tuple[Tensor, object]] | None:
    """Return flash-linear-attention's chunked gated delta rule if it can take these values."""
    return _rule_kernel() if v_BTNE.is_cuda and v_BTNE.dtype in _RULE_DTYPES else None


def convolution_kernel_for(x_BCT: Tensor, width: int) -> Callable[..., Tensor] | None:
    """Return the causal convolution of causal-conv1d if it can take this input."""
    is_taken = x_BCT.is_cuda and x_BCT.dtype in _CONVOLUTION_DTYPES and width in _CONVOLUTION_WIDTHS
    return _convolution_kernel() if is_taken else None


@functools.cache
def _rule_kernel() -> Callable[..., tuple[Tensor, object]] | None:
    if not _is_installed("fla", "the gated delta rule", "flash-linear-attention"):
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    kernel: Callable[..., tuple[Tensor, object]] = chunk_gated_delta_rule
    return kernel if _has_grouped_values() else _with_repeated_heads(kernel)


def _has_grouped_values() -> bool:
    """Return whether the rule's kernel reads a key head for several value heads."""
    try:
        version = importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        # A checkout, or a release from before the package was divided.
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) >= _GROUPED_VALUES


def _with_repeated_heads(
    kernel: Callable[..., tuple[Tensor, object]],
) -> Callable[..., tuple[Tensor, object]]:
    """Wrap a kernel so that each key head is repeated for each of its value heads."""

    def run(
        q_BTGD: Tensor, k_BTGD: Tensor, v_BTNE: Tensor, *rest: Tensor, **options: bool
    ) -> tuple[Tensor, object]:
        heads_per_group = v_BTNE.shape[2] // k_BTGD.shape[2]
        if heads_per_group > 1:
            q_BTGD, k_BTGD = (x.repeat_interleave(heads_per_group, 2) for x in (q_BTGD, k_BTGD))
        return kernel(q_BTGD, k_BTGD, v_BTNE, *rest, **options)

    return run


@functools.cache
def _convolution_kernel() -> Callable[..., Tensor] | None:
    if not _is_installed("causal_conv1d", "the causal convolution", "causal-conv1d"):
        return None
    from causal_conv1d import causal_conv1d_fn

    kernel: Callable[..., Tensor] = causal_conv1d_fn
    return kernel


def _is_installed(package: str, of_what: str, distribution: str) -> bool:
    """Return whether a package is installed; if not, warn of what that costs."""
    if importlib.util.find_spec(package) is not None:
        return True
    _LOGGER.warning(
        expected(
            f"{package}, for {of_what} in kernels of its own",
            "no such package",
            where="linear attention on CUDA; torch's operators run instead, several times slower",
            hint=f"Install {distribution}",
        )
    )
    return False
