"""Launches of the compiled CUDA kernels on the caller's current stream.

This file chooses device and stream and allocates what a launch needs besides its buffers. They are
checked in adam_kernel.py and square_sum.py, which decide on a launch; nothing here waits for the
device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from types import ModuleType

import torch

from megafsdp._native import cuda_module
from megafsdp.errors import expected

_LOGGER = logging.getLogger("megafsdp.optimizer")


def usable_module(device: torch.device) -> ModuleType | None:
    """Return the CUDA kernels if they are built and run on a device; else None.

    Kernels that are built but cannot run there, for an old driver or an architecture that they were
    not compiled for, are reported once.
    """
    module = cuda_module() if device.type == "cuda" else None
    return None if module is None or _why_not_on(device.index) else module


def launch_adam_step(
    module: ModuleType,
    arguments: Mapping[str, object],
    device: torch.device,
    *,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """Launch one step; allocates the table of segments on the device if it is long.

    Args:
        module: From :func:`usable_module`.
        arguments: What the kernels of CPU and CUDA both take: addresses, dtypes, segments, factors.
        device: Where the buffers are.
        grad_scale: ``()`` fp32 there; replaces the number in ``arguments``.
        found_inf: ``()`` fp32 there; the kernel does nothing unless it is zero.

    Raises:
        RuntimeError: CUDA refuses the launch.
    """
    segments = arguments["segments"]
    assert isinstance(segments, list), "a table of segments"
    with torch.cuda.device(device):
        # Freed at return, before the kernel runs: only later work of this stream gets the memory.
        table = torch.empty(module.table_nbytes(len(segments)), dtype=torch.uint8, device=device)
        module.adam_step(
            **arguments,
            # Addresses, not values: the kernel reads them when the stream reaches it.
            device_grad_scale=0 if grad_scale is None else grad_scale.data_ptr(),
            found_inf=0 if found_inf is None else found_inf.data_ptr(),
            table=table.data_ptr(),
            device=device.index,
            stream=torch.cuda.current_stream(device).cuda_stream,
        )


def launch_sum_of_squares(module: ModuleType, values: torch.Tensor) -> torch.Tensor:
    """Launch the sum of squares of a non-empty flat tensor; returns it as a ``()`` fp64 tensor.

    Raises:
        RuntimeError: CUDA refuses a launch.
    """
    # The current device may be another than that of the buffers.
    device = values.device
    with torch.cuda.device(device):
        scratch_numel = module.scratch_numel(values.numel())
        scratch = torch.empty(scratch_numel, dtype=torch.float64, device=device)
        total = torch.empty((), dtype=torch.float64, device=device)
        module.sum_of_squares(
            values=values.data_ptr(),
            numel=values.numel(),
            dtype=str(values.dtype).removeprefix("torch."),
            sum=total.data_ptr(),
            scratch=scratch.data_ptr(),
            device=device.index,
            stream=torch.cuda.current_stream(device).cuda_stream,
        )
    return total


# Cached: it is called before each launch, and the warning must come once.
@functools.cache
def _why_not_on(index: int) -> str:
    module = cuda_module()
    assert module is not None, "asked for a device of kernels that are there"
    # The probe makes the device it asks the thread's; without a driver there is none to restore.
    with torch.cuda.device(index) if torch.cuda.is_available() else contextlib.nullcontext():
        why = str(module.why_not_on(index))
    if why:
        _LOGGER.warning(
            expected(
                f"CUDA kernels that run on this device, built for {module.ARCHS}",
                why,
                where=f"cuda:{index}; the optimizer's slower torch fallback runs instead",
                hint="Update the driver, or set MEGAFSDP_CUDA_ARCHS and build megafsdp again",
            )
        )
    return why
