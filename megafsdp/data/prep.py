"""Prepare text for training: ``train`` and ``validation`` token files and a record of both.

Files are sorted and shuffled by the seed; every ``validation_every``-th document goes to the
validation set; each document ends with the tokenizer's end-of-document token. The corpus streams
through: one document is in memory at a time, or a few batches of them if several processes
tokenize (``megafsdp.data.prep_workers``), with the same results to the bit. Output files replace
older ones only when they are complete, and ``meta.json`` comes last, so an interrupted preparation
starts over and a finished one is not repeated. One preparation at a time writes to a folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from megafsdp.data.indexed import IndexedDataset
from megafsdp.data.indexed_writer import IndexedDatasetWriter, token_dtype
from megafsdp.data.output_files import locked_folder, replace_text
from megafsdp.data.prep_workers import tokenize
from megafsdp.data.text_sources import (
    JSON_SUFFIX,
    Documents,
    TextFile,
    docstring_documents,
    file_documents,
    find_files,
    find_stdlib_files,
)
from megafsdp.data.token_range import token_range
from megafsdp.data.tokenizer import BYTE_SPEC, JsonTokenizer, Tokenizer, load_tokenizer
from megafsdp.errors import ConfigError, DataError, expected

_LOGGER = logging.getLogger("megafsdp.data")
_META_FILE = "meta.json"
_LOCK_FILE = "prep.lock"
_META_VERSION = 1
_SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True)
class PrepOptions:
    """Options of ``megafsdp prep``.

    Attributes:
        output: Folder of the results: train.bin, train.idx, validation.bin, validation.idx,
            meta.json.
        inputs: Text files, JSON lines (.jsonl, .json), both also compressed by gzip, xz or zstd,
            Parquet files, folders of such files or of ``datasets``, or glob patterns.
        stdlib: Read the sources of Python's standard library instead of inputs.
        docstrings: Take only the docstrings of the Python files, one document a file.
        suffixes: Endings of the files to read in folders. With .json among them, .json files that
            are not JSON lines are text; else they are refused.
        json_key: Key of the text in a JSON line, or name of its column in a table.
        encoding_errors: What to do with text that is not UTF-8.
        tokenizer: "byte", or the path of a tokenizers JSON file.
        append_eod: End each document with the end-of-document token.
        validation_every: Every how many documents one goes to validation; 0 for none.
        seed: Seed of the order of files.
        workers: Processes that tokenize.
        no_progress: Draw no progress bar; there is none either when stderr is not a terminal.
        force: Prepare again even if the results are there.
    """

    output: str
    inputs: tuple[str, ...] = ()
    stdlib: bool = False
    docstrings: bool = False
    suffixes: tuple[str, ...] = (".txt", ".md", ".jsonl", ".parquet")
    json_key: str = "text"
    encoding_errors: Literal["strict", "replace"] = "strict"
    tokenizer: str = BYTE_SPEC
    append_eod: bool = True
    validation_every: int = 20
    seed: int = 1234
    workers: int = 1
    no_progress: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class SplitRecord:
    """Figures of one split.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, ends of documents included.
        bytes: Bytes of text, without ends of documents.
        max_token: Largest token; -1 in an empty split.
    """

    documents: int
    tokens: int
    bytes: int
    max_token: int


@dataclass(frozen=True, slots=True)
class PrepRecord:
    """Results of a preparation, as ``meta.json`` stores them.

    Attributes:
        train: The training split.
        validation: The validation split.
        tokenizer: Its specification.
        vocab_size: Its vocabulary, the least that a model needs.
        content_sha256: Hash of all documents in order and of their split.
        input_sha256: Hash of the inputs' names, sizes and times and of the tokenizer file.
        options: The options that decide the content.
        is_fresh: True if the files were written by this call, False if they were there.
    """

    train: SplitRecord
    validation: SplitRecord
    tokenizer: str
    vocab_size: int
    content_sha256: str
    input_sha256: str
    options: dict[str, object]
    is_fresh: bool

    def describe(self) -> str:
        """Return the figures on one line."""
        parts = [
            f"{name} {split.documents:,} documents, {split.tokens:,} tokens"
            for name, split in (("train", self.train), ("validation", self.validation))
        ]
        tokenizer = f"tokenizer {self.tokenizer}, vocabulary {self.vocab_size}"
        return "; ".join([*parts, tokenizer, f"content {self.content_sha256[:12]}"])


def prepare(options: PrepOptions) -> PrepRecord:
    """Write the token files of a corpus, unless they are there already. Call it in one process.

    Args:
        options: What to read and where to write.

    Returns:
        The record of the files.

    Raises:
        ConfigError: An option is wrong, an input leads to no file, the output cannot be written, or
            another job prepares there.
        DataError: A file is not text, the corpus has no training document, a worker was killed, or
            the disk is full.
    """
    _check(options)
    tokenizer = load_tokenizer(options.tokenizer)
    files = find_stdlib_files() if options.stdlib else find_files(options.inputs, options.suffixes)
    input_sha256 = _input_sha256(files, tokenizer)
    existing = None if options.force else _read_record(options, input_sha256)
    if existing is not None:
        _LOGGER.info("'%s' is prepared already: %s", options.output, existing.describe())
        return existing
    output = Path(options.output)
    where = f"the output of prep, '{output}'"
    with locked_folder(output, _LOCK_FILE, where=where) as is_locked:
        if is_locked:
            _remove_leftovers(output)
        return _prepare(options, files, tokenizer, input_sha256)


def recorded_tokenizer(prefix: str) -> tuple[str, int] | None:
    """Return the tokenizer that token files were prepared with and its vocabulary; None if unknown.

    Args:
        prefix: Path of the files without .bin and .idx; of :func:`prepare` or of another program.
    """
    path = Path(prefix)
    if path.name not in _SPLITS:
        return None
    try:
        values = json.loads((path.parent / _META_FILE).read_text())
        return str(values["tokenizer"]), int(values["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of preparations that were killed; no other one is running."""
    for name in (*_SPLITS, _META_FILE):
        for path in folder.glob(f"{name}.[0-9]*.tmp*"):
            path.unlink(missing_ok=True)


def _prepare(
    options: PrepOptions, files: list[TextFile], tokenizer: Tokenizer, input_sha256: str
) -> PrepRecord:
    """Write the token files and their record into a folder that no other job writes to."""
    written = _write_splits(options, files, tokenizer)
    train, validation = (_split_record(Path(options.output, s), written.nbytes[s]) for s in _SPLITS)
    record = PrepRecord(
        train=train,
        validation=validation,
        tokenizer=options.tokenizer,
        vocab_size=tokenizer.vocab_size,
        content_sha256=written.content.hexdigest(),
        input_sha256=input_sha256,
        options=_deciding_options(options),
        is_fresh=True,
    )
    if validation.documents == 0 and options.validation_every:
        _LOGGER.warning(
            "No document went to validation: there are %d and every %dth would have gone. Lower"
            " validation_every, or cut the text into more documents.",
            train.documents,
            options.validation_every,
        )
    _write_record(Path(options.output, _META_FILE), record)
    _LOGGER.info("prepared '%s': %s", options.output, record.describe())
    return record


@dataclass(slots=True)
class _Written:
    content: hashlib._Hash
    nbytes: dict[str, int]


def _write_splits(options: PrepOptions, files: list[TextFile], tokenizer: Tokenizer) -> _Written:
    written = _Written(hashlib.sha256(), dict.fromkeys(_SPLITS, 0))
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                IndexedDatasetWriter(Path(options.output, split), token_dtype(tokenizer.vocab_size))
            )
            for split in _SPLITS
        }
        texts = _texts(options, files)
        tokenized = stack.enter_context(
            closing(tokenize(texts, tokenizer, options.tokenizer, num_workers=options.workers))
        )
        for number, (text, tokens) in enumerate(tokenized, start=1):
            if not text:
                # An empty document counts all the same, so that sources and docstrings of the
                # standard library hold out the same files and can be blended.
                continue
            every = options.validation_every
            split = "validation" if every and number % every == 0 else "train"
            data = text.encode("utf-8")
            written.nbytes[split] += len(data)
            written.content.update(f"{split} {len(data)}\n".encode() + data)
            ends = [tokenizer.eod] if options.append_eod else []
            document = np.empty(len(tokens) + len(ends), dtype=writers[split].dtype)
            document[: len(tokens)] = tokens
            document[len(tokens) :] = ends
            writers[split].add_document(document)
        if written.nbytes["train"] == 0:
            hint = "Give more text"
            where = f"the {len(files)} input files"
            raise DataError(expected("text to train on", "none", where=where, hint=hint))
        # Older results stay until the new ones are complete. Then their record is deleted first, so
        # that no record ever stands beside other files than its own.
        Path(options.output, _META_FILE).unlink(missing_ok=True)
    return written


def _texts(options: PrepOptions, files: list[TextFile]) -> Iterator[str]:
    in_file: Documents = file_documents(
        options.json_key,
        options.encoding_errors,
        takes_json_as_text=JSON_SUFFIX in options.suffixes,
    )
    if options.docstrings:
        in_file = docstring_documents
    shuffled = list(files)
    random.Random(options.seed).shuffle(shuffled)
    with tqdm(
        total=sum(file.nbytes for file in files),
        desc="prep",
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        # None draws the bar only on a terminal.
        disable=True if options.no_progress else None,
    ) as bar:
        for file in shuffled:
            position_nbytes = 0
            for document in in_file(file):
                yield document.text
                bar.update(document.position_nbytes - position_nbytes)
                position_nbytes = document.position_nbytes
            bar.update(file.nbytes - position_nbytes)


def _check(options: PrepOptions) -> None:
    where = "the options of prep"
    if options.stdlib == bool(options.inputs):
        found = f"stdlib={options.stdlib} and inputs {list(options.inputs)}"
        hint = "Name text files, or choose the standard library, not both"
        raise ConfigError(expected("either inputs or stdlib", found, where=where, hint=hint))
    if options.validation_every < 0 or options.validation_every == 1:
        what = "validation_every of 0 (none), or 2 and more"
        hint = "20 holds out 5 % of the documents"
        raise ConfigError(expected(what, options.validation_every, where=where, hint=hint))
    if options.workers < 1:
        hint = "Use at most one for each core of the machine"
        raise ConfigError(expected("at least 1 worker", options.workers, where=where, hint=hint))


def _deciding_options(options: PrepOptions) -> dict[str, object]:
    values = asdict(options)
    for name in ("output", "workers", "no_progress", "force"):
        del values[name]
    # As JSON would give them back: lists in place of tuples.
    decided: dict[str, object] = json.loads(json.dumps(values))
    return decided


def _input_sha256(files: list[TextFile], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.nbytes} {file.mtime_ns}\n".encode())
    if isinstance(tokenizer, JsonTokenizer):
        # The end-of-document token may be named in another file.
        digest.update(f"{tokenizer.eod} ".encode() + Path(tokenizer.path).read_bytes())
    return digest.hexdigest()


def _split_record(prefix: Path, nbytes: int) -> SplitRecord:
    dataset = IndexedDataset(prefix)
    _, largest = token_range(dataset)
    return SplitRecord(dataset.num_documents, dataset.num_tokens, nbytes, largest)


def _write_record(path: Path, record: PrepRecord) -> None:
    values = asdict(record)
    del values["is_fresh"]
    try:
        replace_text(path, json.dumps({"version": _META_VERSION, **values}, indent=1) + "\n")
    except OSError as error:
        what, found = "a record that can be written", f"{type(error).__name__}: {error}"
        hint = "Make room on its disk, or write to another folder"
        raise DataError(expected(what, found, where=f"file '{path}'", hint=hint)) from error


def _read_record(options: PrepOptions, input_sha256: str) -> PrepRecord | None:
    try:
        values = json.loads(Path(options.output, _META_FILE).read_text())
        if values.pop("version") != _META_VERSION:
            return None
        splits = {split: SplitRecord(**values.pop(split)) for split in _SPLITS}
        record = PrepRecord(**{**values, **splits}, is_fresh=False)
        is_whole = all(
            IndexedDataset(Path(options.output, split)).num_tokens == splits[split].tokens
            for split in _SPLITS
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # DataError is a ValueError: files that do not match their record are written again.
        _LOGGER.debug("'%s' is not prepared: %s", options.output, error)
        return None
    is_same = record.options == _deciding_options(options) and record.input_sha256 == input_sha256
    return record if is_whole and is_same else None
