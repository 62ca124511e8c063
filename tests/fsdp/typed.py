"""A stand-in for the package ``spmd_types``: what megafsdp reads of its types, and no checks.

The types are attributes of tensors, one for each mesh axis; an axis is its set of ranks. The tests
that have the package itself are in tests/ecosystem.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Type:
    """R, I, P or V."""

    name: str


@dataclass(frozen=True)
class Shard:
    """Cut along ``dim``."""

    dim: int


R, I, P, V, S = Type("R"), Type("I"), Type("P"), Type("V"), Shard  # noqa: E741


@dataclass(frozen=True)
class MeshAxis:
    """An axis of this rank's."""

    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> MeshAxis:
        """Return the axis of a group."""
        return cls(tuple(dist.get_process_group_ranks(group)))

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)


def assert_type(tensor: torch.Tensor, types: Mapping[MeshAxis, Type | Shard]) -> None:
    """Write types; a cut is V, and an entry of the specification."""
    spec: list[object] = [None] * tensor.ndim
    for axis, each in types.items():
        if isinstance(each, Shard):
            spec[each.dim] = axis
    plain = {axis: V if isinstance(each, Shard) else each for axis, each in types.items()}
    vars(tensor).update(
        _local_type={**get_local_type(tensor), **plain},
        _partition_spec=tuple(spec) if any(spec) else get_partition_spec(tensor),
    )


def current_mesh() -> None:
    """Return that no checks are running."""


_is_checking = contextvars.ContextVar("is_checking", default=False)


def is_type_checking() -> bool:
    """Return whether checks are running, which here say nothing."""
    return _is_checking.get()


@contextlib.contextmanager
def typecheck(is_checking: bool = True) -> Iterator[None]:
    """Let checks run, or pause."""
    token = _is_checking.set(is_checking)
    try:
        yield
    finally:
        _is_checking.reset(token)


def no_typecheck() -> contextlib.AbstractContextManager[None]:
    """Pause the checks."""
    return typecheck(is_checking=False)


def get_local_type(tensor: torch.Tensor) -> Mapping[MeshAxis, Type]:
    """Return the types; none if nobody wrote any."""
    return getattr(tensor, "_local_type", {})


def get_partition_spec(tensor: torch.Tensor) -> tuple[object, ...] | None:
    """Return which axes cut which dimension."""
    return getattr(tensor, "_partition_spec", None)
