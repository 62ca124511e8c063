"""Rows of a batch in which several documents lie end to end, without seeing each other.

Their lengths are known on the host, so each is computed by itself: attention costs the sum of the
squares of the lengths, no mask is made, and a document has the numbers that it has alone.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megafsdp.device.torch_private import without_dynamo
from megafsdp.errors import expected


# Not frozen: the compiler of torch 2.11 reads the fields of frozen dataclasses, and would compile
# layers again for other lengths.
@dataclass(slots=True, eq=False)
class Documents:
    """How the rows of a batch are made of documents; opaque, so that no compiler reads values.

    Attributes:
        lengths: For each row the number of tokens of each document, first to last.
    """

    lengths: Sequence[Sequence[int]]

    def check(self, num_rows: int, num_tokens: int, *, where: str) -> None:
        """Raise ValueError unless they fill so many rows of so many tokens."""
        is_filled = [sum(row) == num_tokens and min(row, default=0) > 0 for row in self.lengths]
        if is_filled != [True] * num_rows:
            raise ValueError(
                expected(
                    f"{num_rows} rows of lengths of at least 1, each with a sum of {num_tokens}",
                    f"{[list(row) for row in self.lengths]}",
                    where=where,
                    hint="Count the padding of a row as a document, or as part of its last one",
                )
            )

    def padded(self, num_tokens: int) -> Documents:
        """Return documents with ``num_tokens`` more tokens in the last document of each row."""
        return Documents([[*row[:-1], row[-1] + num_tokens] for row in self.lengths])

    def begin_anew(self, of_positions: Tensor) -> Tensor:
        """Lay out values of positions, (T, ...), as (B, T, ...), from position 0 in each document.

        Args:
            of_positions: Values of the positions 0 to T - 1 of a row.
        """
        rows = [torch.cat([of_positions[:length] for length in row]) for row in self.lengths]
        return torch.stack(rows)

    def between(self, start: int, stop: int) -> list[list[int]]:
        """Return how many tokens of each document lie between two places of the rows."""
        return [
            [
                max(0, min(end, stop) - max(end - length, start))
                for length, end in zip(row, accumulate(row), strict=True)
            ]
            for row in self.lengths
        ]

    # A compiled layer ends its graph here: other lengths would be another graph.
    @without_dynamo
    def each_alone(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Call a function with each document, as a batch of one row, and join what it returns.

        Args:
            function: Takes tensors of (B, T, ...) and returns one.
            *inputs: Tensors of (B, T, ...), given to the function in this order.
        """
        lengths = [length for row in self.lengths for length in row]
        by_input = [x.flatten(0, 1).split(lengths) for x in inputs]
        outs = [
            function(*(x.unsqueeze(0) for x in document)).squeeze(0)
            for document in zip(*by_input, strict=True)
        ]
        return torch.cat(outs).unflatten(0, (len(self.lengths), -1))
