"""Safetensors files: planned as arithmetic, written tensor by tensor, read slice by slice.

A safetensors file is a length, a JSON header with the place of every tensor, and the tensors'
bytes. The header follows from names, dtypes and shapes alone, so it is written first and tensors
follow in any order, one in memory at a time; the library's own ``save_file`` wants all at once.
Reading is the library's. What the tensors mean is ``hf_mapping``'s business.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, BinaryIO

import torch

from megafsdp.errors import CheckpointError, expected

if TYPE_CHECKING:
    from safetensors import safe_open

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
)
# Readers map the file and view it as tensors, which wants aligned data.
_ALIGNMENT_NBYTES = 8
# Bytes go from the tensor to the file in pieces of this size, so a GPU's tensor needs no host copy.
_PIECE_NBYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Name, dtype and shape of one tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file before it is written.

    Attributes:
        name: File name.
        tensors: What it holds, in order.
        header: Its first bytes, up to the tensors.
        offsets: First byte of each tensor, by name.
        nbytes: Its size.
    """

    name: str
    tensors: tuple[StoredTensor, ...]
    header: bytes = field(repr=False)
    offsets: Mapping[str, int] = field(repr=False)
    nbytes: int


def plan_files(groups: Iterable[Sequence[StoredTensor]], max_nbytes: int) -> list[FilePlan]:
    """Divide tensors into files, in order.

    Args:
        groups: Tensors; those of a group go to one file.
        max_nbytes: Bytes of tensors in a file; a larger group has a file of its own.

    Returns:
        One plan a file, at least one, named as transformers names them.

    Raises:
        CheckpointError: The format has no name for a dtype.
    """
    files: list[list[StoredTensor]] = [[]]
    nbytes = 0
    for group in groups:
        group_nbytes = sum(tensor.nbytes for tensor in group)
        if files[-1] and nbytes + group_nbytes > max_nbytes:
            files.append([])
            nbytes = 0
        files[-1] += group
        nbytes += group_nbytes
    if len(files) == 1:
        return [_plan_file(SINGLE_FILE, files[0])]
    names = [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    return [_plan_file(name, tensors) for name, tensors in zip(names, files, strict=True)]


def _plan_file(name: str, tensors: Sequence[StoredTensor]) -> FilePlan:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start, starts = 0, {}
    for tensor in tensors:
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(
                expected(
                    f"a dtype among {', '.join(str(d) for d in _DTYPE_NAMES)}",
                    tensor.dtype,
                    where=f"'{tensor.name}', to be written as safetensors",
                    hint="Convert the model to one of these first",
                )
            )
        starts[tensor.name] = start
        header[tensor.name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_NBYTES)
    encoded = len(text).to_bytes(8, "little") + text
    offsets = {key: len(encoded) + value for key, value in starts.items()}
    return FilePlan(name, tuple(tensors), encoded, offsets, len(encoded) + start)


def index_of(files: Sequence[FilePlan]) -> str:
    """Return the index that says which of several files holds which tensor."""
    tensors = [(tensor, file.name) for file in files for tensor in file.tensors]
    metadata = {
        "total_parameters": sum(math.prod(tensor.shape) for tensor, _ in tensors),
        "total_size": sum(tensor.nbytes for tensor, _ in tensors),
    }
    weight_map = {tensor.name: name for tensor, name in tensors}
    body = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(body, indent=2) + "\n"


class SafetensorsWriter:
    """Write the tensors of one planned file; leaving the context makes the file durable.

    Args:
        directory: Where the file goes.
        plan: What it will hold.
    """

    def __init__(self, directory: Path, plan: FilePlan) -> None:
        self._plan = plan
        self._missing = {tensor.name: tensor for tensor in plan.tensors}
        self._stream: BinaryIO = (directory / plan.name).open("wb")

    def __enter__(self) -> SafetensorsWriter:
        """Write the header and return the writer."""
        self._stream.write(self._plan.header)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flush to the disk and close."""
        with self._stream:
            if error is None:
                assert not self._missing, f"tensors were not written: {list(self._missing)[:8]}"
                self._stream.flush()
                os.fsync(self._stream.fileno())

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, contiguous and on any device, at its place."""
        planned = self._missing.pop(name)
        assert planned.shape == tuple(tensor.shape), f"{name}: {planned} {tuple(tensor.shape)}"
        assert planned.dtype == tensor.dtype, f"{name}: {planned} {tensor.dtype}"
        self._stream.seek(self._plan.offsets[name])
        flat = tensor.detach().view(-1)
        for piece in flat.split(max(1, _PIECE_NBYTES // flat.element_size())):
            # numpy would pin a storage that its owner wants to release.
            copy = piece.view(torch.uint8).to("cpu", copy=True)
            self._stream.write(memoryview(copy.numpy()))


class SafetensorsReader:
    """Read tensors, or slices of them, of a directory of safetensors files.

    Only headers are read at construction. A context manager, which closes the files.

    Args:
        directory: Holds ``model.safetensors``, or an index and the files that it names.

    Raises:
        CheckpointError: There are no such files, one is missing or damaged, or the index does not
            name what they hold.
        ImportError: The safetensors library is not installed.
    """

    def __init__(self, directory: Path) -> None:
        self._open = _safe_open()
        self._files: dict[str, safe_open] = {}
        self._file_of: dict[str, str] = {}
        self._directory = directory
        named = _weight_map(directory)
        for file in sorted(set(named.values())) if named else [SINGLE_FILE]:
            with self._errors_of(file):
                self._files[file] = self._open(directory / file, framework="pt")
            for name in self._files[file].keys():  # noqa: SIM118 (not a dict)
                self._file_of[name] = file
        if named and named != self._file_of:
            odd = sorted(set(named.items()) ^ set(self._file_of.items()))
            raise CheckpointError(
                expected(
                    "an index of the tensors that the files hold",
                    f"differences such as {odd[:4]}",
                    where=f"'{directory / INDEX_FILE}'",
                    hint="Fetch or export the directory again",
                )
            )

    def __enter__(self) -> SafetensorsReader:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        self._files.clear()

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, from the header."""
        return tuple(self._files[self._file_of[name]].get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory."""
        with self._errors_of(self._file_of[name]):
            return self._files[self._file_of[name]].get_tensor(name)

    def rows(self, name: str, start: int, stop: int, *, dim: int = 0) -> torch.Tensor:
        """Read [start, stop) of dimension 0 or 1 of a tensor to CPU memory, and nothing else."""
        with self._errors_of(self._file_of[name]):
            lazy = self._files[self._file_of[name]].get_slice(name)
            return lazy[:, start:stop] if dim else lazy[start:stop]

    @contextmanager
    def _errors_of(self, file: str) -> Iterator[None]:
        """Convert the library's errors, which do not name the file."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                expected(
                    "a whole safetensors file",
                    f"{type(error).__name__}: {error}",
                    where=f"'{self._directory / file}'",
                    hint="Fetch or export the directory again",
                )
            ) from error


def _weight_map(directory: Path) -> dict[str, str] | None:
    """Return which file holds which tensor; None where there is one file and no index."""
    if (directory / SINGLE_FILE).is_file():
        return None
    path = directory / INDEX_FILE
    try:
        named = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in named.items()}
    except FileNotFoundError:
        got = sorted(p.name for p in directory.glob("*"))[:8] if directory.is_dir() else "nothing"
        raise CheckpointError(
            expected(
                f"{SINGLE_FILE} or {INDEX_FILE}",
                got,
                where=f"'{directory}'",
                hint="Give a directory that save_pretrained() or export_hf() wrote",
            )
        ) from None
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            expected(
                "an index in JSON with a weight_map",
                f"{type(error).__name__}: {error}",
                where=f"'{path}'",
                hint="Fetch or export the directory again",
            )
        ) from error


def _safe_open() -> type[safe_open]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise ImportError(
            expected(
                "the safetensors library",
                str(error),
                where="reading Hugging Face files",
                hint="Install it: pip install megafsdp[hf]",
            )
        ) from error
    return safe_open
