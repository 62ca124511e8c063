"""Placements of a flat buffer among ranks, and the transitions between them.

A placement gives the granule of a tensor that a cut between two ranks must not divide. ``Flat`` is
the default (whole rows); ``BlockAtomic`` keeps blocks of rows together, for scaling factors that
span rows; ``TensorAtomic`` keeps whole tensors together, for optimizers that need a matrix in one
place.

A :class:`Residence` says whether a rank has one shard of a buffer or all of it, and
:data:`TRANSITIONS` names the collective that turns one residence into another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from megafsdp.errors import expected


@dataclass(frozen=True, slots=True)
class Flat:
    """Cut anywhere between two rows."""

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return row_numel


@dataclass(frozen=True, slots=True)
class BlockAtomic:
    """Cut only between blocks of rows.

    Attributes:
        rows: Rows in a block; a last block may be shorter.
    """

    rows: int

    def __post_init__(self) -> None:
        """Check the block height.

        Raises:
            ValueError: ``rows`` is not positive.
        """
        if self.rows < 1:
            raise ValueError(
                expected(
                    "a positive number of rows",
                    self.rows,
                    where="BlockAtomic",
                    hint="Give the height of the scaling block, for example 128",
                )
            )

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return self.rows * row_numel if len(shape) > 1 else row_numel


@dataclass(frozen=True, slots=True)
class TensorAtomic:
    """Never cut a tensor."""

    def granule_numel(self, shape: tuple[int, ...], row_numel: int) -> int:
        """Return the number of consecutive elements that must stay on one rank."""
        return max(math.prod(shape), 1)


Granularity = Flat | BlockAtomic | TensorAtomic


class Residence(Enum):
    """What part of a flat buffer a rank has."""

    # 1/N of the elements, those of this rank's shard.
    SHARD = "shard"
    # All elements, equal on every rank.
    REPLICATE = "replicate"
    # All elements, each an addend of a sum over ranks that is still to be made.
    PARTIAL = "partial"


# (from, to) -> the collective of buffer/comm/collectives.py. A missing pair needs no collective or
# is unsound.
TRANSITIONS: dict[tuple[Residence, Residence], str] = {
    (Residence.SHARD, Residence.REPLICATE): "all_gather",
    (Residence.PARTIAL, Residence.SHARD): "reduce_scatter",
    (Residence.PARTIAL, Residence.REPLICATE): "all_reduce",
}
