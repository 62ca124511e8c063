"""Read a checkpoint in one process, tensor by tensor, with neither a model nor a process group.

The tools and the converters read through this file. :class:`ChunkReader` joins the stored chunks in
any directory of records into tensors. :class:`CheckpointReader` reads our manifest, verifies each
record before reading it, and joins the parts of a fused parameter into one tensor under its whole
name. One tensor is in memory at a time, beside the chunk being read.

Loading into a model is in checkpoint/load.py, writing in tools/writer.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import torch

from megafsdp.buffer.dtensor.uneven_layout import whole
from megafsdp.checkpoint.format import save_root
from megafsdp.checkpoint.format.manifest import Chunk, Record, TensorEntry, read_manifest
from megafsdp.checkpoint.format.records import RecordReader, require_files
from megafsdp.checkpoint.format.regions import odd_cells, with_extent
from megafsdp.checkpoint.state.fused import wholes_by_part
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.errors import CheckpointError


class ChunkReader(RecordReader):
    """The tensors of one directory of records, joined from their stored chunks.

    Args:
        directory: Where the files are.
        entries: Stored tensors by key; may be filled later.
    """

    def __init__(self, directory: Location, entries: Mapping[str, TensorEntry]) -> None:
        super().__init__(directory)
        self._entries = entries

    def read_chunk(self, key: str, record: Record) -> torch.Tensor:
        """Read the record of one chunk; a subclass adds its checks."""
        return self.read_tensor(record)

    def chunks(self, key: str) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Yield each stored chunk of a tensor with its elements, in CPU memory.

        Args:
            key: Key of a stored tensor.

        Raises:
            CheckpointError: There is no such tensor, its chunks do not fill it once, or a record is
                damaged or does not match its entry.
        """
        entry = self._entry(key)
        odd = odd_cells(entry.shape, [chunk.region for chunk in entry.chunks])
        if odd:
            raise CheckpointError.expected(
                f"chunks that fill shape {entry.shape} once",
                f"{odd[0][1]} chunks at {odd[0][0]}",
                where=f"'{key}' of '{self.directory}'",
                hint="The checkpoint is damaged: use another one",
            )
        for chunk in entry.chunks:
            piece = self.read_chunk(key, chunk.record)
            wanted = (entry.torch_dtype, chunk.region.sizes)
            if (piece.dtype, tuple(piece.shape)) != wanted:
                raise CheckpointError.expected(
                    f"a chunk of {wanted[0]} and shape {wanted[1]}",
                    f"{piece.dtype} and {tuple(piece.shape)}",
                    where=f"'{key}' in file '{self.directory / chunk.record.file}'",
                    hint="What describes the file is not this file's: use another checkpoint",
                )
            yield chunk, piece

    def join_chunks(self, key: str, target: torch.Tensor | None = None) -> torch.Tensor:
        """Read a stored tensor, into the caller's memory if given.

        Raises:
            CheckpointError: As :meth:`chunks` does.
        """
        entry = self._entry(key)
        everything = whole(entry.shape)
        if target is None:
            if [chunk.region for chunk in entry.chunks] == [everything]:
                # A single chunk is the tensor; it needs no second copy.
                ((_, tensor),) = self.chunks(key)
                return tensor
            target = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        for chunk, piece in self.chunks(key):
            target[chunk.region.slices_in(everything)] = piece
        return target

    def _entry(self, key: str) -> TensorEntry:
        if key not in self._entries:
            raise _no_such("tensor", key, self.directory)
        return self._entries[key]


class CheckpointReader(ChunkReader):
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
        CheckpointError: There is no such checkpoint, or it is incomplete.
    """

    def __init__(self, directory: str | os.PathLike[str], step: int | None = None) -> None:
        path = save_root.find(directory, step)
        self.manifest = read_manifest(path)
        super().__init__(path, self.manifest.tensors)
        require_files(self.manifest, path, self.manifest.files)
        self.fused = self.manifest.fused_into
        self._whole_by_part = wholes_by_part(self.fused)

    def keys(self) -> list[str]:
        """List the keys of the stored tensors; tied names and objects are in the manifest."""
        return list(self.manifest.tensors)

    def whole_keys(self) -> list[str]:
        """List the keys of the tensors with each fused parameter once, under its whole name.

        A whole key has the position of its first part.
        """
        return list(dict.fromkeys(self._whole_by_part.get(key, key) for key in self.keys()))

    def whole_aliases(self) -> dict[str, str]:
        """Return the tied names of whole tensors: name -> key in :meth:`whole_keys`."""
        wholes = self._whole_by_part
        return {
            wholes.get(alias, alias): wholes.get(key, key)
            for alias, key in self.manifest.aliases.items()
        }

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the global shape of a tensor, by any key that :meth:`tensor` takes."""
        parts, dim, _ = self._resolve(key)
        shapes = [self._entry(part).shape for part in parts]
        first = shapes[0]
        if len(parts) == 1 or not first:
            return first
        return with_extent(first, dim, sum(shape[dim] for shape in shapes))

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a tensor, by any key that :meth:`tensor` takes."""
        return self._entry(self._resolve(key)[0][0]).torch_dtype

    def nbytes(self, key: str) -> int:
        """Return the size of a tensor's elements, by any key that :meth:`tensor` takes."""
        return whole(self.shape(key)).numel * self.dtype(key).itemsize

    def tensor(self, key: str) -> torch.Tensor:
        """Read a whole tensor to CPU memory.

        Args:
            key: One of :meth:`keys` or :meth:`whole_keys`, or a tied name.

        Returns:
            The tensor; the parts of a fused tensor are joined. If the parts are scalars, such as an
            optimizer's step, they must be equal, and one is returned.

        Raises:
            CheckpointError: There is no such tensor, a record is damaged, the chunks do not fill
                the tensor, or scalar parts differ.
        """
        parts, *_ = self._resolve(key)
        if len(parts) == 1:
            return self.join_chunks(parts[0])
        tensor = torch.empty(self.shape(key), dtype=self.dtype(key), device="cpu")
        self.read_into(tensor, key)
        return tensor

    def read_into(self, tensor: torch.Tensor, key: str) -> None:
        """Read a whole tensor into the caller's memory.

        Args:
            tensor: A CPU tensor of the shape and dtype of ``key``; may be mapped from a file.
            key: Any key that :meth:`tensor` takes.

        Raises:
            CheckpointError: As :meth:`tensor` does.
        """
        parts, dim, num_groups = self._resolve(key)
        if len(parts) == 1:
            self.join_chunks(parts[0], tensor)
            return
        if not tensor.ndim:
            tensor.copy_(self._scalar(key, parts))
            return
        start = 0
        for part in parts:
            extent = self._entry(part).shape[dim]
            if num_groups == 1:
                self.join_chunks(part, tensor.narrow(dim, start, extent))
                start += extent
                continue
            # The rows of one part form one region of the whole in each group.
            size = extent // num_groups
            groups = tensor.unflatten(dim, (num_groups, -1)).narrow(dim + 1, start, size)
            groups.copy_(self.join_chunks(part).unflatten(dim, (num_groups, size)))
            start += size

    def object(self, key: str) -> object:
        """Read a structure of plain values and small tensors.

        Raises:
            CheckpointError: There is no such object, or its record is damaged.
        """
        record = self.manifest.objects.get(key)
        if record is None:
            raise _no_such("object", key, self.directory)
        return self.read_object(key, record)

    def read_chunk(self, key: str, record: Record) -> torch.Tensor:
        """Verify and read the record of one chunk."""
        self.verify(key, record)
        return self.read_tensor(record)

    def _resolve(self, key: str) -> tuple[list[str], int, int]:
        """Return the stored keys that make a tensor, the dim that joins them, and num_groups."""
        aliases = self.manifest.aliases
        stored = aliases.get(key, key)
        fused = self.fused.get(stored)
        if fused is None:
            return [stored], 0, 1
        # The parts of a tied parameter are tied names themselves.
        parts = [aliases.get(part, part) for part in fused["parts"]]
        return parts, fused["dim"], fused.get("num_groups", 1)

    def _scalar(self, key: str, parts: list[str]) -> torch.Tensor:
        scalars = [self.join_chunks(part) for part in parts]
        if any(not torch.equal(scalar, scalars[0]) for scalar in scalars):
            raise CheckpointError.expected(
                "one value in all parts",
                dict(zip(parts, [scalar.item() for scalar in scalars], strict=True)),
                where=f"'{key}' of '{self.directory}'",
                hint="Read the parts by their own keys",
            )
        return scalars[0]


def _no_such(kind: str, key: str, directory: Location) -> CheckpointError:
    return CheckpointError.expected(
        f"a stored {kind} '{key}'",
        "none",
        where=f"'{directory}'",
        hint="List the keys with megafsdp ckpt inspect",
    )
