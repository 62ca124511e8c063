"""The document, sample and shuffle indices against a plain reading of Megatron's algorithm."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.data.sample_index import EpochPlan, build_sample_index, plan_epochs, split_ranges
from megafsdp.errors import ConfigError

_LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(
    lambda lengths: sum(lengths) > 1
)


@dataclass
class _Naive:
    documents: list[int]
    boundaries: list[tuple[int, int]]
    order: list[int]


def _naive_indices(lengths: list[int], *, length: int, wanted: int | None, seed: int) -> _Naive:
    """Follow the algorithm step by step, in lists, with numpy's random stream."""
    per_epoch = sum(lengths)
    epochs = 1
    while wanted is not None and epochs * per_epoch < wanted * length + 1:
        epochs += 1
    is_separate = False
    before_last = 0
    if epochs > 1 and wanted is not None:
        before_last = ((epochs - 1) * per_epoch - 1) // length
        is_separate = wanted - before_last < int(0.80 * ((per_epoch - 1) // length))
    stream = np.random.RandomState(seed)

    def shuffled(values: list[int]) -> list[int]:
        array = np.array(values)
        stream.shuffle(array)
        return [int(value) for value in array]

    one_epoch = list(range(len(lengths)))
    if is_separate:
        documents = shuffled(one_epoch * (epochs - 1))
        documents += shuffled(one_epoch)
    else:
        documents = shuffled(one_epoch * epochs)
    num_samples = (epochs * per_epoch - 1) // length
    boundaries = [(0, 0)]
    place, offset = 0, 0
    for _ in range(num_samples):
        remaining = length + 1
        while remaining:
            left = lengths[documents[place]] - offset
            if left >= remaining:
                offset += remaining - 1
                remaining = 0
            else:
                remaining -= left
                place, offset = place + 1, 0
        boundaries.append((place, offset))
    numbers = list(range(num_samples))
    if is_separate:
        order = shuffled(numbers[:before_last])
        order += shuffled(numbers[before_last:])
    else:
        order = shuffled(numbers)
    return _Naive(documents, boundaries, order)


@given(
    lengths=_LENGTHS,
    length=st.integers(1, 12),
    wanted=st.none() | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
)
def test_indices_equal_a_plain_reading_of_the_algorithm(
    lengths: list[int], length: int, wanted: int | None, seed: int
) -> None:
    """Every index is Megatron's, number for number, for one epoch, several and a separate last."""
    naive = _naive_indices(lengths, length=length, wanted=wanted, seed=seed)
    plan = plan_epochs(sum(lengths), sequence_length=length, num_samples=wanted)
    index = build_sample_index(
        np.array(lengths, dtype=np.int32), plan, sequence_length=length, seed=seed
    )
    assert index.document_index.tolist() == naive.documents
    assert [tuple(row) for row in index.sample_index.tolist()] == naive.boundaries
    assert index.shuffle_index.tolist() == naive.order
    assert index.document_index.dtype == index.sample_index.dtype == np.int32
    assert index.shuffle_index.dtype == np.uint32
    assert wanted is None or plan.num_samples >= wanted


@pytest.mark.parametrize(
    ("wanted", "plan"),
    [
        (None, EpochPlan(num_epochs=1, num_samples=9, num_separate=9)),
        (9, EpochPlan(num_epochs=1, num_samples=9, num_separate=9)),
        # 1 of the 9 samples of an epoch is wanted: under 80 %.
        (10, EpochPlan(num_epochs=2, num_samples=19, num_separate=9)),
        (15, EpochPlan(num_epochs=2, num_samples=19, num_separate=9)),
        # 7 of 9, and int(0.80 * 9) is 7.
        (16, EpochPlan(num_epochs=2, num_samples=19, num_separate=19)),
        (19, EpochPlan(num_epochs=2, num_samples=19, num_separate=19)),
    ],
)
def test_last_epoch_is_apart_when_little_of_it_is_wanted(
    wanted: int | None, plan: EpochPlan
) -> None:
    """100 tokens in samples of 10: the threshold of 80 % decides."""
    assert plan_epochs(100, sequence_length=10, num_samples=wanted) == plan
    assert plan.is_last_epoch_separate == (plan.num_separate != plan.num_samples)


def test_samples_of_a_separate_last_epoch_come_last() -> None:
    """No sample of the last epoch is drawn before the earlier epochs are used up."""
    plan = plan_epochs(100, sequence_length=10, num_samples=11)
    lengths = np.full(20, 5, dtype=np.int32)
    index = build_sample_index(lengths, plan, sequence_length=10, seed=7)
    assert sorted(index.shuffle_index[:9].tolist()) == list(range(9))
    assert sorted(index.document_index[:20].tolist()) == list(range(20))


def test_partial_tail_is_counted_exactly() -> None:
    """Above 2^24 tokens the number of samples keeps its last digit."""
    plan = plan_epochs(140_000_021, sequence_length=7, num_samples=None, drop_last_partial=False)
    assert plan.num_samples == 20_000_003
    assert plan_epochs(140_000_021, sequence_length=7, num_samples=None).num_samples == 20_000_002


@pytest.mark.parametrize(
    ("num_sequences", "shares", "bounds"),
    [
        (100, (99, 1, 0), [(0, 99), (99, 100), (100, 100)]),
        (7, (0.5, 0.5), [(0, 4), (4, 7)]),
        (1000, (969, 30, 1), [(0, 969), (969, 999), (999, 1000)]),
        # Megatron adds up shares that are divided already: 28.500000000000004, not 28.5.
        (30, (90, 5, 5), [(0, 27), (27, 29), (29, 30)]),
        (0, (1,), [(0, 0)]),
    ],
)
def test_split_rounds_like_megatron(
    num_sequences: int, shares: tuple[float, ...], bounds: list[tuple[int, int]]
) -> None:
    """Ranges meet each other and follow Python's rounding, halves to even."""
    ranges = split_ranges(num_sequences, shares)
    assert [(part.start, part.stop) for part in ranges] == bounds


@pytest.mark.parametrize(
    "shares",
    [(), (0, 0), (2, -1), (math.nan, 1), (1, math.nan), (math.inf, 1), (math.inf, -math.inf)],
)
def test_split_without_positive_shares_is_refused(shares: tuple[float, ...]) -> None:
    """Shares must make sense as parts of a whole."""
    with pytest.raises(ConfigError, match="99,1,0"):
        split_ranges(10, shares)
