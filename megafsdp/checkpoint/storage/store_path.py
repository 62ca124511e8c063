"""One object or folder of a store, by fsspec: the verbs of pathlib that checkpoints need.

A store has no folders, no renames and no appending: an object appears when it is complete, and
replaces what had its name. A *folder* is a common beginning of names. Objects are read by ranges
and written part by part, so neither needs memory for a whole one. Listings are asked for anew each
time; nothing but cleaning up relies on them.

Errors of the store become :class:`CheckpointError`, which names the URL and what to do. Which
drivers there are, and where their credentials come from, is fsspec's business.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import IO, Any

from megafsdp.errors import CheckpointError

# Parts of an upload: S3 takes 10,000 a file, so files may have 640 GB.
_PART_NBYTES = 1 << 26
# What a write adds to the buffered part at most.
_WRITE_NBYTES = 1 << 23
# One request of a read, of which several run at a time.
_RANGE_NBYTES = 1 << 23
# Fewer bytes cost a request about as much time as these.
_LEAST_NBYTES = 1 << 22
_FULL = (errno.ENOSPC, errno.EDQUOT)


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
        # A driver has connections, which stay in their process.
        return StorePath, (self.url,)

    @property
    def name(self) -> str:
        """Return the last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> StorePath:
        """Return the folder in which it is."""
        return StorePath(self.url.rpartition("/")[0])

    def absolute(self) -> StorePath:
        """Return itself: a URL depends on no working directory."""
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
        fs, path = self._open_driver()
        with _store_errors(self, "answers"):
            fs.invalidate_cache()
            try:
                facts = fs.info(path)
            except (FileNotFoundError, NotADirectoryError):
                return None
        return int(facts["size"]) if facts["type"] == "file" else None

    def list_names(self) -> tuple[list[str], list[str]]:
        """List the names of the objects and of the folders in a folder, each in order.

        Raises:
            CheckpointError: The store does not answer.
        """
        fs, path = self._open_driver()
        with _store_errors(self, "can be listed"):
            fs.invalidate_cache()
            try:
                entries = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return [], []
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for entry in entries:
            full_name = entry["name"].rstrip("/")
            # Some stores list a folder in itself.
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
        with _store_errors(self, "can be read"):
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
        with _store_errors(self, "can be written to", is_missing_wrong=True):
            fs.pipe_file(path, data)
        _require_size(self, len(data))

    def write_text(self, text: str) -> None:
        """Write the object at once, as :meth:`write_bytes` does."""
        self.write_bytes(text.encode())

    def open(self, mode: str, buffering: int = -1) -> IO[bytes]:
        """Open the object.

        Args:
            mode: ``"rb"``, to read ranges, or ``"wb"``, to write part by part.
            buffering: Without effect: requests are as large as fits a store.

        Raises:
            CheckpointError: The store does not answer.
        """
        fs, path = self._open_driver()
        if mode == "rb":
            return StoreInput(self, fs, path)  # type: ignore[return-value]
        assert mode == "wb", "objects are read or written as bytes"
        return StoreOutput(self, fs, path)  # type: ignore[return-value]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects of a folder; those that are not there are no error.

        Raises:
            CheckpointError: The store does not remove them.
        """
        fs, path = self._open_driver()
        paths = [f"{path}/{name}" for name in names]
        with _store_errors(self, "lets objects be removed"):
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


class StoreInput(io.RawIOBase):
    """An object that is read by ranges; what was fetched last is kept, so small reads are few.

    Args:
        place: Its URL, for errors.
        fs: fsspec's file system.
        path: Its path there.
    """

    def __init__(self, place: StorePath, fs: Any, path: str) -> None:
        super().__init__()
        self._place, self._fs, self._path = place, fs, path
        size = place.nbytes()
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(place))
        self._nbytes = size
        self._position = 0
        self._block, self._block_offset = b"", 0

    def readable(self) -> bool:
        """Return that it is."""
        return True

    def seekable(self) -> bool:
        """Return that it is."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position; asks nothing of the store."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the object has bytes, and return how many these are."""
        target = memoryview(buffer).cast("B")
        data = self.read(target.nbytes)
        target[: len(data)] = data
        return len(data)

    def read(self, nbytes: int = -1) -> bytes:
        """Return the next bytes, fewer at the end of the object.

        Raises:
            CheckpointError: The store does not answer.
        """
        left = max(0, self._nbytes - self._position)
        count = left if nbytes is None or nbytes < 0 else min(nbytes, left)
        start = self._position - self._block_offset
        if not 0 <= start <= start + count <= len(self._block):
            # A long read is returned as it is; of a short one the rest serves the next.
            if count > _RANGE_NBYTES:
                self._position += count
                return self._fetch(self._position - count, count)
            self._block = self._fetch(self._position, min(left, max(count, _LEAST_NBYTES)))
            self._block_offset, start = self._position, 0
        self._position += count
        return self._block[start : start + count]

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        starts = list(range(offset, offset + nbytes, _RANGE_NBYTES))
        ends = [min(start + _RANGE_NBYTES, offset + nbytes) for start in starts]
        with _store_errors(self._place, "can be read", is_missing_wrong=True):
            if len(starts) == 1:
                found = [self._fs.cat_file(self._path, start=starts[0], end=ends[0])]
            else:
                found = self._fs.cat_ranges([self._path] * len(starts), starts, ends)
            for piece in found:
                if isinstance(piece, Exception):
                    raise piece
            data = found[0] if len(found) == 1 else b"".join(found)
            if len(data) != nbytes:
                raise OSError(errno.EIO, f"{len(data)} of {nbytes} bytes from {offset} came")
        return data


class StoreOutput(io.RawIOBase):
    """An object in the making: it appears when it is closed, or never.

    Args:
        place: Its URL, for errors.
        fs: fsspec's file system.
        path: Its path there.
    """

    def __init__(self, place: StorePath, fs: Any, path: str) -> None:
        super().__init__()
        self._place, self._nbytes = place, 0
        with self._errors():
            self._stream = fs.open(path, "wb", block_size=_PART_NBYTES)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the object, or give it up after an error."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # That of the base class would complete the object.
        self.discard()

    def writable(self) -> bool:
        """Return that it is."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes, and return how many they are.

        Raises:
            CheckpointError: The store does not take them.
        """
        flat = memoryview(data).cast("B")
        with self._errors():
            # The driver copies what it gets to the part that it sends next, hence in pieces.
            for start in range(0, flat.nbytes, _WRITE_NBYTES):
                self._stream.write(flat[start : start + _WRITE_NBYTES])
        self._nbytes += flat.nbytes
        return flat.nbytes

    def close(self) -> None:
        """Complete the object.

        Raises:
            CheckpointError: The store does not take it; the object is not there.
        """
        if self.closed:
            return
        super().close()
        with self._errors():
            self._stream.close()
        _require_size(self._place, self._nbytes)

    def discard(self) -> None:
        """Give the object up, and the parts of it that the store has; never fails."""
        if not self.closed:
            super().close()
            self._give_up()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with _store_errors(self._place, "can be written to", is_missing_wrong=True):
            try:
                yield
            except Exception:
                io.RawIOBase.close(self)
                self._give_up()
                raise

    def _give_up(self) -> None:
        if (stream := getattr(self, "_stream", None)) is None:
            return
        # Whatever a driver raises here, the error before it is the one to report.
        with contextlib.suppress(Exception):
            stream.discard()
        # Otherwise the end of its life would complete the object with what is there.
        with contextlib.suppress(Exception):
            stream.closed = True


def _require_size(place: StorePath, nbytes: int) -> None:
    """Check that a store has what it said it took; a reader would find less much later.

    Raises:
        CheckpointError: It has not, or does not answer.
    """
    found = place.nbytes()
    if found != nbytes:
        raise CheckpointError.expected(
            f"an object of {nbytes} bytes",
            "no such object" if found is None else f"{found} bytes",
            where=f"'{place}', which was just written",
            hint="Try again; if it stays so, use a store that keeps what it takes",
        )


def _driver_of(url: str) -> tuple[Any, str]:
    # Its drivers are of stores alone, which few programs use.
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
        raise _as_checkpoint_error(error, url, "can be opened") from error
    return fs, path


@contextlib.contextmanager
def _store_errors(place: StorePath, verb: str, *, is_missing_wrong: bool = False) -> Iterator[None]:
    """Raise a store's errors as ours.

    Args:
        place: What was asked for.
        verb: What it should have done, such as ``"can be read"``.
        is_missing_wrong: Whether a missing object or bucket is such an error too.
    """
    try:
        yield
    except FileNotFoundError as error:
        if not is_missing_wrong:
            raise
        raise _as_checkpoint_error(error, place.url, verb) from error
    except CheckpointError:
        raise
    except Exception as error:
        # Drivers let errors of their libraries through, which have no common class.
        raise _as_checkpoint_error(error, place.url, verb) from error


def _as_checkpoint_error(error: Exception, url: str, verb: str) -> CheckpointError:
    number = error.errno if isinstance(error, OSError) else None
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, PermissionError) or "credential" in text.lower():
        hint = "Give this user the rights to list, read, write and remove objects there"
    elif number in _FULL or "quota" in text.lower():
        hint = "Make room in the store or raise its quota; what was published before stays"
    elif isinstance(error, FileNotFoundError):
        hint = "Make the bucket first, or correct the URL"
    else:
        hint = "Try again when the store answers; what was published before stays"
    return CheckpointError.expected(f"a store that {verb}", text[:400], where=f"'{url}'", hint=hint)
