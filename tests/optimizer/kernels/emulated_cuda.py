"""A stand-in for the compiled CUDA module: the threads of its kernels in turn, on a CPU.

cuda_emulation.cpp runs the code of the kernels as it stands, with the host's arithmetic. Inside of
:func:`emulated_cuda` tensors on a CPU are stepped by it, through all of Python that a GPU uses.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafsdp.optimizer.kernels import cuda as cuda_kernels

_CODES = {"": 0, "float32": 1, "bfloat16": 2, "float16": 3}
_BUFFERS = ("weight", "remainder", "grad", "exp_avg", "exp_avg_sq", "copy_out")


class EmulatedCuda:
    """What the module's functions do, and what was asked of it.

    Attributes:
        launches: Of each call its function and how many launches it took.
        was_aligned: Whether the last step moved whole vectors.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulate_adam.restype = ctypes.c_int64
        self._library.emulate_scratch_numel.restype = ctypes.c_int64
        self.launches: list[tuple[str, int]] = []
        self.was_aligned = False

    def adam_step(self, **given: Any) -> None:
        """Step, as the module does on a GPU; scalars on the device are on the host here."""
        segments, late = given["segments"], given["late"]
        flushes = ctypes.c_bool(given["flush_denormals"])
        found_inf = _float_at(given["found_inf"])
        skips = found_inf is not None and found_inf != 0
        scale = _float_at(given["device_grad_scale"])
        scale = given["grad_scale"] if scale is None else scale
        constants = np.array([row for _, _, row in segments], dtype=np.float32)
        if late:
            room = (ctypes.c_float * constants.size).from_address(given["late_constants"])
            self._library.emulate_late_constants(
                ctypes.c_int64(len(late)),
                _addresses(row[0] for row in late),
                _addresses(row[1] for row in late),
                _pointer(np.array([row[2] for row in late], dtype=np.float64)),
                _pointer(np.array([row[3] for row in late], dtype=np.bool_)),
                _pointer(constants),
                ctypes.c_bool(skips),
                flushes,
                room,
            )
            constants = np.ctypeslib.as_array(room)
        is_aligned = ctypes.c_bool(False)
        names = ("grad_dtype", "state_dtype", "copy_out_dtype")
        count = (
            0
            if skips
            else self._library.emulate_adam(
                _addresses(given[name] for name in _BUFFERS),
                (ctypes.c_int * 3)(*(_CODES[given[name]] for name in names)),
                ctypes.c_int64(len(segments)),
                _pointer(np.array([row[:2] for row in segments], dtype=np.int64)),
                _pointer(constants),
                ctypes.c_bool(bool(late)),
                ctypes.c_float(scale),
                flushes,
                ctypes.byref(is_aligned),
            )
        )
        self.launches.append(("adam_step", count))
        self.was_aligned = is_aligned.value

    def scratch_numel(self, numel: int) -> int:
        """Return the doubles that a buffer's sums take."""
        return int(self._library.emulate_scratch_numel(ctypes.c_int64(numel)))

    def sums_of_squares(
        self, buffers: Sequence[tuple[int, int, str]], sums: int, scratch: int, **_: object
    ) -> None:
        """Sum the squares of each buffer."""
        self._library.emulate_square_sums(
            ctypes.c_int(len(buffers)),
            _addresses(address for address, _, _ in buffers),
            _pointer(np.array([numel for _, numel, _ in buffers], dtype=np.int64)),
            (ctypes.c_int * len(buffers))(*(_CODES[dtype] for _, _, dtype in buffers)),
            ctypes.c_void_p(sums),
            ctypes.c_void_p(scratch),
        )
        self.launches.append(("sums_of_squares", len(buffers)))


@contextlib.contextmanager
def emulated_cuda(library: Path) -> Iterator[EmulatedCuda]:
    """Let every device have the emulated kernels."""
    module = EmulatedCuda(library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernels, "usable_module", lambda device: module)
        patch.setattr(cuda_kernels, "current_stream", lambda device: contextlib.nullcontext(0))
        yield module


def _float_at(address: int) -> float | None:
    return ctypes.c_float.from_address(address).value if address else None


def _addresses(addresses: Iterator[int]) -> ctypes.Array[ctypes.c_void_p]:
    values = list(addresses)
    return (ctypes.c_void_p * len(values))(*values)


def _pointer(values: np.ndarray) -> ctypes.c_void_p:
    return values.ctypes.data_as(ctypes.c_void_p)
