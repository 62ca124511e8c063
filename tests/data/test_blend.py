"""Blends: proportions at every prefix, exhaustion, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from megafsdp.data import BlendedDataset, build_blending_indices, samples_per_dataset
from megafsdp.errors import ConfigError, DataError


class _Counted:
    """Samples whose tokens are (source, number)."""

    def __init__(self, source: int, num_samples: int, sequence_length: int = 1) -> None:
        self.sequence_length = sequence_length
        self._source = source
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        assert 0 <= sample < self._num_samples
        return np.array([self._source, sample])


def test_known_order_of_a_small_blend() -> None:
    """Weights 3 and 1 by hand; at the fifth sample both lag alike and the first one wins."""
    dataset_index, dataset_sample_index = build_blending_indices([3, 1], 8)
    assert dataset_index.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]
    assert dataset_sample_index.tolist() == [0, 0, 1, 2, 3, 1, 4, 5]
    assert (dataset_index.dtype, dataset_sample_index.dtype) == (np.int16, np.int64)


def test_every_prefix_keeps_the_weights() -> None:
    """No dataset is ever more than one sample away from its share."""
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    dataset_index, _ = build_blending_indices(weights.tolist(), 2000)
    dealt = np.cumsum(dataset_index[:, None] == np.arange(4), axis=0)
    shares = np.arange(1, 2001)[:, None] * weights
    assert np.abs(dealt - shares).max() <= 1.0


def test_samples_come_from_their_sources() -> None:
    """A blend reads each source in its own order."""
    weights = [1.0, 2.0]
    sizes = samples_per_dataset(weights, 300)
    assert sizes == [101, 201]
    blend = BlendedDataset(
        [_Counted(source, size) for source, size in enumerate(sizes)], weights, num_samples=300
    )
    assert (len(blend), blend.sequence_length) == (300, 1)
    seen: dict[int, list[int]] = {0: [], 1: []}
    for sample in range(300):
        source, number = blend[sample].tolist()
        seen[source].append(number)
    assert seen == {0: list(range(100)), 1: list(range(200))}


def test_blend_without_weights_reads_everything_once() -> None:
    """Every sample of every source appears, spread evenly."""
    sizes = [5, 1, 14]
    blend = BlendedDataset([_Counted(source, size) for source, size in enumerate(sizes)])
    read = sorted(tuple(blend[sample].tolist()) for sample in range(len(blend)))
    assert read == [(source, i) for source, size in enumerate(sizes) for i in range(size)]


def test_limits_drop_a_source_that_ran_out() -> None:
    """The rest of the blend goes to those that have samples."""
    dataset_index, _ = build_blending_indices([1, 1], 6, limits=[1, 9])
    assert dataset_index.tolist().count(0) == 1


def test_shares_are_rounded_up_before_and_after_the_surplus() -> None:
    """As Megatron does; a dataset of another number of samples is shuffled in another order."""
    assert samples_per_dataset([1, 2], 1000) == [336, 671]


@pytest.mark.parametrize("sample", [-1, 4])
def test_sample_out_of_range_is_an_index_error(sample: int) -> None:
    """Neither end wraps around."""
    with pytest.raises(IndexError, match="of 4"):
        BlendedDataset([_Counted(0, 4)])[sample]


@pytest.mark.parametrize(
    "weights",
    [[], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.nan, 1.0], [math.inf, 1.0], [1e308] * 2],
)
def test_weights_that_are_not_positive_are_refused(weights: list[float]) -> None:
    """A source without weight does not belong in the blend."""
    with pytest.raises(ConfigError, match="positive weights of a finite sum"):
        build_blending_indices(weights, 4)
    with pytest.raises(ConfigError, match="positive weights of a finite sum"):
        samples_per_dataset(weights, 4)


def test_more_datasets_than_numbers_are_refused() -> None:
    """They are counted in 16 bits."""
    with pytest.raises(ConfigError, match="1 to 32767 positive weights"):
        build_blending_indices([1.0] * 32768, 1)


def test_a_negative_length_is_refused() -> None:
    """A blend of 0 samples is empty."""
    assert [len(index) for index in build_blending_indices([1, 1], 0)] == [0, 0]
    with pytest.raises(ConfigError, match="a length of at least 0, got -1"):
        build_blending_indices([1, 1], -1)
    with pytest.raises(ConfigError, match="a length of at least 0, got -1"):
        BlendedDataset([_Counted(0, 4)], [1.0], num_samples=-1)


@pytest.mark.parametrize("limits", [[4], [4, 4, 4]])
def test_limits_are_one_a_dataset(limits: list[int]) -> None:
    """Others would be read beyond their end, or not at all."""
    with pytest.raises(ConfigError, match="2 limits"):
        build_blending_indices([1, 1], 4, limits=limits)


def test_limits_below_the_length_are_refused() -> None:
    """A blend cannot be longer than its sources together."""
    with pytest.raises(ConfigError, match="4 samples together"):
        build_blending_indices([1, 1], 4, limits=[1, 2])


def test_mismatched_sources_are_refused() -> None:
    """Sequence lengths agree, and weights come one a source with a length of the blend."""
    sources = [_Counted(0, 9), _Counted(1, 9)]
    with pytest.raises(ConfigError, match=r"one sequence_length, got \[1, 2\]"):
        BlendedDataset([*sources[:1], _Counted(1, 9, sequence_length=2)])
    with pytest.raises(ConfigError, match="2 weights and a number of samples, got 1 weights"):
        BlendedDataset(sources, [1.0], num_samples=4)
    with pytest.raises(ConfigError, match="num_samples None"):
        BlendedDataset(sources, [1.0, 1.0])
    with pytest.raises(ConfigError, match="one sequence_length"):
        BlendedDataset([])


def test_source_shorter_than_its_share_is_refused() -> None:
    """The error names the source and how many samples it needs."""
    with pytest.raises(DataError, match=r"at least 10 samples, got 9.*dataset 1"):
        BlendedDataset([_Counted(0, 20), _Counted(1, 9)], [1, 1], num_samples=20)
