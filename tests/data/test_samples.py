"""Samples read from a dataset: their tokens, order, splits, the tail, the cache and refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.data import IndexedDataset, SampleDataset, split_ranges
from megafsdp.errors import ConfigError, DataError
from tests.data.files import write_dataset


def _numbered(lengths: list[int]) -> list[list[int]]:
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        list(range(start, start + length)) for start, length in zip(starts, lengths, strict=False)
    ]


@pytest.fixture
def indexed(tmp_path: Path) -> IndexedDataset:
    """Return 40 documents of 0 to 12 tokens, each token its own position in the file."""
    return write_dataset(tmp_path / "set", _numbered([(7 * i) % 13 for i in range(40)]))


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(
        lambda lengths: sum(lengths) > 1
    ),
    sequence_length=st.integers(1, 12),
    num_samples=st.integers(1, 40),
)
def test_samples_are_windows_of_the_shuffled_stream(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    sequence_length: int,
    num_samples: int,
) -> None:
    """Each sample is one window of the documents laid end to end, overlapping the next by one."""
    documents = _numbered(lengths)
    indexed = write_dataset(tmp_path_factory.mktemp("samples") / "set", documents)
    dataset = SampleDataset(
        indexed, sequence_length=sequence_length, num_samples=num_samples, seed=5
    )
    order = dataset.index.document_index.tolist()
    stream = [token for document in order for token in documents[document]]
    assert len(dataset) >= num_samples
    for sample in range(len(dataset)):
        start = int(dataset.index.shuffle_index[sample]) * sequence_length
        tokens = dataset[sample]
        assert tokens.dtype == np.int64
        assert tokens.tolist() == stream[start : start + sequence_length + 1]
        assert len(tokens) == sequence_length + 1


def test_one_epoch_with_its_tail_has_every_label_once(indexed: IndexedDataset) -> None:
    """For validation nothing wraps around: all tokens but the first are labels exactly once."""
    dataset = SampleDataset(indexed, sequence_length=11, num_samples=None, drop_last_partial=False)
    samples = [dataset[sample].tolist() for sample in range(len(dataset))]
    labels = sorted(label for sample in samples for label in sample[1:])
    first = indexed[int(dataset.index.document_index[0])]
    for document in dataset.index.document_index.tolist():
        first = indexed[document]
        if len(first):
            break
    assert labels == sorted(set(range(indexed.num_tokens)) - {int(first[0])})
    assert sorted(map(len, samples)) == [
        (indexed.num_tokens - 1) % 11 + 1,
        *[12] * (len(samples) - 1),
    ]


def test_another_seed_gives_another_order(indexed: IndexedDataset) -> None:
    """The seed decides the order and nothing else does."""
    first, again, other = (
        SampleDataset(indexed, sequence_length=4, num_samples=30, seed=seed) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(first[i], again[i]) for i in range(30))
    assert not all(np.array_equal(first[i], other[i]) for i in range(30))


def test_split_samples_stay_in_their_sequences(indexed: IndexedDataset) -> None:
    """Training and validation parts of one file share no token."""
    seen = []
    for part in split_ranges(len(indexed), (80, 20)):
        dataset = SampleDataset(indexed, sequence_length=3, num_samples=200, sequences=part)
        tokens = {int(token) for i in range(len(dataset)) for token in dataset[i]}
        assert tokens <= {int(token) for sequence in part for token in indexed[sequence]}
        seen.append(tokens)
    assert all(seen)
    assert not seen[0] & seen[1]


def test_cached_indices_give_the_same_samples(indexed: IndexedDataset, tmp_path: Path) -> None:
    """The second dataset maps the first one's files and reads the same samples."""
    plain = SampleDataset(indexed, sequence_length=4, num_samples=90)
    for _ in range(2):
        cached = SampleDataset(
            indexed, sequence_length=4, num_samples=90, cache_dir=tmp_path / "cache"
        )
        assert all(np.array_equal(plain[i], cached[i]) for i in range(len(plain)))
    assert isinstance(cached.index.sample_index, np.memmap)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 7},
        {"sequence_length": 5},
        {"num_samples": 200},
        {"drop_last_partial": False},
        {"sequences": range(3, 40)},
    ],
    ids=str,
)
def test_other_indices_have_entries_of_their_own(
    indexed: IndexedDataset, tmp_path: Path, changed: dict[str, Any]
) -> None:
    """A cache gives no dataset the indices of another one, whatever differs."""
    options: dict[str, Any] = {"sequence_length": 4, "num_samples": 90}
    SampleDataset(indexed, **options, cache_dir=tmp_path)
    options |= changed
    plain, cached = (SampleDataset(indexed, **options, cache_dir=d) for d in (None, tmp_path))
    assert len(cached) == len(plain)
    assert all(np.array_equal(plain[i], cached[i]) for i in range(len(plain)))


def test_more_tokens_than_32_bits_count_are_samples() -> None:
    """Two documents together are too long for an int32, and so are places in them."""
    huge = SimpleNamespace(
        prefix="huge", dtype=np.dtype("<u2"), sequence_lengths=np.full(3, 2**30, dtype=np.int32)
    )
    dataset = SampleDataset(
        huge,  # type: ignore[arg-type]
        sequence_length=2**29,
        num_samples=None,
        sequences=range(3),
    )
    assert len(dataset) == 5
    rows = [[row // 2, row % 2 * 2**29] for row in range(6)]
    assert dataset.index.sample_index.tolist() == rows


@pytest.mark.parametrize("sample", [-1, 30])
def test_sample_out_of_range_is_an_index_error(indexed: IndexedDataset, sample: int) -> None:
    """Samples do not wrap around."""
    dataset = SampleDataset(indexed, sequence_length=8, num_samples=None)
    assert len(dataset) < 31
    with pytest.raises(IndexError):
        dataset[sample]


@pytest.mark.parametrize(("sequence_length", "num_samples"), [(0, 5), (4, 0), (4, -1)])
def test_numbers_that_are_not_positive_are_refused(
    indexed: IndexedDataset, sequence_length: int, num_samples: int
) -> None:
    """A sample has tokens, and there is at least one."""
    with pytest.raises(ConfigError, match="positive sequence_length and num_samples"):
        SampleDataset(indexed, sequence_length=sequence_length, num_samples=num_samples)


@pytest.mark.parametrize("num_samples", [None, 10])
def test_empty_split_is_refused(indexed: IndexedDataset, num_samples: int | None) -> None:
    """Without tokens there is no sample, and no endless count of epochs."""
    with pytest.raises(DataError, match=r"at least \d+ tokens, got 0.*set"):
        SampleDataset(indexed, sequence_length=4, num_samples=num_samples, sequences=range(3, 3))


def test_epoch_shorter_than_a_sample_is_refused_or_repeated(tmp_path: Path) -> None:
    """One epoch of 5 tokens gives no sample of 9; several epochs do."""
    indexed = write_dataset(tmp_path / "set", [[1, 2, 3, 4, 5]])
    with pytest.raises(DataError, match="at least 9 tokens, got 5"):
        SampleDataset(indexed, sequence_length=8, num_samples=None)
    assert SampleDataset(indexed, sequence_length=8, num_samples=1)[0].tolist() == [
        *[1, 2, 3, 4, 5],
        *[1, 2, 3, 4],
    ]


def test_float_tokens_are_refused(tmp_path: Path) -> None:
    """A file of floating-point values is not a text."""
    indexed = write_dataset(tmp_path / "set", [[1, 2, 3]], "<f4")
    with pytest.raises(DataError, match="integer tokens, got float32"):
        SampleDataset(indexed, sequence_length=1, num_samples=1)
