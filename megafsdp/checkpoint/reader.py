"""Read a checkpoint in one process, tensor by tensor, with neither a model nor a process group.

The tools and the converters read through this file: chunks are joined to whole tensors and, where
asked for by their whole name, the parts of a fused parameter to one tensor. Every record is
verified before it is trusted. One tensor is in memory at a time, beside the chunk being read.
Loading into a model is ``load``'s, writing ``writer``'s.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import torch

from megafsdp.checkpoint import directory as on_disk
from megafsdp.checkpoint.coverage import odd_cells
from megafsdp.checkpoint.manifest import Chunk, TensorEntry, read_manifest
from megafsdp.checkpoint.records import RecordReader, require_files
from megafsdp.checkpoint.regions import whole
from megafsdp.errors import CheckpointError, expected


class CheckpointReader:
    """One checkpoint's tensors and objects by key; a context manager that closes its file.

    Args:
        directory: The save root, or one checkpoint's own directory.
        step: The step; None means the latest published one.

    Raises:
        CheckpointError: There is none, or it is incomplete.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        self.directory: Path = on_disk.find(Path(directory), step)
        self.manifest = read_manifest(self.directory)
        require_files(self.manifest, self.directory, self.manifest.files)
        self._fused: dict[str, dict] = getattr(self.manifest, "fused_into", {})
        self._records = RecordReader(self.directory)

    def __enter__(self) -> CheckpointReader:
        """Return the reader."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the open file."""
        self._records.__exit__(kind, error, trace)

    def keys(self) -> list[str]:
        """List the keys of the stored tensors; tied names and objects are in the manifest."""
        return list(self.manifest.tensors)

    def whole_keys(self) -> list[str]:
        """List the keys of the tensors with each fused parameter once, under its whole name.

        A whole key stands where the first of its parts does.
        """
        whole_by_part = {part: key for key, fused in self._fused.items() for part in fused["parts"]}
        return list(dict.fromkeys(whole_by_part.get(key, key) for key in self.keys()))

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape of a tensor, by any key that :meth:`tensor` takes."""
        parts = self._parts(key)
        if parts is None:
            return self._entry(key)[1].shape
        shapes = [self._entry(part)[1].shape for part in parts]
        if not shapes[0]:
            return ()
        dim = self._fused[key]["dim"]
        extent = sum(shape[dim] for shape in shapes)
        return (*shapes[0][:dim], extent, *shapes[0][dim + 1 :])

    def tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory.

        Args:
            key: One of :meth:`keys` or :meth:`whole_keys`, or a tied name.

        Returns:
            The tensor; the parts of a fused one are joined. Of parts that are scalars, such as an
            optimizer's step, the first is returned, which is every part's.

        Raises:
            CheckpointError: There is no such tensor, a record is damaged, the chunks do not fill
                the tensor, or scalar parts differ.
        """
        parts = self._parts(key)
        if parts is None:
            return self._stored(key)
        if not self.shape(key):
            return self._scalar(key, parts)
        return torch.cat([self._stored(part) for part in parts], self._fused[key]["dim"])

    def object(self, key: str) -> object:
        """Read a structure of plain values and small tensors.

        Raises:
            CheckpointError: There is no such object, or its record is damaged.
        """
        record = self.manifest.objects.get(key)
        if record is None:
            raise _no_such("object", key, self.directory)
        return self._records.read_object(key, record)

    def chunk(self, key: str, chunk: Chunk) -> torch.Tensor:
        """Verify and read one chunk of a stored tensor.

        Args:
            key: The tensor's key.
            chunk: One of the chunks of its entry in the manifest.

        Raises:
            CheckpointError: Its record is damaged, or holds another tensor than the manifest says.
        """
        self._records.verify(key, chunk.record)
        piece = self._records.read_tensor(chunk.record)
        wanted = (self.manifest.tensors[key].torch_dtype, chunk.region.sizes)
        if (piece.dtype, tuple(piece.shape)) != wanted:
            raise CheckpointError(
                expected(
                    f"a chunk of {wanted[0]} and shape {wanted[1]}",
                    f"{piece.dtype} and {tuple(piece.shape)}",
                    where=f"'{key}' in file '{self.directory / chunk.record.file}'",
                    mend="The manifest is not this file's: use another checkpoint",
                )
            )
        return piece

    def _parts(self, key: str) -> list[str] | None:
        """Return the keys of a whole tensor's parts; None if it is stored under its own name."""
        fused = None if key in self.manifest.tensors else self._fused.get(key)
        return None if fused is None else list(fused["parts"])

    def _entry(self, key: str) -> tuple[str, TensorEntry]:
        stored = self.manifest.aliases.get(key, key)
        if stored not in self.manifest.tensors:
            raise _no_such("tensor", key, self.directory)
        return stored, self.manifest.tensors[stored]

    def _stored(self, key: str) -> torch.Tensor:
        stored, entry = self._entry(key)
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        if odd:
            raise CheckpointError(
                expected(
                    f"chunks that fill shape {entry.shape} once",
                    f"{odd[0][1]} chunks at {odd[0][0]}",
                    where=f"'{stored}' of '{self.directory}'",
                    mend="The checkpoint is damaged: use another one",
                )
            )
        if len(entry.chunks) == 1:
            return self.chunk(stored, entry.chunks[0])
        tensor = torch.empty(entry.shape, dtype=entry.torch_dtype)
        for chunk in entry.chunks:
            index = chunk.region.slices_in(whole(entry.shape))
            tensor[index] = self.chunk(stored, chunk)
        return tensor

    def _scalar(self, key: str, parts: list[str]) -> torch.Tensor:
        scalars = [self._stored(part) for part in parts]
        if any(not torch.equal(scalar, scalars[0]) for scalar in scalars):
            raise CheckpointError(
                expected(
                    "one value in all parts",
                    dict(zip(parts, [scalar.item() for scalar in scalars], strict=True)),
                    where=f"'{key}' of '{self.directory}'",
                    mend="Read the parts by their own keys",
                )
            )
        return scalars[0]


def _no_such(kind: str, key: str, directory: Path) -> CheckpointError:
    return CheckpointError(
        expected(
            f"a stored {kind} '{key}'",
            "none",
            where=f"'{directory}'",
            mend="List the keys with megafsdp ckpt inspect",
        )
    )
