"""Megatron-LM's blends of token files: weights and prefixes in turns, in one list or one string.

``0.3 a 0.7 b``, as ``--data-path`` has it, becomes prefixes ``[a, b]`` and weights ``[0.3, 0.7]``
before the types of the configuration are checked. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megafsdp.training.config.sections import require


def words_of(train: object) -> object:
    """Return the words of a string; anything else as it is."""
    return train.split() if isinstance(train, str) else train


def separate_weights(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section ``data`` whose ``train`` has prefixes alone.

    Args:
        data: The section as YAML or a command line has it. What is neither a string nor a list of
            words and numbers stays, for the check of types.

    Raises:
        ConfigError: Some prefixes have a weight before them and others have none, or there are
            ``weights`` besides.
    """
    words = words_of(data.get("train"))
    if not isinstance(words, list) or not all(_is_word(word) for word in words):
        return dict(data)
    weights = [_weight_of(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return {**data, "train": words}
    require(
        None not in weights and len(words) % 2 == 0,
        "data.train",
        "a weight before each prefix, or before none",
        words,
        "Write it like 0.3 a 0.7 b; a prefix that is a number needs its folder, as in ./2024",
    )
    require(
        data.get("weights") is None,
        "data.weights",
        "weights in one place",
        f"{data.get('weights')} beside data.train {words}",
        "Leave data.weights out, or the weights in data.train",
    )
    return {**data, "train": words[1::2], "weights": weights}


def _is_word(value: object) -> bool:
    # True is an int too.
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def _weight_of(word: str | int | float) -> float | None:
    """Return the number that a word is; None if it is none."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
