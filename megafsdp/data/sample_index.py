"""Megatron's document, sample and shuffle indices: which tokens make which training sample.

Documents of some epochs are shuffled and laid end to end; the stream is cut into samples of
``sequence_length + 1`` tokens that overlap by one; the samples are shuffled. All of it follows from
the document lengths, the sequence length, the number of samples and one seed, so every rank of any
mesh builds the same indices without a collective. Arithmetic is in integers: Megatron's
float32 count of validation samples is one off above 2^24 tokens.

This file is arithmetic only; tokens are read by ``megafsdp.data.samples``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megafsdp.data.compiled_loops import place_samples
from megafsdp.errors import ConfigError, expected


def split_ranges(num_sequences: int, shares: Sequence[float]) -> list[range]:
    """Divide sequences into consecutive ranges with Megatron's roundings.

    Args:
        num_sequences: How many sequences the dataset has.
        shares: Relative sizes, such as (99, 1, 0) for training, validation and test.

    Returns:
        One range a share; empty for a share of 0.

    Raises:
        ConfigError: A share is negative or not finite, or all are 0.
    """
    if not all(share >= 0 for share in shares) or not 0 < sum(shares) < math.inf:
        raise ConfigError(
            expected(
                "finite shares of 0 or more, some of them positive",
                list(shares),
                where="the split of a dataset",
                hint="Write the split like 99,1,0",
            )
        )
    total = sum(shares)
    ends = [0.0, *accumulate(share / total for share in shares)]
    bounds = [round(end * float(num_sequences)) for end in ends]
    return [range(begin, end) for begin, end in pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Places of the tokens of every sample.

    Attributes:
        document_index: (epochs * documents,) which sequence of the dataset lies where.
        sample_index: (samples + 1, 2) place in ``document_index`` and token offset of each
            boundary.
        shuffle_index: (samples,) which sample comes when.
    """

    document_index: NDArray[np.integer]
    sample_index: NDArray[np.integer]
    shuffle_index: NDArray[np.integer]

    def arrays(self) -> dict[str, NDArray[np.integer]]:
        """Return the three arrays by name."""
        return {
            "document_index": self.document_index,
            "sample_index": self.sample_index,
            "shuffle_index": self.shuffle_index,
        }


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Numbers of epochs and samples that a request needs.

    Attributes:
        num_epochs: How often the documents are read.
        num_samples: Samples in those epochs, at least as many as were asked for.
        num_separate: Samples that are shuffled apart from the last epoch's; ``num_samples`` if the
            last epoch is not apart.
    """

    num_epochs: int
    num_samples: int
    num_separate: int

    @property
    def is_last_epoch_separate(self) -> bool:
        """Return whether the last epoch is shuffled on its own."""
        return self.num_separate < self.num_samples


def plan_epochs(
    tokens_per_epoch: int,
    *,
    sequence_length: int,
    num_samples: int | None,
    drop_last_partial: bool = True,
) -> EpochPlan:
    """Count epochs and samples.

    The last epoch is shuffled apart when less than 80 % of it is asked for: otherwise the samples
    that are not reached would be drawn from every epoch, and some documents would be seen less
    often than others.

    Args:
        tokens_per_epoch: Tokens of all documents once, at least one.
        sequence_length: Tokens a sample has besides its last label.
        num_samples: How many samples are wanted; None for one epoch, whatever that gives.
        drop_last_partial: Leave out the tail of the last epoch that does not fill a sample.

    Returns:
        The plan.
    """
    wanted = 0 if num_samples is None else num_samples * sequence_length + 1
    num_epochs = max(1, -(-wanted // tokens_per_epoch))
    num_steps = num_epochs * tokens_per_epoch - 1
    num_planned = num_steps // sequence_length
    if not drop_last_partial:
        num_planned = -(-num_steps // sequence_length)
    if num_samples is None or num_epochs == 1:
        return EpochPlan(num_epochs, num_planned, num_planned)
    num_before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // sequence_length
    num_in_epoch = (tokens_per_epoch - 1) // sequence_length
    is_separate = num_samples - num_before_last < 4 * num_in_epoch // 5
    return EpochPlan(num_epochs, num_planned, num_before_last if is_separate else num_planned)


def build_sample_index(
    lengths: NDArray[np.int32],
    plan: EpochPlan,
    *,
    sequence_length: int,
    seed: int,
) -> SampleIndex:
    """Build the three indices, drawing from one random stream in Megatron's order.

    Args:
        lengths: Tokens of each document; ids in ``document_index`` count from the first.
        plan: Epochs and samples, from :func:`plan_epochs` for the sum of the lengths.
        sequence_length: Tokens a sample has besides its last label.
        seed: Seed of the stream.

    Returns:
        The indices. They take 4 bytes a document and epoch, and 12 bytes a sample.
    """
    lengths = np.array(lengths, dtype=np.int32)
    stream = np.random.RandomState(seed)
    num_together = plan.num_epochs - plan.is_last_epoch_separate
    document_index = _shuffled_epochs(len(lengths), num_together, stream)
    if plan.is_last_epoch_separate:
        last_epoch = _shuffled_epochs(len(lengths), 1, stream)
        document_index = np.concatenate((document_index, last_epoch))
    sample_index = place_samples(
        lengths,
        document_index,
        sequence_length=sequence_length,
        num_samples=plan.num_samples,
        num_tokens=plan.num_epochs * int(lengths.sum(dtype=np.int64)),
    )
    is_narrow = plan.num_samples < np.iinfo(np.uint32).max - 1
    shuffle_index = np.arange(plan.num_samples, dtype=np.uint32 if is_narrow else np.int64)
    stream.shuffle(shuffle_index[: plan.num_separate])
    if plan.is_last_epoch_separate:
        stream.shuffle(shuffle_index[plan.num_separate :])
    return SampleIndex(document_index, sample_index, shuffle_index)


def _shuffled_epochs(
    num_documents: int, num_epochs: int, stream: np.random.RandomState
) -> NDArray[np.integer]:
    is_narrow = num_documents <= np.iinfo(np.int32).max
    epoch = np.arange(num_documents, dtype=np.int32 if is_narrow else np.int64)
    document_index = np.tile(epoch, num_epochs)
    stream.shuffle(document_index)
    return document_index
