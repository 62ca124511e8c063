"""Sources of text: files, folders, JSON lines, tables, and Python's own standard library.

A source is a sorted list of files plus a rule that turns each file into documents, so a corpus
never has to fit in memory. Tokens and splits are made in ``megafsdp.data.prep``; compressed files
are opened in ``megafsdp.data.compression``, tables read in ``megafsdp.data.tables``.
"""

from __future__ import annotations

import ast
import codecs
import glob
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megafsdp.data.compression import open_stream, without_compression_suffix
from megafsdp.data.tables import PARQUET_SUFFIX, is_dataset_folder, table_rows
from megafsdp.errors import ConfigError, DataError, expected

# Left out: tables and generated data, which a model learns by heart so that losses would flatter
# it; tests, which are not uniform in kind; and what is not part of the standard library.
_NOT_STDLIB = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "turtledemo",
    }
)
_JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
JSON_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of a corpus and the documents in it.

    Attributes:
        path: Where the file lies; a folder that ``datasets`` has saved counts as one file.
        name: What it is sorted by and hashed as; the same on machines that keep it elsewhere.
        nbytes: Its size.
        mtime_ns: When it was changed.
    """

    path: Path
    name: str
    nbytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        text: Its text.
        position_nbytes: How much of the file was read with it, for progress bars.
    """

    text: str
    position_nbytes: int


Documents = Callable[[TextFile], Iterator[Document]]


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[TextFile]:
    """List the files that paths, folders and glob patterns lead to, sorted by path.

    Args:
        inputs: Files are taken as they are, folders searched for ``suffixes``, patterns expanded to
            both (``**`` crosses folders). A folder that ``datasets`` has saved is taken as it is.
        suffixes: File name endings that count inside folders; .gz, .xz and .zst may follow them.

    Returns:
        Each file once, by the first of the names that lead to it.

    Raises:
        ConfigError: An input leads to no file, or to several datasets.
    """
    found: dict[Path, Path] = {}
    for entry in inputs:
        matches = [entry] if Path(entry).exists() else glob.glob(entry, recursive=True)
        paths = [path for match in matches for path in _files_of(Path(match), suffixes)]
        if not paths:
            raise ConfigError(
                expected(
                    "at least one text file",
                    "none",
                    where=f"the input '{entry}'",
                    hint=f"Give a file, a folder with files that end in {', '.join(suffixes)}, or a"
                    " pattern that matches some; `suffixes` sets the endings",
                )
            )
        for path in sorted(paths, key=Path.as_posix):
            found.setdefault(path.resolve(), path)
    paths = sorted(found.values(), key=Path.as_posix)
    return [_text_file(path, path.as_posix()) for path in paths]


def _files_of(path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return a file, or the files of a folder, or nothing if the path is neither."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    if is_dataset_folder(path):
        return [path]
    return [p for p in path.rglob("*") if p.is_file() and _is_wanted(p.name, suffixes)]


def _is_wanted(name: str, suffixes: Sequence[str]) -> bool:
    return any(n.endswith(tuple(suffixes)) for n in (name, without_compression_suffix(name)))


def find_stdlib_files() -> list[TextFile]:
    """List the sources of Python's standard library (about 500 files, 9 MB), sorted by path.

    Left out are tests and folders that hold mostly tables.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for folder, subfolders, files in os.walk(root):
        # Pruned in place, because site-packages may hold many times more files.
        subfolders[:] = [name for name in subfolders if name not in _NOT_STDLIB]
        inside = Path(folder).relative_to(root)
        names += [(inside / file).as_posix() for file in files if file.endswith(".py")]
    return [_text_file(root / name, name) for name in sorted(names)]


def _text_file(path: Path, name: str) -> TextFile:
    states = [file.stat() for file in (path.iterdir() if path.is_dir() else (path,))]
    nbytes, mtime_ns = sum(s.st_size for s in states), max(s.st_mtime_ns for s in states)
    return TextFile(path, name, nbytes, mtime_ns)


def file_documents(
    json_key: str, encoding_errors: str, *, takes_json_as_text: bool = False
) -> Documents:
    """Return the rule for text files: a line of JSON lines, a row of a table, or else the file.

    Args:
        json_key: Key of the text in a JSON line; name of its column in a table.
        encoding_errors: ``"strict"`` refuses a file that is not UTF-8, ``"replace"`` reads broken
            characters as U+FFFD.
        takes_json_as_text: Read a .json file without JSON lines of the key as text, not refuse it.

    Returns:
        A function from a file to its documents; it raises DataError if the file is not as it
        should be.
    """

    def documents(file: TextFile) -> Iterator[Document]:
        path = file.path
        if path.is_dir() or path.suffix.lower() == PARQUET_SUFFIX:
            for number, (text, share) in enumerate(table_rows(path, json_key), start=1):
                where = f"'{path}', row {number}"
                yield Document(_encodable(text, where, encoding_errors), int(share * file.nbytes))
            return
        suffix = Path(without_compression_suffix(path.name)).suffix.lower()
        is_json_lines = suffix in _JSONL_SUFFIXES
        if suffix == JSON_SUFFIX:
            is_json_lines = _begins_with_object(path, json_key if takes_json_as_text else None)
            if not (is_json_lines or takes_json_as_text):
                what = f"JSON lines, each an object with text under the key '{json_key}'"
                hint = f"Write one object a line; to read such files as text, add {JSON_SUFFIX} to"
                hint += " the suffixes"
                found = "a first line that is no whole object"
                raise DataError(expected(what, found, where=f"file '{path}'", hint=hint))
        with open_stream(path) as stream:
            if not is_json_lines:
                text = _decoded(stream.lines.read(), f"file '{path}'", encoding_errors)
                yield Document(text, file.nbytes)
                return
            for number, line in enumerate(stream.lines, start=1):
                where = f"file '{path}', line {number}"
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    text = _json_text(_decoded(line, where, encoding_errors), json_key, where)
                    text = _encodable(text, where, encoding_errors)
                    yield Document(text, stream.position())

    return documents


def _begins_with_object(path: Path, json_key: str | None) -> bool:
    """Return whether the first line of text is a whole JSON object, with text under a given key."""
    with open_stream(path) as stream:
        first = next(filter(bytes.strip, stream.lines), b"")
    try:
        value = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (json_key is None or isinstance(value.get(json_key), str))


def _encodable(text: str | bytes, where: str, encoding_errors: str) -> str:
    """Check a text that came out of JSON or a table, which can have half of a surrogate pair."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return _decoded(data, where, encoding_errors)


def docstring_documents(file: TextFile) -> Iterator[Document]:
    """Yield one document, all docstrings of a Python file; an empty one if it has none.

    Raises:
        DataError: The file is not Python.
    """
    try:
        with warnings.catch_warnings():
            # Parsing may warn about escapes in other people's code.
            warnings.simplefilter("ignore")
            tree = ast.parse(file.path.read_bytes())
    except (SyntaxError, ValueError) as error:
        what = "Python source to take docstrings from"
        hint = "Leave the file out, or read whole files with docstrings=False"
        raise DataError(expected(what, error, where=f"file '{file.path}'", hint=hint)) from error
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    yield Document("\n\n".join(text for text in texts if text), file.nbytes)


def _decoded(data: bytes, where: str, encoding_errors: str) -> str:
    try:
        return data.decode("utf-8", encoding_errors)
    except UnicodeDecodeError as error:
        what = "UTF-8 text"
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        hint = "Convert the file, leave it out, or set encoding_errors to 'replace'"
        raise DataError(expected(what, found, where=where, hint=hint)) from error


def _json_text(line: str, json_key: str, where: str) -> str:
    what = f"a JSON object with text under the key '{json_key}'"
    try:
        value = json.loads(line)
    # ValueError: broken JSON, or a number of more digits than Python reads.
    except (ValueError, RecursionError) as error:
        hint = "Mend the line, or take the file out of the inputs"
        raise DataError(expected(what, f"broken JSON ({error})", where=where, hint=hint)) from error
    text = value.get(json_key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        hint = "Set json_key to the key that holds the text"
        if isinstance(value, dict) and json_key in value:
            found = f"{json.dumps(text):.40}"
            hint = f"Take out the rows without text, or {hint[0].lower()}{hint[1:]}"
        else:
            keys = ", ".join(value) if isinstance(value, dict) else "none"
            found = f"the keys {keys}"
        raise DataError(expected(what, found, where=where, hint=hint))
    return text
