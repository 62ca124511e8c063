"""The two inner loops of the sample index, each with a version in numba and one without.

``place_samples`` finds the start of every training sample in a sequence of documents;
``interleave`` deals the samples of a blend to its datasets. numba changes the time, not the
results. numba is imported when a loop is long enough to repay its 1 to 3 s of import and
compilation, with ``MEGAFSDP_NUMBA=1`` always, with ``MEGAFSDP_NUMBA=0`` never.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

_LOGGER = logging.getLogger("megafsdp.data")
_NUM_STEPS_WORTH_COMPILING = 1 << 20
_Loop = TypeVar("_Loop", bound=Callable[..., None])


def place_samples(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    *,
    sequence_length: int,
    num_samples: int,
    num_tokens: int,
) -> NDArray[np.integer]:
    """Find the first token of every sample in the documents laid end to end.

    Sample i holds the tokens at positions ``i * sequence_length`` to ``(i + 1) * sequence_length``,
    both included: the last token of a sample is the first of the next, because it is a label here
    and an input there. A position past the end (of the last, partial sample) is moved to the last
    token. Example with documents of 3 and 6 tokens and sequence_length 4::

        position   0 1 2 | 3 4 5 6 7 8
        sample 0   0 1 2   3 4              rows (0, 0), (1, 1), (1, 5)
        sample 1             4 5 6 7 8

    Args:
        lengths: Tokens of each document.
        document_index: Which document lies where; a document may lie in several places, or be
            empty.
        sequence_length: Tokens a sample has besides its last label.
        num_samples: How many samples to place.
        num_tokens: Tokens of the documents laid end to end, at least one.

    Returns:
        (num_samples + 1, 2): position in ``document_index`` and token offset in that document; row
        i is the first token of sample i and the last of sample i - 1. int32 where that is wide
        enough, else int64.
    """
    is_wide = len(document_index) > np.iinfo(np.int32).max
    rows = np.empty((num_samples + 1, 2), dtype=np.int64 if is_wide else np.int32)
    num_steps = len(document_index) + num_samples
    place = _compiled(_walk) if _uses_numba(num_steps) else _search
    place(lengths, document_index, sequence_length, num_tokens - 1, rows)
    # As in Megatron, sample 0 starts in the first document even if that is empty.
    rows[0] = 0
    return rows


def interleave(
    weights: NDArray[np.float64], limits: NDArray[np.int64], num_samples: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Deal samples to datasets so that every prefix is as near to the weights as it can be.

    Each sample goes to the dataset that is furthest behind, ``weight * max(sample, 1) - dealt``;
    the first of equals wins. A dataset that has dealt its limit drops out.

    Args:
        weights: (datasets,), adding up to 1.
        limits: (datasets,), the most samples each dataset may deal.
        num_samples: How many to deal, at most the sum of the limits.

    Returns:
        Dataset of each sample, and how many samples that dataset had dealt before.
    """
    dataset_index = np.empty(num_samples, dtype=np.int16)
    dataset_sample_index = np.empty(num_samples, dtype=np.int64)
    deal = _compiled(_deal) if _uses_numba(num_samples * len(weights)) else _deal
    deal(weights, limits, dataset_index, dataset_sample_index)
    return dataset_index, dataset_sample_index


def _uses_numba(num_steps: int) -> bool:
    setting = os.environ.get("MEGAFSDP_NUMBA")
    is_wanted = num_steps >= _NUM_STEPS_WORTH_COMPILING if setting is None else setting != "0"
    return is_wanted and _find_numba()


@cache
def _find_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError as error:
        _LOGGER.warning(
            "numba cannot be imported (%s): sample indices and blends are built without it, equal"
            " and 10 to 100 times slower. `pip install numba` restores the speed.",
            error,
        )
        return False
    return True


@cache
def _compiled(loop: _Loop) -> _Loop:
    import numba

    try:
        return cast("_Loop", numba.njit(cache=True)(loop))
    except RuntimeError as error:
        _LOGGER.warning("numba compiles in every process, which takes 1 to 3 s: %s", error)
        return cast("_Loop", numba.njit(loop))


def _walk(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    sequence_length: int,
    last_position: int,
    rows: NDArray[np.integer],
) -> None:
    place = 0
    offset = 0
    position = 0
    for row in range(1, len(rows)):
        target = min(row * sequence_length, last_position)
        offset += target - position
        position = target
        while offset >= lengths[document_index[place]]:
            offset -= lengths[document_index[place]]
            place += 1
        rows[row, 0] = place
        rows[row, 1] = offset


def _search(
    lengths: NDArray[np.int32],
    document_index: NDArray[np.integer],
    sequence_length: int,
    last_position: int,
    rows: NDArray[np.integer],
) -> None:
    lengths_in_place = lengths[document_index]
    ends = np.cumsum(lengths_in_place, dtype=np.int64)
    positions = np.arange(len(rows), dtype=np.int64) * sequence_length
    np.minimum(positions, last_position, out=positions)
    places = np.searchsorted(ends, positions, side="right")
    rows[:, 0] = places
    rows[:, 1] = positions - (ends[places] - lengths_in_place[places])


def _deal(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64],
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
) -> None:
    num_dealt = np.zeros(len(weights), dtype=np.int64)
    for sample in range(len(dataset_index)):
        scale = float(max(sample, 1))
        chosen = 0
        longest_lag = -np.inf
        for dataset in range(len(weights)):
            lag = weights[dataset] * scale - num_dealt[dataset]
            if lag > longest_lag and num_dealt[dataset] < limits[dataset]:
                chosen = dataset
                longest_lag = lag
        dataset_index[sample] = chosen
        dataset_sample_index[sample] = num_dealt[chosen]
        num_dealt[chosen] += 1
