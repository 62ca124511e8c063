"""A stand-in for the compiled CUDA kernels on tiles: their threads in turn, on a CPU.

cuda_emulation.cpp runs the code of the kernels as it stands, with the host's arithmetic. Inside of
:func:`emulated_cuda` tensors on a CPU are quantized by it, through all of Python that a GPU uses.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megafsdp.quantize import cuda_kernels, kernels
from megafsdp.quantize.cuda_kernels import CudaKernels

Coding = tuple[str, str, int, int]


class _CodingNames(ctypes.Structure):
    _fields_ = (
        ("element", ctypes.c_char_p),
        ("scaling", ctypes.c_char_p),
        ("tile_rows", ctypes.c_int64),
        ("tile_cols", ctypes.c_int64),
    )


class EmulatedCuda:
    """What the module's functions do, and what was asked of it.

    Attributes:
        launches: Of each call its function and how many launches it took.
        were_aligned: Of each call but those of tables, whether it moved vectors.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.emulated_error.restype = ctypes.c_char_p
        self._library.emulated_was_aligned.restype = ctypes.c_bool
        self.launches: list[tuple[str, int]] = []
        self.were_aligned: list[bool] = []

    def is_one_pass(self, coding: Coding) -> bool:
        """Return whether encode_matrix finds the scales by itself."""
        return bool(self._library.emulate_is_one_pass(_names(coding)))

    def add_tile_maxima(self, **given: Any) -> None:
        """Raise maxima."""
        self._call("add_tile_maxima", "emulate_maxima", *self._tiles(given))

    def encode_tiles(self, **given: Any) -> None:
        """Write codes."""
        noise, largest = _numbers(given["noise"]), ctypes.c_void_p(given["largest"][0])
        self._call("encode_tiles", "emulate_encode", *self._tiles(given), noise, largest)

    def fill_scale_tables(self, **given: Any) -> None:
        """Write tables."""
        count = ctypes.c_int64(len(given["tables"]))
        largest = ctypes.c_void_p(given["largest"][0])
        names, numbers = _names(given["coding"]), _numbers(given["tables"])
        self._call("fill_scale_tables", "emulate_fill", names, count, numbers, largest)

    def decode_tiles(self, **given: Any) -> None:
        """Write values."""
        numbers = _numbers(given[name] for name in ("shape", "codes", "table", "out"))
        dtype = given["out_dtype"].encode()
        self._call("decode_tiles", "emulate_decode", _names(given["coding"]), numbers, dtype)

    def encode_matrix(self, **given: Any) -> None:
        """Write codes of a matrix in one pass."""
        names = ("shape", "values", "codes", "transposed", "maximum", "table")
        numbers = _numbers(given[name] for name in names)
        dtype = given["dtype"].encode()
        self._call("encode_matrix", "emulate_matrix", _names(given["coding"]), numbers, dtype)

    def transpose_codes(self, **given: Any) -> None:
        """Transpose codes."""
        numbers = _numbers(given[name] for name in ("shape", "codes", "transposed"))
        self._call("transpose_codes", "emulate_transpose", given["element"].encode(), numbers)

    def _tiles(self, given: dict[str, Any]) -> tuple[Any, ...]:
        return (
            _names(given["coding"]),
            given["dtype"].encode(),
            given["through"].encode(),
            ctypes.c_int64(len(given["fragments"])),
            _numbers(given["fragments"]),
        )

    def _call(self, function: str, emulation: str, *arguments: Any) -> None:
        call = getattr(self._library, emulation)
        call.restype = ctypes.c_int64
        count = call(*arguments)
        if count < 0:
            raise ValueError(self._library.emulated_error().decode())
        self.launches.append((function, count))
        if function != "fill_scale_tables":
            self.were_aligned.append(self._library.emulated_was_aligned())


@contextlib.contextmanager
def emulated_cuda(library: Path) -> Iterator[EmulatedCuda]:
    """Let tensors on a CPU have the emulated kernels."""
    module = EmulatedCuda(library)
    emulated = CudaKernels(module, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_module_for", lambda tensor: emulated)
        patch.setattr(cuda_kernels, "current_stream", lambda device: contextlib.nullcontext(0))
        yield module


def _names(coding: Coding) -> Any:
    element, scaling, rows, cols = coding
    return ctypes.byref(_CodingNames(element.encode(), scaling.encode(), rows, cols))


def _numbers(nested: Iterable[Any]) -> Any:
    flat = list(_flat(nested))
    return (ctypes.c_int64 * len(flat))(*flat)


def _flat(nested: Iterable[Any]) -> Iterator[int]:
    for value in nested:
        if isinstance(value, int):
            yield value
        else:
            yield from _flat(value)
