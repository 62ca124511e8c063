"""Preparing text for training: ``train`` and ``validation`` token files and a record of both.

Files are sorted and shuffled by the seed; every ``validation_every``-th document goes to the
validation set; each document ends with the tokenizer's end-of-document token. The corpus streams
through: memory holds one document at a time. Output files replace older ones only when they are
complete, and ``meta.json`` comes last, so an interrupted preparation starts over and a finished one
is not repeated.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from tqdm import tqdm

from megafsdp.data.indexed import IndexedDataset
from megafsdp.data.indexed_writer import IndexedDatasetWriter, token_dtype
from megafsdp.data.text_sources import (
    Documents,
    TextFile,
    docstring_documents,
    file_documents,
    find_files,
    find_stdlib_files,
)
from megafsdp.data.tokenizer import BYTE_SPEC, Tokenizer, load_tokenizer
from megafsdp.data.vocabulary import token_range
from megafsdp.errors import ConfigError, DataError, expected

_LOGGER = logging.getLogger("megafsdp.data")
_META_FILE = "meta.json"
_META_VERSION = 1
_SPLITS = ("train", "validation")


@dataclass(frozen=True, slots=True)
class PrepOptions:
    """Options of ``megafsdp prep``.

    Attributes:
        output: Folder of the results: train.bin, train.idx, validation.bin, validation.idx,
            meta.json.
        inputs: Text files, JSON-lines files (.jsonl), folders, or glob patterns.
        stdlib: Read the sources of Python's standard library instead of inputs.
        docstrings: Take only the docstrings of the Python files, one document a file.
        suffixes: Endings of the files to read in folders.
        json_key: Key of the text in a JSON line.
        encoding_errors: What to do with text that is not UTF-8.
        tokenizer: "byte", or the path of a tokenizers JSON file.
        append_eod: End each document with the end-of-document token.
        validation_every: Every how many documents one goes to validation; 0 for none.
        seed: Seed of the order of files.
        no_progress: Draw no progress bar; there is none either when stderr is not a terminal.
        force: Prepare again even if the results are there.
    """

    output: str
    inputs: tuple[str, ...] = ()
    stdlib: bool = False
    docstrings: bool = False
    suffixes: tuple[str, ...] = (".txt", ".md", ".jsonl")
    json_key: str = "text"
    encoding_errors: Literal["strict", "replace"] = "strict"
    tokenizer: str = BYTE_SPEC
    append_eod: bool = True
    validation_every: int = 20
    seed: int = 1234
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
    """What a preparation gave, as ``meta.json`` keeps it.

    Attributes:
        train: The training split.
        validation: The validation split.
        tokenizer: Its specification.
        vocab_size: Its vocabulary, which a model needs at least.
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


def prepare(options: PrepOptions) -> PrepRecord:
    """Write the token files of a corpus, unless they are there already. One process only.

    Args:
        options: What to read and where to write.

    Returns:
        The record of the files.

    Raises:
        ConfigError: An option is wrong, or an input leads to no file.
        DataError: A file is not text, or the corpus has no training document.
    """
    _check(options)
    tokenizer = load_tokenizer(options.tokenizer)
    files = find_stdlib_files() if options.stdlib else find_files(options.inputs, options.suffixes)
    input_sha256 = _input_sha256(files, options.tokenizer)
    existing = None if options.force else _existing(options, input_sha256)
    if existing is not None:
        _LOGGER.info("'%s' is prepared already: %s", options.output, _summary(existing))
        return existing
    start_s = time.perf_counter()
    meta_path = Path(options.output, _META_FILE)
    meta_path.unlink(missing_ok=True)
    corpus = _write_splits(options, files, tokenizer)
    train, validation = (
        _split_record(Path(options.output, split), corpus.num_bytes[split]) for split in _SPLITS
    )
    record = PrepRecord(
        train=train,
        validation=validation,
        tokenizer=options.tokenizer,
        vocab_size=tokenizer.vocab_size,
        content_sha256=corpus.content.hexdigest(),
        input_sha256=input_sha256,
        options=_deciding_options(options),
        is_fresh=True,
    )
