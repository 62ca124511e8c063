"""Folders that the library ``datasets`` saves, prepared for training."""

from __future__ import annotations

from pathlib import Path

import pytest

from megafsdp.data import ByteTokenizer, IndexedDataset, PrepOptions, prepare
from megafsdp.errors import ConfigError, DataError

pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
TEXTS = [f"text {i}, äöü" for i in range(1000)]


def _prepared(folder: Path, output: Path, column: str = "body") -> list[str]:
    options = PrepOptions(
        output=str(output), inputs=(str(folder),), json_key=column, validation_every=0
    )
    prepare(options)
    dataset = IndexedDataset(output / "train")
    return [ByteTokenizer().decode(dataset[i].tolist()) for i in range(len(dataset))]


def test_rows_come_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    """Of several files, and where the dataset was shuffled and chosen from before it was saved."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"body": TEXTS, "id": list(range(1000))})
    table.save_to_disk(tmp_path / "plain", num_shards=3)
    assert _prepared(tmp_path / "plain", tmp_path / "a") == TEXTS
    shuffled = table.shuffle(seed=3).select(range(500))
    shuffled.save_to_disk(tmp_path / "shuffled")
    found = _prepared(tmp_path / "shuffled", tmp_path / "b")
    assert found == shuffled["body"][:]
    assert found != TEXTS[:500]
    with pytest.raises(DataError, match="a column 'text', got the columns body, id"):
        _prepared(tmp_path / "plain", tmp_path / "c", "text")
    both = datasets.DatasetDict({"train": table, "test": table})
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(ConfigError, match="one split of a DatasetDict, got all of train, test"):
        _prepared(tmp_path / "both", tmp_path / "d")
    assert _prepared(tmp_path / "both" / "train", tmp_path / "e") == TEXTS
