"""Which samples a configuration trains and evaluates on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megafsdp.data import ByteTokenizer, IndexedDatasetWriter
from megafsdp.errors import ConfigError, DataError
from megafsdp.training.datasets import Datasets, build_datasets
from tests.training.runs import SEQUENCE_LENGTH, tiny, write_corpus


def _build(folder: Path, *, vocab_size: int = 320, steps: int = 6, **data: object) -> Datasets:
    config = tiny(folder, data=dict(data), train={"steps": steps})
    return build_datasets(config, vocab_size=vocab_size)


def test_training_samples_last_for_the_run(tmp_path: Path) -> None:
    """There are enough of them, each of the full length, wrapping round the epochs."""
    write_corpus(tmp_path, num_documents=3)
    train = _build(tmp_path, steps=20).train
    assert len(train) >= 240
    assert {len(train[i]) for i in range(240)} == {SEQUENCE_LENGTH + 1}


def test_a_run_whose_index_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    """As where a number of steps stands for no end; the index has a row a sample."""
    write_corpus(tmp_path)
    with pytest.raises(DataError, match=r"120,000,000,000,000,000 samples.*train\.steps"):
        _build(tmp_path, steps=10**16)


def test_every_held_out_token_is_predicted_once(tmp_path: Path) -> None:
    """All labels of validation together are the file's tokens but the first."""
    write_corpus(tmp_path)
    datasets = _build(tmp_path)
    held_out = datasets.validation
    assert held_out is not None
    num_labels = sum(len(held_out[i]) - 1 for i in range(len(held_out)))
    tokens = np.fromfile(tmp_path / "validation.bin", dtype="<u2")
    assert num_labels == len(tokens) - 1


def test_split_holds_out_the_end_of_the_training_file(tmp_path: Path) -> None:
    """Shares of 50 and 50 leave half of the documents for validation."""
    write_corpus(tmp_path)
    datasets = _build(tmp_path, validation=[], split="50,50")
    assert datasets.validation is not None
    whole = _build(tmp_path, validation=[]).order["epochs"][0]["num_samples"]
    half = datasets.order["epochs"][0]["num_samples"]
    assert 0.4 * whole < half < 0.6 * whole
    assert 0.4 * whole < len(datasets.validation) < 0.6 * whole


def test_nothing_held_out_means_no_validation(tmp_path: Path) -> None:
    """Without prefixes and without a split there is nothing to evaluate on."""
    write_corpus(tmp_path)
    assert _build(tmp_path, validation=[]).validation is None


@pytest.mark.parametrize("split", [None, "90,10"])
def test_file_without_held_out_tokens_is_left_out_of_validation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, split: str | None
) -> None:
    """With a warning that names it and the option; the rest is evaluated as without it."""
    write_corpus(tmp_path)
    with IndexedDatasetWriter(tmp_path / "small") as writer:
        for _ in range(0 if split is None else 4):
            writer.add_document([1] * 50)
    name, option = ("validation", "data.validation") if split is None else ("train", "data.split")
    prefixes = {name: [str(tmp_path / name), str(tmp_path / "small")]}
    wanted = _build(tmp_path, **({"validation": []} if split else {}), split=split).validation
    assert not caplog.text
    found = _build(tmp_path, **({"validation": []} | prefixes), split=split).validation
    assert wanted is not None and found is not None and len(found) == len(wanted) > 2
    assert all((found[i] == wanted[i]).all() for i in range(len(wanted)))
    assert caplog.text.count("is evaluated") == 1
    assert f"small.bin' is evaluated: by {option}" in caplog.text


@pytest.mark.parametrize("split", [None, "90,10"])
def test_no_tokens_to_evaluate_on_are_refused(tmp_path: Path, split: str | None) -> None:
    """Where some are asked for; the message names the option."""
    write_corpus(tmp_path, num_documents=4)
    with IndexedDatasetWriter(tmp_path / "one") as writer:
        writer.add_document([1])
    held_out = [str(tmp_path / "one")] if split is None else []
    option = r"data\.validation" if split is None else r"data\.split"
    with pytest.raises(DataError, match=rf"evaluate on, got fewer in each of 1 files.*{option}"):
        _build(tmp_path, validation=held_out, split=split)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("split", [None, "1,99"])
def test_file_without_tokens_to_train_on_is_refused(
    tmp_path: Path, others: int, split: str | None
) -> None:
    """Alone or in a blend; the message names it."""
    write_corpus(tmp_path)
    with IndexedDatasetWriter(tmp_path / "empty") as writer:
        if split is not None:
            writer.add_document([1] * 50)
    prefixes = [str(tmp_path / "train")] * others + [str(tmp_path / "empty")]
    with pytest.raises(DataError, match=r"tokens to train on, got none.*empty\.bin.*data\.train"):
        _build(tmp_path, train=prefixes, validation=[], split=split)


def test_blend_follows_the_weights(tmp_path: Path) -> None:
    """Three samples of the second file come for one of the first."""
    for name, largest in (("one", 200), ("two", 201)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, largest=largest)
    prefixes = [str(tmp_path / "one/train"), str(tmp_path / "two/train")]
    blend = _build(tmp_path, train=prefixes, weights=[1.0, 3.0], validation=[]).train
    assert np.bincount(blend.dataset_index).tolist() == [18, 54]  # type: ignore[attr-defined]


def test_order_is_that_of_a_longer_run_within_an_epoch(tmp_path: Path) -> None:
    """A run can be prolonged without reshuffling, until it needs another epoch."""
    write_corpus(tmp_path)
    short, longer, long = (_build(tmp_path, steps=n) for n in (2, 10, 50))
    assert short.order == longer.order
    assert all((short.train[i] == longer.train[i]).all() for i in range(24))
    assert short.order != long.order


def test_planned_length_keeps_the_order(tmp_path: Path) -> None:
    """data.num_samples makes a short run read as the long one does."""
    write_corpus(tmp_path)
    planned, long = _build(tmp_path, steps=2, num_samples=600), _build(tmp_path, steps=50)
    assert planned.order == long.order
    assert all((planned.train[i] == long.train[i]).all() for i in range(24))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_missing_file_is_named(tmp_path: Path, split: str) -> None:
    """The message has the path and how to write such files."""
    write_corpus(tmp_path)
    (tmp_path / f"{split}.idx").unlink()
    with pytest.raises(DataError, match=rf"{split}\.idx.*megafsdp prep"):
        _build(tmp_path)


def test_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """Before the first step, naming token, file and the vocabulary that would do."""
    write_corpus(tmp_path, largest=300)
    with pytest.raises(DataError, match=r"token 300.*train\.bin.*at least 301"):
        _build(tmp_path, vocab_size=300)


@pytest.mark.parametrize(
    ("recorded", "is_other"),
    [
        ({"tokenizer": "byte", "vocab_size": 320}, False),
        ({"tokenizer": "bpe", "vocab_size": 320}, True),
        ({"tokenizer": "byte", "vocab_size": 384}, True),
        ({}, False),
        (None, False),
    ],
)
def test_a_record_of_another_tokenizer_is_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recorded: dict[str, object] | None,
    is_other: bool,
) -> None:
    """Its tokens fit, so only what prep has recorded tells it apart; said once for both files."""
    write_corpus(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps(recorded))
    build_datasets(tiny(tmp_path), vocab_size=320, tokenizer=ByteTokenizer())
    said = [m for m in caplog.messages if "was prepared with the tokenizer" in m]
    assert len(said) == is_other
    assert all("not with 'byte' of 320" in message for message in said)


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("auto", "takes them for other texts, bits per byte .*Prepare the data again"),
        ("saved/tokenizer.json", "of 320: bits per byte .*Set data.tokenizer to it"),
    ],
)
def test_data_of_another_tokenizer_than_the_saved_models_is_prepared_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tokenizer: str, said: str
) -> None:
    """To set data.tokenizer would silence the warning and train on tokens that mean others."""
    write_corpus(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"tokenizer": "byte", "vocab_size": 320}))
    config = tiny(tmp_path, data={"tokenizer": tokenizer})
    config = replace(config, model=replace(config.model, from_hf="saved"))
    build_datasets(config, vocab_size=320, tokenizer=ByteTokenizer())
    (message,) = (m for m in caplog.messages if "was prepared with the tokenizer" in m)
    assert re.search(said, message)


def test_tokenizer_of_other_data_is_refused(tmp_path: Path) -> None:
    """The byte tokenizer cannot have made token 999, and would count its bytes as none."""
    write_corpus(tmp_path, largest=999)
    config = tiny(tmp_path)
    build_datasets(config, vocab_size=1024)
    with pytest.raises(ConfigError, match=r"token 999 in file .*data\.tokenizer"):
        build_datasets(config, vocab_size=1024, tokenizer=ByteTokenizer())


def test_documents_without_their_last_token_are_not_told_apart(tmp_path: Path) -> None:
    """Refused by the first document that has tokens; files that end with the token are read."""
    write_corpus(tmp_path)
    config = tiny(tmp_path, data={"document_mask": True})
    found = r"that end with token 256, .*'byte', got token 255 .* of file '.*train.bin'"
    with pytest.raises(ConfigError, match=found):
        build_datasets(config, vocab_size=320, tokenizer=ByteTokenizer())
    write_corpus(tmp_path, largest=256)
    with IndexedDatasetWriter(tmp_path / "more", "<u2") as writer:
        writer.add_document([])
        writer.add_document([1, 2, 256])
    for prefixes in (config.data.train, [str(tmp_path / "more")]):
        config = tiny(tmp_path, data={"document_mask": True, "train": prefixes})
        build_datasets(config, vocab_size=320, tokenizer=ByteTokenizer())
