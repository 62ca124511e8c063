"""Directories of safetensors files, written and read by the safetensors library.

The library is imported when it is needed, and its errors become this package's, with the name of
the file. output.py plans which tensors a file has; mapping.py says what they mean.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megafsdp.checkpoint.format.save_root import sync_file
from megafsdp.errors import CheckpointError, expected

if TYPE_CHECKING:
    from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DAMAGED = "Fetch or export the directory again"


def write_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write contiguous CPU tensors to one file, and wait until it is on the disk.

    Raises:
        OSError: The disk is full, or the file cannot be written.
    """
    save_file = require_library("safetensors.torch").save_file
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except require_library("safetensors").SafetensorError as error:
        raise OSError(str(error)) from error
    sync_file(path)


class SafetensorsReader:
    """Read tensors, or slices of them, of a directory of safetensors files.

    Only headers are read at construction. The files are closed with the reader's last reference.

    Args:
        directory: Holds ``model.safetensors``, or an index and the files that it names.

    Raises:
        CheckpointError: There are no such files, one is missing or damaged, or the index does not
            match the tensors in the files.
        ImportError: The safetensors library is not installed.
    """

    def __init__(self, directory: Path) -> None:
        library = require_library("safetensors")
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = {}
        self._directory = directory
        named = _weight_map(directory)
        for file in sorted(set(named.values())) if named else [SINGLE_FILE]:
            with self._errors_of(file):
                self._files[file] = library.safe_open(directory / file, framework="pt")
            for name in self._files[file].keys():  # noqa: SIM118 (not a dict)
                self._file_of[name] = file
        if named and named != self._file_of:
            odd = sorted(set(named.items()) ^ set(self._file_of.items()))
            raise CheckpointError.expected(
                "an index of the tensors that the files hold",
                f"differences such as {odd[:4]}",
                where=f"'{directory / INDEX_FILE}'",
                hint=_DAMAGED,
            )

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def dtype_name(self, name: str) -> str:
        """Return the format's name of a tensor's dtype, such as ``BF16``, from the header."""
        return str(self._files[self._file_of[name]].get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory."""
        with self._errors_of(self._file_of[name]):
            return self._files[self._file_of[name]].get_tensor(name)

    def rows(self, name: str, start: int, stop: int, *, dim: int = 0) -> torch.Tensor:
        """Read only [start, stop) along dimension 0 or 1 of a tensor, to CPU memory."""
        with self._errors_of(self._file_of[name]):
            lazy = self._files[self._file_of[name]].get_slice(name)
            return lazy[:, start:stop] if dim else lazy[start:stop]

    @contextmanager
    def _errors_of(self, file: str) -> Iterator[None]:
        """Convert the library's errors, which do not name the file."""
        try:
            yield
        except Exception as error:
            raise CheckpointError.expected(
                "a whole safetensors file",
                f"{type(error).__name__}: {error}",
                where=f"'{self._directory / file}'",
                hint=_DAMAGED,
            ) from error


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Return the file of each tensor; None if there is one file and no index."""
    if (directory / SINGLE_FILE).is_file():
        return None
    path = directory / INDEX_FILE
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in named.items()}
    except FileNotFoundError:
        got = sorted(p.name for p in directory.glob("*"))[:8] if directory.is_dir() else "nothing"
        raise CheckpointError.expected(
            f"{SINGLE_FILE} or {INDEX_FILE}",
            got,
            where=f"'{directory}'",
            hint="Give a directory that save_pretrained() or export_hf() wrote",
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError.expected(
            "an index in JSON with a weight_map",
            f"{type(error).__name__}: {error}",
            where=f"'{path}'",
            hint=_DAMAGED,
        ) from error


def require_library(name: str) -> ModuleType:
    """Import an optional library.

    Raises:
        ImportError: It is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            expected(
                f"the library {name.partition('.')[0]}",
                str(error),
                where="reading or writing Hugging Face files",
                hint="Install it: pip install megafsdp[hf]",
            )
        ) from error
