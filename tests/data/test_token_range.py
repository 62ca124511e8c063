"""The range of tokens and the refusal of a vocabulary that is too small."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from unittest import mock

import pytest

from megafsdp.data import IndexedDataset, check_vocabulary, token_range
from megafsdp.errors import DataError
from tests.data.files import write_dataset

# The package exports the function of the same name.
_MODULE = importlib.import_module("megafsdp.data.token_range")


def test_range_is_found_across_pieces(tmp_path: Path) -> None:
    """Smallest and largest token of the whole file, wherever they are."""
    dataset = write_dataset(tmp_path / "set", [[5, 9, 4], [7], [], [3, 6]], "<i4")
    with mock.patch.object(_MODULE, "_PIECE_NUM_TOKENS", 2):
        assert token_range(dataset) == (3, 9)


def test_empty_dataset_has_an_empty_range(tmp_path: Path) -> None:
    """Without tokens no vocabulary is too small."""
    dataset = write_dataset(tmp_path / "set", [])
    assert token_range(dataset) == (0, -1)
    check_vocabulary(dataset, 1)


def test_file_is_scanned_once(tmp_path: Path) -> None:
    """The side file answers later calls, until the tokens change."""
    dataset = write_dataset(tmp_path / "set", [[1, 2]])
    assert token_range(dataset) == (1, 2)
    with mock.patch.object(_MODULE, "_scan", side_effect=AssertionError("scanned again")):
        assert token_range(IndexedDataset(tmp_path / "set")) == (1, 2)
    changed = write_dataset(tmp_path / "set", [[1, 8]])
    os.utime(changed.data_path, ns=(1, 1))
    assert token_range(changed) == (1, 8)


def test_broken_side_file_is_replaced(tmp_path: Path) -> None:
    """What cannot be read as a record is scanned again and written anew."""
    dataset = write_dataset(tmp_path / "set", [[1, 2]])
    for content in ("", "[]", "{}", '{"smallest": 0}'):
        (tmp_path / "set.range.json").write_text(content)
        assert token_range(dataset) == (1, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "set.bin",
        "set.idx",
        "set.range.json",
    ]


def test_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    """The scan answers although its result cannot be kept."""
    dataset = write_dataset(tmp_path / "set", [[1, 2]])
    with mock.patch.object(Path, "write_text", side_effect=PermissionError("read-only")):
        assert token_range(dataset) == (1, 2)
    assert not (tmp_path / "set.range.json").exists()


def test_vocabulary_smaller_than_the_largest_token_is_refused(tmp_path: Path) -> None:
    """The error names the file, the token, the vocabulary and the size that would do."""
    dataset = write_dataset(tmp_path / "set", [[1, 256], [2]])
    check_vocabulary(dataset, 257)
    with pytest.raises(DataError, match=r"vocab_size 256, got token 256.*set\.bin'.*least 257"):
        check_vocabulary(dataset, 256)


def test_negative_token_is_refused(tmp_path: Path) -> None:
    """No embedding has a row for a token below 0."""
    dataset = write_dataset(tmp_path / "set", [[1, -1]], "<i4")
    with pytest.raises(DataError, match="got token -1"):
        check_vocabulary(dataset, 10)
