"""The checkpoint tools from the command line: what the docs show, exit codes, JSON, messages."""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp.checkpoint import save
from megafsdp.training.cli.main import main

_DOCS = Path(__file__).parents[3] / "docs" / "checkpoint-tools.md"


def _blocks() -> list[tuple[str, str]]:
    """Return the code blocks of the docs page in order, with their language."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", _DOCS.read_text(), re.MULTILINE | re.DOTALL)


def _plain(text: str) -> str:
    """Replace what depends on the versions of torch and of Python."""
    text = re.sub(r"[\d,]+ bytes", "N bytes", text)
    text = re.sub(r"(byte|checksum) \d+|\d+ in the manifest", r"\1 N", text)
    return re.sub(r"(megafsdp|torch|numpy|python) \d[\w.+]*", r"\1 V", text)


def run_docs(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str]]:
    """Run every block of the docs page; return what it shows beside what comes out."""
    names: dict[str, object] = {}
    results = []
    for language, block in _blocks():
        if language == "python":
            exec(compile(block, str(_DOCS), "exec"), names)
            continue
        printed = []
        for line in block.splitlines():
            if line.startswith("$ megafsdp "):
                printed.append(line)
                main(shlex.split(line)[2:])
                printed += capsys.readouterr().out.splitlines()
        results.append((block, "".join(f"{line}\n" for line in printed)))
    return results


def test_the_docs_show_what_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sample of the page is reproduced, but for sizes and versions."""
    monkeypatch.chdir(tmp_path)
    results = run_docs(capsys)
    assert len(results) == 8
    for shown, printed in results:
        assert _plain(printed) == _plain(shown)


def _saved(root: Path, value: float = 0.0) -> Path:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(value)
    return save(root, step=4, model=model)


def _printed(capsys: pytest.CaptureFixture[str], words: list[str], code: int) -> str:
    assert main(["ckpt", *words]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_verify_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 without faults, 1 with; both as text and as JSON; no bar where there is no terminal."""
    path = _saved(tmp_path)
    for options in ([], ["--no-progress"], ["--step", "4"]):
        assert "sound" in _printed(capsys, ["verify", str(tmp_path), *options], 0)
    assert json.loads(_printed(capsys, ["verify", str(path), "--json"], 0))["is_sound"]
    (path / "__0_0.distcp").unlink()
    assert "__0_0.distcp: model.bias: its file" in _printed(capsys, ["verify", str(path)], 1)
    found = json.loads(_printed(capsys, ["verify", str(path), "--json"], 1))["findings"]
    assert ("__0_0.distcp", "model.bias") in [(f["file"], f["key"]) for f in found]


def test_diff_has_an_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 if equal, 1 if not; tolerances and patterns decide."""
    _saved(tmp_path / "a")
    _saved(tmp_path / "b", 0.5)
    words = ["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--ignore", "rng.*"]
    assert "model.bias: 2 of 2 elements, by at most 0.5" in _printed(capsys, words, 1)
    body = json.loads(_printed(capsys, [*words, "--json"], 1))
    assert body["tensors"][0]["max_abs_difference"] == 0.5 and not body["is_equal"]
    assert "equal" in _printed(capsys, [*words, "--atol", "0.6"], 0)
    assert "equal" in _printed(capsys, [*words, "model.b*"], 0)
    assert main(["ckpt", "diff", str(tmp_path / "a"), str(tmp_path)]) == 1
    assert "CheckpointError" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rtol", "--atol"])
@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_tolerance_is_a_number_of_at_least_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    """Any other is a mistake of the options, not a difference."""
    for name in ("a", "b"):
        _saved(tmp_path / name, float(name == "b"))
    assert (
        main(["ckpt", "diff", str(tmp_path / "a"), str(tmp_path / "b"), f"{option}={value}"]) == 2
    )
    message = f"a finite number of at least 0, got {float(value)}. In {option}."
    assert message in capsys.readouterr().err


def test_convert_goes_both_ways(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path that was written is printed; what cannot be converted is one message."""
    _saved(tmp_path / "a")
    file, back = tmp_path / "a.pt", tmp_path / "b"
    words = ["convert", str(tmp_path / "a"), str(file), "--to", "torch"]
    assert _printed(capsys, words, 0) == f"{file}\n"
    words = ["convert", str(file), str(back), "--to", "megafsdp", "--step", "7", "--json"]
    written = json.loads(_printed(capsys, words, 0))["written"]
    assert written == str(back / "iter_0000007")
    assert main(["ckpt", "convert", str(back), str(file), "--to", "megafsdp"]) == 1
    assert "from megafsdp to megafsdp" in capsys.readouterr().err
    words = ["convert", str(back), str(file), "--to", "torch"]
    for option in ("precision", "fp16"), ("transformer-impl", "local"), ("ignore", "x"):
        assert main(["ckpt", *words, f"--{option[0]}", option[1]]) == 1
        assert option[0].replace("-", "_") in capsys.readouterr().err


@pytest.mark.parametrize("to", ["megafsdp", "nvidia"])
def test_a_target_that_cannot_be_written_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    """As where the disk is full, or the folder is another user's."""
    _saved(tmp_path / "a")
    file = str(tmp_path / "a.pt")
    assert main(["ckpt", "convert", str(tmp_path / "a"), file, "--to", "torch"]) == 0
    source = file if to == "megafsdp" else tmp_path / "a"
    # A file is where the folder of the target should be.
    target = tmp_path / "a.pt/there"
    assert main(["ckpt", "convert", str(source), str(target), "--to", to, "--step", "4"]) == 1
    assert "NotADirectoryError" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["export_hf", "import_hf"])
def test_a_full_disk_ends_a_tool_with_one_message(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tool: str,
) -> None:
    """With the target's name."""

    def fail(*unused: object, **unused_too: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"megafsdp.training.cli.checkpoint_tools.{tool}_checkpoint", fail)
    _saved(tmp_path / "a")
    words = [tool.replace("_", "-"), str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["ckpt", *words]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error and f"'{tmp_path / 'b'}'" in error


def test_inspect_lists_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--keys`` chooses by patterns, in text and in JSON."""
    path = _saved(tmp_path)
    text = _printed(capsys, ["inspect", str(path), "--keys", "*.bias"], 0)
    assert "model.bias" in text and "model.weight" not in text
    body = json.loads(_printed(capsys, ["inspect", str(path), "--json", "--keys", "extra"], 0))
    assert body["tensors"] == [] and list(body["objects"]) == ["extra"]
    assert body["sections"]["model"]["num_tensors"] == 2
