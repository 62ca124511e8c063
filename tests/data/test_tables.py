"""Text in tables: Parquet files, and folders of ``datasets``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from megafsdp.data.tables import is_dataset_folder, table_rows
from megafsdp.data.text_sources import file_documents, find_files
from megafsdp.errors import ConfigError, DataError

TEXTS = [f"text {i}, äöü" for i in range(1000)]


def _parquet(path: Path, **columns: object) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=300)
    return path


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_rows_of_a_parquet_file_are_documents_in_order(tmp_path: Path, kind: object) -> None:
    """Across row groups; other columns are not read; the share that was read grows to 1."""
    column = pyarrow.array(TEXTS, kind)
    path = _parquet(tmp_path / "a.parquet", id=list(range(1000)), body=column)
    found = list(table_rows(path, "body"))
    assert [text for text, _ in found] == TEXTS
    assert [share for _, share in found] == [(i + 1) / 1000 for i in range(1000)]
    (file,) = find_files([str(tmp_path)], (".parquet",))
    documents = list(file_documents("body", "strict")(file))
    assert [document.text for document in documents] == TEXTS
    assert documents[-1].position_nbytes == file.nbytes


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (["a", None], r"text in column 'text', got None.*a\.parquet', row 2.*Take out the rows"),
        ([1, 2], "text in column 'text', got 1"),
    ],
)
def test_rows_without_text_are_refused(tmp_path: Path, column: list[object], message: str) -> None:
    """The first is named."""
    path = _parquet(tmp_path / "a.parquet", text=column)
    with pytest.raises(DataError, match=message):
        list(table_rows(path, "text"))


def test_rows_that_are_not_utf8_are_refused_or_replaced(tmp_path: Path) -> None:
    """As in text files: some writers store bytes of other encodings as strings."""
    data = pyarrow.array([b"ok", b"caf\xe9!"], pyarrow.binary())
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, data.buffers())
    _parquet(tmp_path / "A.PARQUET", text=column)
    (file,) = find_files([str(tmp_path / "A.PARQUET")], ())
    message = r"UTF-8 text, got byte 0xe9 at offset 3.*A\.PARQUET', row 2.*encoding_errors"
    with pytest.raises(DataError, match=message):
        list(file_documents("text", "strict")(file))
    replaced = [document.text for document in file_documents("text", "replace")(file)]
    assert replaced == ["ok", "caf\ufffd!"]
    _parquet(tmp_path / "b.parquet", text=data)
    with pytest.raises(DataError, match="text in column 'text', got b'ok'"):
        list(table_rows(tmp_path / "b.parquet", "text"))


def test_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The message lists those that are."""
    path = _parquet(tmp_path / "a.parquet", body=["a"], url=["b"])
    with pytest.raises(DataError, match=r"a column 'text', got the columns body, url.*json_key"):
        list(table_rows(path, "text"))


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    """As damaged, by its name; with the names of the column's package behind it."""
    path = _parquet(tmp_path / "a.parquet", text=TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a whole Parquet file.*a\.parquet"):
        list(table_rows(path, "text"))


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        (path / name).write_text("{}")
    return path


def test_missing_packages_are_said(tmp_path: Path) -> None:
    """With the extra that brings each."""
    path = _parquet(tmp_path / "a.parquet", text=TEXTS)
    with (
        mock.patch.dict(sys.modules, pyarrow=None),
        pytest.raises(ConfigError, match=r"pyarrow.*pip install 'megafsdp\[parquet\]'"),
    ):
        list(table_rows(path, "text"))
    folder = _folder(tmp_path / "saved")
    with (
        mock.patch.dict(sys.modules, datasets=None),
        pytest.raises(ConfigError, match=r"datasets.*pip install 'megafsdp\[datasets\]'"),
    ):
        list(table_rows(folder, "text"))


def test_a_folder_of_datasets_is_one_file(tmp_path: Path) -> None:
    """It is found as a whole, by its marks, with the bytes of all its files."""
    folder = _folder(tmp_path / "saved")
    (file,) = find_files([str(folder)], (".txt",))
    assert (file.path, file.nbytes) == (folder, 6)
    # Any file that is newer is another dataset.
    for number, path in enumerate(sorted(folder.iterdir())):
        os.utime(path, ns=(10**18, 10**18 + number))
    (file,) = find_files([str(folder)], (".txt",))
    assert file.mtime_ns == 10**18 + 2
    (tmp_path / "plain").mkdir()
    assert not is_dataset_folder(tmp_path / "plain")
    (tmp_path / "plain/state.json").write_text("{}")
    assert not is_dataset_folder(tmp_path / "plain")


def test_a_folder_of_several_datasets_asks_for_one(tmp_path: Path) -> None:
    """Training on the test split would go unnoticed."""
    folder = tmp_path / "dict"
    _folder(folder / "train")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(ConfigError, match=r"one split.*all of train, test.*'.*dict/train'"):
        find_files([str(folder)], (".txt",))


def test_what_datasets_cannot_load_is_refused(tmp_path: Path) -> None:
    """Its errors are of many kinds, and do not name the folder."""
    folder = _folder(tmp_path / "saved")

    def fail(path: str) -> None:
        raise KeyError("_data_files")

    stand_in = SimpleNamespace(load_from_disk=fail)
    with (
        mock.patch.dict(sys.modules, datasets=stand_in),
        pytest.raises(DataError, match=r"save_to_disk\(\) wrote, got '_data_files'.*saved"),
    ):
        list(table_rows(folder, "text"))
