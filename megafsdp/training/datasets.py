"""Build the training and validation samples that a configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megafsdp.data import (
    BlendedDataset,
    IndexedDataset,
    SampleDataset,
    SampleSource,
    check_vocabulary,
    samples_per_dataset,
    split_ranges,
)
from megafsdp.training.config import Config, split_shares


@dataclass(frozen=True, slots=True)
class Datasets:
    """What a run reads.

    Attributes:
        train: Samples of at least the run's length.
        validation: Every held-out token once; None if nothing is held out.
    """

    train: SampleSource
    validation: SampleSource | None


def build_datasets(config: Config, *, vocab_size: int) -> Datasets:
    """Open the token files of a run and index their samples; local.

    Args:
        config: The run.
        vocab_size: Rows of the model's embedding.

    Raises:
        DataError: A file is missing or damaged, has too few tokens, or tokens beyond the
            vocabulary.
        ConfigError: The split leaves nothing.
    """
    data = config.data
    opened = [_open(prefix, vocab_size) for prefix in data.train]
    shares = None if data.split is None else split_shares(data.split)
    train_parts, held_out = [(o, range(len(o))) for o in opened], []
    if shares is not None:
        ranges = [split_ranges(len(o), shares) for o in opened]
        train_parts = [(o, r[0]) for o, r in zip(opened, ranges, strict=True)]
        held_out = [(o, r[1]) for o, r in zip(opened, ranges, strict=True)]
    for prefix in data.validation:
        indexed = _open(prefix, vocab_size)
        held_out.append((indexed, range(len(indexed))))
    builder = _Builder(config)
    num_samples = max(config.num_samples, data.num_samples or 0)
    validation = [builder.one_pass(o, part) for o, part in held_out]
    return Datasets(
        train=builder.blend(train_parts, data.weights, num_samples),
        validation=BlendedDataset(validation) if validation else None,
    )


def _open(prefix: str, vocab_size: int) -> IndexedDataset:
    indexed = IndexedDataset(prefix)
    check_vocabulary(indexed, vocab_size)
    return indexed


_Part = tuple[IndexedDataset, range]


class _Builder:
    """What all datasets of a run have in common."""

    def __init__(self, config: Config) -> None:
        self._sequence_length = config.data.sequence_length
        self._seed = config.data.seed
        cache = config.data.cache
        self._cache = config.run_directory / "index_cache" if cache is None else Path(cache)

    def one_pass(self, indexed: IndexedDataset, sequences: range) -> SampleDataset:
        """Read a part of a file once, in a seeded order, its last tokens included."""
        return SampleDataset(
            indexed,
            sequence_length=self._sequence_length,
            num_samples=None,
            seed=self._seed,
            sequences=sequences,
            drop_last_partial=False,
            cache_dir=self._cache,
        )

    def blend(
        self, parts: Sequence[_Part], weights: Sequence[float] | None, num_samples: int
    ) -> SampleSource:
        """Mix parts of files by weight, or by their numbers of tokens."""
        if len(parts) == 1:
            return self._repeated(*parts[0], num_samples)
        if weights is None:
            weights = [float(o.sequence_lengths[p.start : p.stop].sum()) for o, p in parts]
        needed = samples_per_dataset(weights, num_samples)
        sources = [self._repeated(o, p, n) for (o, p), n in zip(parts, needed, strict=True)]
        return BlendedDataset(sources, weights, num_samples=num_samples)

    def _repeated(
        self, indexed: IndexedDataset, sequences: range, num_samples: int
    ) -> SampleSource:
        return SampleDataset(
            indexed,
            sequence_length=self._sequence_length,
            num_samples=num_samples,
            seed=self._seed,
            sequences=sequences,
            cache_dir=self._cache,
        )
