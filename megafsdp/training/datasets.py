"""Build the training and validation samples that a configuration names."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megafsdp.data import (
    BlendedDataset,
    IndexedDataset,
    SampleDataset,
    SampleSource,
    Tokenizer,
    check_vocabulary,
    samples_per_dataset,
    split_ranges,
    token_range,
)
from megafsdp.data.prep import recorded_tokenizer
from megafsdp.data.tokenizer import BYTE_SPEC
from megafsdp.errors import DataError, expected
from megafsdp.training.config.sections import AUTO_TOKENIZER, Config, require
from megafsdp.training.config.validate import split_shares

_LOGGER = logging.getLogger("megafsdp.training")
_Part = tuple[IndexedDataset, range]


@dataclass(frozen=True, slots=True)
class Datasets:
    """The samples that a run reads.

    Attributes:
        train: At least as many samples as the run consumes.
        validation: Every held-out token once; None if nothing is to be held out.
        order: Everything that decides which training sample has which number, as plain values.
        fingerprints: One for each token file, by the option that names it; equal contents have
            equal fingerprints.
    """

    train: SampleSource
    validation: SampleSource | None
    order: dict[str, object]
    fingerprints: dict[str, str]


def build_datasets(
    config: Config,
    *,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    num_samples: int | None = None,
) -> Datasets:
    """Open the token files of a run and index their samples; local.

    Args:
        config: The run.
        vocab_size: Rows of the model's embedding.
        tokenizer: Turns the run's tokens into text.
        num_samples: Length of the run; None for that of a run whose batch size never changed.

    Raises:
        DataError: A file is missing or damaged, has too few tokens or none to train on, or tokens
            beyond the vocabulary; or no file has tokens to evaluate on, where some are asked for;
            or memory is too small for the index of a run so long.
        ConfigError: The split leaves nothing, or the tokenizer is not that of the files.
    """
    data = config.data
    train_parts, held_out = _parts(config, vocab_size, tokenizer)
    if tokenizer is not None:
        _warn_of_other_tokenizer(config, tokenizer)
    for part in train_parts:
        _check_not_empty(part)
    weights = data.weights
    if weights is None:
        weights = [float(o.sequence_lengths[p.start : p.stop].sum()) for o, p in train_parts]
    num_trained = config.num_samples if num_samples is None else num_samples
    num_samples = max(num_trained, data.num_samples or 0)
    is_blend = len(train_parts) > 1
    needed = samples_per_dataset(weights, num_samples) if is_blend else [num_samples]
    train = [
        _samples(config, part, num_samples=n) for part, n in zip(train_parts, needed, strict=True)
    ]
    validation = [
        _samples(config, part, num_samples=None) for part in _with_labels(config, held_out)
    ]
    return Datasets(
        train=BlendedDataset(train, weights, num_samples=num_samples) if is_blend else train[0],
        validation=BlendedDataset(validation) if validation else None,
        order={
            "weights": list(weights),
            "split": data.split,
            "sequence_length": data.sequence_length,
            "seed": data.seed,
            # A longer run has the same order as long as it needs no more epochs.
            "epochs": [asdict(source.plan) for source in train],
            # Data that was prepared again may have as many tokens in other documents.
            "lengths_sha256": [source.lengths_sha256 for source in train],
        },
        fingerprints=_fingerprints("data.train", train_parts)
        # With data.split the held-out sequences lie in the same files.
        | ({} if data.split is not None else _fingerprints("data.validation", held_out)),
    )


def _fingerprints(option: str, parts: list[_Part]) -> dict[str, str]:
    return {f"{option}[{i}]": indexed.fingerprint() for i, (indexed, _) in enumerate(parts)}


def _parts(
    config: Config, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[list[_Part], list[_Part]]:
    """Return which sequences of which files are trained on, and which are held out."""

    def opened(prefix: str) -> IndexedDataset:
        indexed = IndexedDataset(prefix)
        check_vocabulary(indexed, vocab_size)
        if tokenizer is not None:
            _check_tokenizer(indexed, tokenizer, config.tokenizer)
            if config.data.document_mask:
                _check_end_of_document(indexed, tokenizer, config.tokenizer)
        return indexed

    data = config.data
    files = [opened(prefix) for prefix in data.train]
    if data.split is not None:
        shares = split_shares(data.split)
        ranges = [split_ranges(len(file), shares) for file in files]
        trained = [(file, r[0]) for file, r in zip(files, ranges, strict=True)]
        return trained, [(file, r[1]) for file, r in zip(files, ranges, strict=True)]
    whole = [(file, range(len(file))) for file in files]
    held_out = [opened(prefix) for prefix in data.validation]
    return whole, [(file, range(len(file))) for file in held_out]


def _check_not_empty(part: _Part) -> None:
    """Refuse a file without tokens to train on: it would have no weight in a blend."""
    indexed, sequences = part
    if not _num_tokens(part):
        raise DataError(
            expected(
                "tokens to train on",
                f"none in {len(sequences)} of {len(indexed)} sequences",
                where=f"file '{indexed.data_path}' of data.train",
                hint="Leave the file out, or give training a larger share in data.split",
            )
        )


def _with_labels(config: Config, held_out: list[_Part]) -> list[_Part]:
    """Return the held-out parts that have a token to predict; warn of each that has none."""
    option = "data.validation" if config.data.split is None else "data.split"
    found = [part for part in held_out if _num_tokens(part) >= 2]
    if held_out and not found:
        raise DataError(
            expected(
                "two tokens or more to evaluate on",
                f"fewer in each of {len(held_out)} files",
                where=f"the training configuration, {option}",
                hint="Hold out more, or leave it out to evaluate on nothing",
            )
        )
    for indexed, sequences in held_out:
        if (indexed, sequences) not in found:
            _LOGGER.warning(
                "Nothing of the file '%s' is evaluated: by %s fewer than two of its tokens are held"
                " out, in %d of %d sequences.",
                *(indexed.data_path, option, len(sequences), len(indexed)),
            )
    return found


def _num_tokens(part: _Part) -> int:
    indexed, sequences = part
    return int(indexed.sequence_lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def _check_tokenizer(indexed: IndexedDataset, tokenizer: Tokenizer, spec: str | None) -> None:
    """Refuse a tokenizer with fewer tokens than a file has: bits per byte would be wrong."""
    _, largest = token_range(indexed)
    require(
        largest < tokenizer.vocab_size,
        "data.tokenizer",
        f"the tokenizer of the data, where '{spec}' has {tokenizer.vocab_size} tokens",
        f"token {largest} in file '{indexed.data_path}'",
        "Set it to the tokenizer that the data was prepared with, or to null",
    )


def _check_end_of_document(indexed: IndexedDataset, tokenizer: Tokenizer, spec: str | None) -> None:
    """Refuse a file whose first document does not end with the end-of-document token."""
    lengths, ends = indexed.sequence_lengths, indexed.document_boundaries[1:]
    last = next((int(end) - 1 for end in ends if end and lengths[end - 1]), None)
    if last is None:
        return
    (token,) = indexed.slice_of(last, int(lengths[last]) - 1, 1).tolist()
    require(
        token == tokenizer.eod,
        "data.document_mask",
        f"documents that end with token {tokenizer.eod}, the end-of-document token of '{spec}'",
        f"token {token} at the end of a document of file '{indexed.data_path}'",
        "Prepare the data with it (megafsdp prep, or Megatron-LM's --append-eod), or set"
        " data.document_mask to false",
    )


def _warn_of_other_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Warn if a record beside the files names another tokenizer, though its tokens fit.

    Paths are not compared, as files may have moved. Another tokenizer is one with another
    vocabulary size, or bytes in place of a file or the reverse.
    """
    spec, prefixes = config.tokenizer, [*config.data.train, *config.data.validation]
    records = {record: p for p in prefixes if (record := recorded_tokenizer(p)) is not None}
    for (recorded, vocab_size), prefix in records.items():
        is_same = (recorded == BYTE_SPEC) == (spec == BYTE_SPEC)
        if not is_same or vocab_size != tokenizer.vocab_size:
            _LOGGER.warning(
                "'%s' was prepared with the tokenizer '%s' of %d tokens, not with '%s' of %d:%s"
                " bits per byte and text samples are wrong. %s.",
                *(prefix, recorded, vocab_size, spec, tokenizer.vocab_size),
                *_consequences(config),
            )


def _consequences(config: Config) -> tuple[str, str]:
    """Return what else another tokenizer makes wrong, and the cure."""
    if config.model.from_hf is None or config.data.tokenizer != AUTO_TOKENIZER:
        return "", "Set data.tokenizer to it, or to null"
    return (
        " the saved model takes them for other texts,",
        "Prepare the data again with --tokenizer of model.from_hf, or set data.tokenizer",
    )


def _samples(config: Config, part: _Part, *, num_samples: int | None) -> SampleDataset:
    """Index a part of a file; without a number of samples every token is a label once."""
    indexed, sequences = part
    cache = config.data.cache
    try:
        return SampleDataset(
            indexed,
            sequence_length=config.data.sequence_length,
            num_samples=num_samples,
            seed=config.data.seed,
            sequences=sequences,
            drop_last_partial=num_samples is not None,
            cache_dir=config.run_directory / "index_cache" if cache is None else Path(cache),
        )
    except MemoryError as error:
        count = "all" if num_samples is None else f"{num_samples:,}"
        what, where = "an index that fits into memory", f"{count} samples of '{indexed.data_path}'"
        hint = "Lower train.steps, train.samples or data.num_samples: a run goes on if given more"
        raise DataError(expected(what, f"{error}", where=where, hint=hint)) from error
