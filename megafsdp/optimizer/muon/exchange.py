"""Bring matrices that are cut over ranks to one owner each, and what becomes of them back.

Every rank knows every rank's cuts, so who sends how much to whom is arithmetic, made once. Matrices
travel in rounds; a round is one all-to-all each way. Two ranks, A owned by rank 0, B by rank 1::

    rank 0 holds [A0 A1 | B0]     sends B0 to 1         owns A: [A0 A1 | A2]
    rank 1 holds [A2 | B1 B2]     sends A2 to 0         owns B: [B0 | B1 B2]

This file moves elements; what is done to a matrix by its owner is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megafsdp.buffer.comm.collectives import all_to_all


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """A matrix and who holds which of its elements.

    Attributes:
        numel: Its elements.
        cost: Work of its owner, in any unit.
        held: Its elements [start, stop) on each rank of the group, in row-major order.
    """

    numel: int
    cost: float
    held: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a matrix, as they lie in a message."""

    matrix: int
    start: int
    stop: int


def choose_owners(matrices: Sequence[CutMatrix], num_ranks: int) -> list[int]:
    """Return the rank that gets each matrix: costliest first, each to the least loaded rank.

    Among equally loaded ranks the one that holds most of the matrix is taken, then the first.
    """
    loads = [0.0] * num_ranks
    owners = [0] * len(matrices)
    for index in _costliest_first(matrices):
        held = matrices[index].held
        owner = min(range(num_ranks), key=lambda r: (loads[r], held[r][0] - held[r][1], r))
        loads[owner] += matrices[index].cost
        owners[index] = owner
    return owners


def choose_rounds(
    matrices: Sequence[CutMatrix], owners: Sequence[int], num_ranks: int, max_numel: int
) -> list[list[int]]:
    """Cut the matrices, at least one, costliest first, into rounds.

    In a round no rank owns more than ``max_numel`` elements, or than the largest matrix has, and
    none sends more than twice that: of like matrices of all layers the same ranks hold more than
    their share. Costliest first puts matrices of like cost into a round, so that its owners are
    done at about the same time.
    """
    limit = max([max_numel, *(m.numel for m in matrices)])
    rounds: list[list[int]] = []
    owned = sent = [0] * num_ranks
    for index in _costliest_first(matrices):
        matrix = matrices[index]
        own = [matrix.numel * (rank == owners[index]) for rank in range(num_ranks)]
        send = [stop - start for start, stop in matrix.held]
        owned = [n + more for n, more in zip(owned, own, strict=True)]
        sent = [n + more for n, more in zip(sent, send, strict=True)]
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
        owners: The owner of each.
        rank: This rank's number within the group.
        group: Ranks that exchange; None means that this rank holds every matrix whole.

    Attributes:
        owned: The matrices that this rank gets.
        sends: What this rank holds, in the order of :meth:`gather`'s source.
        receives: What this rank gets, in the order of :meth:`gather`'s result.
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
        num_ranks = len(matrices[indices[0]].held)
        self.owned = [i for i in indices if owners[i] == rank]
        to = [
            [Segment(i, *matrices[i].held[rank]) for i in indices if owners[i] == r]
            for r in range(num_ranks)
        ]
        of = [[Segment(i, *matrices[i].held[r]) for i in self.owned] for r in range(num_ranks)]
        self._num_sent = [sum(s.stop - s.start for s in segments) for segments in to]
        self._num_received = [sum(s.stop - s.start for s in segments) for segments in of]
        self.sends = [s for segments in to for s in segments if s.stop > s.start]
        self.receives = [s for segments in of for s in segments if s.stop > s.start]

    @property
    def num_sent(self) -> int:
        """Return the elements of the matrices of the round that this rank holds."""
        return sum(self._num_sent)

    def gather(self, source: torch.Tensor, label: str) -> torch.Tensor:
        """Send what this rank holds to the owners; return what it gets. Collective."""
        return self._exchange(source, self._num_sent, self._num_received, label)

    def scatter(self, source: torch.Tensor, label: str) -> torch.Tensor:
        """Send back what was gathered, in the same order; return what this rank holds."""
        return self._exchange(source, self._num_received, self._num_sent, label)

    def _exchange(
        self, source: torch.Tensor, num_sent: list[int], num_received: list[int], label: str
    ) -> torch.Tensor:
        if self._group is None or self._group.size() == 1:
            return source
        output = source.new_empty(sum(num_received))
        all_to_all(output, source, (num_received, num_sent), self._group, label)
        return output


def pieces(flat: torch.Tensor, segments: Sequence[Segment]) -> list[torch.Tensor]:
    """Return the view of each segment of a message."""
    return list(flat.split([s.stop - s.start for s in segments])) if segments else []
