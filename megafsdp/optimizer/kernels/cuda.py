"""Launches of the compiled CUDA kernels on the caller's current stream.

This file chooses device and stream and allocates what a launch needs besides its buffers.
adam_kernel.py and square_sum.py check the buffers and decide on a launch; nothing here waits for
the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import torch

from megafsdp._native import current_stream, usable_cuda_module

# Counted for Adam on fp32 buffers.
_COST = (
    "a step is 74 torch operators that move 900 bytes an element instead of a kernel that moves 28"
)
# Addresses of a count of steps and of a learning rate in fp64 (or 0); the rate, both betas and the
# decay as numbers; adam_w_mode and bias_correction.
LateParameter = tuple[int, int, tuple[float, float, float, float], tuple[bool, bool]]


def usable_module(device: torch.device) -> ModuleType | None:
    """Return the CUDA kernels if they are built and run on a device; else None.

    For a CUDA device it is reported once if they are not built or cannot run there, because of an
    old driver or an architecture that they were not compiled for.
    """
    return usable_cuda_module(device, "megafsdp.optimizer", _COST)


def launch_adam_step(
    module: ModuleType,
    arguments: Mapping[str, object],
    device: torch.device,
    *,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    late: Sequence[LateParameter] = (),
) -> None:
    """Launch one step; allocates only the constants that are computed on the device.

    Args:
        module: From :func:`usable_module`.
        arguments: Arguments of both the CPU and the CUDA kernel: addresses, dtypes, segments,
            factors.
        device: Where the buffers are.
        grad_scale: ``()`` fp32 on the device; replaces the number in ``arguments``.
        found_inf: ``()`` fp32 on the device; the kernel does nothing unless it is zero.
        late: For each segment, the inputs from which the device computes its constants; empty if
            the constants are given.

    Raises:
        RuntimeError: CUDA refuses the launch.
    """
    with current_stream(device) as stream:
        # Freed at return, before the kernel runs; only later work of this stream reuses the memory.
        constants = torch.empty((len(late), 8), dtype=torch.float32, device=device)
        module.adam_step(
            **arguments,
            # Addresses, not values: the kernel reads them when the stream reaches it.
            device_grad_scale=0 if grad_scale is None else grad_scale.data_ptr(),
            found_inf=0 if found_inf is None else found_inf.data_ptr(),
            late=late,
            late_constants=constants.data_ptr(),
            device=device.index,
            stream=stream,
        )


def launch_sums_of_squares(module: ModuleType, buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Launch the sums of squares of non-empty flat tensors of one device, all at once.

    Returns:
        ``(buffers,)`` fp64 on that device.

    Raises:
        RuntimeError: CUDA refuses a launch.
    """
    device = buffers[0].device
    with current_stream(device) as stream:
        numel = sum(module.scratch_numel(values.numel()) for values in buffers)
        scratch = torch.empty(numel, dtype=torch.float64, device=device)
        sums = torch.empty(len(buffers), dtype=torch.float64, device=device)
        module.sums_of_squares(
            buffers=[
                (values.data_ptr(), values.numel(), str(values.dtype).removeprefix("torch."))
                for values in buffers
            ],
            sums=sums.data_ptr(),
            scratch=scratch.data_ptr(),
            device=device.index,
            stream=stream,
        )
    return sums
