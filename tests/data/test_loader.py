"""Batches by consumed samples: the same global batch at any data-parallel size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megafsdp.data import PADDING_SAMPLE_ID, Batch, Loader
from megafsdp.errors import ConfigError, DataError

_SEQUENCE_LENGTH = 4


class _Numbered:
    """Sample i holds the tokens 10 i, 10 i + 1, ...; the last sample may be a short tail."""

    def __init__(self, num_samples: int, *, tail: int = _SEQUENCE_LENGTH + 1) -> None:
        self.sequence_length = _SEQUENCE_LENGTH
        self._num_samples = num_samples
        self._tail = tail

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        is_last = sample == self._num_samples - 1
        return 10 * sample + np.arange(self._tail if is_last else _SEQUENCE_LENGTH + 1)


def _loaders(
    dp_size: int, *, dataset: _Numbered, batch: int, micro: int, **options: Any
) -> list[Loader]:
    return [
        Loader(
            dataset,
            global_batch_size=batch,
            micro_batch_size=micro,
            dp_rank=rank,
            dp_size=dp_size,
            **options,
        )
        for rank in range(dp_size)
    ]


def _rows(batches: list[Batch]) -> dict[int, tuple[list[int], list[int], list[float]]]:
    rows = {}
    for batch in batches:
        for row, sample in enumerate(batch.sample_ids.tolist()):
            tensors = (batch.tokens[row], batch.labels[row], batch.loss_mask[row])
            rows[sample] = tuple(tensor.tolist() for tensor in tensors)
    return rows


@pytest.mark.parametrize(("dp_size", "micro"), [(1, 12), (1, 1), (2, 3), (3, 4), (3, 2), (4, 1)])
def test_global_batch_is_the_same_at_any_size(dp_size: int, micro: int) -> None:
    """Ids, tokens, labels and masks of a global batch do not depend on ranks or microbatches."""
    loaders = _loaders(dp_size, dataset=_Numbered(60), batch=12, micro=micro)
    for consumed in (0, 12, 24, 48):
        batches = [batch for loader in loaders for batch in loader.step_batch(consumed)]
        ids = sorted(sample for batch in batches for sample in batch.sample_ids.tolist())
        assert ids == list(range(consumed, consumed + 12))
        for sample, (tokens, labels, mask) in _rows(batches).items():
            assert tokens == [10 * sample + i for i in range(4)]
            assert labels == [10 * sample + i for i in range(1, 5)]
            assert mask == [1.0] * 4


def test_order_within_a_global_batch_is_megatrons() -> None:
    """Microbatch k of rank r starts at k * mbs * dp + r * mbs."""
    first, second = _loaders(2, dataset=_Numbered(40), batch=8, micro=2)
    assert [batch.sample_ids.tolist() for batch in first.step_batch(16)] == [[16, 17], [20, 21]]
    assert [batch.sample_ids.tolist() for batch in second.step_batch(16)] == [[18, 19], [22, 23]]
    assert (first.num_microbatches, first.num_steps) == (2, 5)


def test_batch_has_the_promised_dtypes() -> None:
    """Tokens, labels and ids are int64, the mask is fp32, all contiguous."""
    (loader,) = _loaders(1, dataset=_Numbered(4), batch=2, micro=2)
    (batch,) = loader.step_batch(0)
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == torch.float32
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (2, 4)
    assert all(t.is_contiguous() for t in (batch.tokens, batch.labels, batch.loss_mask))


def test_short_tail_is_masked() -> None:
    """Of a sample with 3 tokens the 2 labels count; padding is token 0 with mask 0."""
    (loader,) = _loaders(1, dataset=_Numbered(2, tail=3), batch=2, micro=2)
    (batch,) = loader.step_batch(0)
    assert batch.tokens.tolist() == [[0, 1, 2, 3], [10, 11, 12, 0]]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [11, 12, 0, 0]]
    assert batch.loss_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]


class _Ended(_Numbered):
    """Tokens that are 3 above a multiple of 10, and all of sample 1, end a document."""

    def __getitem__(self, sample: int) -> NDArray[np.int64]:
        tokens = super().__getitem__(sample)
        return np.where((tokens % 10 == 1) | (sample == 1), 3, tokens)


def test_documents_of_a_row_end_with_their_token() -> None:
    """Its last token ends none that a next could follow, and padding belongs to the last."""
    (plain,) = _loaders(1, dataset=_Numbered(2), batch=2, micro=2)
    assert plain.step_batch(0)[0].document_lengths is None
    dataset = _Ended(3, tail=3)
    (loader,) = _loaders(1, dataset=dataset, batch=4, micro=4, pad_last=True, end_of_document=3)
    (batch,) = loader.step_batch(0)
    # The third is short, the fourth padding alone.
    assert batch.tokens.tolist() == [[0, 3, 2, 3], [3] * 4, [20, 3, 22, 0], [0] * 4]
    assert batch.document_lengths == [[2, 2], [1] * 4, [2, 2], [4]]
    *tensors, lengths = batch.to(torch.device("cpu"))
    assert len(tensors) == 3 and lengths == batch.document_lengths


@pytest.mark.parametrize("dp_size", [1, 2, 3])
def test_padded_evaluation_sees_every_sample_once(dp_size: int) -> None:
    """With pad_last the incomplete global batch ends in masked rows without an id."""
    loaders = _loaders(dp_size, dataset=_Numbered(8), batch=6, micro=1, pad_last=True)
    assert loaders[0].num_steps == 2
    batches = [
        batch for loader in loaders for step in (0, 1) for batch in loader.step_batch(6 * step)
    ]
    ids = sorted(sample for batch in batches for sample in batch.sample_ids.tolist())
    assert ids == [PADDING_SAMPLE_ID] * 4 + list(range(8))
    masked = [batch for batch in batches if batch.sample_ids.tolist() == [PADDING_SAMPLE_ID]]
    assert all(not batch.loss_mask.any() and not batch.tokens.any() for batch in masked)


@pytest.mark.parametrize(("num_samples", "num_steps"), [(5, 1), (6, 1), (7, 2), (12, 2)])
def test_a_padded_evaluation_ends_with_the_dataset(num_samples: int, num_steps: int) -> None:
    """No global batch is padding alone."""
    dataset = _Numbered(num_samples)
    (loader,) = _loaders(1, dataset=dataset, batch=6, micro=6, pad_last=True)
    assert loader.num_steps == num_steps
    assert (loader.step_batch(6 * (num_steps - 1))[-1].sample_ids >= 0).any()


@pytest.mark.parametrize(
    ("consumed", "pad_last"), [(-1, False), (3, False), (8, False), (8, True), (-6, True)]
)
def test_end_of_the_dataset_is_an_error(consumed: int, pad_last: bool) -> None:
    """Nothing wraps around silently; the message says how long the dataset has to be."""
    (loader,) = _loaders(1, dataset=_Numbered(8), batch=6, micro=6, pad_last=pad_last)
    with pytest.raises(DataError, match=r"got 8 samples.*num_samples"):
        loader.step_batch(consumed)


@pytest.mark.parametrize(
    ("batch", "micro", "dp_size", "choices"),
    [
        (10, 4, 3, ["multiple of 12", "got 10", "Use global_batch_size 12"]),
        (
            20,
            3,
            2,
            ["multiple of 6", "global_batch_size 18, or global_batch_size 24", "1 or 2 or 5 or 10"],
        ),
        (12, 2, 4, ["global_batch_size 8", "size of 1 or 2 or 3 or 6", "micro_batch_size 1 or 3"]),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(
    batch: int, micro: int, dp_size: int, choices: list[str]
) -> None:
    """The error lists global batches, microbatches and data-parallel sizes that would fit."""
    with pytest.raises(ConfigError) as caught:
        _loaders(dp_size, dataset=_Numbered(40), batch=batch, micro=micro)
    for choice in choices:
        assert choice in str(caught.value)


@pytest.mark.parametrize(("batch", "micro"), [(0, 1), (4, 0), (-4, 2)])
def test_sizes_that_are_not_positive_are_refused(batch: int, micro: int) -> None:
    """A batch has samples."""
    with pytest.raises(ConfigError, match="positive global_batch_size and micro_batch_size"):
        _loaders(1, dataset=_Numbered(4), batch=batch, micro=micro)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_mesh_is_refused(rank: int) -> None:
    """A rank that does not exist would read another one's samples."""
    with pytest.raises(ConfigError, match=f"from 0 to 1, got {rank}"):
        Loader(_Numbered(4), global_batch_size=2, micro_batch_size=1, dp_rank=rank, dp_size=2)


@pytest.mark.parametrize("pin_memory", [True, False])
def test_what_a_gpu_copies_is_pinned(monkeypatch: pytest.MonkeyPatch, pin_memory: bool) -> None:
    """The batch's own memory is, not that of a copy on the way; its values are the same."""
    pinned: list[int] = []
    make = torch.zeros

    def noting(*shape: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        made = make(*shape, **kwargs)
        pinned.extend([made.data_ptr()] if pin_memory else [])
        return made

    plain, *_ = _loaders(2, dataset=_Numbered(60), batch=12, micro=3)
    monkeypatch.setattr(torch, "zeros", noting)
    loader = Loader(
        _Numbered(60),
        global_batch_size=12,
        micro_batch_size=3,
        dp_rank=0,
        dp_size=2,
        pin_memory=pin_memory,
    )
    batches = loader.step_batch(12)
    assert _rows(batches) == _rows(plain.step_batch(12))
    found = [t.data_ptr() for b in batches for t in (b.tokens, b.labels, b.loss_mask)]
    assert pinned == (found if pin_memory else [])
    assert all(tensor.is_contiguous() for b in batches for tensor in b.to(torch.device("cpu")))
