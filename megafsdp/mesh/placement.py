"""Placements of a flat buffer among ranks, and the transitions between them.

A placement gives the granule of a tensor that a cut between two ranks must not divide. ``Flat`` is
the default (whole rows); ``TensorAtomic`` keeps whole tensors together, for optimizers that need a
matrix on one rank; ``Even`` cuts each tensor by itself as FSDP2 does, for programs that rely on it.

A :class:`Residence` says whether a rank has one shard of a buffer or all of it, and
:data:`TRANSITIONS` names the collective that turns one residence into another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Flat:
    """Cut anywhere between two rows."""

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return row_numel


@dataclass(frozen=True, slots=True)
class TensorAtomic:
    """Never cut a tensor."""

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return max(math.prod(shape), 1)


@dataclass(frozen=True, slots=True)
class Even:
    """Cut every tensor into equal chunks along dimension 0, as ``torch.chunk`` does."""

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return math.prod(shape[1:])


Granularity = Flat | TensorAtomic | Even


class Residence(Enum):
    """Which part of a flat buffer a rank has."""

    # 1/N of the elements: this rank's shard.
    SHARD = "shard"
    # All elements, equal on every rank.
    REPLICATE = "replicate"
    # All elements, each of them an addend of a sum over ranks that is still to be made.
    PARTIAL = "partial"


# (from, to) -> the collective of buffer/comm/collectives.py. A missing pair needs no collective or
# is unsound.
TRANSITIONS: dict[tuple[Residence, Residence], str] = {
    (Residence.SHARD, Residence.REPLICATE): "all_gather",
    (Residence.PARTIAL, Residence.SHARD): "reduce_scatter",
    (Residence.PARTIAL, Residence.REPLICATE): "all_reduce",
}
