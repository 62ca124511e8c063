"""Megatron-LM's blends of token files: weights and prefixes in turn, in one list or one string.

``0.3 a 0.7 b``, as ``--data-path`` has it, becomes prefixes ``[a, b]`` and weights ``[0.3, 0.7]``
before the types of the configuration are checked. Nothing here opens a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megafsdp.training.config.sections import require


def words_of(train: object) -> object:
    """Split a string into words, numbers as numbers; return anything else as it is."""
    return [_number_or_word(word) for word in train.split()] if isinstance(train, str) else train


def separate_weights(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``data`` with the weights in ``train`` moved to ``weights``.

    Args:
        data: The section as YAML or a command line has it. In a list, numbers are weights and text
            is a prefix, whatever it looks like; in a string, words that look like numbers are
            weights. Anything else stays, for the check of types.

    Raises:
        ConfigError: Some prefixes have a weight before them and others have none, or there are
            ``weights`` besides.
    """
    words = words_of(data.get("train"))
    if not isinstance(words, list) or not any(map(_is_number, words)):
        return {**data, "train": words} if "train" in data else dict(data)
    weights, prefixes = words[::2], words[1::2]
    is_in_turns = all(map(_is_number, weights)) and all(isinstance(p, str) for p in prefixes)
    require(
        is_in_turns and len(weights) == len(prefixes),
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
    return {**data, "train": prefixes, "weights": weights}


def _is_number(value: object) -> bool:
    # True is an int too.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number_or_word(word: str) -> float | str:
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word
