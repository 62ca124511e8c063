"""Megatron-LM's blends in data.train."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import config_from_dict, parse_config
from megafsdp.training.datasets import build_datasets
from tests.training.runs import tiny, write_corpus


@pytest.mark.parametrize(
    ("train", "prefixes", "weights"),
    [
        ("0.3 a 0.7 b", ["a", "b"], [0.3, 0.7]),
        ("30 data/a\n 70\tdata/b ", ["data/a", "data/b"], [30.0, 70.0]),
        ([0.3, "a", 7, "b c"], ["a", "b c"], [0.3, 7.0]),
        ("1e-1 a 2 ./2024", ["a", "./2024"], [0.1, 2.0]),
        # Text of a list is what it is written as.
        (["1", "a", "2024"], ["1", "a", "2024"], None),
        ([1, "2", 0.5, "3"], ["2", "3"], [1.0, 0.5]),
        ("1 a", ["a"], [1.0]),
        ("a b", ["a", "b"], None),
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        # Words that Python reads as floats, but no weights.
        ("nan a inf b", ["nan", "a", "inf", "b"], None),
        ([], [], None),
    ],
)
def test_weights_and_prefixes_in_turns_are_separated(
    train: object, prefixes: list[str], weights: list[float] | None
) -> None:
    """From a list or a string; without weights all words are prefixes."""
    config = config_from_dict({"data": {"train": train}})
    assert (config.data.train, config.data.weights) == (prefixes, weights)
    assert config_from_dict(config.to_dict()) == config


def test_a_command_line_and_files_have_blends(tmp_path: Path) -> None:
    """One overrides the other whole; += appends to its words."""
    path = tmp_path / "config.yaml"
    path.write_text("data: {train: 0.3 a 0.7 b}")
    config = ["--config", str(path)]
    assert parse_config(config).data.weights == [0.3, 0.7]
    given = parse_config([*config, "--data.train", "1 c 2 d 3 e"]).data
    assert (given.train, given.weights) == (["c", "d", "e"], [1.0, 2.0, 3.0])
    alone = parse_config([*config, "--data.train", "c"]).data
    assert (alone.train, alone.weights) == (["c"], None)
    more = parse_config([*config, "--data.train+=[0.1, f]"]).data
    assert (more.train, more.weights) == (["a", "b", "f"], [0.3, 0.7, 0.1])
    words = ["--data.train", "[0.5, a, 0.5, b]", "--data.split", "9,1"]
    assert parse_config(words).data.weights == [0.5, 0.5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"train": "0.3 a 0.7"}, r"before each prefix.*\[0.3, 'a', 0.7\].*data\.train"),
        ({"train": "0.3 a b c"}, r"before each prefix, or before none.*\./2024"),
        ({"train": "2024"}, r"\./2024"),
        ({"train": ["a", 0.3]}, r"before each prefix.*\['a', 0\.3\]"),
        ({"train": "1 a 2 b", "weights": [1.0, 2.0]}, "weights in one place.*data.weights"),
        ({"train": "0 a 1 b"}, r"data\.weights .*a number above 0.*got the list \[0\.0, 1\.0\]"),
        ({"train": "-1 a 1 b"}, r"data\.weights .*a number above 0.*got the list \[-1\.0, 1\.0\]"),
        ({"train": [1, 2]}, r"before each prefix.*\[1, 2\]"),
        (
            {"train": [True, "a"]},
            r"data\.train to be a list, each item text .*, got the list \[True",
        ),
        ({"train": 5}, r"data\.train to be a list, .*got 5"),
        ({"train": "0.5 a 0.5 b", "weigths": [1]}, "Did you mean data.weights"),
    ],
)
def test_blends_that_say_two_things_are_refused(data: dict[str, object], message: str) -> None:
    """Some weights only, weights twice, weights that are none."""
    with pytest.raises(ConfigError, match=message):
        config_from_dict({"data": data})


def test_a_blend_in_a_string_trains_like_weights(tmp_path: Path) -> None:
    """Three samples of the second file come for one of the first."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
    train = f"1 {tmp_path}/one/train 3 {tmp_path}/two/train"
    config = tiny(tmp_path, data={"train": train, "validation": []}, train={"steps": 6})
    blend = build_datasets(config, vocab_size=320).train
    assert np.bincount(blend.dataset_index).tolist() == [18, 54]  # type: ignore[attr-defined]
