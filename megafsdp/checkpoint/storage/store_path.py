"""One object or folder of a store, through fsspec: the pathlib methods that checkpoints need.

A store has no folders, no renames and no appending: an object appears when it is complete, and
replaces the object of the same name. A *folder* is a common prefix of names. Listings are fetched
anew each time; only cleaning up relies on them.

store_files.py reads and writes objects in pieces, store_errors.py converts errors. fsspec decides
which drivers there are and where their credentials come from.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import IO, Any

from megafsdp.checkpoint.storage.store_errors import READ, as_checkpoint_error, store_errors
from megafsdp.checkpoint.storage.store_files import (
    StoreInput,
    StoreOutput,
    object_nbytes,
    require_nbytes,
)
from megafsdp.errors import CheckpointError


class StorePath(os.PathLike[str]):
    """The URL of an object or folder in a store.

    Args:
        url: As fsspec takes it, such as ``s3://bucket/run``.
    """

    __slots__ = ("_driver", "url")

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._driver: tuple[int, Any, str] | None = None

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"StorePath({self.url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self.url}/{name}")

    def __reduce__(self) -> tuple[type[StorePath], tuple[str]]:
        # Without the driver: its connections belong to this process.
        return StorePath, (self.url,)

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """Return the folder that contains it."""
        return StorePath(self.url.rpartition("/")[0])

    def absolute(self) -> StorePath:
        """Return itself: a URL does not depend on the working directory."""
        return self

    def is_file(self) -> bool:
        """Return whether the object is there.

        Raises:
            CheckpointError: The store does not answer.
        """
        return self.nbytes() is not None

    def nbytes(self) -> int | None:
        """Return the size of the object; None if it is not there.

        Raises:
            CheckpointError: The store does not answer.
        """
        return object_nbytes(self.url, *self._open_driver())

    def list_names(self) -> tuple[list[str], list[str]]:
        """List the names of the objects and of the folders in a folder, each in order.

        Raises:
            CheckpointError: The store does not answer.
        """
        fs, path = self._open_driver()
        with store_errors(self.url, "can be listed"):
            fs.invalidate_cache()
            try:
                entries = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return [], []
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for entry in entries:
            full_name = entry["name"].rstrip("/")
            # Some stores list a folder as an entry of itself.
            if full_name != path.rstrip("/"):
                names[entry["type"] == "file"].add(full_name.rpartition("/")[2])
        return sorted(names[True]), sorted(names[False])

    def read_bytes(self) -> bytes:
        """Return the object's bytes.

        Raises:
            FileNotFoundError: It is not there.
            CheckpointError: The store does not answer.
        """
        fs, path = self._open_driver()
        with store_errors(self.url, READ):
            return fs.cat_file(path)

    def read_text(self, *, errors: str = "strict") -> str:
        """Return the object's text, as :meth:`read_bytes` does."""
        return self.read_bytes().decode(errors=errors)

    def write_bytes(self, data: bytes) -> None:
        """Write the object at once.

        Raises:
            CheckpointError: The store does not take it.
        """
        fs, path = self._open_driver()
        with store_errors(self.url, "can be written to", is_missing_wrong=True):
            fs.pipe_file(path, data)
        require_nbytes(self.url, fs, path, len(data))

    def write_text(self, text: str) -> None:
        """Write the object at once, as :meth:`write_bytes` does."""
        self.write_bytes(text.encode())

    def open(self, mode: str, buffering: int = -1) -> IO[bytes]:
        """Open the object.

        Args:
            mode: ``"rb"``, to read ranges, or ``"wb"``, to write part by part.
            buffering: Has no effect; the size of requests is chosen for stores.

        Raises:
            CheckpointError: The store does not answer.
        """
        fs, path = self._open_driver()
        if mode == "rb":
            return StoreInput(self.url, fs, path)  # type: ignore[return-value]
        assert mode == "wb", "objects are read or written as bytes"
        return StoreOutput(self.url, fs, path)  # type: ignore[return-value]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects of a folder; missing ones are no error.

        Raises:
            CheckpointError: The store does not remove them.
        """
        fs, path = self._open_driver()
        paths = [f"{path}/{name}" for name in names]
        with store_errors(self.url, "lets objects be removed"):
            if not paths:
                return
            try:
                fs.rm(paths)
            except FileNotFoundError:
                for one in paths:
                    with contextlib.suppress(FileNotFoundError):
                        fs.rm_file(one)

    def _open_driver(self) -> tuple[Any, str]:
        """Return fsspec's file system and the path in it.

        Raises:
            CheckpointError: There is no driver for such a URL, or its package is not installed.
        """
        # The connections of a driver do not survive a fork.
        if self._driver is None or self._driver[0] != os.getpid():
            self._driver = (os.getpid(), *_driver_of(self.url))
        return self._driver[1:]


def _driver_of(url: str) -> tuple[Any, str]:
    # Imported here, as few programs use a store.
    import fsspec.core

    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise CheckpointError.expected(
            f"the package that opens {url.partition('://')[0]}:// URLs",
            f"{type(error).__name__}: {error}",
            where=f"'{url}'",
            hint="Install it: megafsdp[objects] brings s3fs for s3://, gs:// needs gcsfs",
        ) from error
    except ValueError as error:
        raise CheckpointError.expected(
            "a URL of a kind that fsspec knows, such as s3:// or gs://",
            f"{type(error).__name__}: {error}",
            where=f"'{url}'",
            hint="Correct the URL, give a local path, or install the package that registers it",
        ) from error
    except Exception as error:
        raise as_checkpoint_error(error, url, "can be opened") from error
    return fs, path
