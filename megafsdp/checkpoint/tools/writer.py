"""Write a checkpoint in one process, tensor by tensor, with neither a model nor a process group.

Converters and imports write through this file. It makes the same files as ``save``: records in
``__0_0.distcp``, ``.metadata`` and ``manifest.json``, published atomically. Each tensor is written
when it is added, so its memory can be freed. checkpoint/save.py saves the state of a model.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence

import torch

from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint.format.manifest import Chunk, Manifest, TensorEntry, dtype_name, joining
from megafsdp.checkpoint.format.plain_values import plain, whole_number
from megafsdp.checkpoint.format.publication import saves_to
from megafsdp.checkpoint.format.records import RecordWriter
from megafsdp.checkpoint.state.merge import common_facts, library_versions
from megafsdp.checkpoint.storage.locations import Location, location_of
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import FusedParts

# Kept small, as a reader has a chunk in memory beside the tensor that it fills.
_CHUNK_NBYTES = 1 << 28


class CheckpointWriter:
    """A checkpoint being written; leaving the context without :meth:`publish` discards it.

    Keys are those of ``save``: ``model.<fqn>``, ``optimizer.state.<fqn>.<state>``,
    ``optimizer.param_groups``, and so on. If ``extra`` or ``common`` is not added, it is made here,
    because ``load`` needs both.

    Args:
        directory: The save root, a path or the URL of a store.
        step: The training step; it names the directory.
        world_size: Number of ranks whose random states are added, as ``rng.<rank>``; with 0, a load
            leaves random states alone.

    Raises:
        CheckpointError: The step is the published one already, or is not a whole number from 0.
    """

    def __init__(
        self, directory: str | os.PathLike[str], step: int, *, world_size: int = 0
    ) -> None:
        self._root = location_of(directory)
        if (number := whole_number(step, least=0)) is None:
            raise CheckpointError.expected(
                "a step of at least 0",
                repr(step),
                where=f"'{self._root}'",
                hint="Give the step that the checkpoint is to be published as",
            )
        self._manifest = Manifest(number, world_size, library_versions(), {}, {}, {}, {})
        self._is_published = False
        self._saves = saves_to(self._root)
        self._draft = self._saves.prepare(number)
        self._records = RecordWriter(self._draft.folder, 0, suffix=self._draft.suffix)

    def __enter__(self) -> CheckpointWriter:
        """Return the writer."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Discard what was not published."""
        if self._is_published:
            return
        self._records.close(is_durable=False)
        self._saves.discard(self._draft)

    def add_tensor(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        chunk_rows: int | None = None,
        fused: FusedParts | None = None,
    ) -> None:
        """Write a whole tensor.

        Args:
            key: Its key, not used before.
            tensor: A plain tensor on any device.
            chunk_rows: Number of rows per chunk; None makes chunks of at most 256 MiB.
            fused: Logical tensors inside, if a fused tensor is stored whole.

        Raises:
            CheckpointError: The key is taken.
        """
        self._require_new(key)
        chunks = []
        for region in _row_slabs(tensor, chunk_rows):
            rows = tensor[region.slices_in(Region((0,) * tensor.ndim, tuple(tensor.shape)))]
            chunks.append(Chunk(region, self._records.append_tensor(rows)))
        self._manifest.tensors[key] = TensorEntry(
            tuple(tensor.shape), dtype_name(tensor.dtype), tuple(chunks), fused
        )

    def add_stack(self, key: str, tensors: Iterable[torch.Tensor]) -> None:
        """Write tensors of one shape and dtype as one tensor, stacked along a new dim 0.

        Args:
            key: Its key, not used before.
            tensors: At least one; each is a chunk, and may be freed before the next one is made.

        Raises:
            CheckpointError: The key is taken.
        """
        self._require_new(key)
        chunks = []
        for index, tensor in enumerate(tensors):
            shape, dtype = tuple(tensor.shape), tensor.dtype
            region = Region((index, *(0 for _ in shape)), (1, *shape))
            chunks.append(Chunk(region, self._records.append_tensor(tensor.unsqueeze(0))))
        self._manifest.tensors[key] = TensorEntry(
            (len(chunks), *shape), dtype_name(dtype), tuple(chunks)
        )

    def add_object(self, key: str, value: object) -> None:
        """Write a structure of plain values and small tensors.

        Raises:
            CheckpointError: The key is taken, the value would not load with ``weights_only=True``,
                or ``extra`` is not a dict, which ``load`` must return.
        """
        self._require_new(key)
        if key == "extra" and not isinstance(value, dict):
            raise CheckpointError.expected(
                "a dict of the caller's values",
                repr(value)[:80],
                where=f"'extra' of '{self._root}'",
                hint="Give the value a name: {'name': value}",
            )
        self._manifest.objects[key] = self._records.append_object(plain(key, value))

    def alias(self, key: str, target: str) -> None:
        """Give a written tensor a further name, for a tied parameter.

        Raises:
            CheckpointError: The key is taken, or there is no such tensor.
        """
        self._require_new(key)
        self._require_tensors(key, [target], self._manifest.tensors)
        self._manifest.aliases[key] = target

    def fuse(self, key: str, parts: Sequence[str], *, dim: int = 0, num_groups: int = 1) -> None:
        """Declare written tensors to be the parts of one fused parameter.

        Args:
            key: The key of the whole.
            parts: Keys of the parts, in their order along ``dim``.
            dim: The dimension along which they are joined.
            num_groups: How many times the sequence of all parts repeats in the whole tensor, each
                time with the next piece of each part.

        Raises:
            CheckpointError: The key is taken, or a part was not written.
        """
        self._require_new(key)
        # The parts of a tied parameter are tied names themselves.
        self._require_tensors(key, parts, self._manifest.stored())
        self._manifest.fused_into[key] = joining(list(parts), dim, num_groups)

    def publish(self) -> Location:
        """Make the files durable and publish the directory as the latest checkpoint.

        Returns:
            The published directory.
        """
        manifest = self._manifest
        if "extra" not in manifest.objects:
            self.add_object("extra", {})
        if "common" not in manifest.objects:
            self.add_object("common", common_facts(manifest.step, manifest.world_size, {}))
        self._records.close(is_durable=True)
        manifest.files[self._records.file_name] = self._records.nbytes
        self._saves.describe(manifest, self._draft)
        final = self._saves.publish(self._draft)
        self._is_published = True
        return final

    def _require_new(self, key: str) -> None:
        own = self._manifest
        if key in own.stored() or key in own.objects or key in own.fused_into:
            raise CheckpointError.expected(
                "each key once",
                f"'{key}' again",
                where=f"'{self._root}'",
                hint="Give every tensor and object a key of its own",
            )

    def _require_tensors(self, key: str, targets: Sequence[str], known: Container[str]) -> None:
        missing = [target for target in targets if target not in known]
        if missing:
            raise CheckpointError.expected(
                f"tensors for '{key}' to stand for",
                f"no tensors {missing[:20]}",
                where=f"'{self._root}'",
                hint="Add the tensors first",
            )


def _row_slabs(tensor: torch.Tensor, chunk_rows: int | None) -> list[Region]:
    """Cut a tensor's rows into slabs; none for an empty tensor, one for a scalar."""
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return []
    if not shape:
        return [Region((), ())]
    num_rows = shape[0]
    rows = chunk_rows or max(1, _CHUNK_NBYTES * num_rows // max(1, tensor.nbytes))
    others = (0,) * (len(shape) - 1)
    return [
        Region((start, *others), (min(rows, num_rows - start), *shape[1:]))
        for start in range(0, num_rows, rows)
    ]
