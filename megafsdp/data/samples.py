"""Training samples of one indexed dataset, read by number.

Which tokens make a sample is computed in ``megafsdp.data.sample_index``; blends of several datasets
are in ``megafsdp.data.blend``; batches are made by ``megafsdp.data.loader``.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megafsdp.data.index_cache import cached_arrays, lengths_digest
from megafsdp.data.indexed import IndexedDataset
from megafsdp.data.sample_index import SampleIndex, build_sample_index, plan_epochs
from megafsdp.errors import ConfigError, DataError, expected

DEFAULT_SEED = 1234


class SampleSource(Protocol):
    """A source that a loader and a blend read: numbered samples of one sequence length.

    Attributes:
        sequence_length: Tokens a sample has besides its last label.
    """

    sequence_length: int

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Return the tokens of one sample, at most ``sequence_length + 1``."""
        ...


class SampleDataset:
    """Read training samples from one indexed dataset, in a seeded order.

    Sample i is ``sequence_length + 1`` tokens: the inputs and, shifted by one, the labels. With
    ``drop_last_partial=False`` one sample, the tail of the last epoch, is shorter.

    For validation use ``num_samples=None, drop_last_partial=False``: every token but the first is a
    label once, none twice, and nothing wraps around.

    Args:
        indexed: The tokens.
        sequence_length: Tokens a sample has besides its last label.
        num_samples: How many samples are needed at least; None for one epoch. Another number gives
            another order, so keep it for the whole of a training run.
        seed: Seed of all shuffling.
        sequences: Which sequences of the dataset to use, from
            :func:`megafsdp.data.split_ranges`; None for all.
        drop_last_partial: Leave out the tail of the last epoch that does not fill a sample.
        cache_dir: Folder that keeps the indices between runs; None builds them each time.

    Attributes:
        lengths_sha256: Digest of the lengths of the sequences in order. Lengths and arguments
            together decide which tokens make which sample.

    Raises:
        ConfigError: A number is not positive.
        DataError: The sequences have too few tokens for one sample, or values that are not
            integers.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        sequence_length: int,
        num_samples: int | None,
        seed: int = DEFAULT_SEED,
        sequences: range | None = None,
        drop_last_partial: bool = True,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.indexed = indexed
        self.sequence_length = sequence_length
        self.sequences = range(len(indexed)) if sequences is None else sequences
        lengths = indexed.sequence_lengths[self.sequences.start : self.sequences.stop]
        num_tokens = int(lengths.sum(dtype=np.int64))
        self._check(num_samples, num_tokens, drop_last_partial)
        self.plan = plan_epochs(
            num_tokens,
            sequence_length=sequence_length,
            num_samples=num_samples,
            drop_last_partial=drop_last_partial,
        )
        self.lengths_sha256 = lengths_digest(lengths)
        description: dict[str, str | int | bool | None] = {
            "algorithm": "megatron gpt samples, exact integers, 1",
            "lengths_sha256": self.lengths_sha256,
            "sequence_length": sequence_length,
            "num_samples": num_samples,
            "drop_last_partial": drop_last_partial,
            "seed": seed,
        }
        self.index = SampleIndex(
            **cached_arrays(
                cache_dir,
                description,
                lambda: build_sample_index(
                    lengths, self.plan, sequence_length=sequence_length, seed=seed
                ).arrays(),
            )
        )

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.plan.num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Return one sample: ``sequence_length + 1`` tokens, or fewer if it is the tail."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)} in '{self.indexed.prefix}'")
        row = int(self.index.shuffle_index[sample])
        first_place, first_offset = self.index.sample_index[row].tolist()
        last_place, last_offset = self.index.sample_index[row + 1].tolist()
        pieces = []
        for place in range(first_place, last_place + 1):
            sequence = self.sequences.start + int(self.index.document_index[place])
            begin = first_offset if place == first_place else 0
            length = int(self.indexed.sequence_lengths[sequence])
            end = last_offset + 1 if place == last_place else length
            pieces.append(self.indexed.slice_of(sequence, begin, end - begin))
        return np.concatenate(pieces).astype(np.int64)

    def _check(self, num_samples: int | None, num_tokens: int, drop_last_partial: bool) -> None:
        where = f"the samples of '{self.indexed.prefix}', sequences {self.sequences}"
        if self.sequence_length < 1 or (num_samples is not None and num_samples < 1):
            found = f"{self.sequence_length} and {num_samples}"
            hint = "Give 1 or more, or num_samples=None for one epoch"
            what = "a positive sequence_length and num_samples"
            raise ConfigError(expected(what, found, where=where, hint=hint))
        if self.indexed.dtype.kind not in "iu":
            hint = "Prepare the data with an integer dtype"
            what = "integer tokens"
            raise DataError(expected(what, self.indexed.dtype.name, where=where, hint=hint))
        least = self.sequence_length + 1 if drop_last_partial and num_samples is None else 2
        if num_tokens < least:
            hint = "Use a shorter sequence_length, another split, or more text"
            what = f"at least {least} tokens"
            raise DataError(expected(what, num_tokens, where=where, hint=hint))
