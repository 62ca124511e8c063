"""Blends: several sample sources mixed by weight into one order that every rank computes alike.

The mixing is greedy and uses no random numbers, so every prefix of the blend keeps the weights as
exactly as whole samples allow; each source shuffles itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megafsdp.data.compiled_loops import interleave
from megafsdp.data.samples import SampleSource
from megafsdp.errors import ConfigError, DataError, expected

_SURPLUS = 1.005
_MAX_DATASETS = 32767
_NO_LIMIT = np.iinfo(np.int64).max


def build_blending_indices(
    weights: Sequence[float], num_samples: int, limits: Sequence[int] | None = None
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Deal samples to datasets by Megatron's greedy rule.

    Args:
        weights: One positive weight a dataset, of any sum.
        num_samples: Length of the blend, at least 0.
        limits: The most samples each dataset may give; None for no limit.

    Returns:
        (num_samples,) which dataset, and (num_samples,) which of its samples.

    Raises:
        ConfigError: A weight is not positive and finite, there are none or too many, the length is
            negative, or the limits are too low or not as many as the weights.
    """
    _check(weights, num_samples)
    if limits is not None and len(limits) != len(weights):
        raise _blend_error(f"{len(weights)} limits", list(limits)[:10])
    if limits is not None and sum(limits) < num_samples:
        raise _blend_error(f"datasets of {num_samples} samples together", list(limits))
    most = np.full(len(weights), _NO_LIMIT) if limits is None else np.array(limits, dtype=np.int64)
    return interleave(shares_of(weights), most, num_samples)


def shares_of(weights: Sequence[float]) -> NDArray[np.float64]:
    """Return weights divided by their sum; the order of a blend depends on nothing else."""
    shares = np.array(weights, dtype=np.float64)
    return shares / shares.sum()


def samples_per_dataset(weights: Sequence[float], num_samples: int) -> list[int]:
    """Return how many samples each dataset of a blend should be built with.

    It is 0.5 % more than the dataset's share, as in Megatron, because the greedy order may run
    ahead.

    Raises:
        ConfigError: As :func:`build_blending_indices` does.
    """
    _check(weights, num_samples)
    total = sum(weights)
    return [math.ceil(math.ceil(num_samples * (weight / total)) * _SURPLUS) for weight in weights]


class BlendedDataset:
    """Read samples from several sources mixed by weight.

    Args:
        datasets: The sources, all of one sequence length.
        weights: One positive weight a source, of any sum; None reads every source to its end, each
            in proportion to its length.
        num_samples: Length of the blend; None, only without weights, for all samples of all
            sources.

    Raises:
        ConfigError: Weights are not positive and finite, do not match the sources, or lack
            ``num_samples``; this is negative; or sequence lengths differ.
        DataError: A source has fewer samples than its share; see :func:`samples_per_dataset`.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float] | None = None,
        *,
        num_samples: int | None = None,
    ) -> None:
        lengths = [len(dataset) for dataset in datasets]
        if len({dataset.sequence_length for dataset in datasets}) != 1:
            sequence_lengths = [dataset.sequence_length for dataset in datasets]
            raise _blend_error("datasets of one sequence_length", sequence_lengths)
        if weights is not None and (len(weights) != len(datasets) or num_samples is None):
            found = f"{len(weights)} weights and num_samples {num_samples}"
            raise _blend_error(f"{len(datasets)} weights and a number of samples", found)
        self.datasets = list(datasets)
        self.sequence_length = self.datasets[0].sequence_length
        self.dataset_index, self.dataset_sample_index = build_blending_indices(
            lengths if weights is None else weights,
            sum(lengths) if num_samples is None else num_samples,
            limits=lengths if weights is None else None,
        )
        self._check_lengths(lengths)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        """Return the tokens of one sample."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)} in a blend")
        source = self.datasets[int(self.dataset_index[sample])]
        return source[int(self.dataset_sample_index[sample])]

    def _check_lengths(self, lengths: list[int]) -> None:
        num_dealt = np.bincount(self.dataset_index, minlength=len(lengths)).tolist()
        for number, (wanted, length) in enumerate(zip(num_dealt, lengths, strict=True)):
            if wanted > length:
                raise DataError(
                    expected(
                        f"at least {wanted} samples",
                        length,
                        where=f"dataset {number} of a blend of {len(self)} samples",
                        hint="Build each dataset with samples_per_dataset(weights, num_samples)",
                    )
                )


def _check(weights: Sequence[float], num_samples: int) -> None:
    is_sound = all(weight > 0 for weight in weights) and math.isfinite(sum(weights))
    if not 0 < len(weights) <= _MAX_DATASETS or not is_sound:
        what = f"1 to {_MAX_DATASETS} positive weights of a finite sum"
        raise _blend_error(what, list(weights)[:10])
    if num_samples < 0:
        raise _blend_error("a length of at least 0", num_samples)


def _blend_error(what: str, got: object) -> ConfigError:
    hint = "Give one positive weight a dataset, the length of the blend, and one sequence_length"
    return ConfigError(expected(what, got, where="a blend of datasets", hint=hint))
