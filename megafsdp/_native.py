"""Find the compiled kernels of ``megafsdp/csrc``, for CPUs and for CUDA, if there are any.

Every caller has a torch fallback that gives the same bits, so this file never raises on import.
Setting ``MEGAFSDP_NATIVE=0`` turns the kernels off; it is read at every call, as the kernels read
``MEGAFSDP_SIMD``.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

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
