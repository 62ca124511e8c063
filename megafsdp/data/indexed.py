"""Megatron's indexed token files: the byte format and a memory-mapped reader.

A dataset is a pair of files with one prefix. ``<prefix>.bin`` holds the tokens of all sequences
back to back, without a header. ``<prefix>.idx`` says what they are (little-endian, S sequences, D
document boundaries)::

    offset  0        9        17       18   26   34       34+4S     34+12S
    field   MMIDIDX  version  dtype    S    D    lengths  pointers  boundaries  [modes]
    type    9 bytes  u64 = 1  u8 code  u64  u64  i32 x S  i64 x S   i64 x D     i8 x S

Modes are written by multimodal tools only. A pointer is the byte offset of a sequence in ``.bin``;
document d is the sequences from boundary d to boundary d+1, so the first boundary is 0 and the last
is S. Files are written by ``megafsdp.data.indexed_writer``; which tokens make a training sample is
computed in ``megafsdp.data.sample_index``.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafsdp.data.index_cache import lengths_digest
from megafsdp.errors import DataError, expected

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
CODE_TO_DTYPE: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_PIECE_NUM_ROWS = 1 << 20
# Ranges of tokens that stand for all of a file in its fingerprint.
_NUM_RANGES, _RANGE_NUM_TOKENS = 64, 512
_NOT_AN_INDEX = "Give the prefix of a .bin/.idx pair that `megafsdp prep` or Megatron-LM wrote"
_COPY_AGAIN = "Copy the .bin and the .idx file again as a pair, or prepare the data again"

TokenArray = NDArray[np.generic]


class IndexedDataset:
    """Read the sequences of one ``.bin``/``.idx`` pair through memory maps.

    The files are validated once, here, against each other. Nothing is copied: arrays are read-only
    views of the page cache, which all ranks of a node share. Pickling sends the prefix, not the
    tokens.

    Args:
        prefix: Path of the pair without ``.bin`` and ``.idx``.

    Attributes:
        prefix: The prefix, as text.
        dtype: Token dtype, as the index file states it.
        sequence_lengths: (S,) int32, in tokens.
        sequence_pointers: (S,) int64, in bytes.
        document_boundaries: (D,) int64, in sequences.
        sequence_modes: (S,) int8 of multimodal files, else None.

    Raises:
        DataError: A file is missing, or not what its header says.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        index = _map(self.index_path, self.prefix)
        num_sequences, num_boundaries = self._read_header(index)
        sizes = [4 * num_sequences, 8 * num_sequences, 8 * num_boundaries]
        self._check_index_nbytes(len(index), num_sequences, HEADER.size + sum(sizes))
        lengths, pointers, boundaries, modes = np.split(index[HEADER.size :], np.cumsum(sizes))
        self.sequence_lengths: NDArray[np.int32] = lengths.view("<i4")
        self.sequence_pointers: NDArray[np.int64] = pointers.view("<i8")
        self.document_boundaries: NDArray[np.int64] = boundaries.view("<i8")
        self.sequence_modes: NDArray[np.int8] | None = modes.view("i1") if modes.size else None
        self._check_boundaries()
        tokens = _map(self.data_path, self.prefix)
        self._check_sequences(tokens.size)
        self.tokens: TokenArray = tokens.view(self.dtype)

    @property
    def index_path(self) -> Path:
        """Return the path of the ``.idx`` file."""
        return Path(self.prefix + ".idx")

    @property
    def data_path(self) -> Path:
        """Return the path of the ``.bin`` file."""
        return Path(self.prefix + ".bin")

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.document_boundaries) - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sequences."""
        return self.tokens.size

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> TokenArray:
        """Return all tokens of one sequence, as a read-only view."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)} in '{self.prefix}'")
        return self.slice_of(sequence, 0, int(self.sequence_lengths[sequence]))

    def slice_of(self, sequence: int, token_offset: int, num_tokens: int) -> TokenArray:
        """Return a part of one sequence, as a read-only view; the range must lie inside it."""
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize + token_offset
        return self.tokens[start : start + num_tokens]

    def fingerprint(self) -> str:
        """Return text that all copies of a file share: figures and two hashes.

        One hash is of the lengths of all sequences, one of 64 evenly spaced ranges of 512 tokens.
        Files that differ only between these ranges have the same fingerprint.
        """
        last_start = max(self.num_tokens - _RANGE_NUM_TOKENS, 0)
        sampled = hashlib.sha256()
        for start in np.linspace(0, last_start, _NUM_RANGES, dtype=np.int64).tolist():
            sampled.update(self.tokens[start : start + _RANGE_NUM_TOKENS].tobytes())
        return (
            f"{len(self):,} sequences {lengths_digest(self.sequence_lengths)[:16]},"
            f" {self.num_tokens:,} tokens {sampled.hexdigest()[:16]}"
        )

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        """Pickle as the prefix; the receiver maps the files again."""
        return IndexedDataset, (self.prefix,)

    def _read_header(self, index: NDArray[np.uint8]) -> tuple[int, int]:
        header = index[: HEADER.size].tobytes()
        if len(header) < HEADER.size:
            raise self._error(f"a header of {HEADER.size} bytes", f"{len(header)} bytes")
        magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        if magic != MAGIC:
            raise self._error(f"the magic bytes {MAGIC!r}", repr(magic), hint=_NOT_AN_INDEX)
        if version != VERSION:
            raise self._error(f"index version {VERSION}", version, hint=_NOT_AN_INDEX)
        if code not in CODE_TO_DTYPE:
            raise self._error(f"a dtype code in {sorted(CODE_TO_DTYPE)}", code)
        self.dtype: np.dtype[np.generic] = CODE_TO_DTYPE[code]
        return num_sequences, num_boundaries

    def _check_index_nbytes(self, nbytes: int, num_sequences: int, wanted: int) -> None:
        if nbytes not in (wanted, wanted + num_sequences):
            state = "truncated at" if nbytes < wanted else "of"
            what = f"{wanted} bytes for the {num_sequences} sequences of the header"
            raise self._error(what, f"a file {state} {nbytes} bytes")

    def _check_boundaries(self) -> None:
        boundaries = self.document_boundaries
        ends = (int(boundaries[0]), int(boundaries[-1])) if len(boundaries) else ()
        if ends != (0, len(self)):
            what = f"document boundaries from 0 to {len(self)}, the number of sequences"
            raise self._error(what, f"{ends or 'none'}")
        if (boundaries[1:] < boundaries[:-1]).any():
            raise self._error("document boundaries in ascending order", "a descent")

    def _check_sequences(self, data_nbytes: int) -> None:
        end = 0
        for start in range(0, len(self), _PIECE_NUM_ROWS):
            lengths = self.sequence_lengths[start : start + _PIECE_NUM_ROWS].astype(np.int64)
            ends = end + np.cumsum(lengths * self.dtype.itemsize)
            starts = np.concatenate(([end], ends[:-1]))
            is_wrong = (self.sequence_pointers[start : start + _PIECE_NUM_ROWS] != starts) | (
                lengths < 0
            )
            if is_wrong.any():
                row = start + int(is_wrong.argmax())
                found = f"{self.sequence_pointers[row]} with length {self.sequence_lengths[row]}"
                raise self._error(
                    f"the byte pointer {starts[row - start]} of sequence {row}", found
                )
            end = int(ends[-1])
        if data_nbytes != end:
            state = "truncated at" if data_nbytes < end else "of"
            what = f"the {end} bytes of tokens that '{self.index_path}' lists"
            raise self._error(what, f"a file {state} {data_nbytes} bytes", path=self.data_path)

    def _error(
        self, what: str, got: object, *, path: Path | None = None, hint: str | None = None
    ) -> DataError:
        where = f"file '{path or self.index_path}'"
        return DataError(expected(what, got, where=where, hint=hint or _COPY_AGAIN))


def _map(path: Path, prefix: str) -> NDArray[np.uint8]:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, dtype=np.uint8)
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise DataError(
            expected(
                "a readable data file",
                error.strerror,
                where=f"file '{path}'",
                hint=f"Check the prefix '{prefix}' (a path without .bin and .idx), or write the"
                " files with `megafsdp prep`",
            )
        ) from error
    return np.frombuffer(pages, dtype=np.uint8)
