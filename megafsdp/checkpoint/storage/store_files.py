"""Objects of stores as files: read by ranges, written part by part.

Neither needs memory for a whole object. A written object appears when it is closed; its size in the
store is then checked.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from megafsdp.checkpoint.storage.store_errors import READ, store_errors
from megafsdp.errors import CheckpointError

# Size of a part of an upload: S3 takes 10,000 parts per file, so files may have 640 GB.
_PART_NBYTES = 1 << 26
# The most that one write adds to the buffered part.
_WRITE_NBYTES = 1 << 23
# Size of one read request; several run at a time.
_RANGE_NBYTES = 1 << 23
# The least that a request reads: fewer bytes take about as long.
_LEAST_NBYTES = 1 << 22


class StoreInput(io.RawIOBase):
    """An object that is read by ranges; the last block is kept, so small reads are few requests.

    Args:
        url: Its URL, for errors.
        fs: fsspec's file system.
        path: Its path there.
    """

    def __init__(self, url: str, fs: Any, path: str) -> None:
        super().__init__()
        self._url, self._fs, self._path = url, fs, path
        size = object_nbytes(url, fs, path)
        if size is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", url)
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
        """Move the position; no request to the store."""
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._nbytes}[whence]
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the object has bytes, and return their number."""
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
            # A long read is returned directly; a short one fetches a block for the next reads.
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
        with store_errors(self._url, READ, is_missing_wrong=True):
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
    """An object that is being written: it appears when it is closed, or never.

    Args:
        url: Its URL, for errors.
        fs: fsspec's file system.
        path: Its path there.
    """

    def __init__(self, url: str, fs: Any, path: str) -> None:
        super().__init__()
        self._url, self._fs, self._path, self._nbytes = url, fs, path, 0
        self._error: CheckpointError | None = None
        with self._errors():
            self._stream = fs.open(path, "wb", block_size=_PART_NBYTES)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the object, or discard it after an error."""
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # The base class's __del__ would complete the object.
        self.discard()

    def writable(self) -> bool:
        """Return that it is."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes, and return their number.

        Raises:
            CheckpointError: The store does not take them.
        """
        flat = memoryview(data).cast("B")
        with self._errors():
            # In pieces, as the driver copies each into the buffer of the part to be sent next.
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
        require_nbytes(self._url, self._fs, self._path, self._nbytes)

    def discard(self) -> None:
        """Discard the object and the parts of it that the store has; never fails."""
        if not self.closed:
            super().close()
            self._give_up()

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        # An archive that is written to this file writes its end even after an error.
        if self._error is not None:
            raise self._error
        try:
            with store_errors(self._url, "can be written to", is_missing_wrong=True):
                yield
        except CheckpointError as error:
            self._error = error
            io.RawIOBase.close(self)
            self._give_up()
            raise

    def _give_up(self) -> None:
        if (stream := getattr(self, "_stream", None)) is None:
            return
        # Whatever a driver raises here, the error before it is the one to report.
        with contextlib.suppress(Exception):
            stream.discard()
        # Otherwise its destructor would complete the object with what it has so far.
        with contextlib.suppress(Exception):
            stream.closed = True


def object_nbytes(url: str, fs: Any, path: str) -> int | None:
    """Return the size of an object; None if it is not there.

    Args:
        url: Its URL, for errors.
        fs: fsspec's file system.
        path: Its path there.

    Raises:
        CheckpointError: The store does not answer.
    """
    with store_errors(url, "answers"):
        # Do not rely on earlier listings.
        fs.invalidate_cache()
        try:
            facts = fs.info(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
    return int(facts["size"]) if facts["type"] == "file" else None


def require_nbytes(url: str, fs: Any, path: str, nbytes: int) -> None:
    """Check that a store has all bytes that it accepted; else a reader would notice much later.

    Args:
        url: The object's URL, for errors.
        fs: fsspec's file system.
        path: Its path there.
        nbytes: The size it was written with.

    Raises:
        CheckpointError: It does not have them, or does not answer.
    """
    found = object_nbytes(url, fs, path)
    if found != nbytes:
        raise CheckpointError.expected(
            f"an object of {nbytes} bytes",
            "no such object" if found is None else f"{found} bytes",
            where=f"'{url}', which was just written",
            hint="Try again; if it stays so, use a store that keeps what it takes",
        )
