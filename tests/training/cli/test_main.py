"""The console entry: commands, exit codes, messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint.state.merge import library_versions
from megafsdp.training import to_yaml
from megafsdp.training.cli.main import main
from tests.training.runs import tiny, write_corpus


def test_train_runs_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A YAML file and an override are a run; the code is 0."""
    write_corpus(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(tiny(tmp_path)))
    assert main(["train", "--config", str(path), "--train.steps=2"]) == 0
    assert "step 2/2" in capsys.readouterr().out


def test_paths_of_tools_may_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell expands no ~ after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("some text")
    assert main(["prep", "~/a.txt", "--output=~/data", "--validation-every=0"]) == 0
    assert (tmp_path / "data" / "train.bin").is_file()


def test_train_says_what_a_recipe_leaves_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, with the reason: a run must show whether its weights are in codes."""
    write_corpus(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(tiny(tmp_path, precision={"recipe": "mxfp8"}, train={"steps": 2})))
    assert main(["train", "--config", str(path)]) == 0
    lines = [line for line in caplog.messages if "weights in codes of mxfp8" in line]
    assert len(lines) == 1
    assert "embedding" in lines[0].partition("others stay as they are: ")[2]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--trian.steps", "2"], "train.steps", 2),
        (["--train.steps", "2"], "data.train", 2),
        (["--train.steps", "2", "--data.train=[no/such]"], "no/such.idx", 1),
        (["--train.steps", "2", "--data.train=[x]", "--parallel.tp=2"], "tp", 2),
    ],
)
def test_error_of_the_user_is_one_message(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
    code: int,
) -> None:
    """No traceback, an exit code that is not 0, and a sentence that says how to mend it."""
    given = [*arguments, "--run.directory", str(tmp_path / "run"), "--run.device=cpu"]
    assert main(["train", *given]) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("more", [["--train.steps=1"], ["--dry-run"]])
def test_a_recipe_that_fits_no_weight_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    """By a run and by a dry run; it names the option."""
    write_corpus(tmp_path)
    path = tmp_path / "config.yaml"
    odd = {"precision": {"recipe": "mxfp8"}, "model": {"hidden_size": 40}}
    path.write_text(to_yaml(tiny(tmp_path, **odd)))
    assert main(["train", "--config", str(path), *more]) == 2
    assert "Leave out the recipe, which is precision.recipe" in capsys.readouterr().err


def test_prep_writes_files_that_train_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text goes in, a prefix comes out; a second call finds it done."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" * 50)
    words = ["prep", str(tmp_path), "--output", str(tmp_path / "data"), "--validation-every=4"]
    assert main(words) == 0
    assert "train 3 documents" in capsys.readouterr().out
    assert main(words) == 0
    config = tiny(tmp_path, data={"train": [str(tmp_path / "data/train")], "validation": []})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert main(["train", "--config", str(path), "--train.steps=1"]) == 0


def test_prep_without_inputs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It asks for files or for the standard library."""
    assert main(["prep", "--output", str(tmp_path / "data")]) == 2
    assert "inputs or stdlib" in capsys.readouterr().err


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    """One line a finding, and code 0 whatever is lost."""
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the samples; where in the loop it was raised would hide that."""
    write_corpus(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(tiny(tmp_path, optimizer={"lr": 1e30})))
    assert main(["train", "--config", str(path), "--schedule.warmup_samples=0"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("megafsdp: NonFiniteError: Expected a finite loss")
    assert "In samples [" in message and "is saved in" in message


def test_inspect_lists_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON; a folder without one is an error."""
    write_corpus(tmp_path)
    config = tiny(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    main(["train", "--config", str(path), "--train.steps=1"])
    capsys.readouterr()
    assert main(["ckpt", "inspect", str(config.checkpoint_directory)]) == 0
    assert "model.decoder.layers.0.mlp.linear_fc1.weight" in capsys.readouterr().out
    assert main(["ckpt", "inspect", str(config.checkpoint_directory), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert main(["ckpt", "inspect", str(config.run_directory)]) == 0
    assert "step 1, saved by" in capsys.readouterr().out
    assert main(["ckpt", "inspect", str(tmp_path)]) == 1
    assert "CheckpointError" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["trian"], ["ckpt"], ["ckpt", "inspect"]])
def test_unknown_command_is_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What is no command exits with 2 and the usage."""
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert "usage: megafsdp" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The list of commands is complete."""
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("train", "prep", "generate", "doctor", "ckpt"))


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """With those of torch and Python, as questions of users need them."""
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"megafsdp {library_versions()['megafsdp']} (torch {torch.__version__}"
    )


def test_prep_takes_compressed_files_and_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options reach the preparation."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"body": "one"}\n' * 30))
    words = ["prep", str(tmp_path / "a.jsonl.gz"), "--output", str(tmp_path / "data")]
    assert main([*words, "--json-key", "body", "--workers", "2"]) == 0
    assert "train 29 documents" in capsys.readouterr().out
    assert main([*words, "--workers", "0"]) == 2
    assert "at least 1 worker" in capsys.readouterr().err
