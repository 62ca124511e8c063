"""Launches of the compiled CUDA kernels on the caller's current stream.

This file chooses device and stream and allocates what a launch needs besides its buffers. They are
checked in adam_kernel.py and square_sum.py, which decide on a launch; nothing here waits for the
device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

import torch

from megafsdp._native import cuda_module, why_cuda_missing
from megafsdp.errors import expected

_LOGGER = logging.getLogger("megafsdp.optimizer")

# Counted of Adam on fp32 buffers.
_COST = (
    "a step is 74 torch operators that move 900 bytes an element instead of a kernel that moves 28"
)
# Addresses of a count of steps and of a rate in fp64, or 0; the rate, both betas and the decay;
# whether it is AdamW, and corrects for the bias.
LateParameter = tuple[int, int, tuple[float, float, float, float], tuple[bool, bool]]


def usable_module(device: torch.device) -> ModuleType | None:
    """Return the CUDA kernels if they are built and run on a device; else None.

    For a device of CUDA it is reported once that they are not built, or cannot run there, for an
    old driver or an architecture that they were not compiled for.
    """
    if device.type != "cuda":
        return None
    module = cuda_module()
    if module is None:
        _report_missing(why_cuda_missing())
        return None
    return None if _why_not_on(device.index) else module


def launch_adam_step(
    module: ModuleType,
    arguments: Mapping[str, object],
    device: torch.device,
    *,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    late: Sequence[LateParameter] = (),
) -> None:
    """Launch one step; allocates nothing but the constants that are computed on the device.

    Args:
        module: From :func:`usable_module`.
        arguments: What the kernels of CPU and CUDA both take: addresses, dtypes, segments, factors.
        device: Where the buffers are.
        grad_scale: ``()`` fp32 there; replaces the number in ``arguments``.
        found_inf: ``()`` fp32 there; the kernel does nothing unless it is zero.
        late: For each segment what its constants are computed of there; none if they are given.

    Raises:
        RuntimeError: CUDA refuses the launch.
    """
    with current_stream(device) as stream:
        # Freed at return, before the kernel runs: only later work of this stream gets the memory.
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
        ``(buffers,)`` fp64 there.

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


@contextlib.contextmanager
def current_stream(device: torch.device) -> Iterator[int]:
    """Make a device the current one, which another may be, and give the handle of its stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


# Cached: it is called before each launch, and the warning must come once.
@functools.cache
def _report_missing(why: str) -> None:
    # Whoever turns native code off knows.
    if why == "MEGAFSDP_NATIVE=0":
        return
    _LOGGER.warning(
        expected(
            "the optimizer's CUDA kernels",
            why,
            where=f"this installation of megafsdp; {_COST}",
            hint="Install nvcc, then run 'MEGAFSDP_CUDA=1 pip install --no-build-isolation -e .'",
        )
    )


# Cached for the same reasons.
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
                where=f"cuda:{index}; {_COST}",
                hint="Update the driver, or set MEGAFSDP_CUDA_ARCHS and build megafsdp again",
            )
        )
    return why
