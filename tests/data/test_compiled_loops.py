"""The inner loops: numba, numpy and a walk token by token all agree."""

from __future__ import annotations

import logging
import os
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megafsdp.data import compiled_loops as loops
from megafsdp.data.compiled_loops import interleave, place_samples

_LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(
    lambda lengths: sum(lengths) > 1
)


def _both(loop: mock.Mock | object, **arguments: object) -> tuple[object, object]:
    assert callable(loop)
    results = []
    for setting in ("0", "1"):
        with mock.patch.dict(os.environ, MEGAFSDP_NUMBA=setting):
            results.append(loop(**arguments))
    return results[0], results[1]


def _naive_rows(
    lengths: list[int], document_index: list[int], *, sequence_length: int, num_samples: int
) -> list[tuple[int, int]]:
    stream = [
        (place, offset)
        for place, document in enumerate(document_index)
        for offset in range(lengths[document])
    ]
    last = len(stream) - 1
    boundaries = [stream[min(i * sequence_length, last)] for i in range(1, num_samples + 1)]
    return [(0, 0), *boundaries]


@given(lengths=_LENGTHS, sequence_length=st.integers(1, 12), data=st.data())
def test_samples_are_placed_alike_by_all(
    lengths: list[int], sequence_length: int, data: st.DataObject
) -> None:
    """Numba and numpy find the boundaries of a list of all tokens, empty documents included."""
    documents = st.lists(st.sampled_from(range(len(lengths))), min_size=1, max_size=30)
    document_index = data.draw(documents.filter(lambda d: sum(lengths[i] for i in d) > 1))
    num_tokens = sum(lengths[i] for i in document_index)
    num_samples = -(-(num_tokens - 1) // sequence_length)
    plain, compiled = _both(
        place_samples,
        lengths=np.array(lengths, dtype=np.int32),
        document_index=np.array(document_index, dtype=np.int32),
        sequence_length=sequence_length,
        num_samples=num_samples,
        num_tokens=num_tokens,
    )
    assert isinstance(plain, np.ndarray)
    assert isinstance(compiled, np.ndarray)
    assert plain.dtype == compiled.dtype == np.int32
    assert np.array_equal(plain, compiled)
    naive = _naive_rows(
        lengths, document_index, sequence_length=sequence_length, num_samples=num_samples
    )
    assert [tuple(row) for row in plain.tolist()] == naive


def test_positions_beyond_float32_are_exact() -> None:
    """Two billion tokens in one document: every boundary is an exact multiple, the last clamped."""
    num_tokens, sequence_length = 2_000_000_011, 100_003
    num_samples = -(-(num_tokens - 1) // sequence_length)
    plain, compiled = _both(
        place_samples,
        lengths=np.array([num_tokens], dtype=np.int32),
        document_index=np.zeros(1, dtype=np.int32),
        sequence_length=sequence_length,
        num_samples=num_samples,
        num_tokens=num_tokens,
    )
    assert isinstance(plain, np.ndarray)
    assert plain[:-1, 1].tolist() == [i * sequence_length for i in range(num_samples)]
    assert plain[-1].tolist() == [0, num_tokens - 1]
    assert np.array_equal(plain, compiled)


def _naive_deal(weights: list[float], limits: list[int], num_samples: int) -> list[int]:
    dealt = [0] * len(weights)
    order = []
    for sample in range(num_samples):
        lags = [
            weight * max(sample, 1) - count if count < limit else -float("inf")
            for weight, count, limit in zip(weights, dealt, limits, strict=True)
        ]
        chosen = lags.index(max(lags))
        dealt[chosen] += 1
        order.append(chosen)
    return order


@given(
    shares=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    limits=st.lists(st.integers(0, 30), min_size=6, max_size=6),
)
def test_blends_are_dealt_alike_by_all(shares: list[int], limits: list[int]) -> None:
    """Numba and Python give the order of a naive greedy loop; datasets may run out."""
    weights = np.array(shares, dtype=np.float64) / sum(shares)
    most = limits[: len(shares)]
    plain, compiled = _both(
        interleave,
        weights=weights,
        limits=np.array(most, dtype=np.int64),
        num_samples=sum(most),
    )
    assert isinstance(plain, tuple)
    assert isinstance(compiled, tuple)
    order: NDArray[np.int16] = plain[0]
    assert order.tolist() == _naive_deal(weights.tolist(), most, sum(most))
    seen = [0] * len(shares)
    for dataset, sample in zip(order.tolist(), plain[1].tolist(), strict=True):
        assert sample == seen[dataset]
        seen[dataset] += 1
    for one, other in zip(plain, compiled, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)


def test_numba_is_not_imported_for_short_loops_or_where_it_is_switched_off() -> None:
    """A small corpus does not pay for a compiler."""
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(loops, "_find_numba", side_effect=AssertionError("asked for numba")),
    ):
        os.environ.pop("MEGAFSDP_NUMBA", None)
        interleave(np.array([1.0]), np.array([9]), 9)
        with mock.patch.object(loops, "_NUM_STEPS_WORTH_COMPILING", 9):
            with pytest.raises(AssertionError, match="asked for numba"):
                interleave(np.array([1.0]), np.array([9]), 9)
            os.environ["MEGAFSDP_NUMBA"] = "0"
            interleave(np.array([1.0]), np.array([9]), 9)


def test_missing_numba_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without numba the result is there, and one warning says what was lost."""
    loops._find_numba.cache_clear()
    try:
        with (
            mock.patch.dict(os.environ, MEGAFSDP_NUMBA="1"),
            mock.patch.dict(sys.modules, numba=None),
            caplog.at_level(logging.WARNING, "megafsdp.data"),
        ):
            for _ in range(2):
                order, _ = interleave(np.array([0.5, 0.5]), np.array([2, 2]), 4)
    finally:
        loops._find_numba.cache_clear()
    assert order.tolist() == [0, 1, 0, 1]
    assert [record.message.count("pip install numba") for record in caplog.records] == [1]
