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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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
        document_lengths: For each row the number of tokens of each of its documents, in order;
            padding counts as part of the last. None if the loader ignores documents.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    sample_ids: torch.Tensor
    document_lengths: list[list[int]] | None = None

    def to(self, device: torch.device) -> tuple[Any, ...]:
        """Return what a model is called with: tokens, labels and mask on a device.

        The lengths of documents follow where there are any. Does not wait for the device if the
        tensors are pinned.
        """
        tensors = (self.tokens, self.labels, self.loss_mask)
        moved = tuple(t.to(device, non_blocking=True) for t in tensors)
        return moved if self.document_lengths is None else (*moved, self.document_lengths)


class Loader:
    """Cut global batches of a dataset into the microbatches of one rank. Local: no collective.

    Args:
        dataset: Samples by number.
        global_batch_size: Samples of one step over all ranks.
        micro_batch_size: Samples of one forward on one rank.
        dp_rank: This rank among the data-parallel ranks; ranks that share out a layer or a sequence
            have the same.
        dp_size: Number of data-parallel ranks.
        pin_memory: Lock the pages of tokens, labels and masks, so that a copy of them to a GPU with
            ``non_blocking=True`` does not wait for it. torch reuses such memory only after the
            copies from it are made, even if the batch is dropped before.
        pad_last: Fill the last global batch with masked rows, so that an evaluation sees every
            sample once. Without it an incomplete global batch is an error. A microbatch may be
            masked as a whole: sum losses and mask over microbatches and ranks before dividing.
        end_of_document: The last token of each document, by which batches say where the documents
            of a row end; None ignores documents.

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
        pin_memory: bool = False,
        pad_last: bool = False,
        end_of_document: int | None = None,
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
        self.dp_size = dp_size
        self._dp_rank = dp_rank
        self._pins_memory = pin_memory
        self._pads_last = pad_last
        self._end_of_document = end_of_document

    @property
    def num_steps(self) -> int:
        """Return the number of global batches; ``pad_last`` adds the incomplete one."""
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
        stride = self.micro_batch_size * self.dp_size
        return [self._microbatch(first + k * stride) for k in range(self.num_microbatches)]

    def _microbatch(self, first_sample: int) -> Batch:
        shape = (self.micro_batch_size, self.dataset.sequence_length)
        lengths = None if self._end_of_document is None else [[shape[1]] for _ in range(shape[0])]
        batch = Batch(
            tokens=self._zeros(shape, torch.int64),
            labels=self._zeros(shape, torch.int64),
            loss_mask=self._zeros(shape, torch.float32),
            sample_ids=torch.full(shape[:1], PADDING_SAMPLE_ID, dtype=torch.int64, device="cpu"),
            document_lengths=lengths,
        )
        # Written in place: a copy of pinned memory, contiguous() too, would not be pinned.
        tokens, labels, mask = (t.numpy() for t in (batch.tokens, batch.labels, batch.loss_mask))
        for row in range(shape[0]):
            sample = first_sample + row
            if sample < len(self.dataset):
                stored = self.dataset[sample]
                # The last token of a short sample is an input too, whose label is masked.
                tokens[row, : len(stored)] = stored[: shape[1]]
                labels[row, : len(stored) - 1] = stored[1:]
                mask[row, : len(stored) - 1] = 1.0
                batch.sample_ids[row] = sample
                if lengths is not None:
                    lengths[row] = self._document_lengths(stored[: shape[1]], shape[1])
        return batch

    def _document_lengths(self, stored: NDArray[np.int64], row_length: int) -> list[int]:
        """Return the lengths of the documents in a row; padding belongs to the last."""
        ends = np.flatnonzero(stored[:-1] == self._end_of_document) + 1
        return np.diff(ends, prepend=0, append=row_length).tolist()

    def _zeros(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=self._pins_memory)


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
