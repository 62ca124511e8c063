"""Sources of text: files, folders, JSON lines, and Python's own standard library.

A source is a sorted list of files plus a rule that turns each file into documents, so a corpus
never has to fit in memory. Tokens and splits are made in ``megafsdp.data.prep``.
"""

from __future__ import annotations

import ast
import glob
import io
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megafsdp.errors import ConfigError, DataError, expected

# Tables and generated data that a model learns by heart, which would make the losses flattering,
# tests, which are not uniform in kind, and what is not the standard library's.
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
# What compressed files begin with, which no UTF-8 text does.
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


@dataclass(frozen=True, slots=True)
class TextFile:
    """One file of a corpus and the documents in it.

    Attributes:
        path: Where the file lies.
        name: What it is sorted by and hashed as; the same on machines that keep it elsewhere.
        nbytes: Its size.
        mtime_ns: When it was changed.
    """

    path: Path
    name: str
    nbytes: int
    mtime_ns: int


Documents = Callable[[TextFile], Iterator[str]]


def find_files(inputs: Sequence[str], suffixes: Sequence[str]) -> list[TextFile]:
    """List the files that paths, folders and glob patterns lead to, sorted by path.

    Args:
        inputs: Files are taken as they are, folders searched for ``suffixes``, patterns expanded
            (``**`` crosses folders).
        suffixes: File name endings that count inside folders.

    Returns:
        Each file once.

    Raises:
        ConfigError: An input leads to no file.
    """
    found: set[Path] = set()
    for entry in inputs:
        path = Path(entry)
        if path.is_dir():
            paths = [p for p in path.rglob("*") if p.is_file() and p.name.endswith(tuple(suffixes))]
        elif path.is_file():
            paths = [path]
        else:
            paths = [p for p in map(Path, glob.glob(entry, recursive=True)) if p.is_file()]
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
        found.update(paths)
    return [_text_file(path, path.as_posix()) for path in sorted(found, key=Path.as_posix)]


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
    state = path.stat()
    return TextFile(path, name, state.st_size, state.st_mtime_ns)


def file_documents(json_key: str, encoding_errors: str) -> Documents:
    """Return the rule for text files: each line of JSON lines is a document, or else the file.

    Args:
        json_key: Key of the text in a JSON line.
        encoding_errors: ``"strict"`` refuses a file that is not UTF-8, ``"replace"`` reads broken
            characters as U+FFFD.

    Returns:
        A function from a file to its documents; it raises DataError where the file is not as it
        should be.
    """

    def documents(file: TextFile) -> Iterator[str]:
        with file.path.open("rb") as lines:
            _check_uncompressed(lines, file.path)
            if file.path.suffix.lower() not in _JSONL_SUFFIXES:
                yield _decoded(lines.read(), f"file '{file.path}'", encoding_errors)
                return
            for number, line in enumerate(lines, start=1):
                where = f"file '{file.path}', line {number}"
                if line.strip():
                    text = _json_text(_decoded(line, where, encoding_errors), json_key, where)
                    # JSON can spell half of a surrogate pair, which no UTF-8 text has.
                    data = text.encode("utf-8", "surrogatepass")
                    yield _decoded(data, where, encoding_errors)

    return documents


def _check_uncompressed(file: io.BufferedReader, path: Path) -> None:
    """Refuse a compressed file, whose bytes would pass as broken characters."""
    start = file.peek()
    for magic, name in _COMPRESSED.items():
        if start.startswith(magic):
            hint = "Decompress the file first"
            raise DataError(expected("text", f"{name} data", where=f"file '{path}'", hint=hint))


def docstring_documents(file: TextFile) -> Iterator[str]:
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
    yield "\n\n".join(text for text in texts if text)


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
    if not isinstance(value, dict) or not isinstance(value.get(json_key), str):
        keys = ", ".join(value) if isinstance(value, dict) else "none"
        hint = "Set json_key to the key that holds the text"
        raise DataError(expected(what, f"the keys {keys}", where=where, hint=hint))
    text: str = value[json_key]
    return text
