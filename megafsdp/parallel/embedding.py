"""Tables of vectors: words cut by the vocabulary, positions whole on every rank.

Shape suffixes: B batch, T sequence, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.parallel.context import own_part
from megafsdp.parallel.documents import Documents
from megafsdp.parallel.layer import ParallelModule
from megafsdp.parallel.mappings import reduce_from_tp, reduce_scatter_sequence


class VocabParallelEmbedding(ParallelModule):
    """A table of word vectors of which each rank of tp has some rows.

    A rank looks up the words that it has and writes zeros for the others; the sum over tp, or its
    part of the sequence, is the embedding.

    Args:
        vocab_size: Number of words, on all ranks of tp together.
        hidden_size: Length of a vector.
        init_std: Standard deviation of the initial table.
        sequence_parallel: Whether the result is cut along the sequence.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the table is made.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        init_std: float = 0.02,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.sequence_parallel = sequence_parallel
        self.declarations = {"weight": ParameterAnnotation(0)}
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, device=device))
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the table from a normal distribution."""
        nn.init.normal_(whole, std=self.init_std)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Look up (B, T) ids as (B, T, H), or (B, T / tp, H) with the sequence cut.

        Raises:
            ValueError: ``sequence_parallel``, and tp does not divide T.
        """
        group, weight = self.tp_group, self._localized("weight")
        if group is None:
            return F.embedding(ids_BT, weight)
        num_rows = weight.shape[0]
        rows_BT = ids_BT - group.rank() * num_rows
        is_other_BT = (rows_BT < 0) | (rows_BT >= num_rows)
        found_BTH = F.embedding(rows_BT.masked_fill(is_other_BT, 0), weight)
        found_BTH = found_BTH.masked_fill(is_other_BT.unsqueeze(-1), 0.0)
        reduce = reduce_scatter_sequence if self.sequence_parallel else reduce_from_tp
        return reduce(found_BTH, group)


class PositionEmbedding(ParallelModule):
    """A learned vector for each position; every rank has the table and adds its own positions.

    Args:
        num_positions: Number of vectors.
        hidden_size: Length of each.
        init_std: Standard deviation of the initial table.
        sequence_parallel: Whether each rank has a part of the sequence.
        tp_mesh: As for ``set_device_mesh``.
        weight_mesh: As for ``set_device_mesh``.
        device: Where the table is made.
    """

    def __init__(
        self,
        num_positions: int,
        hidden_size: int,
        *,
        init_std: float = 0.02,
        sequence_parallel: bool = False,
        tp_mesh: DeviceMesh | None = None,
        weight_mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.init_std = init_std
        self.sequence_parallel = sequence_parallel
        self.declarations = {"weight": ParameterAnnotation(sums_over_tp=sequence_parallel)}
        self.weight = nn.Parameter(torch.empty(num_positions, hidden_size, device=device))
        self._start(tp_mesh, weight_mesh)

    def initialize(self, name: str, whole: Tensor) -> None:
        """Draw the table from a normal distribution."""
        nn.init.normal_(whole, std=self.init_std)

    def forward(self, num_tokens: int, documents: Documents | None = None) -> Tensor:
        """Look up the positions of ``num_tokens`` tokens, or this rank's part of them.

        Args:
            num_tokens: Tokens of a sequence, or of the part that this rank of cp has.
            documents: Documents of the whole sequences of a batch, each of which begins at position
                0; None for one a sequence.

        Returns:
            (T, H), which all sequences share, or with documents (B, T, H).
        """
        group, context, weight = self.tp_group, self.cp_group, self._localized("weight")
        num_positions = num_tokens * (1 if context is None else context.size())
        positions = torch.arange(num_positions, device=weight.device)
        if documents is not None:
            positions = documents.begin_anew(positions)
        if context is not None:
            positions = own_part(positions, context, dim=-1)
        if group is not None and self.sequence_parallel:
            positions = positions.chunk(group.size(), dim=-1)[group.rank()]
        # A sequence padded to what tp and cp divide may be longer than the table.
        return F.embedding(positions.clamp_(max=weight.shape[0] - 1), weight)
