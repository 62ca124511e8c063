"""Sums of squares of flat tensors, by a compiled kernel if possible, else in torch; the same bits.

reference.py defines the order of the additions; the compiled kernels use the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafsdp._native import native_module
from megafsdp.device.torch_private import version_of
from megafsdp.optimizer.kernels import cuda as cuda_kernels
from megafsdp.optimizer.kernels import reference
from megafsdp.optimizer.kernels.adam_kernel import (
    DTYPE_NAMES,
    VALUE_DTYPES,
    check_flat,
    check_positive,
)


def sum_of_squares(values: torch.Tensor, *, num_threads: int | None = None) -> float:
    """Return the sum of squares of a ``(numel,)`` tensor; fp32, bf16 or fp16; local.

    Squares are exact and are added in fp64, in an order that depends only on their positions. The
    sum of finite values cannot overflow: it is not finite if and only if one of the values is not.
    Waits for a device; :func:`device_sum_of_squares` does not.

    Raises:
        ValueError: The tensor is not flat, contiguous and of one of these dtypes, or
            ``num_threads`` is not positive.
    """
    return device_sum_of_squares(values, num_threads=num_threads).item()


@torch.no_grad()
def device_sum_of_squares(values: torch.Tensor, *, num_threads: int | None = None) -> torch.Tensor:
    """Return :func:`sum_of_squares` as a ``()`` fp64 tensor on the device of the values; local.

    The bits are those of a CPU. Runs on the current stream and waits for nothing.

    Raises:
        ValueError: The tensor is not flat, contiguous and fp32, bf16 or fp16, or ``num_threads`` is
            not positive.
        RuntimeError: CUDA refuses a launch.
    """
    num_threads = torch.get_num_threads() if num_threads is None else num_threads
    check_positive("num_threads", num_threads)
    numel, device = values.numel(), values.device
    check_flat("values", values, VALUE_DTYPES, numel=numel, device=device)
    # Empty tensors have no valid address for a kernel.
    cuda = cuda_kernels.usable_module(device) if numel > 0 else None
    if cuda is not None:
        return cuda_kernels.launch_sums_of_squares(cuda, [values])[0]
    native = native_module() if device.type == "cpu" and numel > 0 else None
    if native is None:
        return reference.sum_of_squares(values)
    total = native.sum_of_squares(
        values=values.data_ptr(),
        numel=numel,
        dtype=DTYPE_NAMES[values.dtype],
        num_threads=num_threads,
    )
    return torch.tensor(total, dtype=torch.float64, device="cpu")


def remember_square_sum(values: torch.Tensor) -> torch.Tensor:
    """Return :func:`device_sum_of_squares`, and keep it for :func:`known_square_sums`.

    Args:
        values: A flat tensor whose writers bump its version counter, such as a main gradient.
    """
    total = device_sum_of_squares(values)
    # Kept in an attribute, which lives as long as the gradient: there is no table to clear.
    values._megafsdp_square_sum = (version_of(values), total)  # type: ignore[attr-defined]
    return total


def known_square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of squares of contiguous, non-empty tensors of one device.

    Kept sums that are still valid are not computed again; CUDA computes all others together.

    Returns:
        ``(tensors,)`` fp64 on the device.
    """
    sums = [_kept_square_sum(values) for values in tensors]
    missing = [i for i, known in enumerate(sums) if known is None]
    flat = [tensors[i].view(-1) for i in missing]
    cuda = cuda_kernels.usable_module(tensors[0].device)
    if cuda is not None and flat:
        computed = cuda_kernels.launch_sums_of_squares(cuda, flat)
        if len(flat) == len(tensors):
            return computed
        found = list(computed)
    else:
        found = [device_sum_of_squares(values) for values in flat]
    for i, total in zip(missing, found, strict=True):
        sums[i] = total
    return torch.stack([total for total in sums if total is not None])


def _kept_square_sum(values: torch.Tensor) -> torch.Tensor | None:
    known: tuple[int, torch.Tensor] | None = getattr(values, "_megafsdp_square_sum", None)
    # If a scaler or a user has changed the gradient in place since, the sum is stale.
    return known[1] if known is not None and known[0] == version_of(values) else None


def has_square_sum_kernel(values: torch.Tensor) -> bool:
    """Return whether a compiled kernel adds the squares of a tensor, which may have any shape."""
    # A view with strides has no flat form without a copy.
    if not values.is_contiguous() or values.dtype not in VALUE_DTYPES:
        return False
    if values.device.type == "cpu":
        return native_module() is not None
    return cuda_kernels.usable_module(values.device) is not None
