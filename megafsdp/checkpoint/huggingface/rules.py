"""Rules between Hugging Face's tensor layouts and ours, each usable in both directions.

A rule is a list of runs: consecutive rows of ours that are consecutive rows (or, transposed,
columns) of one of theirs. It rearranges elements and never computes with them, so a round trip is
exact, and whoever needs a few rows of ours can tell which slices of theirs to read. Names and
tables stand in ``hf_mapping``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megafsdp.errors import CheckpointError, expected

Allocate = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class WeightGeometry:
    """What the mapping must know of a model, beside the tensors.

    Attributes:
        num_layers: Number of transformer layers.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads.
        head_dim: Rows of one head.
        vocab_size: Rows of the embedding at Hugging Face.
        padded_vocab_size: Rows of our embedding, ``vocab_size`` or more.
        is_tied: True if the output layer's weight is the embedding's.
    """

    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int
    is_tied: bool

    def __post_init__(self) -> None:
        """Check the values against each other.

        Raises:
            ValueError: Heads do not divide into groups, or the padding is negative.
        """
        is_divisible = self.num_attention_heads % self.num_query_groups == 0
        if not is_divisible or self.padded_vocab_size < self.vocab_size:
            raise ValueError(
                expected(
                    "heads that divide into groups and padded_vocab_size >= vocab_size",
                    self,
                    where="WeightGeometry",
                    hint="Take the sizes from the config of the model that the weights belong to",
                )
            )

    @property
    def group_rows(self) -> tuple[int, int, int]:
        """Return the rows of query, key and value in one group of a fused qkv."""
        heads_per_group = self.num_attention_heads // self.num_query_groups
        return (heads_per_group * self.head_dim, self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows that stand together on both sides.

    Attributes:
        part: Index of the Hugging Face tensor.
        their_start: First row there; first column if the rule transposes.
        our_start: First row in ours.
        num_rows: How many.
    """

    part: int
    their_start: int
    our_start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Rule:
    """How some Hugging Face tensors hold the rows of one of ours.

    Attributes:
        part_rows: Rows of each of theirs, from the rows of ours.
        runs: Where the rows stand, from the rows of each of theirs. Rows of ours in no run are
            padding.
        is_transposed: Theirs keep as columns what are rows in ours.
        is_padded: Ours may have rows that theirs lack.
    """

    part_rows: Callable[[int, WeightGeometry], tuple[int, ...]]
    runs: Callable[[tuple[int, ...], WeightGeometry], list[Run]]
    is_transposed: bool = False
    is_padded: bool = False

    def their_shapes(
        self, shape: tuple[int, ...], geometry: WeightGeometry
    ) -> list[tuple[int, ...]]:
        """Return the shapes of theirs, from the shape of ours.

        Raises:
            CheckpointError: Ours has not the rows of the geometry.
        """
        shapes = [(rows, *shape[1:]) for rows in self.part_rows(shape[0], geometry)]
        return [s[::-1] for s in shapes] if self.is_transposed else shapes

    def join(self, theirs: Sequence[Tensor], geometry: WeightGeometry) -> Tensor:
        """Make ours; padding rows are 0. One that needs no rearranging is returned as it is."""
        parts = [t.T for t in theirs] if self.is_transposed else list(theirs)
        rows = tuple(part.shape[0] for part in parts)
        num_rows = geometry.padded_vocab_size if self.is_padded else sum(rows)
        wanted = self.part_rows(num_rows, geometry)
        if rows != wanted:
            raise _wrong_rows(f"{wanted} rows for the parts of one tensor", tuple(rows))
        runs = self.runs(rows, geometry)
        if len(runs) == 1 and runs[0].num_rows == num_rows:
            return parts[0].contiguous()
        ours = parts[0].new_zeros((num_rows, *parts[0].shape[1:]))
        for run in runs:
            ours[run.our_start : run.our_start + run.num_rows] = parts[run.part][
                run.their_start : run.their_start + run.num_rows
            ]
        return ours

    def split(self, ours: Tensor, geometry: WeightGeometry) -> list[Tensor]:
        """Return theirs, contiguous; those that need no rearranging are views of ours."""
        num_parts = len(self.part_rows(ours.shape[0], geometry))
        allocate = ours.new_empty
        return [self.part(i, ours, geometry, allocate=allocate) for i in range(num_parts)]

    def part(
        self, index: int, ours: Tensor, geometry: WeightGeometry, *, allocate: Allocate
    ) -> Tensor:
        """Return one of theirs, contiguous.

        Args:
            index: Which of theirs.
            ours: The full tensor.
            geometry: The model's sizes.
            allocate: Makes an uninitialised tensor like ``ours`` of a shape; called once, and not
                at all where a view of ours will do.

        Raises:
            CheckpointError: Ours has not the rows of the geometry.
        """
        rows = self.part_rows(ours.shape[0], geometry)
        runs = [run for run in self.runs(rows, geometry) if run.part == index]
        if len(runs) == 1 and not self.is_transposed:
            return ours[runs[0].our_start : runs[0].our_start + runs[0].num_rows].contiguous()
        theirs = allocate(self.their_shapes(tuple(ours.shape), geometry)[index])
        as_rows = theirs.T if self.is_transposed else theirs
        for run in runs:
            as_rows[run.their_start : run.their_start + run.num_rows] = ours[
                run.our_start : run.our_start + run.num_rows
            ]
        return theirs


def _one_part(rows: int, geometry: WeightGeometry) -> tuple[int, ...]:
    return (rows,)


def _two_halves(rows: int, geometry: WeightGeometry) -> tuple[int, ...]:
    return (rows - rows // 2, rows // 2)


def _vocabulary(rows: int, geometry: WeightGeometry) -> tuple[int, ...]:
    if rows != geometry.padded_vocab_size:
        raise _wrong_rows(f"{geometry.padded_vocab_size} rows for our vocabulary", rows)
    return (geometry.vocab_size,)


def _three_parts(rows: int, geometry: WeightGeometry) -> tuple[int, ...]:
    parts = tuple(geometry.num_query_groups * n for n in geometry.group_rows)
    if rows != sum(parts):
        raise _wrong_rows(f"{sum(parts)} rows for fused query, key and value", rows)
    return parts


def _three_blocks(rows: int, geometry: WeightGeometry) -> tuple[int, ...]:
    return (sum(_three_parts(rows, geometry)),)


def _stacked(part_rows: tuple[int, ...], geometry: WeightGeometry) -> list[Run]:
    return [Run(i, 0, sum(part_rows[:i]), rows) for i, rows in enumerate(part_rows)]


def _grouped(part_rows: tuple[int, ...], geometry: WeightGeometry) -> list[Run]:
    """Interleave query, key and value by query group: q0 k0 v0 | q1 k1 v1 | ..."""
    runs, our_start = [], 0
    for group in range(geometry.num_query_groups):
        for part, rows in enumerate(geometry.group_rows):
            runs.append(Run(part, group * rows, our_start, rows))
            our_start += rows
    return runs


def _grouped_blocks(part_rows: tuple[int, ...], geometry: WeightGeometry) -> list[Run]:
    """Interleave likewise, where query, key and value are blocks of one tensor."""
    sizes = [geometry.num_query_groups * rows for rows in geometry.group_rows]
    return [
        Run(0, sum(sizes[: run.part]) + run.their_start, run.our_start, run.num_rows)
        for run in _grouped(part_rows, geometry)
    ]


SAME = Rule(_one_part, _stacked)
# GPT-2's Conv1D keeps its weight as (in, out).
TRANSPOSED = Rule(_one_part, _stacked, is_transposed=True)
PADDED_VOCABULARY = Rule(_vocabulary, _stacked, is_padded=True)
GATE_UP = Rule(_two_halves, _stacked)
GROUPED_QKV = Rule(_three_parts, _grouped)
# One tensor of three blocks [all q; all k; all v].
BLOCKS_QKV = Rule(_three_blocks, _grouped_blocks)
CONV1D_BLOCKS_QKV = Rule(_three_blocks, _grouped_blocks, is_transposed=True)


def _wrong_rows(what: str, got: object) -> CheckpointError:
    return CheckpointError(
        expected(
            what,
            got,
            where="a tensor to be mapped between Hugging Face's layout and ours",
            hint="Take the sizes from the config of the model that the weights belong to",
        )
    )
