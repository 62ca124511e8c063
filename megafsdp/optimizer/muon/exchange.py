"""Gather each matrix that is cut over ranks on one owner, and scatter its update back.

Each rank computes the cuts of all ranks, so messages are planned once, without communication.
Matrices are sent in rounds; a round is one all-to-all each way. Two ranks, A owned by rank 0, B by
rank 1::

    rank 0 has [A0 A1 | B0]     sends B0 to 1         owns A: [A0 A1 | A2]
    rank 1 has [A2 | B1 B2]     sends A2 to 0         owns B: [B0 | B1 B2]

This file moves elements; the caller decides what the owner does to a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_to_all


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """A matrix and the ranges of its elements on each rank.

    Attributes:
        numel: Number of its elements.
        cost: Work of its owner, in any unit.
        ranges: Its elements [start, stop) on each rank of the group, in row-major order.
    """

    numel: int
    cost: float
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a matrix, counted in the order of a message."""

    matrix: int
    start: int
    stop: int


def choose_owners(matrices: Sequence[CutMatrix], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: costliest first, each to the least loaded rank.

    Among equally loaded ranks, the one with most of the matrix is taken, then the first.
    """
    loads = [0.0] * num_ranks
    owners = [0] * len(matrices)
    for index in _costliest_first(matrices):
        # The inputs are equal on all ranks, so all choose the same without a collective.
        ranges = matrices[index].ranges
        owner = min(range(num_ranks), key=lambda r: (loads[r], ranges[r][0] - ranges[r][1], r))
        loads[owner] += matrices[index].cost
        owners[index] = owner
    return owners


def choose_rounds(
    matrices: Sequence[CutMatrix], owners: Sequence[int], num_ranks: int, max_numel: int
) -> list[list[int]]:
    """Divide the matrices, of which there is at least one, into rounds, costliest first.

    In a round no rank owns more elements than ``max_numel`` or the largest matrix, and none sends
    more than twice that. (Senders need a limit too: of similar matrices in all layers, the same
    ranks have more than their share.) Costliest first puts matrices of similar cost into a round,
    so that its owners finish at about the same time.
    """
    # An owner needs whole matrices, so a round must have room for the largest one.
    limit = max([max_numel, *(m.numel for m in matrices)])
    rounds: list[list[int]] = []
    owned = sent = [0] * num_ranks
    for index in _costliest_first(matrices):
        matrix = matrices[index]
        own = [matrix.numel * (rank == owners[index]) for rank in range(num_ranks)]
        send = [stop - start for start, stop in matrix.ranges]
        owned = [n + more for n, more in zip(owned, own, strict=True)]
        sent = [n + more for n, more in zip(sent, send, strict=True)]
        # A round is a collective, so all ranks must form the same rounds: check all ranks' limits.
        if not rounds or max(owned) > limit or max(sent) > 2 * limit:
            rounds.append([])
            owned, sent = own, send
        rounds[-1].append(index)
    return rounds


def _costliest_first(matrices: Sequence[CutMatrix]) -> list[int]:
    return sorted(range(len(matrices)), key=lambda index: -matrices[index].cost)


class Round:
    """One rank's messages of one round.

    Args:
        indices: The matrices of the round.
        matrices: All matrices.
        owners: The owner of each matrix.
        rank: This rank's number within the group.
        group: Ranks that exchange; None means that this rank has every matrix whole.

    Attributes:
        owned: The matrices that this rank owns.
        sends: This rank's elements, in the order of :meth:`gather`'s source.
        receives: The elements that it receives, in the order of :meth:`gather`'s result.
    """

    def __init__(
        self,
        indices: Sequence[int],
        matrices: Sequence[CutMatrix],
        owners: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._group = group
        num_ranks = len(matrices[indices[0]].ranges)
        self.owned = [i for i in indices if owners[i] == rank]
        # all_to_all() takes elements by destination; for each one, in the order of the round.
        to = [
            [Segment(i, *matrices[i].ranges[rank]) for i in indices if owners[i] == r]
            for r in range(num_ranks)
        ]
        of = [[Segment(i, *matrices[i].ranges[r]) for i in self.owned] for r in range(num_ranks)]
        self._num_sent = [sum(s.stop - s.start for s in segments) for segments in to]
        self._num_received = [sum(s.stop - s.start for s in segments) for segments in of]
        self.sends = [s for segments in to for s in segments if s.stop > s.start]
        self.receives = [s for segments in of for s in segments if s.stop > s.start]

    @property
    def num_sent(self) -> int:
        """Return the number of elements in the round that this rank has."""
        return sum(self._num_sent)

    def gather(self, source: torch.Tensor, label: str) -> torch.Tensor:
        """Send this rank's elements to the owners; return those that it receives. Collective."""
        return self._exchange(source, self._num_sent, self._num_received, label)

    def scatter(self, source: torch.Tensor, label: str) -> torch.Tensor:
        """Send back gathered elements, in the same order; return this rank's. Collective."""
        return self._exchange(source, self._num_received, self._num_sent, label)

    def _exchange(
        self, source: torch.Tensor, num_sent: list[int], num_received: list[int], label: str
    ) -> torch.Tensor:
        # Nothing is sent: the result is the source itself, which callers must not use any more.
        if self._group is None or self._group.size() == 1:
            return source
        output = source.new_empty(sum(num_received))
        all_to_all(output, source, (num_received, num_sent), self._group, label)
        return output


def pieces(flat: torch.Tensor, segments: Sequence[Segment]) -> list[torch.Tensor]:
    """Return the view of each segment of a message."""
    return list(flat.split([s.stop - s.start for s in segments])) if segments else []
