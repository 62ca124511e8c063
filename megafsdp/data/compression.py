"""Compressed files as streams of bytes: gzip and xz by Python, zstd by an optional package.

A file is known by its first bytes, not by its name. What is cut short or damaged raises, in the
middle of a stream too: a corpus never ends early without a word.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from megafsdp.errors import ConfigError, DataError, expected

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Endings that say nothing of what is inside.
COMPRESSION_SUFFIXES = (".gz", ".xz", ".zst")
_CHUNK_NBYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class ByteStream:
    """A file that is read.

    Attributes:
        lines: Its bytes, decompressed.
        position: Returns how many bytes of the file itself were read.
    """

    lines: io.BufferedIOBase
    position: Callable[[], int]


@contextlib.contextmanager
def open_stream(path: Path) -> Iterator[ByteStream]:
    """Open a file, compressed or not; local.

    Args:
        path: The file.

    Raises:
        ConfigError: The file is zstd's and the package zstandard is not installed.
        DataError: Inside of the context: what is read is damaged or cut short.
    """
    with path.open("rb") as file, contextlib.ExitStack() as opened:
        start = file.peek()
        kind = next((name for magic, name in _KINDS.items() if start.startswith(magic)), None)
        if kind is None:
            yield ByteStream(file, file.tell)
            return
        lines = opened.enter_context(_OPENERS[kind](file, path))
        try:
            yield ByteStream(lines, file.tell)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise DataError(
                expected(
                    f"a whole {kind} file",
                    f"{type(error).__name__}: {error}",
                    where=f"file '{path}' at byte {file.tell():,} of {path.stat().st_size:,}",
                    hint="Fetch or write the file again, or take it out of the inputs",
                )
            ) from error


def without_compression_suffix(name: str) -> str:
    """Return a file's name without the ending of a compression: ``a.jsonl`` for ``a.jsonl.gz``."""
    for suffix in COMPRESSION_SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


class _ZstdFile(io.RawIOBase):
    """The content of a zstd file, frame by frame.

    The package's own stream ends without an error where a frame is cut short.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            what = "the package zstandard, which reads zstd files"
            hint = "Run `pip install 'megafsdp[zstd]'`, or decompress the file first"
            raise ConfigError(expected(what, error, where=f"file '{path}'", hint=hint)) from error
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._broken = zstandard.ZstdError
        self._frame = self._decompressor.decompressobj()
        self._is_inside = False
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer as far as there is content; 0 at the end of the file."""
        while not self._content:
            self._compressed = self._compressed or self._file.read(_CHUNK_NBYTES)
            if not self._compressed:
                if self._is_inside:
                    raise EOFError("the last frame is cut short")
                return 0
            self._decompress()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._content))
        target[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self) -> None:
        if not self._is_inside:
            self._frame = self._decompressor.decompressobj()
        try:
            self._content = memoryview(self._frame.decompress(self._compressed))
        except self._broken as error:
            raise EOFError(f"{error}") from error
        self._is_inside = not self._frame.eof
        self._compressed = self._frame.unused_data


def _open_zstd(file: BinaryIO, path: Path) -> io.BufferedReader:
    return io.BufferedReader(_ZstdFile(file, path), _CHUNK_NBYTES)


# What the files begin with, which no UTF-8 text does.
_KINDS = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_OPENERS: dict[str, Callable[[BinaryIO, Path], io.BufferedIOBase]] = {
    "gzip": lambda file, _: gzip.GzipFile(fileobj=file),
    "xz": lambda file, _: lzma.open(file),  # noqa: SIM115 (closed by whoever opens)
    "zstd": _open_zstd,
}
