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

from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import Chunk, TensorEntry, read_manifest
from megafsdp.checkpoint.format.records import RecordReader, require_files
from megafsdp.checkpoint.format.regions import odd_cells, whole
from megafsdp.errors import CheckpointError


class CheckpointReader:
    """One checkpoint's tensors and objects by key; a context manager that closes its file.

    Attributes:
        directory: The checkpoint's own directory.
        manifest: What it holds.
        fused: Fused parameters stored in parts: key of the whole -> ``parts`` (keys), ``dim``, and
            ``num_groups`` if they repeat.

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
        self.fused = self.manifest.fused_into
        self._whole_by_part = {
            part: key for key, fused in self.fused.items() for part in fused["parts"]
        }
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
        return list(dict.fromkeys(self._whole_by_part.get(key, key) for key in self.keys()))

    def whole_aliases(self) -> dict[str, str]:
        """Return the tied names as names of whole tensors: name -> key in :meth:`whole_keys`."""
        whole = self._whole_by_part
        return {
            whole.get(alias, alias): whole.get(key, key)
            for alias, key in self.manifest.aliases.items()
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape of a tensor, by any key that :meth:`tensor` takes."""
        stored, parts = self._resolve(key)
        shapes = [self._entry(part).shape for part in parts]
        if stored not in self.fused or not shapes[0]:
            return shapes[0]
        dim = self.fused[stored]["dim"]
        extent = sum(shape[dim] for shape in shapes)
        return (*shapes[0][:dim], extent, *shapes[0][dim + 1 :])

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor, by any key that :meth:`tensor` takes."""
        return self._entry(self._resolve(key)[1][0]).torch_dtype

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
        shape, dtype = self.shape(key), self.dtype(key)
        stored, parts = self._resolve(key)
        if len(parts) > 1 and not shape:
            return self._scalar(stored, parts)
        chunks = self._entry(parts[0]).chunks
        if len(parts) == 1 and len(chunks) == 1:
            # What was written whole needs no second copy.
            self._require_filled(parts[0])
            return self.chunk(parts[0], chunks[0])
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        self._fill(tensor, stored, parts)
        return tensor

    def read_into(self, tensor: torch.Tensor, key: str) -> None:
        """Read a whole tensor into memory of the caller's.

        Args:
            tensor: A CPU tensor of the shape and dtype of ``key``; may be mapped from a file.
            key: Any key that :meth:`tensor` takes.

        Raises:
            CheckpointError: As :meth:`tensor` does.
        """
        stored, parts = self._resolve(key)
        if len(parts) > 1 and not tensor.ndim:
            tensor.copy_(self._scalar(stored, parts))
        else:
            self._fill(tensor, stored, parts)

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
            raise CheckpointError.expected(
                f"a chunk of {wanted[0]} and shape {wanted[1]}",
                f"{piece.dtype} and {tuple(piece.shape)}",
                where=f"'{key}' in file '{self.directory / chunk.record.file}'",
                hint="The manifest is not this file's: use another checkpoint",
            )
        return piece

    def _resolve(self, key: str) -> tuple[str, list[str]]:
        """Return the key that a tied name stands for, and the keys of its parts, or itself."""
        aliases = self.manifest.aliases
        stored = aliases.get(key, key)
        if stored in self.fused:
            # The parts of a tied parameter are tied names themselves.
            return stored, [aliases.get(part, part) for part in self.fused[stored]["parts"]]
        return stored, [stored]

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.manifest.tensors:
            raise _no_such("tensor", key, self.directory)
        return self.manifest.tensors[key]

    def _fill(self, tensor: torch.Tensor, stored: str, parts: list[str]) -> None:
        """Copy the chunks of a tensor, or of its parts one after another, to their places."""
        joining = self.fused.get(stored, {"dim": 0})
        start, dim, num_groups = 0, joining["dim"], joining.get("num_groups", 1)
        for part in parts:
            entry = self._entry(part)
            self._require_filled(part)
            target = tensor
            if num_groups > 1:
                # The rows of one part are as many windows of the whole.
                groups = tensor.unflatten(dim, (num_groups, -1))
                size = entry.shape[dim] // num_groups
                window = groups.narrow(dim + 1, start, size)
                window.copy_(self.tensor(part).unflatten(dim, (num_groups, size)))
                start += size
                continue
            if len(parts) > 1:
                target = tensor.narrow(dim, start, entry.shape[dim])
                start += entry.shape[dim]
            for chunk in entry.chunks:
                target[chunk.region.slices_in(whole(entry.shape))] = self.chunk(part, chunk)

    def _require_filled(self, key: str) -> None:
        entry = self._entry(key)
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        if odd:
            raise CheckpointError.expected(
                f"chunks that fill shape {entry.shape} once",
                f"{odd[0][1]} chunks at {odd[0][0]}",
                where=f"'{key}' of '{self.directory}'",
                hint="The checkpoint is damaged: use another one",
            )

    def _scalar(self, key: str, parts: list[str]) -> torch.Tensor:
        scalars = [self.tensor(part) for part in parts]
        if any(not torch.equal(scalar, scalars[0]) for scalar in scalars):
            raise CheckpointError.expected(
                "one value in all parts",
                dict(zip(parts, [scalar.item() for scalar in scalars], strict=True)),
                where=f"'{key}' of '{self.directory}'",
                hint="Read the parts by their own keys",
            )
        return scalars[0]


def _no_such(kind: str, key: str, directory: Path) -> CheckpointError:
    return CheckpointError.expected(
        f"a stored {kind} '{key}'",
        "none",
        where=f"'{directory}'",
        hint="List the keys with megafsdp ckpt inspect",
    )
