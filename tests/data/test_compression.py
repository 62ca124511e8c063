"""Compressed files give what was compressed, to the last byte, or an error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import struct
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import zstandard

from megafsdp.data.compression import open_stream
from megafsdp.errors import ConfigError, DataError

# Words that repeat, of several buffers' length when decompressed.
CONTENT = " ".join(random.Random(0).choices(["one", "two", "drei", "vier"], k=100_000)).encode()
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zstd": zstandard.compress,
}


def _read(path: Path) -> bytes:
    with open_stream(path) as stream:
        return stream.lines.read()


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_content_comes_back(tmp_path: Path, kind: str) -> None:
    """Of one piece, of several behind each other as appending makes them, of none."""
    path, compress = tmp_path / "file", COMPRESSORS[kind]
    for pieces in ([CONTENT], [CONTENT[:7], b"", CONTENT[7:]], [b""]):
        path.write_bytes(b"".join(map(compress, pieces)))
        assert _read(path) == b"".join(pieces)
    path.write_bytes(CONTENT)
    assert _read(path) == CONTENT


def test_zstd_of_a_stream_of_unknown_length_is_read(tmp_path: Path) -> None:
    """Its frames say neither their size nor where they end."""
    path = tmp_path / "file"
    compressor = zstandard.ZstdCompressor()
    with path.open("wb") as file, compressor.stream_writer(file) as writer:
        for start in range(0, len(CONTENT), 1000):
            writer.write(CONTENT[start : start + 1000])
            writer.flush()
    assert _read(path) == CONTENT


def test_padding_between_streams_is_passed_over(tmp_path: Path) -> None:
    """Of xz in words of four zeros, as its format allows; gzip takes any number."""
    path = tmp_path / "file"
    for kind, num_zeros in (("xz", 4), ("xz", 1 << 17), ("gzip", 3)):
        pieces = [COMPRESSORS[kind](piece) for piece in (CONTENT[:7], CONTENT[7:])]
        path.write_bytes(b"".join(piece + bytes(num_zeros) for piece in pieces))
        assert _read(path) == CONTENT
    for rest in (b"", lzma.compress(CONTENT)):
        path.write_bytes(lzma.compress(CONTENT) + bytes(6) + rest)
        with pytest.raises(DataError, match=r"a whole xz file, got .*6 zeros"):
            _read(path)


@pytest.mark.parametrize("kind", COMPRESSORS)
@pytest.mark.parametrize("place", [0, 8])
def test_damage_behind_the_first_stream_is_an_error(tmp_path: Path, kind: str, place: int) -> None:
    """In the first bytes of the second, or in its header: what follows is not left out."""
    path, first = tmp_path / "file", COMPRESSORS[kind](CONTENT[:7])
    second = bytearray(COMPRESSORS[kind](CONTENT[7:]))
    second[place : place + 8] = b"\xff" * 8
    path.write_bytes(first + second)
    with pytest.raises(DataError, match=f"a whole {kind} file"):
        _read(path)


def test_zstd_that_begins_with_a_frame_to_be_skipped_is_read(tmp_path: Path) -> None:
    """The parallel pzstd writes one before each frame; sixteen beginnings are reserved for them."""
    path = tmp_path / "file"
    for number in (0x184D2A50, 0x184D2A5F):
        frame = struct.pack("<II4s", number, 4, b"size")
        pieces = map(zstandard.compress, (CONTENT[:7], CONTENT[7:]))
        path.write_bytes(b"".join(frame + piece for piece in pieces))
        assert _read(path) == CONTENT


@pytest.mark.parametrize("ending", ["bz2", "LZ4", "Z", "br", "gz", "xz", "zst"])
def test_a_name_that_promises_another_compression_is_refused(tmp_path: Path, ending: str) -> None:
    """Whatever the bytes are, UTF-8 too; the error is about the compression."""
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(bz2.compress(CONTENT))
    message = rf"compressed, got the ending \.{ending} and the first bytes b'BZh9.*{path}"
    with pytest.raises(DataError, match=message):
        _read(path)
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"the first bytes b''"):
        _read(path)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path, kind: str) -> None:
    """Wherever it is cut; the message names the file, the place and what to do."""
    path, whole = tmp_path / "file", COMPRESSORS[kind](CONTENT)
    for length in (12, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=rf"a whole {kind} file.*{path}.*Fetch or write"):
            _read(path)


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_a_damaged_file_is_an_error(tmp_path: Path, kind: str) -> None:
    """Bytes in the middle that are others."""
    data = bytearray(COMPRESSORS[kind](CONTENT))
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(range(64))
    path = tmp_path / "file"
    path.write_bytes(data)
    if kind == "zstd":
        # Without a checksum in the frame a change may decode; one that ends a frame early does not.
        data[6:12] = b"\xff" * 6
        path.write_bytes(data)
    with pytest.raises(DataError, match=f"a whole {kind} file"):
        _read(path)


def test_missing_package_of_zstd_is_said(tmp_path: Path) -> None:
    """The others need none."""
    for kind, compress in COMPRESSORS.items():
        (tmp_path / kind).write_bytes(compress(CONTENT))
    with mock.patch.dict(sys.modules, zstandard=None):
        assert _read(tmp_path / "gzip") == _read(tmp_path / "xz") == CONTENT
        with pytest.raises(ConfigError, match=r"zstandard.*zstd'.*pip install 'megafsdp\[zstd\]'"):
            _read(tmp_path / "zstd")


def test_a_few_bytes_of_xz_are_not_held_as_all_their_content(tmp_path: Path) -> None:
    """32 MB of one letter come in pieces."""
    path = tmp_path / "file"
    path.write_bytes(lzma.compress(b"a" * (32 << 20)))
    num_bytes = 0
    tracemalloc.start()
    try:
        with open_stream(path) as stream:
            while piece := stream.lines.read(1 << 16):
                num_bytes += piece.count(b"a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The dictionary takes 8 MB.
    assert num_bytes == 32 << 20 and peak < 16 << 20
