"""YAML files, command lines, and what is said about wrong names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import yaml

from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import config_from_dict, differences, parse_config, to_yaml
from megafsdp.training.config.sections import ProfileOptions

EXAMPLES = sorted(Path(__file__).parents[3].glob("examples/configs/*.yaml"))


def _write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_command_line_overrides_file(tmp_path: Path) -> None:
    """The file fills in, the command line has the last word, the rest are defaults."""
    path = _write(tmp_path, "optimizer: {lr: 2e-3, eps: 1.0e-6}\ndata: {train: [a, b]}\n")
    config = parse_config(["--config", path, "--optimizer.lr", "5e-4", "--data.train+=c"])
    assert config.optimizer.lr == 5e-4
    assert config.optimizer.eps == 1e-6
    assert config.data.train == ["a", "b", "c"]
    assert config.optimizer.weight_decay == 0.1


def test_a_file_is_read_as_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the locale is, as it was written: also where a job starts in locale C."""
    path = tmp_path / "config.yaml"
    path.write_text("run: {name: Prüfung}", encoding="utf-8")
    read = Path.read_text

    def in_locale_c(path: Path, encoding: str | None = None, errors: str | None = None) -> str:
        return read(path, encoding or "ascii", errors)

    monkeypatch.setattr(Path, "read_text", in_locale_c)
    assert parse_config(["--config", str(path)]).run.name == "Prüfung"


@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_command_line_overrides_files_that_come_later(tmp_path: Path, form: str) -> None:
    """Files override each other in their order, and options override them wherever they stand."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("train: {steps: 7, global_batch_size: 4}\nrun: {name: first}")
    second.write_text("train: {steps: 9, global_batch_size: 8}")
    words = ["--train.steps", "2", *form.format(first).split(), "--run.seed=5"]
    config = parse_config([*words, *form.format(second).split()])
    assert (config.train.steps, config.train.global_batch_size) == (2, 8)
    assert (config.run.name, config.run.seed) == ("first", 5)


def test_the_file_of_a_run_that_was_moved_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin another run in the old folder; options or a later file name a folder anew."""
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    words = ["--config", _write(moved, "run: {directory: old}")]
    assert parse_config(words).run.directory == "old", "no run has begun in this folder"
    (moved / "metrics.jsonl").touch()
    message = re.escape(f"run's own folder, '{moved}', got 'old'. In run.directory of '{words[1]}'")
    other = tmp_path / "other.yaml"
    other.write_text("run: {name: other}")
    for more in ([], ["--config", str(other)], ["--run.name", "other"]):
        with pytest.raises(ConfigError, match=f"{message}.*Give --run.directory {moved} to go on"):
            parse_config([*words, *more])
    (moved / "copy.yaml").write_text("run: {directory: old}")
    assert parse_config(["--config", str(moved / "copy.yaml")]).run.directory == "old"
    assert parse_config([*words, "--run.directory", "moved"]).run.directory == "moved"
    later = tmp_path / "later.yaml"
    later.write_text("run: {directory: new}")
    assert parse_config([*words, "--config", str(later)]).run.directory == "new"
    (tmp_path / "old").symlink_to(moved)
    assert parse_config(words).run.directory == "old", "the same folder by another name"


def test_yaml_round_trip_is_exact(tmp_path: Path) -> None:
    """What to_yaml() writes is read back as the same configuration."""
    config = parse_config(
        ["--optimizer.betas=[0.8,0.9]", "--model.num_layers=3", "--data.train=[x]", "--run.name=n"]
    )
    assert parse_config(["--config", _write(tmp_path, to_yaml(config))]) == config
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize("value", [None, True, False, 1, 2])
def test_resharding_is_a_choice_or_a_number(tmp_path: Path, value: bool | int | None) -> None:
    """True is not read as 1, from a file, a command line or a checkpoint's values."""
    config = parse_config([f"--parallel.reshard_after_forward={json.dumps(value)}"])
    again = parse_config(["--config", _write(tmp_path, to_yaml(config))])
    for each in (config, again, config_from_dict(config.to_dict())):
        assert each.parallel.reshard_after_forward is value


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        (["--optimizer.lrr", "1"], "optimizer.lr"),
        (["--model.num_layer=2"], "model.num_layers"),
        (["--lr", "1"], "optimizer.lr"),
        (["--train.sequence_length", "8"], "data.sequence_length"),
        (["--optimiser.lr=1"], "optimizer.lr"),
    ],
)
def test_unknown_option_names_the_nearest(arguments: list[str], nearest: str) -> None:
    """A slip, a wrong section and a missing section all lead to the right name."""
    with pytest.raises(ConfigError, match=rf"command line.*{nearest}"):
        parse_config(arguments)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("optimizer: {learning_rate: 1, lr: 1}", "optimizer"),
        ("optimizer: {weight_decai: 1}", "optimizer.weight_decay"),
        ("trian: {steps: 1}", "train"),
        # As options are spelt.
        ("run.directory: x", "Write it as run: {directory: VALUE}"),
        ("logging: {profile.start: 3}", "Write it as logging: {profile: {start: VALUE}}"),
    ],
)
def test_unknown_key_of_a_file_names_the_nearest(tmp_path: Path, text: str, nearest: str) -> None:
    """The message names the file too."""
    with pytest.raises(ConfigError, match=rf"config\.yaml.*{nearest}"):
        parse_config(["--config", _write(tmp_path, text)])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train:\n  steps: 7\n  steps: 9", "'steps' twice, in lines 2 and 3"),
        ("train: {steps: 7}\nmodel: {preset: gpt2-small}\ntrain: {}", "'train' twice.* 1 and 3"),
        ("data: {train: [{a: 1, a: 1}]}", "'a' twice"),
    ],
)
def test_key_that_stands_twice_is_refused(tmp_path: Path, text: str, found: str) -> None:
    """YAML would take the last and lose the others without a word."""
    with pytest.raises(ConfigError, match=rf"{found}.*config\.yaml"):
        parse_config(["--config", _write(tmp_path, text)])


def test_whole_numbers_are_decimal() -> None:
    """With a sign and with underscores between digits too."""
    words = ["--train.steps", "1_000", "--run.seed", "+7", "--schedule.warmup_samples", "0"]
    config = parse_config(words)
    assert (config.train.steps, config.run.seed, config.schedule.warmup_samples) == (1000, 7, 0)


def test_anchors_are_no_keys_that_stand_twice(tmp_path: Path) -> None:
    """One value may be written once and meant in several places."""
    text = "data: {train: &files [a], validation: *files}\ntrain: {steps: 7}\nmuon: {eps: 7}"
    assert parse_config(["--config", _write(tmp_path, text)]).data.validation == ["a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer.lr", "fast"], "optimizer.lr to be a number above 0, got the text 'fast'"),
        (["--optimizer.lr", ".inf"], "optimizer.lr to be a number above 0, got inf, which is not"),
        (["--train.steps", "1.5"], "train.steps to be a whole number above 0 or null, got 1.5"),
        (["--train.steps", "true"], "train.steps to be a whole number above 0 or null, got true"),
        (["--train.steps", "010"], "a whole number above 0 or null, got the text '010'"),
        (["--train.steps", "0x10"], "a whole number above 0 or null, got the text '0x10'"),
        (["--train.steps", "1:30"], "a whole number above 0 or null, got the text '1:30'"),
        (
            ["--train.steps", ""],
            "train.steps to be a whole number above 0 or null, got the text ''",
        ),
        (["--train.steps", "[1"], "argument --train.steps: '[1' is not YAML"),
        (["--run.name", "null"], "run.name to be text, got null"),
        (
            ["--optimizer.betas", "[0.9]"],
            "optimizer.betas to be a list of 2, each item a number of at least 0 and below 1, got"
            " the list [0.9]. In the command line. See megafsdp train --help optimizer",
        ),
        (
            ["--data.validation", "x"],
            "data.validation to be a list, each item text that is not empty, got the text 'x'. In"
            " the command line. Write a list of one item as [x]. See megafsdp train --help data for"
            " what it does.",
        ),
        (
            ["--data.weights", "0.5"],
            "0.5. In the command line. Write a list of one item as [0.5]. S",
        ),
        (["--optimizer.betas", "0.9"], "got 0.9. In the command line. See megafsdp train --help"),
        (["--data.weights", "[1, a]"], "each item a number above 0 or null, got the list [1, 'a']"),
        (
            ["--optimizer.lr_multipliers", "2"],
            "a mapping, each value a number of at least 0, got 2",
        ),
        (
            ["--model.tie_embeddings", "1"],
            "model.tie_embeddings to be true or false or null, got 1",
        ),
        (["--run.directory", ""], "run.directory to be text that is not empty, got the text ''"),
        # As an unset variable of a shell leaves it: it would mean the folder of the command.
        (["--checkpoint.directory="], "checkpoint.directory to be text that is not empty or null"),
        (["--data.cache="], "data.cache to be text that is not empty or null, got the text ''"),
        (["--data.validation", "[a, '']"], "each item text that is not empty, got the list"),
        (["--precision.keep_fp32", "*norm"], "precision.keep_fp32+: '*norm' is not YAML"),
        (
            ["--logging.profile", "3"],
            "profile to be a mapping of start, steps, ranks or null, got 3",
        ),
        (
            ["--logging.profile.start", "a"],
            "logging.profile.start to be a whole number above 0, got",
        ),
        (
            ["--schedule.kind", "linear"],
            "schedule.kind to be cosine, wsd or constant, got the text 'linear'",
        ),
        (["--train.steps"], "argument --train.steps: expected one argument"),
        (["word"], "got 'word'"),
        (["--config", "no/such/file.yaml"], "a file that can be read, got No such file"),
        (["--config"], "argument --config: expected one argument"),
    ],
)
def test_unreadable_value_is_a_config_error(arguments: list[str], message: str) -> None:
    """Wrong types, unknown choices, missing values and files are errors, not exits."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(arguments)


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], (0.0, "auto")),
        (["--optimizer.offload_fraction=0.5", "--optimizer.speculate=false"], (0.5, False)),
        (["--optimizer.offload_fraction", "1", "--optimizer.speculate", "true"], (1, True)),
        (["--optimizer.offload_fraction=auto", "--optimizer.speculate=auto"], ("auto", "auto")),
    ],
)
def test_a_number_or_a_word_is_what_it_looks_like(
    words: list[str], values: tuple[object, object]
) -> None:
    """The choices of offload are numbers, facts, or auto."""
    optimizer = parse_config(words).optimizer
    found = optimizer.offload_fraction, optimizer.speculate
    assert found == values
    assert type(found[1]) is type(values[1])


TEXTS = [
    "# Title",
    "null",
    "Null",
    "~",
    "---",
    "--title",
    "a # b",
    "1e3",
    "-1.5E7",
    "010",
    "[a]",
    "'a'",
    " a ",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_arrives_as_it_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """From values, a file and a command line, for fields with and without null, and in a list."""
    # No path is empty.
    written = text or "0"
    values = {
        "run": {"name": text},
        "data": {"train": [written, written], "tokenizer": written},
        "evaluation": {"sample_prompt": text},
        "checkpoint": {"directory": written},
    }
    path = os.path.expanduser(written)
    words = ["--config", _write(tmp_path, json.dumps(values))]
    configs = [config_from_dict(values), parse_config(words)]
    if text != "null":
        more = [f"--data.train={json.dumps([written, written])}", f"--data.tokenizer={written}"]
        more += [f"--run.name={text}", f"--evaluation.sample_prompt={text}"]
        configs.append(parse_config([*more, f"--checkpoint.directory={written}"]))
    for config in configs:
        given = {name: {k: config.to_dict()[name][k] for k in values[name]} for name in values}
        # The values that are paths are expanded, which only changes the text "~".
        assert given == {
            **values,
            "data": {"train": [path, path], "tokenizer": path},
            "checkpoint": {"directory": path},
        }
        assert config_from_dict(config.to_dict()) == config
        assert type(config.evaluation.sample_prompt) is str
        assert type(config.data.train[0]) is str
    with pytest.raises(SystemExit):
        parse_config([*words, "--print-config"])
    printed = _write(tmp_path, capsys.readouterr().out)
    assert parse_config(["--config", printed]) == configs[0]


def test_home_folders_are_expanded_in_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files and options, where no shell does it; text that is no path stays as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    _write(tmp_path, "model: {from_hf: ~/saved}\ndata: {train: [~/a, b~], tokenizer: ~/t}\n")
    config = parse_config(
        [
            "--config=~/config.yaml",
            "--run.directory=~/run",
            "--checkpoint.directory=~/steps",
            "--data.validation=[~/v]",
            "--data.cache=~/c",
            "--evaluation.sample_prompt=~/p",
        ]
    )
    assert config.model.from_hf == f"{tmp_path}/saved"
    assert config.data.train == [f"{tmp_path}/a", "b~"]
    assert config.data.validation == [f"{tmp_path}/v"]
    assert (config.data.tokenizer, config.data.cache) == (f"{tmp_path}/t", f"{tmp_path}/c")
    assert config.run_directory == tmp_path / "run"
    assert config.checkpoint_directory == tmp_path / "steps"
    assert config.evaluation.sample_prompt == "~/p"


def test_a_folder_may_be_named_by_a_number() -> None:
    """Of a year, say."""
    assert parse_config(["--run.directory", "2026"]).run.directory == "2026"


@pytest.mark.parametrize("null", ["null", "~", ""])
def test_null_is_none(tmp_path: Path, null: str) -> None:
    """A bare null of a file, and the word null on a command line, take a text away."""
    path = _write(tmp_path, "evaluation: {sample_prompt: a}")
    more = tmp_path / "more.yaml"
    more.write_text(f"evaluation:\n  sample_prompt: {null}\n")
    assert parse_config([f"--train.steps={null}"] if null else []).train.steps is None
    for words in (["--config", str(more)], ["--evaluation.sample_prompt", "null"]):
        assert parse_config(["--config", path]).evaluation.sample_prompt == "a"
        assert parse_config(["--config", path, *words]).evaluation.sample_prompt is None
    assert config_from_dict({"data": {"tokenizer": None}}).data.tokenizer is None


def test_text_that_begins_with_dashes_is_no_option() -> None:
    """It has a space where a name would be, so it may stand behind its option's name."""
    config = parse_config(["--evaluation.sample_prompt", "-- a = b"])
    assert config.evaluation.sample_prompt == "-- a = b"


@pytest.mark.parametrize("text", ["a: {b: [}", "- a\n- b\n", "optimizer: 3\n", "", "# a"])
def test_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    """Broken YAML, a list, a value in a section's place, and an empty file are errors."""
    with pytest.raises(ConfigError):
        parse_config(["--config", _write(tmp_path, text)])


def test_section_without_values_is_named(tmp_path: Path) -> None:
    """All of its lines are commented out, say."""
    path = _write(tmp_path, "train: {steps: 2}\nevaluation:\n  # num_samples: 8\n")
    with pytest.raises(
        ConfigError,
        match=r"section evaluation to be a mapping of fields to values, got null.*config\.yaml",
    ):
        parse_config(["--config", path])


def test_print_config_prints_yaml_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    """--print-config shows the values after overrides."""
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--train.steps", "7", "--print-config"])
    assert exit_info.value.code == 0
    assert yaml.safe_load(capsys.readouterr().out)["train"]["steps"] == 7


def _help(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse_config(["--help", *words])
    assert exit_info.value.code == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_lists_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the first line of its docstring, and with how to read on; no single values."""
    text = _help(capsys)
    for section in config_from_dict({}).to_dict():
        assert f" {section} " in text
    assert "schedule The learning rate over consumed samples" in text
    assert "--help SECTION" in text
    assert "--schedule.kind" not in text
    assert len(text) < 3000


@pytest.mark.parametrize("arguments", [["--optimizer", "muon"], ["--optimizer=muon"]])
def test_a_section_that_is_given_a_value_names_one_of_its_fields(arguments: list[str]) -> None:
    """As a flag of other programs might be spelled."""
    words = r"the section 'optimizer'.*such as --optimizer\.kind; megafsdp train --help optimizer"
    with pytest.raises(ConfigError, match=words):
        parse_config(arguments)


def test_help_of_a_section_describes_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    """With types in words, defaults, and values that stand in groups; others are not there."""
    text = _help(capsys, "schedule", "logging")
    assert (
        "--schedule.warmup_samples VALUE Length of the linear rise from 0. (a whole number" in text
    )
    assert "(a number of at least 0 and at most 1; default 0.1)" in text
    assert "--logging.profile.start VALUE The first step. (a whole number above 0; default" in text
    assert "--optimizer.lr" not in text
    with pytest.raises(ConfigError, match=r"known name, got 'optimiser'.*Did you mean optimizer"):
        parse_config(["--help", "optimiser"])


def test_help_of_all_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """It has a line for each value, with the text of its docstring."""
    text = _help(capsys, "all")
    for section, values in config_from_dict({}).to_dict().items():
        # A second spelling comes before the word of its value since Python 3.13.
        assert all(re.search(rf"--{section}\.{name}(,.*?)? VALUE", text) for name in values)


def test_groups_of_values_are_set_whole_or_one_by_one(tmp_path: Path) -> None:
    """On a command line and in a file; a file's null is no obstacle."""
    profile = parse_config(["--logging.profile", "{start: 5, ranks: [0, 1]}"]).logging.profile
    assert profile == ProfileOptions(start=5, steps=3, ranks=[0, 1])
    path = _write(tmp_path, "logging: {profile: null}")
    words = ["--config", path, "--logging.profile.steps=2", "--logging.profile.ranks+=1"]
    config = parse_config(words)
    assert config.logging.profile == ProfileOptions(steps=2, ranks=[0, 1])
    assert parse_config(["--config", _write(tmp_path, to_yaml(config))]) == config
    with pytest.raises(ConfigError, match=r"'logging\.profile\.strat'.*logging\.profile\.start"):
        parse_config(["--logging.profile", "{strat: 5}"])


def test_differences_name_both_values() -> None:
    """Only what differs is listed; a value that one side lacks is called absent."""
    lines = differences({"a": {"x": 1, "y": 2}}, {"a": {"x": 1, "y": 3}, "b": {"z": None}})
    assert lines == ["a.y: 2 -> 3", "b.z: absent -> None"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_configuration_is_readable(path: Path) -> None:
    """Every configuration under examples/ parses."""
    assert parse_config(["--config", str(path)]).data.train
