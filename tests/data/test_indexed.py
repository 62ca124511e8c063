"""Reading .bin/.idx pairs: golden bytes, all dtypes, and every way a pair can be broken."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafsdp.data import IndexedDataset, indexed
from megafsdp.errors import DataError
from tests.data.files import write_dataset

_DOCUMENTS = [[1, 2, 3], [4], [5, 65499]]
# Magic, version, code 8, S = 3, D = 4, lengths, pointers, boundaries: 34 + 12 * 3 + 8 * 4 bytes.
_GOLDEN_INDEX = bytes.fromhex(
    "4d4d49444944580000 0100000000000000 08 0300000000000000 0400000000000000"
    "03000000 01000000 02000000"
    "0000000000000000 0600000000000000 0800000000000000"
    "0000000000000000 0100000000000000 0200000000000000 0300000000000000"
)
_GOLDEN_DATA = bytes.fromhex("0100 0200 0300 0400 0500 dbff")


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Return the prefix of a pair with the golden bytes."""
    (tmp_path / "corpus.v1.idx").write_bytes(_GOLDEN_INDEX)
    (tmp_path / "corpus.v1.bin").write_bytes(_GOLDEN_DATA)
    return tmp_path / "corpus.v1"


def test_golden_bytes_are_read(prefix: Path) -> None:
    """The 102-byte index of three uint16 documents gives the documents back."""
    assert len(_GOLDEN_INDEX) == 102
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == np.uint16
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (3, 3, 6)
    assert [dataset[i].tolist() for i in range(3)] == _DOCUMENTS
    assert dataset.document_boundaries.tolist() == [0, 1, 2, 3]
    assert dataset.slice_of(0, 1, 2).tolist() == [2, 3]
    assert dataset.sequence_modes is None


def test_golden_bytes_are_written(tmp_path: Path) -> None:
    """The writer produces the golden bytes, bit for bit."""
    write_dataset(tmp_path / "mine", _DOCUMENTS)
    assert (tmp_path / "mine.idx").read_bytes() == _GOLDEN_INDEX
    assert (tmp_path / "mine.bin").read_bytes() == _GOLDEN_DATA


def test_sequence_modes_are_read(prefix: Path) -> None:
    """One trailing byte a sequence, as multimodal tools write, is read as modes."""
    Path(f"{prefix}.idx").write_bytes(_GOLDEN_INDEX + bytes([0, 1, 0]))
    modes = IndexedDataset(prefix).sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 0]


def test_tokens_cannot_be_written(prefix: Path) -> None:
    """A view of the file is read-only."""
    with pytest.raises(ValueError, match="read-only"):
        IndexedDataset(prefix)[0][0] = 7


def test_pickling_sends_the_prefix_only(prefix: Path) -> None:
    """A dataset travels to another process as a short message and works there."""
    message = pickle.dumps(IndexedDataset(prefix))
    assert len(message) < 200 + len(str(prefix))
    assert pickle.loads(message)[2].tolist() == _DOCUMENTS[2]


@pytest.mark.parametrize("sequence", [-1, 3])
def test_sequence_out_of_range_is_an_index_error(prefix: Path, sequence: int) -> None:
    """Neither end wraps around."""
    with pytest.raises(IndexError, match="of 3"):
        IndexedDataset(prefix)[sequence]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_file_is_named(prefix: Path, suffix: str) -> None:
    """A missing half of the pair is an error that names the file and the way to write it."""
    Path(f"{prefix}{suffix}").unlink()
    with pytest.raises(DataError, match=rf"corpus\.v1\{suffix}'.*megafsdp prep"):
        IndexedDataset(prefix)


def _patched(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:offset] + value + index[offset + len(value) :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_patched(0, b"NUMPYX"), "magic bytes"),
        (_patched(9, b"\2"), "index version 1, got 2"),
        (_patched(17, b"\11"), "dtype code in .*, got 9"),
        (_patched(18, b"\4"), "for the 4 sequences of the header, got a file truncated at 102"),
        (_patched(24, b"\377"), "got a file truncated at 102"),
        (lambda index: index[:20], "a header of 34 bytes, got 20 bytes"),
        (lambda index: b"", "a header of 34 bytes, got 0 bytes"),
        (lambda index: index[:-1], "102 bytes .*, got a file truncated at 101 bytes"),
        (lambda index: index + b"\0", "102 bytes .*, got a file of 103 bytes"),
        (_patched(94, b"\2"), r"boundaries from 0 to 3, .*, got \(0, 2\)"),
        (_patched(70, b"\1"), r"boundaries from 0 to 3, .*, got \(1, 3\)"),
        (_patched(78, b"\3"), "ascending order"),
        (_patched(34, b"\2"), "byte pointer 4 of sequence 1, got 6"),
        (_patched(37, b"\200"), "byte pointer 0 of sequence 0, got 0 with length -"),
    ],
)
def test_broken_index_is_refused(
    prefix: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    """Each field of the index is checked, and the file is named."""
    path = Path(f"{prefix}.idx")
    path.write_bytes(change(_GOLDEN_INDEX))
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_GOLDEN_DATA[:-1], "12 bytes of tokens.*truncated at 11"),
        (b"", "truncated at 0"),
        (_GOLDEN_DATA * 2, "12 bytes of tokens.*a file of 24"),
    ],
)
def test_data_of_another_length_is_refused(prefix: Path, data: bytes, message: str) -> None:
    """The size of .bin must be what the index adds up to."""
    path = Path(f"{prefix}.bin")
    path.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        IndexedDataset(prefix)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("num_rows", [1, 2])
def test_sequences_are_checked_piece_by_piece(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """A piece of a long index goes on where the one before ended."""
    monkeypatch.setattr(indexed, "_PIECE_NUM_ROWS", num_rows)
    assert len(IndexedDataset(prefix)) == 3
    # The last pointer, one token too far.
    Path(f"{prefix}.idx").write_bytes(_patched(62, b"\12")(_GOLDEN_INDEX))
    with pytest.raises(DataError, match="byte pointer 8 of sequence 2, got 10"):
        IndexedDataset(prefix)


def test_index_without_boundaries_is_refused(prefix: Path) -> None:
    """Even an empty dataset has the boundary 0."""
    Path(f"{prefix}.idx").write_bytes(_patched(18, bytes(16))(_GOLDEN_INDEX[:34]))
    with pytest.raises(DataError, match=r"boundaries from 0 .*, got none"):
        IndexedDataset(prefix)


def test_a_fingerprint_is_of_tokens_all_over_the_file(tmp_path: Path) -> None:
    """Files of the same lengths that differ in one token, here or there, have others."""
    found = []
    for number, changed in enumerate((None, None, 0, 1100, 1999)):
        tokens = [[1] * 2000]
        if changed is not None:
            tokens[0][changed] = 2
        found.append(write_dataset(tmp_path / f"{number}", tokens).fingerprint())
    assert found[0] == found[1] and len(set(found)) == 4


def test_the_last_range_of_a_fingerprint_is_as_long_as_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the first four tokens and the last four."""
    monkeypatch.setattr(indexed, "_NUM_RANGES", 2)
    monkeypatch.setattr(indexed, "_RANGE_NUM_TOKENS", 4)
    found = []
    for changed in (None, 3, 4, 15, 16):
        tokens = [1] * 20
        if changed is not None:
            tokens[changed] = 2
        found.append(write_dataset(tmp_path / f"{changed}", [tokens]).fingerprint())
    assert [fingerprint == found[0] for fingerprint in found] == [True, False, True, True, False]
