"""A run's folder stands for its checkpoints, and a checkpoint for its run's model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from megafsdp.checkpoint import save
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.training import to_yaml
from megafsdp.training.cli.main import main
from megafsdp.training.resume import find_stored
from megafsdp.training.run_folder import checkpoints_of, config_in, root_to_publish_in
from tests.training.runs import HYBRID, tiny


def _run(folder: Path, **sections: dict[str, object]) -> Path:
    """Make what a run leaves: its configuration and a checkpoint."""
    config = tiny(folder, **sections)
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "config.yaml").write_text(to_yaml(config))
    save(config.checkpoint_directory, step=3, model=nn.Linear(3, 2))
    return config.run_directory


def test_checkpoints_of_a_run_are_found(tmp_path: Path) -> None:
    """In its folder, also when that has moved, or where the run has set them apart."""
    run = _run(tmp_path)
    assert checkpoints_of(run) == run / "checkpoints"
    written = (run / "config.yaml").read_text()
    for text in ("run: {}", "checkpoint:"):
        (run / "config.yaml").write_text(text)
        assert checkpoints_of(run) == run / "checkpoints", "a file of a user's hand"
    (run / "config.yaml").write_text(written)
    moved = tmp_path / "moved"
    shutil.move(run, moved)
    assert checkpoints_of(moved) == moved / "checkpoints"
    apart = tmp_path / "apart"
    run = _run(tmp_path / "other", checkpoint={"directory": str(apart)})
    assert checkpoints_of(run) == apart


def test_other_folders_are_what_they_were(tmp_path: Path) -> None:
    """A save root, one checkpoint, a file, and nothing at all."""
    run = _run(tmp_path)
    root = run / "checkpoints"
    for path in (root, root / "iter_0000003", run / "config.yaml", tmp_path / "none"):
        assert checkpoints_of(path) == path


def test_a_run_without_checkpoints_is_said(tmp_path: Path) -> None:
    """With where they are looked for."""
    run = _run(tmp_path)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"a checkpoint of the run, got none.*run/checkpoints"
    ):
        checkpoints_of(run)
    (run / "config.yaml").write_text("- a list")
    with pytest.raises(ConfigError, match=r"the configuration of a run in YAML.*config\.yaml"):
        checkpoints_of(run)


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "{run}"],
        ["inspect", "{run}", "--step", "3"],
        ["verify", "{run}"],
        ["diff", "{run}", "{run}"],
        ["convert", "{run}", "{run}/a.pt", "--to", "torch"],
    ],
)
def test_tools_take_the_folder_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """As they take its checkpoints."""
    run = _run(tmp_path)
    assert main(["ckpt", *(word.format(run=run) for word in words)]) == 0
    assert capsys.readouterr().err == ""


def test_a_torch_file_is_split_as_a_run_has_it(tmp_path: Path) -> None:
    """--fused-like takes the folder of a run as it takes its checkpoints."""
    run, file, again = _run(tmp_path), str(tmp_path / "a.pt"), str(tmp_path / "again")
    assert main(["ckpt", "convert", str(run), file, "--to", "torch"]) == 0
    words = ["ckpt", "convert", file, again, "--to", "megafsdp", "--step", "3"]
    assert main([*words, "--fused-like", str(run)]) == 0
    assert main(["ckpt", "diff", str(run), again, "--ignore", "common"]) == 0


@pytest.mark.parametrize("has_config", [True, False])
@pytest.mark.parametrize(
    "words", [["convert", "{file}", "{run}", "--to", "megafsdp"], ["import-hf", "{file}", "{run}"]]
)
def test_nothing_is_published_in_the_folder_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], has_config: bool
) -> None:
    """The run would not look there: the message says where it does, and how runs start."""
    run = _run(tmp_path)
    if not has_config:
        (run / "config.yaml").unlink()
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "a.pt")
    before = sorted(run.rglob("*"))
    assert main(["ckpt", *(word.format(file=tmp_path / "a.pt", run=run) for word in words)]) == 1
    error = capsys.readouterr().err
    assert f"has its checkpoints in '{run / 'checkpoints'}'" in error
    assert "--model.from_hf" in error
    assert sorted(run.rglob("*")) == before


def test_a_run_may_have_its_checkpoints_in_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then this is a save root, as are a new folder, another one and a store's."""
    inside = tmp_path / "run"
    run = _run(tmp_path, checkpoint={"directory": str(inside)})
    monkeypatch.chdir(tmp_path)
    for root in (run, Path("run"), tmp_path / "new", _run(tmp_path / "other") / "checkpoints"):
        assert root_to_publish_in(root) == root
    assert str(root_to_publish_in("memory://run")) == "memory://run"


def test_a_run_does_not_go_on_from_weights_alone(tmp_path: Path) -> None:
    """It says how a run starts from weights."""
    config = tiny(tmp_path)
    save(config.checkpoint_directory, step=3, model=nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"a checkpoint of a training run.*--model\.from_hf"):
        find_stored(config)


def test_a_folder_of_imported_weights_is_no_folder_for_a_run(tmp_path: Path) -> None:
    """The run would look in its folder `checkpoints`, find none, and begin with random weights."""
    config = tiny(tmp_path)
    save(config.run_directory, step=3, model=nn.Linear(3, 2))
    with pytest.raises(ConfigError, match=r"of a run, got .*step 3.*run'.*--model\.from_hf"):
        find_stored(config)


@pytest.mark.parametrize("place", ["run", "run/checkpoints/iter_0000003"])
def test_checkpoints_are_not_looked_for_beside_where_they_lie(tmp_path: Path, place: str) -> None:
    """A run would begin anew, in the folder of another run or of one checkpoint."""
    config = tiny(tmp_path)
    save(config.checkpoint_directory, step=3, model=nn.Linear(3, 2))
    directory, root = str(tmp_path / place), config.checkpoint_directory
    with pytest.raises(ConfigError, match=r"checkpoint\.directory") as failure:
        find_stored(tiny(tmp_path / "new", checkpoint={"directory": directory}))
    assert f"--checkpoint.directory {root}" in str(failure.value)
    # A folder of a run without checkpoints may become one of checkpoints.
    assert find_stored(tiny(tmp_path / "new", checkpoint={"directory": str(tmp_path)})) is None


def test_the_folder_of_one_checkpoint_is_no_folder_for_a_run(tmp_path: Path) -> None:
    """When the checkpoint is removed, the run would be gone with it."""
    config = tiny(tmp_path)
    save(config.checkpoint_directory, step=3, model=nn.Linear(3, 2))
    run = replace(config.run, directory=str(config.checkpoint_directory / "iter_0000003"))
    with pytest.raises(ConfigError, match=r"got one checkpoint\. In run\.directory"):
        find_stored(replace(config, run=run))


def test_a_checkpoint_says_the_model_of_its_run(tmp_path: Path) -> None:
    """And dtypes and data; what this version has no longer is left out."""
    precision = {"param_dtype": "bf16", "main_params_dtype": "bf16"}
    optimizer = {"store_param_remainders": True}
    config = tiny(tmp_path, model=HYBRID, precision=precision, optimizer=optimizer)
    values = config.to_dict()
    values["model"]["of_another_version"] = 3
    found = config_in({"config": values, "run": {}})
    assert found is not None
    for section in ("model", "precision", "optimizer", "data"):
        assert getattr(found, section) == getattr(config, section)
    for extra in ({}, None, {"config": {}}, {"config": None}):
        assert config_in(extra) is None
