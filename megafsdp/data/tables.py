"""Text in a column of a table: Parquet files, and folders that ``datasets`` has saved.

Rows are read in their order, a batch at a time. pyarrow and datasets are imported when they are
needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megafsdp.errors import ConfigError, DataError, expected

PARQUET_SUFFIX = ".parquet"
_BATCH_ROWS = 256
_DATASET_FILES = ("dataset_info.json", "state.json")
_DICT_FILE = "dataset_dict.json"

# The texts of some rows, and how many rows the table has.
Rows = tuple[Sequence[object], int]


class BrokenText(bytes):
    """A text of a table that is not UTF-8."""


def is_dataset_folder(path: Path) -> bool:
    """Return whether ``Dataset.save_to_disk()`` wrote a folder.

    Raises:
        ConfigError: ``DatasetDict.save_to_disk()`` did, so that it has several datasets.
    """
    if (path / _DICT_FILE).is_file():
        splits = json.loads((path / _DICT_FILE).read_text(encoding="utf-8")).get("splits", [])
        raise ConfigError(
            expected(
                "one split of a DatasetDict",
                f"all of {', '.join(splits)}",
                where=f"the input '{path}'",
                hint="Name the folders of the splits to read, such as "
                f"'{path / (splits[0] if splits else 'train')}'",
            )
        )
    return all((path / name).is_file() for name in _DATASET_FILES)


def table_rows(path: Path, column: str) -> Iterator[tuple[str | BrokenText, float]]:
    """Read the texts of one column, in the order of the rows.

    Args:
        path: A Parquet file, or a folder of ``datasets``.
        column: Name of the column.

    Yields:
        Each text, and the share of the table that is read with it.

    Raises:
        ConfigError: The package that reads it is not installed.
        DataError: The file is damaged, has no such column, or the column is not of text.
    """
    number = 0
    batches = dataset_batches(path, column) if path.is_dir() else _parquet_batches(path, column)
    for texts, num_rows in batches:
        for text in texts:
            number += 1
            if not isinstance(text, str | BrokenText):
                where = f"'{path}', row {number}"
                hint = "Take out the rows without text, or name another column by json_key"
                what = f"text in column '{column}'"
                raise DataError(expected(what, repr(text), where=where, hint=hint))
            yield text, number / num_rows


def _parquet_batches(path: Path, column: str) -> Iterator[Rows]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise _missing("pyarrow", "parquet", path, error) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _require_column(path, column, file.schema_arrow.names)
            for batch in file.iter_batches(_BATCH_ROWS, columns=[column], use_threads=False):
                yield _texts_of(batch.column(0)), file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        what = "a whole Parquet file"
        hint = "Fetch or write the file again, or take it out of the inputs"
        raise DataError(expected(what, error, where=f"file '{path}'", hint=hint)) from error


def _texts_of(column: Any) -> list[object]:
    """Return the values of a column of Arrow; texts that are not UTF-8 as their bytes."""
    try:
        values: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        # Parquet does not check what is stored as a string.
        import pyarrow

        values = [_text_of(value) for value in column.cast(pyarrow.large_binary()).to_pylist()]
    return values


def _text_of(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return BrokenText(value)


def dataset_batches(path: Path, column: str) -> Iterator[Rows]:
    """Read a column of a folder of ``datasets``, in the order of the dataset's own indices."""
    try:
        import datasets
    except ImportError as error:
        raise _missing("datasets", "datasets", path, error) from error
    try:
        table = datasets.load_from_disk(str(path))
    except Exception as error:  # Errors of Arrow, of JSON, or of the files.
        what = "a folder that Dataset.save_to_disk() wrote"
        hint = "Write the folder again, or take it out of the inputs"
        raise DataError(expected(what, error, where=f"folder '{path}'", hint=hint)) from error
    _require_column(path, column, table.column_names)
    for batch in table.select_columns([column]).with_format(None).iter(_BATCH_ROWS):
        yield batch[column], len(table)


def _require_column(path: Path, column: str, names: Sequence[str]) -> None:
    if column not in names:
        hint = "Set json_key to the column that has the text"
        got = f"the columns {', '.join(names)}"
        raise DataError(expected(f"a column '{column}'", got, where=f"'{path}'", hint=hint))


def _missing(package: str, extra: str, path: Path, error: ImportError) -> ConfigError:
    what = f"the package {package}, which reads this table"
    hint = f"Run `pip install 'megafsdp[{extra}]'`, or write the texts as JSON lines"
    return ConfigError(expected(what, error, where=f"'{path}'", hint=hint))
