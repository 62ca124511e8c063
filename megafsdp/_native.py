"""Find the compiled kernels of ``megafsdp/csrc``, for CPUs and for CUDA, if there are any.

Every caller has a torch fallback that gives the same bits, so this file never raises on import.
Setting ``MEGAFSDP_NATIVE=0`` turns the kernels off; it is read at every call, as the kernels read
``MEGAFSDP_SIMD``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType

import torch

from megafsdp.errors import expected


def _import(name: str) -> tuple[ModuleType | None, str]:
    """Return a module, or None and why there is none."""
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, str(error)


_CSRC, _WHY_MISSING = _import("megafsdp._csrc")
_CUDA, _WHY_CUDA_MISSING = _import("megafsdp._cuda")

HOW_TO_BUILD = (
    "Install a C++17 compiler and pybind11, then run "
    "'pip install --no-build-isolation -e .' in the checkout"
)


def native_module() -> ModuleType | None:
    """Return the compiled module; None if it is not built or ``MEGAFSDP_NATIVE=0``."""
    return None if os.environ.get("MEGAFSDP_NATIVE") == "0" else _CSRC


def cuda_module() -> ModuleType | None:
    """Return the compiled CUDA kernels; None if they are not built or ``MEGAFSDP_NATIVE=0``.

    They may be built where no device can run them; ``why_not_on(device)`` of the module says so.
    """
    return None if os.environ.get("MEGAFSDP_NATIVE") == "0" else _CUDA


def require_native_module() -> ModuleType:
    """Return the compiled module.

    Raises:
        RuntimeError: It is not built, or turned off; says how to build it.
    """
    module = native_module()
    if module is None:
        raise RuntimeError(
            expected(
                "the native module megafsdp._csrc",
                why_missing(),
                where="this installation of megafsdp",
                hint=f"{HOW_TO_BUILD}, and leave MEGAFSDP_NATIVE unset",
            )
        )
    return module


def why_missing() -> str:
    """Return why :func:`native_module` gives None; empty if it gives the module."""
    if _CSRC is None:
        return _WHY_MISSING
    return "MEGAFSDP_NATIVE=0" if native_module() is None else ""


def why_cuda_missing() -> str:
    """Return why :func:`cuda_module` gives None; empty if it gives the module."""
    if _CUDA is None:
        return _WHY_CUDA_MISSING
    return "MEGAFSDP_NATIVE=0" if cuda_module() is None else ""


def usable_cuda_module(device: torch.device, logger: str, cost: str) -> ModuleType | None:
    """Return the CUDA kernels if they are built and run on a device; else None.

    On a GPU, kernels that are not built or cannot run there (an old driver, or an architecture that
    they were not compiled for) are reported once.

    Args:
        device: Where they are to run; for any device but a GPU the result is None.
        logger: Name of the logger that reports.
        cost: A clause that says what is lost without them.
    """
    if device.type != "cuda":
        return None
    module = cuda_module()
    if module is None:
        _report_missing(why_cuda_missing(), logger, cost)
        return None
    return None if _why_not_on(device.index, logger, cost) else module


@contextlib.contextmanager
def current_stream(device: torch.device) -> Iterator[int]:
    """Make a device the current one inside the context, and yield the handle of its stream."""
    with torch.cuda.device(device):
        yield torch.cuda.current_stream(device).cuda_stream


# Cached: it is called before each launch, and the warning must come once.
@functools.cache
def _report_missing(why: str, logger: str, cost: str) -> None:
    # The user turned native code off: no warning.
    if why == "MEGAFSDP_NATIVE=0":
        return
    logging.getLogger(logger).warning(
        expected(
            "compiled CUDA kernels",
            why,
            where=f"this installation of megafsdp; {cost}",
            hint="Install nvcc, then run 'MEGAFSDP_CUDA=1 pip install --no-build-isolation -e .'",
        )
    )


# Cached for the same reasons.
@functools.cache
def _why_not_on(index: int, logger: str, cost: str) -> str:
    module = cuda_module()
    assert module is not None, "asked for a device of kernels that are there"
    # The probe changes the thread's current device; without a driver there is none to restore.
    with torch.cuda.device(index) if torch.cuda.is_available() else contextlib.nullcontext():
        why = str(module.why_not_on(index))
    if why:
        logging.getLogger(logger).warning(
            expected(
                f"CUDA kernels that run on this device, built for {module.ARCHS}",
                why,
                where=f"cuda:{index}; {cost}",
                hint="Update the driver, or set MEGAFSDP_CUDA_ARCHS and build megafsdp again",
            )
        )
    return why
