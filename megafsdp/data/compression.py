"""Compressed files as streams of bytes: gzip and xz by Python, zstd by an optional package.

A file is known by its first bytes, not by its name; a name that promises a compression which the
file does not have is refused. Damaged or truncated files raise, in the middle of a stream and also
between two streams: a corpus never ends early without an error.
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
from typing import TYPE_CHECKING, Any, BinaryIO

from megafsdp.errors import ConfigError, DataError, expected

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Endings that say nothing about the content.
COMPRESSION_SUFFIXES = (".gz", ".xz", ".zst")
# Endings of compressions and archives that are not supported.
_FOREIGN_SUFFIXES = (".7z", ".br", ".bz2", ".lz", ".lz4", ".lzma", ".lzo", ".rar", ".z", ".zip")
_CHUNK_NBYTES = 1 << 16
# Zeros may stand between the streams of an xz file and behind the last, in units of this size.
_XZ_PADDING_NBYTES = 4


@dataclass(frozen=True, slots=True)
class ByteStream:
    """A file being read.

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
        DataError: The name ends like a compressed file's, but the content is of no supported kind.
            Inside of the context: the file is damaged or cut short.
    """
    with path.open("rb") as file, contextlib.ExitStack() as opened:
        start = file.peek()
        kind = next((name for magic, name in _KINDS.items() if start.startswith(magic)), None)
        if kind is None:
            _require_plain_name(path, start)
            yield ByteStream(file, file.tell)
            return
        lines = opened.enter_context(_OPENERS[kind](file, path))
        try:
            yield ByteStream(lines, file.tell)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                expected(
                    f"a whole {kind} file",
                    f"{type(error).__name__}: {error}",
                    where=f"file '{path}' at byte {file.tell():,} of {path.stat().st_size:,}",
                    hint="Fetch or write the file again, or take it out of the inputs",
                )
            ) from error


def _require_plain_name(path: Path, start: bytes) -> None:
    """Refuse a name that ends like a compressed file's: its bytes are not text to learn."""
    if path.suffix.lower() in (*COMPRESSION_SUFFIXES, *_FOREIGN_SUFFIXES):
        raise DataError(
            expected(
                "text, or a file that gzip, xz or zstd has compressed",
                f"the ending {path.suffix} and the first bytes {start[:6]!r}",
                where=f"file '{path}'",
                hint="Decompress it, or fetch it again; if it is text, take the ending off its"
                " name",
            )
        )


def without_compression_suffix(name: str) -> str:
    """Return a file's name without the ending of a compression: ``a.jsonl`` for ``a.jsonl.gz``."""
    for suffix in COMPRESSION_SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)]
    return name


class _StreamsFile(io.RawIOBase):
    """The content of a file of compressed streams, one after the other.

    The packages' own readers end without an error if a frame of zstd is cut short, or if damage
    follows a stream of xz.

    Args:
        file: The compressed file.
        new_stream: Returns what decompresses the next stream: an object of lzma's or zstandard's.
        broken: The error that this raises.
        padding_nbytes: Size of the units of zeros that may stand between streams; 0 for none.
        limits: Keywords of ``decompress``: how much it may return for one input.
    """

    def __init__(
        self,
        file: BinaryIO,
        new_stream: Callable[[], Any],
        broken: type[Exception],
        *,
        padding_nbytes: int = 0,
        **limits: int,
    ) -> None:
        self._file = file
        self._new_stream = new_stream
        self._broken = broken
        self._padding_nbytes = padding_nbytes
        self._limits = limits
        self._num_zeros = 0
        # None between two streams.
        self._stream: Any = None
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer as far as there is content; 0 at the end of the file."""
        while not self._content:
            # A decompressor with a limit may have more content of its last input.
            if self._stream is None or getattr(self._stream, "needs_input", True):
                self._compressed = self._compressed or self._file.read(_CHUNK_NBYTES)
                if not self._compressed:
                    if self._stream is not None:
                        raise EOFError("the last stream is cut short")
                    self._end_padding()
                    return 0
            self._decompress()
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._content))
        target[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _decompress(self) -> None:
        if self._stream is None:
            if self._padding_nbytes:
                rest = self._compressed.lstrip(b"\0")
                self._num_zeros += len(self._compressed) - len(rest)
                self._compressed = rest
                if not rest:
                    return
            self._end_padding()
            self._stream = self._new_stream()
        try:
            content = self._stream.decompress(self._compressed, **self._limits)
            self._content = memoryview(content)
        except self._broken as error:
            raise EOFError(f"{error}") from error
        self._compressed = self._stream.unused_data
        if self._stream.eof:
            self._stream = None

    def _end_padding(self) -> None:
        if self._num_zeros and self._num_zeros % self._padding_nbytes:
            what = f"{self._num_zeros} zeros behind a stream, no multiple of {self._padding_nbytes}"
            raise EOFError(what)
        self._num_zeros = 0


def _open_xz(file: BinaryIO, _: Path) -> io.BufferedReader:
    streams = _StreamsFile(
        file,
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
        lzma.LZMAError,
        padding_nbytes=_XZ_PADDING_NBYTES,
        # A few bytes of xz may stand for gigabytes.
        max_length=_CHUNK_NBYTES,
    )
    return io.BufferedReader(streams, _CHUNK_NBYTES)


def _open_zstd(file: BinaryIO, path: Path) -> io.BufferedReader:
    try:
        import zstandard
    except ImportError as error:
        what = "the package zstandard, which reads zstd files"
        hint = "Run `pip install 'megafsdp[zstd]'`, or decompress the file first"
        raise ConfigError(expected(what, error, where=f"file '{path}'", hint=hint)) from error
    new_stream = zstandard.ZstdDecompressor().decompressobj
    streams = _StreamsFile(file, new_stream, zstandard.ZstdError)
    return io.BufferedReader(streams, _CHUNK_NBYTES)


# First bytes of the files, with which no text begins. pzstd writes a frame to be skipped first, and
# such frames have sixteen possible beginnings.
_KINDS = {
    **{b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"},
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},
}
_OPENERS: dict[str, Callable[[BinaryIO, Path], io.BufferedIOBase]] = {
    "gzip": lambda file, _: gzip.GzipFile(fileobj=file),
    "xz": _open_xz,
    "zstd": _open_zstd,
}
