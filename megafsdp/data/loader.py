"""Batches of one data-parallel rank, addressed by how many samples the run has consumed.

The loader has no position and no state: the same number gives the same batch, so resuming needs one
integer and a global batch has the same samples at any data-parallel size. Example with a global
batch of 8, micro-batches of 2 and 2 ranks, after 16 consumed samples::

    sample           16 17 | 18 19 | 20 21 | 22 23
    rank                 0       1       0       1
    microbatch           0       0       1       1
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from megafsdp.data.samples import SampleSource
from megafsdp.errors import ConfigError, DataError, expected

PADDING_SAMPLE_ID = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch of one rank, on the CPU. B is the microbatch size, T the sequence length.

    Attributes:
        tokens: (B, T) int64 inputs.
        labels: (B, T) int64, the next token of every input.
        loss_mask: (B, T) fp32, 1 where the label is a real token, 0 where it is padding.
        sample_ids: (B,) int64, number of each sample in the dataset; -1 for a row of padding.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor


class Loader:
    """Cut global batches of a dataset into the microbatches of one rank. Local: no collective.

    Args:
        dataset: Samples by number.
        global_batch_size: Samples of one step over all ranks.
        micro_batch_size: Samples of one forward on one rank.
        dp_rank: This rank among the data-parallel ranks.
        dp_size: Number of data-parallel ranks.
        pad_last: Fill the last global batch with masked rows, so that an evaluation sees every
            sample once. Without it an incomplete global batch is an error. A microbatch may be
            masked as a whole: sum losses and mask over microbatches and ranks before dividing.

    Raises:
        ConfigError: The global batch is not a whole number of microbatches on every rank.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        pad_last: bool = False,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            what = f"a data-parallel rank from 0 to {dp_size - 1}"
            hint = "Pass the rank and the size of the same mesh"
            raise ConfigError(expected(what, dp_rank, where="the loader", hint=hint))
        _check_batch_sizes(global_batch_size, micro_batch_size, dp_size)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.num_microbatches = global_batch_size // (micro_batch_size * dp_size)
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._pads_last = pad_last

    @property
    def num_steps(self) -> int:
        """Return how many global batches there are, with ``pad_last`` the incomplete one too."""
        num_samples = len(self.dataset) + (self.global_batch_size - 1 if self._pads_last else 0)
        return num_samples // self.global_batch_size

    def step_batch(self, consumed_samples: int) -> list[Batch]:
        """Return this rank's microbatches of the global batch that starts at a sample.

        Args:
            consumed_samples: Samples of all earlier global batches.

        Returns:
            ``num_microbatches`` microbatches.

        Raises:
            DataError: The dataset ends before the global batch does, or, with ``pad_last``, before
                it starts.
        """
        end = consumed_samples + (1 if self._pads_last else self.global_batch_size)
        if consumed_samples < 0 or end > len(self.dataset):
            raise DataError(
                expected(
                    f"a dataset of at least {end} samples and a sample that is not negative",
                    f"{len(self.dataset)} samples, asked from {consumed_samples}",
                    where=f"a global batch of {self.global_batch_size} samples",
                    hint="Build the dataset with num_samples = steps * global_batch_size",
                )
            )
        first = consumed_samples + self._dp_rank * self.micro_batch_size
        stride = self.micro_batch_size * self._dp_size
        return [self._microbatch(first + k * stride) for k in range(self.num_microbatches)]

    def _microbatch(self, first_sample: int) -> Batch:
        shape = (self.micro_batch_size, self.dataset.sequence_length + 1)
        rows = np.zeros(shape, dtype=np.int64)
        mask = np.zeros((shape[0], shape[1] - 1), dtype=np.float32)
        sample_ids = np.full(shape[0], PADDING_SAMPLE_ID, dtype=np.int64)
        for row in range(shape[0]):
            sample = first_sample + row
            if sample < len(self.dataset):
                tokens = self.dataset[sample]
                rows[row, : len(tokens)] = tokens
                mask[row, : len(tokens) - 1] = 1.0
                sample_ids[row] = sample
        stored = torch.from_numpy(rows)
        return Batch(
            tokens=stored[:, :-1].contiguous(),
            labels=stored[:, 1:].contiguous(),
            loss_mask=torch.from_numpy(mask),
            sample_ids=torch.from_numpy(sample_ids),
        )


def _check_batch_sizes(global_batch_size: int, micro_batch_size: int, dp_size: int) -> None:
    if min(global_batch_size, micro_batch_size) < 1:
        found = f"{global_batch_size} and {micro_batch_size}"
        what = "a positive global_batch_size and micro_batch_size"
        raise ConfigError(expected(what, found, where="the loader", hint="Give 1 or more"))
    together = micro_batch_size * dp_size
    if global_batch_size % together == 0:
        return
    below = global_batch_size // together * together
    choices = [f"global_batch_size {size}" for size in (below, below + together) if size]
    if global_batch_size % dp_size == 0:
        per_rank = global_batch_size // dp_size
        sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        choices.append(f"micro_batch_size {' or '.join(map(str, sizes))}")
    sizes = [size for size in range(1, global_batch_size + 1) if global_batch_size % size == 0]
    fitting = [size // micro_batch_size for size in sizes if size % micro_batch_size == 0]
    if fitting:
        choices.append(f"a data-parallel size of {' or '.join(map(str, fitting))}")
    raise ConfigError(
        expected(
            f"a global_batch_size that is a multiple of {together},"
            f" micro_batch_size {micro_batch_size} times {dp_size} data-parallel ranks",
            global_batch_size,
            where="the loader",
            hint="Use " + ", or ".join(choices),
        )
    )
