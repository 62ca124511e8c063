"""Checks of values one by one, and the form of what is said about them."""

from __future__ import annotations

import math
from typing import Any

from megafsdp.errors import ConfigError, expected
from megafsdp.training.config.sections import Config

# 31 years; torch counts a clock's nanoseconds in 64 bits.
_MAX_TIMEOUT_S = 10**9


def check_ranges(config: Config, *, world_size: int) -> None:
    """Check every value whose range depends on no other value; local.

    Args:
        config: The run.
        world_size: Number of ranks; each has a seed of its own.

    Raises:
        ConfigError: A value is out of its range.
    """
    for path in (
        "train.global_batch_size",
        "train.max_skips",
        "train.micro_batch_size",
        "data.sequence_length",
        "data.num_samples",
        "evaluation.interval_steps",
        "evaluation.batches",
        "checkpoint.interval_steps",
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "logging.interval_steps",
        "muon.ns_steps",
        "muon.bucket_numel",
    ):
        value = value_of(config, path)
        if value is not None and value < 1:
            raise bad_value(path, "a whole number of at least 1", value)
    for path in (
        "optimizer.weight_decay",
        "optimizer.eps",
        "optimizer.momentum",
        "muon.eps",
        "schedule.warmup_samples",
        "evaluation.sample_tokens",
        "evaluation.sample_temperature",
        "parallel.prefetch",
    ):
        if not 0 <= value_of(config, path) < math.inf:
            raise bad_value(path, "a finite number of at least 0", value_of(config, path))
    for path in ("optimizer.lr", "optimizer.clip_norm", "run.timeout_s"):
        value = value_of(config, path)
        if value is not None and not 0 < value < math.inf:
            raise bad_value(path, "a finite number above 0", value)
    if config.run.timeout_s > _MAX_TIMEOUT_S:
        what = f"at most {_MAX_TIMEOUT_S:,} seconds"
        raise bad_value("run.timeout_s", what, config.run.timeout_s)
    if not 0 <= config.schedule.min_lr_ratio <= 1:
        raise bad_value(
            "schedule.min_lr_ratio", "a share from 0 to 1", config.schedule.min_lr_ratio
        )
    if not config.run.directory:
        raise bad_value("run.directory", "a folder", "''")
    _check_seeds(config, world_size)


def _check_seeds(config: Config, world_size: int) -> None:
    # NumPy's stream of the samples takes 32 bits, torch's generators 64.
    for path, end in (("run.seed", 2**64 - world_size + 1), ("data.seed", 2**32)):
        if not 0 <= value_of(config, path) < end:
            what = f"a whole number from 0 to {end - 1}"
            raise bad_value(path, what, value_of(config, path))


def value_of(config: Config, path: str) -> Any:
    """Return the value at ``section.field``."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def bad_value(path: str, what: str, got: object, mend: str | None = None) -> ConfigError:
    """Return the error of a value that cannot be run.

    Args:
        path: Its ``section.field``.
        what: What it must be.
        got: What it is.
        mend: What the user can do; None asks for a value of the range.
    """
    mend = mend or f"Set {path} within this range"
    return ConfigError(expected(what, got, where=f"the training configuration, {path}", mend=mend))
