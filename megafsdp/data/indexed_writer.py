"""Writers of Megatron's indexed token files: an atomic writer and the merge of several datasets.

The byte format is described in ``megafsdp.data.indexed``. Readers see a pair of files that belong
together, or no index: both files are written beside their targets, made durable, and renamed.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megafsdp.data.indexed import CODE_TO_DTYPE, HEADER, MAGIC, VERSION, IndexedDataset
from megafsdp.errors import DataError, expected

_DTYPE_TO_CODE = {dtype: code for code, dtype in CODE_TO_DTYPE.items()}
_COPY_NBYTES = 1 << 24
_LONGEST_SEQUENCE = 2**31 - 1


def token_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Return the dtype that Megatron's writer chooses: uint16 below 65500 tokens, else int32."""
    return np.dtype("<u2" if vocab_size < 65500 else "<i4")


class IndexedDatasetWriter:
    """Write one ``.bin``/``.idx`` pair, published at once.

    Tokens stream to a temporary file beside the target; memory use is 4 bytes a sequence and 8 a
    document. :meth:`close` makes both files durable and renames them. Used as a context manager the
    writer closes at the end of the block, or discards everything if the block raised.

    Args:
        prefix: Path of the pair without ``.bin`` and ``.idx``; missing folders are made.
        dtype: Token dtype; see :func:`token_dtype`.

    Raises:
        DataError: The format has no code for the dtype. From the methods: the files cannot be
            written, on a full disk for instance.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: DTypeLike = "<u2") -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _DTYPE_TO_CODE:
            names = ", ".join(known.name for known in _DTYPE_TO_CODE)
            raise self._error(f"one of the dtypes {names}", self.dtype.name, "Choose one of them")
        self._lengths = array("i")
        self._boundaries = array("q", [0])
        self._temporary = f"{self.prefix}.{os.getpid()}.tmp"
        with self._writing():
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            # Open until close() or discard().
            self._file: BinaryIO = open(f"{self._temporary}.bin", "wb")  # noqa: SIM115

    def add_sequence(self, tokens: ArrayLike) -> None:
        """Append one sequence to the document that is open.

        Raises:
            DataError: A token does not fit the dtype, or the sequence is too long for the format.
        """
        values = np.asarray(tokens).reshape(-1)
        if values.size > _LONGEST_SEQUENCE:
            hint = "Add it as several sequences, then call end_document()"
            raise self._error(f"at most {_LONGEST_SEQUENCE} tokens a sequence", values.size, hint)
        stored = values.astype(self.dtype)
        if values.dtype != self.dtype and not np.array_equal(stored, values):
            token = values[stored != values][0]
            hint = "Make the writer with dtype=token_dtype(vocab_size)"
            raise self._error(f"tokens that fit {self.dtype.name}", f"token {token}", hint)
        with self._writing():
            self._file.write(stored.tobytes())
        self._lengths.append(stored.size)

    def end_document(self) -> None:
        """End the document; the next sequence starts another."""
        self._boundaries.append(len(self._lengths))

    def add_document(self, tokens: ArrayLike) -> None:
        """Append a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def append(self, dataset: IndexedDataset) -> None:
        """Append all documents of another dataset; a document that is open ends before them.

        Raises:
            DataError: Its dtype differs, or it has sequence modes, which this writer does not keep.
        """
        if dataset.dtype != self.dtype or dataset.sequence_modes is not None:
            modes = "" if dataset.sequence_modes is None else " with modes"
            hint = f"Leave '{dataset.prefix}' out, or prepare it again"
            raise self._error(
                f"{self.dtype.name} tokens without modes", dataset.dtype.name + modes, hint
            )
        self._end_open_document()
        with dataset.data_path.open("rb") as source:
            while piece := source.read(_COPY_NBYTES):
                with self._writing():
                    self._file.write(piece)
        first_sequence = len(self._lengths)
        self._lengths.frombytes(dataset.sequence_lengths.tobytes())
        self._boundaries.frombytes((dataset.document_boundaries[1:] + first_sequence).tobytes())

    def close(self) -> None:
        """Publish both files; sequences after the last ended document become one more document."""
        self._end_open_document()
        with self._writing():
            with open(f"{self._temporary}.idx", "wb") as index:
                self._write_index(index)
                _make_durable(index)
            _make_durable(self._file)
            self._file.close()
            # Otherwise a reader between the two renames would read new tokens by the old index.
            Path(f"{self.prefix}.idx").unlink(missing_ok=True)
            os.replace(f"{self._temporary}.bin", f"{self.prefix}.bin")
            os.replace(f"{self._temporary}.idx", f"{self.prefix}.idx")

    def discard(self) -> None:
        """Delete what was written; an older pair under the same prefix stays."""
        # On a full disk the rest of the buffer cannot be written; the file is deleted anyway.
        with contextlib.suppress(OSError):
            self._file.close()
        for suffix in (".bin", ".idx"):
            Path(self._temporary + suffix).unlink(missing_ok=True)

    def _end_open_document(self) -> None:
        if self._boundaries[-1] != len(self._lengths):
            self.end_document()

    def _write_index(self, index: BinaryIO) -> None:
        code = _DTYPE_TO_CODE[self.dtype]
        lengths = np.frombuffer(self._lengths, dtype="<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype="<i8", out=pointers[1:])
        pointers *= self.dtype.itemsize
        index.write(HEADER.pack(MAGIC, VERSION, code, len(lengths), len(self._boundaries)))
        for column in (lengths, pointers, np.frombuffer(self._boundaries, dtype="<i8")):
            index.write(column.tobytes())

    def __enter__(self) -> IndexedDatasetWriter:
        """Return the writer."""
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Publish the files, or discard them if the block raised."""
        try:
            if error_type is None:
                self.close()
        finally:
            # Nothing is left to discard after a close that succeeded.
            self.discard()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what, found = "files that can be written", f"{type(error).__name__}: {error}"
            hint = "Make room on its disk, or write to another folder"
            raise self._error(what, found, hint) from error

    def _error(self, what: str, got: object, hint: str) -> DataError:
        return DataError(expected(what, got, where=f"the writer of '{self.prefix}'", hint=hint))


def merge(prefixes: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    """Concatenate datasets of one dtype into a new pair of files, in the order given.

    Args:
        prefixes: The datasets, at least one.
        output: Prefix of the new pair; it may equal one of the inputs.

    Raises:
        DataError: No dataset is given, one cannot be read, or their dtypes differ.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise DataError(
            expected(
                "at least one dataset",
                "none",
                where=f"the merge into '{os.fspath(output)}'",
                hint="Name the prefixes to merge",
            )
        )
    with IndexedDatasetWriter(output, datasets[0].dtype) as writer:
        for dataset in datasets:
            writer.append(dataset)


def _make_durable(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
