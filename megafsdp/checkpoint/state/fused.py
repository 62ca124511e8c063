"""Splitting and joining: names and pieces on disk of a parameter and of tensors like it.

A fused parameter whose layer names its parts is stored as these parts, each a tensor of its own;
experts are stored by their index in the layer. Weights, gradients and optimizer states, sharded or
plain, go through the same :class:`StoredForm`: a save reads its pieces and a load writes into them,
so a load joins the parts in place. format/regions.py says which rank has what of a piece.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

import torch

from megafsdp.buffer.dtensor.uneven_layout import Region, whole
from megafsdp.checkpoint.format.regions import Stored, TensorPart, with_extent
from megafsdp.checkpoint.state.declared import declared_parts
from megafsdp.checkpoint.state.experts import (
    holders,
    is_named_by_expert,
    is_partial_stack,
    name_in_layer,
    stack_in_layer,
)
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ExpertRange, annotation_of
from megafsdp.mesh.fused_parts import FusedParts


@dataclass(frozen=True, slots=True)
class StoredForm:
    """How one parameter, and every tensor of its shape, is stored.

    Attributes:
        name: The parameter's name on disk, experts by their index in the layer.
        parts: Names of the stored tensors: the parts of a fused parameter, or ``name`` alone.
        shape: The parameter's shape in memory.
        fused: The parts, if it is stored split.
        grouping: The parts, if it is stored whole.
        experts: Which experts it has.
        ranks: Ranks that have the same values of a plain tensor; None means all.
        is_own: True if only ``ranks`` have it under this name.
        num_in_order: Number of ranks whose parts follow one another in memory; 1 means the order of
            the whole.
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    fused: FusedParts | None
    grouping: FusedParts | None
    experts: ExpertRange | None
    ranks: tuple[int, ...] | None
    is_own: bool
    num_in_order: int = 1

    def as_in(self, stored: Container[str], section: str = "") -> StoredForm:
        """Return this form, or the undivided one if a checkpoint has the parameter whole.

        A checkpoint written without the model, e.g. by a converter, may not split it.

        Args:
            stored: Names in the checkpoint.
            section: Prefix of the parameter's name there.
        """
        if self.fused is None or self.fused.num_groups > 1 or section + self.name not in stored:
            return self
        return self if any(section + part in stored for part in self.parts) else self.undivided()

    def undivided(self) -> StoredForm:
        """Return the form of the same parameter without parts."""
        return replace(self, parts=(self.name,), fused=None, grouping=self.fused or self.grouping)

    def is_split(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor of the parameter is split into parts, not repeated for each."""
        return self.fused is not None and tuple(tensor.shape) == self.shape

    def pieces(self, tensor: torch.Tensor) -> list[Stored]:
        """Return the stored pieces of a tensor of the parameter, one for each name; no copies.

        Args:
            tensor: The parameter, its gradient or a state. A tensor of another shape than the
                parameter, such as a count of steps, is stored once with each part.

        Raises:
            CheckpointError: The tensor does not fit the declaration.
        """
        if tuple(tensor.shape) != self.shape:
            return [self._beside(tensor)] * len(self.parts)
        shape, place = stack_in_layer(self.name, self.shape, self.experts)
        if self.fused is None and self.grouping is not None and self.num_in_order > 1:
            regions = _regions_in_whole(self.grouping, self.num_in_order, self.shape, place)
            return [TensorPart(tensor, shape, regions, self.ranks)]
        if self.fused is None:
            if self.ranks is None and place == whole(self.shape) and shape == self.shape:
                return [tensor]
            return [TensorPart(tensor, shape, ((whole(self.shape), place),), self.ranks)]
        return [
            TensorPart(
                tensor,
                with_extent(shape, self.fused.dim, size * self.fused.num_groups),
                self._regions(_as_laid(self.fused, self.num_in_order), index, place),
                self.ranks,
            )
            for index, size in enumerate(self.fused.sizes)
        ]

    def _beside(self, tensor: torch.Tensor) -> Stored:
        if is_partial_stack(self.experts) and tensor.ndim:
            raise CheckpointError.expected(
                f"states of shape {self.shape} or scalars beside a stack of experts",
                f"shape {tuple(tensor.shape)}",
                where=f"a state of '{self.name}'",
                hint="Use an optimizer whose states are like the parameter",
            )
        if not self.is_own:
            return tensor
        everything = whole(tuple(tensor.shape))
        return TensorPart(tensor, everything.sizes, ((everything, everything),), self.ranks)

    def _regions(
        self, fused: FusedParts, index: int, place: Region
    ) -> tuple[tuple[Region, Region], ...]:
        """Return the place of one part in memory and in the stored tensor, a pair for each group.

        With groups [gate0; up0; gate1; up1], as in a tensor cut for two tensor-parallel ranks, the
        part ``up`` consists of two regions in memory that follow one another on disk.
        """
        dim, size = fused.dim, fused.sizes[index]
        pairs = []
        for group in range(fused.num_groups):
            start = group * sum(fused.sizes) + sum(fused.sizes[:index])
            offsets, sizes, target = [0] * len(self.shape), [*self.shape], [*place.offsets]
            offsets[dim], sizes[dim], target[dim] = start, size, target[dim] + group * size
            inner = Region(tuple(offsets), tuple(sizes))
            pairs.append((inner, Region(tuple(target), inner.sizes)))
        return tuple(pairs)


def stored_form(name: str, parameter: torch.Tensor) -> StoredForm:
    """Return how a parameter is stored, as its layer declared it.

    Args:
        name: Its name in the module.
        parameter: The parameter, sharded or not.

    Raises:
        CheckpointError: The declaration does not fit the parameter.
    """
    (fused, num_in_order), experts = declared_parts(parameter), annotation_of(parameter).experts
    shape = tuple(parameter.shape)
    if fused is not None:
        _require_fit(name, shape, fused, experts)
    in_layer = name_in_layer(name, experts)
    is_split = fused is not None and fused.stored_as is not None
    return StoredForm(
        name=in_layer,
        parts=part_names(in_layer, fused),
        shape=shape,
        fused=fused if is_split else None,
        grouping=None if is_split else fused,
        experts=experts,
        ranks=holders(name, parameter, experts),
        is_own=is_named_by_expert(experts),
        num_in_order=num_in_order,
    )


def wholes_by_part(fused_into: dict[str, dict]) -> dict[str, str]:
    """Return the key of the whole by the key of each part, from a manifest's map."""
    return {part: key for key, fused in fused_into.items() for part in fused["parts"]}


def part_names(name: str, fused: FusedParts | None) -> tuple[str, ...]:
    """Return the names of a parameter's parts on disk; its own name if it is stored whole."""
    if fused is None or fused.stored_as is None:
        return (name,)
    path, _, parameter = name.rpartition(".")
    outer, _, module = path.rpartition(".")
    names = (t.format(module=module, parameter=parameter) for t in fused.stored_as)
    # A parameter of the root has no module.
    return tuple(".".join(filter(None, (outer, name.lstrip(".")))) for name in names)


def _as_laid(fused: FusedParts, num_ranks: int) -> FusedParts:
    """Return the parts as groups, one for each rank whose parts follow one another in memory."""
    if num_ranks == 1:
        return fused
    sizes = tuple(size // num_ranks for size in fused.sizes)
    return replace(fused, sizes=sizes, num_groups=num_ranks)


def _regions_in_whole(
    fused: FusedParts, num_ranks: int, shape: tuple[int, ...], place: Region
) -> tuple[tuple[Region, Region], ...]:
    """Return, for each rank and part, its place in memory and its place in the whole."""
    dim, pairs = fused.dim, []
    sizes = _as_laid(fused, num_ranks).sizes
    for rank in range(num_ranks):
        for index, size in enumerate(sizes):
            start = rank * sum(sizes) + sum(sizes[:index])
            offsets, extents, target = [0] * len(shape), [*shape], [*place.offsets]
            offsets[dim], extents[dim] = start, size
            target[dim] += sum(fused.sizes[:index]) + rank * size
            inner = Region(tuple(offsets), tuple(extents))
            pairs.append((inner, Region(tuple(target), inner.sizes)))
    return tuple(pairs)


def _require_fit(
    name: str, shape: tuple[int, ...], fused: FusedParts, experts: ExpertRange | None
) -> None:
    is_stack = experts is not None and experts.name_component is None
    is_inside = (1 if is_stack else 0) <= fused.dim < len(shape)
    if not is_inside or shape[fused.dim] != fused.extent:
        declared = f"shape {with_extent(shape, fused.dim, fused.extent)} for" if is_inside else ""
        raise CheckpointError.expected(
            f"{declared} the parts {fused.names} of sizes {fused.sizes} along dim {fused.dim}",
            f"shape {shape}",
            where=f"'{name}'",
            hint="Declare sizes that add up to the parameter's extent, along a dim that does "
            "not count experts",
        )
