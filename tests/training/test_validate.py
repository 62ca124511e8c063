"""Values that cannot be run, and what is said about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafsdp.errors import ConfigError
from megafsdp.training.validate import validate
from tests.training.runs import tiny


def test_sound_configuration_passes(tmp_path: Path) -> None:
    """The tiny run fits one, two, three and four ranks."""
    for world_size in (1, 2, 3, 4):
        validate(tiny(tmp_path), world_size=world_size)


@pytest.mark.parametrize(
    ("section", "values", "what"),
    [
        ("model", {"preset": "qwen3-toi"}, "qwen3-toy"),
        ("model", {"num_query_groups": 3}, "num_query_groups"),
        ("data", {"train": []}, "data.train"),
        ("data", {"weights": [1.0, 2.0]}, "data.weights"),
        ("data", {"split": "90,10"}, "either validation prefixes or a split"),
        ("data", {"validation": [], "split": "all"}, "data.split"),
        ("data", {"sequence_length": 17}, "max_sequence_length, 16"),
        ("data", {"sequence_length": 0}, "data.sequence_length"),
        ("optimizer", {"lr": 0.0}, "optimizer.lr"),
        ("optimizer", {"lr": float("inf")}, "optimizer.lr"),
        ("optimizer", {"betas": [0.9, 1.0]}, "optimizer.betas"),
        ("optimizer", {"clip_norm": 0.0}, "optimizer.clip_norm"),
        ("optimizer", {"weight_decay": float("nan")}, "optimizer.weight_decay"),
        ("schedule", {"warmup_samples": -1}, "schedule.warmup_samples"),
        ("schedule", {"decay_samples": 60}, "warm-up and decay"),
        ("schedule", {"min_lr_ratio": 1.5}, "schedule.min_lr_ratio"),
        ("train", {"steps": None}, "either steps or samples"),
        ("train", {"samples": 120}, "either steps or samples"),
        ("train", {"steps": None, "samples": 11}, "train.samples"),
        ("train", {"global_batch_size": 13}, "multiple of the 2 ranks"),
        ("train", {"micro_batch_size": 4}, "divisor of the 6 samples"),
        ("parallel", {"dp_shard": 3}, "world size 2"),
        ("parallel", {"dp_outer": 4}, "world size 2"),
        ("checkpoint", {"keep_last": 0}, "checkpoint.keep_last"),
        ("logging", {"interval_steps": 0}, "logging.interval_steps"),
    ],
)
def test_value_that_cannot_be_run_is_refused(
    tmp_path: Path, section: str, values: dict[str, Any], what: str
) -> None:
    """The message names the field or the bound, and says how to mend it."""
    config = tiny(tmp_path, **{section: values})
    with pytest.raises(ConfigError, match=what):
        validate(config, world_size=2)


def test_unknown_strategy_is_refused(tmp_path: Path) -> None:
    """A name that no strategy has is an error, with the known ones listed."""
    with pytest.raises(ConfigError, match="no_shard"):
        tiny(tmp_path, parallel={"strategy": "zero"})


@pytest.mark.parametrize("axis", ["cp", "tp", "ep"])
def test_reserved_degree_says_that_it_is_not_built(tmp_path: Path, axis: str) -> None:
    """A sound wish raises NotImplementedError that names it."""
    with pytest.raises(NotImplementedError, match=axis):
        validate(tiny(tmp_path, parallel={axis: 2}), world_size=2)
