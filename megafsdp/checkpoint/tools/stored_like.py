"""Store whole tensors as another checkpoint stores those of the same names: in parts or whole.

A file of whole tensors does not say which of them are fused. The manifest of another checkpoint of
the same model does, and only that is read. ``save`` splits by the model itself, in state/fused.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megafsdp.checkpoint.format.manifest import path_of, read_manifest, section_of
from megafsdp.checkpoint.format.regions import with_extent
from megafsdp.checkpoint.state.canonical import state_key
from megafsdp.checkpoint.storage.locations import Location
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError

STATE_PREFIX = "optimizer.state."


class FusedLike:
    """How the tensors of a model are stored: in parts if another checkpoint does so, else whole.

    Args:
        like: The other checkpoint's directory; None stores everything whole.
    """

    def __init__(self, like: Location | None) -> None:
        self._like = None if like is None else read_manifest(like)
        self._where = f"'{like}'"
        fused = {} if self._like is None else self._like.fused_into
        self._fused = {k.removeprefix("model."): v for k, v in fused.items() if _is_model(k)}

    def names(self, key: str) -> list[str]:
        """Return the keys under which the tensor or object of a key is stored."""
        name, rename = _parameter(key)
        if name not in self._fused:
            return [key]
        return [rename(part.removeprefix("model.")) for part in self._fused[name]["parts"]]

    def add(
        self, writer: CheckpointWriter, key: str, tensor: torch.Tensor, tied_to: str | None
    ) -> None:
        """Write a tensor under its key, or its parts under theirs.

        Args:
            writer: The checkpoint in the making.
            key: The key of the whole.
            tensor: Its values. A tensor of another shape than the parameter's, such as a count of
                steps, is stored with each part.
            tied_to: Key of the tensor of which this is a further name; None if it is no alias.

        Raises:
            CheckpointError: The shape of a parameter does not fit its parts.
        """
        name, _ = _parameter(key)
        if name not in self._fused:
            self._add_whole(writer, key, tensor, tied_to)
            return
        parts, fused = self.names(key), self._fused[name]
        pieces, is_split = self._pieces(key, name, tensor)
        targets = [None] * len(parts) if tied_to is None else self.names(tied_to)
        for part, piece, target in zip(parts, pieces, targets, strict=True):
            self._add_whole(writer, part, piece, target)
        if is_split or not tensor.ndim:
            writer.fuse(key, parts, dim=fused["dim"], num_groups=fused.get("num_groups", 1))

    def _add_whole(
        self, writer: CheckpointWriter, key: str, tensor: torch.Tensor, tied_to: str | None
    ) -> None:
        if tied_to is not None:
            writer.alias(key, tied_to)
            return
        entry = None if self._like is None else self._like.tensors.get(key)
        is_like = entry is not None and entry.shape == tuple(tensor.shape)
        writer.add_tensor(key, tensor, fused=entry.fused if entry and is_like else None)

    def _pieces(self, key: str, name: str, tensor: torch.Tensor) -> tuple[list[torch.Tensor], bool]:
        assert self._like is not None, "nothing is fused without another checkpoint"
        fused, aliases = self._fused[name], self._like.aliases
        shapes = [self._like.tensors[aliases.get(part, part)].shape for part in fused["parts"]]
        dim = fused["dim"]
        sizes = [shape[dim] for shape in shapes]
        whole = with_extent(shapes[0], dim, sum(sizes))
        if tuple(tensor.shape) == whole:
            num_groups = fused.get("num_groups", 1)
            groups = tensor.unflatten(dim, (num_groups, -1))
            in_group = [size // num_groups for size in sizes]
            return [p.flatten(dim, dim + 1) for p in groups.split(in_group, dim + 1)], True
        if _is_model(key):
            raise CheckpointError.expected(
                f"the shape {whole} of its parts {fused['parts']}",
                f"{tuple(tensor.shape)}",
                where=f"'{key}', to be split as in {self._where}",
                hint="Give a checkpoint of the same model as --fused-like, or none",
            )
        return [tensor] * len(shapes), False


def _is_model(key: str) -> bool:
    return section_of(key) == "model"


def _parameter(key: str) -> tuple[str | None, Callable[[str], str]]:
    """Return the parameter of a key, and a function from a name to its key of the same kind."""
    if _is_model(key):
        return key.removeprefix("model."), lambda name: f"model.{name}"
    if key.startswith(STATE_PREFIX):
        *_, name, state_name = path_of(key)
        return name, lambda other: state_key(other, state_name)
    return None, lambda name: name
