"""Find the compiled kernels of ``megafsdp/csrc``, if there are any.

Every caller has a torch fallback that gives the same bits, so this file never raises on import.
Setting ``MEGAFSDP_NATIVE=0`` turns the kernels off; it is read at every call, as the kernels read
``MEGAFSDP_SIMD``.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

from megafsdp.errors import expected

_CSRC: ModuleType | None = None
_WHY_MISSING = ""
try:
    _CSRC = importlib.import_module("megafsdp._csrc")
except ImportError as error:
    _WHY_MISSING = str(error)

HOW_TO_BUILD = (
    "Install a C++17 compiler and pybind11, then run "
    "'pip install --no-build-isolation -e .' in the checkout"
)


def native_module() -> ModuleType | None:
    """Return the compiled module; None if it is not built or ``MEGAFSDP_NATIVE=0``."""
    return None if os.environ.get("MEGAFSDP_NATIVE") == "0" else _CSRC


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
                mend=f"{HOW_TO_BUILD}, and leave MEGAFSDP_NATIVE unset",
            )
        )
    return module


def why_missing() -> str:
    """Return why :func:`native_module` gives None; empty if it gives the module."""
    if _CSRC is None:
        return _WHY_MISSING
    return "MEGAFSDP_NATIVE=0" if native_module() is None else ""
