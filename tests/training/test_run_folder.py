"""A run's folder stands for its checkpoints, and a checkpoint for its run's model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from torch import nn

from megafsdp.checkpoint import save
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.training import to_yaml
from megafsdp.training.cli.main import main
from megafsdp.training.run_folder import checkpoints_of, config_in
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


def test_a_checkpoint_says_the_model_of_its_run(tmp_path: Path) -> None:
    """And dtypes and data; what this version has no longer is left out."""
    config = tiny(tmp_path, model=HYBRID, precision={"param_dtype": "bf16"})
    values = config.to_dict()
    values["model"]["of_another_version"] = 3
    found = config_in({"config": values, "run": {}})
    assert found is not None
    assert (found.model, found.precision, found.data) == (
        config.model,
        config.precision,
        config.data,
    )
    for extra in ({}, None, {"config": {}}, {"config": None}):
        assert config_in(extra) is None
