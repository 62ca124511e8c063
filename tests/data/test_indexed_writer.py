"""Writing and merging .bin/.idx pairs: round trips, atomic publication, refusals."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megafsdp.data import (
    IndexedDataset,
    IndexedDatasetWriter,
    indexed_writer,
    merge,
    token_dtype,
)
from megafsdp.errors import DataError
from tests.data.files import read_with_struct, write_dataset

_NAMES = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]


def _listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", _NAMES)
def test_every_dtype_makes_the_round_trip(tmp_path: Path, dtype: str) -> None:
    """What is written in any of the eight dtypes is read back in it, by us and by struct."""
    documents = [[0, 1, 127], [], [5]]
    dataset = write_dataset(tmp_path / "set", documents, dtype)
    assert dataset.dtype == np.dtype(dtype)
    assert [dataset[i].tolist() for i in range(3)] == documents
    assert read_with_struct(tmp_path / "set") == (documents, [0, 1, 2, 3])


@given(documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=4)))
def test_documents_of_several_sequences_make_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    """Sequences and boundaries come back whatever is empty."""
    prefix = tmp_path_factory.mktemp("writer") / "set"
    with IndexedDatasetWriter(prefix) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()
    sequences = [sequence for document in documents for sequence in document]
    boundaries = np.cumsum([0, *map(len, documents)]).tolist()
    assert read_with_struct(prefix) == (sequences, boundaries)
    dataset = IndexedDataset(prefix)
    assert [dataset[i].tolist() for i in range(len(dataset))] == sequences
    assert dataset.document_boundaries.tolist() == boundaries


def test_open_document_is_ended_by_close(tmp_path: Path) -> None:
    """Sequences after the last end_document() are not lost."""
    writer = IndexedDatasetWriter(tmp_path / "set")
    writer.add_document([1])
    writer.add_sequence([2])
    writer.add_sequence([3])
    writer.close()
    assert read_with_struct(tmp_path / "set") == ([[1], [2], [3]], [0, 1, 3])


def test_failing_block_leaves_the_older_pair(tmp_path: Path) -> None:
    """An error while writing publishes nothing and leaves no temporary file."""
    write_dataset(tmp_path / "set", [[1, 2]])
    with pytest.raises(KeyError), IndexedDatasetWriter(tmp_path / "set") as writer:
        writer.add_document([9, 9, 9])
        raise KeyError
    assert _listing(tmp_path) == ["set.bin", "set.idx"]
    assert IndexedDataset(tmp_path / "set")[0].tolist() == [1, 2]


def test_old_index_never_meets_new_tokens(tmp_path: Path) -> None:
    """When the second rename fails there is no index, rather than one of other tokens."""
    write_dataset(tmp_path / "set", [[1, 2]])
    rename = os.replace

    def failing(source: str, target: str) -> None:
        if target.endswith(".idx"):
            raise OSError("disk full")
        rename(source, target)

    with (
        mock.patch("megafsdp.data.indexed_writer.os.replace", failing),
        pytest.raises(DataError, match=r"files that can be written, got OSError: disk full.*set'"),
        IndexedDatasetWriter(tmp_path / "set") as writer,
    ):
        writer.add_document([3, 4])
    assert _listing(tmp_path) == ["set.bin"]


def test_a_full_disk_is_an_error_that_leaves_nothing(tmp_path: Path) -> None:
    """What is in the buffer cannot be written by the end either; the older pair stays."""
    write_dataset(tmp_path / "set", [[1, 2]])
    with (
        pytest.raises(DataError, match=r"got OSError.*No space left on device.*set'.*Make room"),
        IndexedDatasetWriter(tmp_path / "set") as writer,
    ):
        writer._file.close()
        # Each write to this device finds it full.
        writer._file = open("/dev/full", "wb")  # noqa: SIM115 (closed by the writer)
        writer.add_document([3, 4])
    assert _listing(tmp_path) == ["set.bin", "set.idx"]
    assert IndexedDataset(tmp_path / "set")[0].tolist() == [1, 2]


def test_nothing_is_visible_before_close(tmp_path: Path) -> None:
    """Readers do not find a pair that is still written; afterwards only the pair is there."""
    with IndexedDatasetWriter(tmp_path / "deep" / "set") as writer:
        writer.add_document([1])
        with pytest.raises(DataError, match=r"set\.idx"):
            IndexedDataset(tmp_path / "deep" / "set")
    assert _listing(tmp_path / "deep") == ["set.bin", "set.idx"]


@pytest.mark.parametrize("token", [-1, 65536])
def test_token_that_does_not_fit_is_refused(tmp_path: Path, token: int) -> None:
    """A token never wraps around in the file's dtype."""
    with (
        pytest.raises(DataError, match=f"fit uint16, got token {token}"),
        IndexedDatasetWriter(tmp_path / "set") as writer,
    ):
        writer.add_document([1, token])


def test_dtype_without_a_code_is_refused(tmp_path: Path) -> None:
    """The format cannot say uint32."""
    with pytest.raises(DataError, match=r"one of the dtypes uint8.*got uint32"):
        IndexedDatasetWriter(tmp_path / "set", "u4")
    assert _listing(tmp_path) == []


@pytest.mark.parametrize(("vocab_size", "name"), [(65499, "uint16"), (65500, "int32")])
def test_dtype_by_vocabulary(vocab_size: int, name: str) -> None:
    """The bound is the one of Megatron's writer."""
    assert token_dtype(vocab_size).name == name


def test_merge_equals_writing_all_at_once(tmp_path: Path) -> None:
    """The merged pair has the bytes of one pair written from all documents."""
    first, second = [[1, 2], [], [3]], [[4, 5, 6]]
    write_dataset(tmp_path / "a", first)
    write_dataset(tmp_path / "b", second)
    write_dataset(tmp_path / "empty", [])
    write_dataset(tmp_path / "whole", first + second)
    merge([tmp_path / "a", tmp_path / "empty", tmp_path / "b"], tmp_path / "merged")
    for suffix in (".bin", ".idx"):
        merged = Path(f"{tmp_path / 'merged'}{suffix}").read_bytes()
        assert merged == Path(f"{tmp_path / 'whole'}{suffix}").read_bytes()


def test_an_open_document_ends_where_another_dataset_follows(tmp_path: Path) -> None:
    """Else its first document would go on with the open one."""
    dataset = write_dataset(tmp_path / "a", [[3], [4]])
    with IndexedDatasetWriter(tmp_path / "set") as writer:
        writer.add_sequence([1])
        writer.add_sequence([2])
        writer.append(dataset)
        writer.add_sequence([5])
    assert read_with_struct(tmp_path / "set") == ([[1], [2], [3], [4], [5]], [0, 2, 3, 4, 5])


def test_sequences_with_modes_are_not_appended(tmp_path: Path) -> None:
    """The writer keeps none, and images would become text."""
    write_dataset(tmp_path / "a", [[1], [2]])
    with Path(f"{tmp_path / 'a'}.idx").open("ab") as index:
        index.write(bytes([0, 1]))
    with pytest.raises(DataError, match="tokens without modes, got uint16 with modes"):
        merge([tmp_path / "a"], tmp_path / "merged")


def test_any_order_of_bytes_may_be_asked_for(tmp_path: Path) -> None:
    """Files are little-endian."""
    dataset = write_dataset(tmp_path / "set", [[1, 258]], ">u2")
    assert dataset[0].tolist() == [1, 258]
    assert Path(f"{tmp_path / 'set'}.bin").read_bytes() == bytes([1, 0, 2, 1])


def test_processes_that_write_one_pair_do_not_mix_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last to finish is found, whole."""
    writers = []
    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        writers.append(IndexedDatasetWriter(tmp_path / "set"))
    for number, writer in enumerate(writers):
        writer.add_document([number] * 3)
    for number, writer in reversed(list(enumerate(writers))):
        writer.close()
        assert IndexedDataset(tmp_path / "set")[0].tolist() == [number] * 3
    assert _listing(tmp_path) == ["set.bin", "set.idx"]


def test_both_files_are_on_the_disk_before_they_are_found(tmp_path: Path) -> None:
    """Otherwise a power failure could leave their names without their content."""
    flushed: list[int] = []
    rename = os.replace

    def noting(source: str, target: str) -> None:
        assert os.stat(source).st_ino in flushed
        rename(source, target)

    with (
        mock.patch.object(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino)),
        mock.patch.object(os, "replace", noting),
    ):
        write_dataset(tmp_path / "set", [[1]])
    assert len(flushed) == 2


def test_merge_into_one_of_its_inputs(tmp_path: Path) -> None:
    """The output may replace an input, because it is renamed at the end."""
    write_dataset(tmp_path / "a", [[1]])
    write_dataset(tmp_path / "b", [[2]])
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "a")
    assert read_with_struct(tmp_path / "a") == ([[1], [2]], [0, 1, 2])


def test_merge_of_two_dtypes_is_refused(tmp_path: Path) -> None:
    """Tokens are not converted silently, and nothing is published."""
    write_dataset(tmp_path / "a", [[1]], "<u2")
    write_dataset(tmp_path / "b", [[1]], "<i4")
    with pytest.raises(DataError, match="uint16 tokens without modes, got int32"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "merged")
    assert _listing(tmp_path) == ["a.bin", "a.idx", "b.bin", "b.idx"]


def test_merge_of_nothing_is_refused(tmp_path: Path) -> None:
    """There is no dtype to write an empty merge in."""
    with pytest.raises(DataError, match="at least one dataset"):
        merge([], tmp_path / "merged")


def test_a_sequence_that_is_too_long_for_the_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its length would not fit the index."""
    monkeypatch.setattr(indexed_writer, "_LONGEST_SEQUENCE", 3)
    with (
        pytest.raises(DataError, match="at most 3 tokens a sequence, got 4"),
        IndexedDatasetWriter(tmp_path / "set") as writer,
    ):
        writer.add_sequence([1, 2, 3])
        writer.add_sequence([1, 2, 3, 4])


def test_sequences_beyond_32_bits_are_found(tmp_path: Path) -> None:
    """Their places in bytes, and sums of their lengths; the tokens are a hole in the file."""
    prefix = tmp_path / "huge"
    with IndexedDatasetWriter(prefix, "<i4") as writer:
        writer._lengths.extend([2**30, 2**30, 5])
    os.truncate(f"{prefix}.bin", 4 * (2**31 + 5))
    dataset = IndexedDataset(prefix)
    assert dataset.sequence_pointers.tolist() == [0, 2**32, 2**33]
    assert dataset[2].tolist() == [0] * 5
