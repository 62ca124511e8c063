"""Local paths and URLs of stores under one type, and operations that differ between the two.

A string with ``://`` is a URL, except ``file://``; anything else is a path. Paths are plain pathlib
paths, so that code for local files is the same with and without stores.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePath
from typing import TypeVar

from megafsdp.checkpoint.storage.store_path import StorePath
from megafsdp.errors import CheckpointError

Location = Path | StorePath
# One of the two, for functions that return the kind that they got.
L = TypeVar("L", bound=Location)

_LOCAL_SCHEMES = ("file", "local")
# First component of a pathlib path that was made from the URL of a store.
_BROKEN_SCHEMES = frozenset({"s3:", "s3a:", "gs:", "gcs:", "az:", "abfs:", "abfss:", "memory:"})


def location_of(directory: str | os.PathLike[str]) -> Location:
    """Return the location that a caller names; nothing is opened.

    Args:
        directory: A local path, in which ``~`` is expanded, or the URL of a folder in a store, such
            as ``s3://bucket/run``.

    Raises:
        CheckpointError: A URL was passed as a pathlib path, which merges its slashes.
    """
    if isinstance(directory, StorePath):
        return directory
    text = os.fspath(directory)
    scheme, mark, rest = text.partition("://")
    if mark:
        return Path(rest) if scheme in _LOCAL_SCHEMES else StorePath(text)
    if (
        isinstance(directory, PurePath)
        and directory.parts[:1]
        and (directory.parts[0] in _BROKEN_SCHEMES)
    ):
        raise CheckpointError.expected(
            "the URL of a store as text",
            f"a {type(directory).__name__}, which has one slash less",
            where=f"'{directory}'",
            hint="Give a str, such as 's3://bucket/run', and join with '/'",
        )
    return Path(os.path.expanduser(directory))


def joined(folder: L, name: str) -> L:
    """Return the location of a name in a folder; it has the folder's type."""
    return folder / name  # type: ignore[return-value]


def local_path(directory: str | os.PathLike[str], *, purpose: str) -> Path:
    """Return a location that must be a local path.

    Args:
        directory: A local path.
        purpose: What it is for, to be named in the error.

    Raises:
        CheckpointError: It is a URL of a store.
    """
    location = location_of(directory)
    if isinstance(location, Path):
        return location
    raise CheckpointError.expected(
        f"a local path for {purpose}",
        "the URL of a store",
        where=f"'{location}'",
        hint="Give a local path, and copy the files with the store's own tool, such as aws s3 cp",
    )


def size_of(file: Location) -> int | None:
    """Return the size of a file in bytes; None if there is no such file.

    Raises:
        CheckpointError: The store does not answer.
    """
    if isinstance(file, StorePath):
        return file.nbytes()
    try:
        facts = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def is_folder(location: Location) -> bool:
    """Return whether a location is a folder; in a store, whether any object is below it.

    Raises:
        CheckpointError: The store does not answer.
    """
    return any(location.list_names()) if isinstance(location, StorePath) else location.is_dir()


def file_names(folder: Location) -> list[str]:
    """List the names of the files in a folder, in order; none if there is no such folder.

    Raises:
        CheckpointError: The store does not answer.
    """
    if isinstance(folder, StorePath):
        return folder.list_names()[0]
    try:
        return sorted(path.name for path in folder.iterdir() if path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []
