"""What ``torch.compile`` asks of our DTensors where it traces a function of them.

It makes a graph for operands as it saw them: of their classes, and of the layouts that say which
rows each rank has. Before it runs a graph again, and before it takes one from its files, it asks
whether these are the same. A graph for one layout is wrong for another of the same shape, and its
results have the layout that it was made for. Another thread may write rows that a graph reads; the
question is the place to wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from megafsdp.buffer.dtensor.busy_memory import wait_for_writers
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.torch_private import DTensorSpec, TensorMeta

Self = TypeVar("Self", bound="TracedAsItself")


class TracedAsItself(DTensor):
    """A DTensor whose subclasses are traced as what they are; torch's would be plain DTensors."""

    @classmethod
    def __tensor_unflatten__(cls: type[Self], *parts: Any) -> Self:  # type: ignore[override]
        """Make a tensor of the class over other memory, at the offset that its local tensor has.

        ``parts`` are the inner tensors, what ``__tensor_flatten__`` says of them, size and stride.
        """
        # torch asserts that a graph's operands are of the class that its tracer made.
        made: Any = DTensor.__tensor_unflatten__(*parts)
        made.__class__ = cls
        return cast(Self, made)

    def _stable_hash_for_caching(self) -> str:
        # Names a graph in torch's files. A gradient's spec is a parameter's, its class is not.
        return f"{type(self).__qualname__} {super()._stable_hash_for_caching()}"


class RowMeta(TensorMeta):
    """Global shape, strides and dtype, as torch has them, with a layout.

    Of what describes a DTensor to the compiler this alone may be a class of our own.
    """

    layout: UnevenLayout


class RowSpec(DTensorSpec):
    """Mesh, placements and global tensor, equal only to a spec with the same layout."""

    @property
    def layout(self) -> UnevenLayout:
        """Return how the global tensor is cut."""
        assert isinstance(self.tensor_meta, RowMeta), "made by spec_of_rows()"
        return self.tensor_meta.layout

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        # The guard of a graph compares an operand's spec with that of the one it was made for, and
        # the graph then reads the local tensor.
        wait_for_writers()
        is_equal = super()._check_equals(other, skip_shapes)
        return is_equal and isinstance(other, RowSpec) and self.layout == other.layout

    def __eq__(self, other: object) -> bool:
        return self._check_equals(other)

    __hash__ = DTensorSpec.__hash__

    def _hash_key(self) -> tuple[Any, ...]:
        # Also of the files in which the compiler keeps graphs.
        return (*super()._hash_key(), self.layout)


def spec_of_rows(spec: DTensorSpec, dtype: torch.dtype, layout: UnevenLayout) -> RowSpec:
    """Return a spec with another dtype and layout; itself if it has them."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor has a global shape"
    # Results of a step have the spec of a parameter: making one costs more than their kernel.
    if isinstance(meta, RowMeta) and meta.layout is layout and meta.dtype == dtype:
        return cast(RowSpec, spec)
    meta = RowMeta(meta.shape, meta.stride, dtype)
    meta.layout = layout
    return RowSpec(spec.mesh, spec.placements, tensor_meta=meta)


def plain_spec(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return a spec of torch's own, with another dtype; itself if it is one that has it."""
    meta = spec.tensor_meta
    assert meta is not None, "a DTensor has a global shape"
    if meta.dtype == dtype and not isinstance(spec, RowSpec):
        return spec
    meta = TensorMeta(meta.shape, meta.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


def layout_of(description: Sequence[object]) -> UnevenLayout:
    """Return the layout in what :meth:`DTensor.__tensor_flatten__` says of a tensor of rows."""
    # By class, not by its place, which changes between versions.
    return next(value.layout for value in description if isinstance(value, RowMeta))
