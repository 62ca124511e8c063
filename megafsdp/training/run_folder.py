"""Find the checkpoints of a run by the run's folder, and the configuration in one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import yaml

from megafsdp.checkpoint import latest_step
from megafsdp.checkpoint.storage.locations import Location, location_of
from megafsdp.errors import CheckpointError, ConfigError, expected
from megafsdp.training.config.parse import config_from_dict
from megafsdp.training.config.sections import CONFIG_FILE, Config

_CHECKPOINTS = "checkpoints"
# The sections that say which model a run trained, how it is stored, and how text becomes tokens.
_SECTIONS = ("model", "precision", "optimizer", "data")


def checkpoints_of(directory: str | os.PathLike[str]) -> Location:
    """Return the save root of a run; any other folder comes back as it is.

    Args:
        directory: A run's folder, recognized by its config.yaml; or a save root or the folder of
            one checkpoint, on this machine or in a store.

    Raises:
        CheckpointError: The run has no checkpoint yet.
        ConfigError: Its config.yaml cannot be read.
    """
    folder = location_of(directory)
    if not isinstance(folder, Path) or not (folder / CONFIG_FILE).is_file():
        return folder
    root = _root_of_run(folder)
    if latest_step(root) is None:
        raise CheckpointError.expected(
            "a checkpoint of the run",
            "none",
            where=f"'{root}', where {folder / CONFIG_FILE} has them",
            hint="Wait for the run's first save, or train it on to the end",
        )
    return root


def root_to_publish_in(directory: str | os.PathLike[str]) -> Location:
    """Return the save root that a tool publishes a checkpoint in; refuse a run's folder.

    Args:
        directory: The save root, which need not exist.

    Raises:
        CheckpointError: It is the folder of a run that has its checkpoints elsewhere.
        ConfigError: Its config.yaml cannot be read.
    """
    folder = location_of(directory)
    if not isinstance(folder, Path):
        return folder
    is_run = (folder / CONFIG_FILE).is_file()
    if not is_run and latest_step(folder / _CHECKPOINTS) is None:
        return folder
    root = _root_of_run(folder) if is_run else folder / _CHECKPOINTS
    if root.absolute() == folder.absolute():
        return folder
    raise CheckpointError.expected(
        "a save root of its own",
        f"a run's folder, which has its checkpoints in '{root}'",
        where=f"'{folder}'",
        hint="Give a new folder; a run starts from saved weights by --model.from_hf",
    )


def _root_of_run(folder: Path) -> Location:
    path = folder / CONFIG_FILE
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        section = values.get("checkpoint") or {}
        # A configured path is relative to where the run started; the default moves with the folder.
        return location_of(section.get("directory") or folder / _CHECKPOINTS)
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        what, hint = "the configuration of a run in YAML", "Name the folder of the checkpoints"
        raise ConfigError(expected(what, error, where=f"'{path}'", hint=hint)) from error


def config_in(extra: object) -> Config | None:
    """Return what a checkpoint's ``extra`` says of its run's model, dtypes, optimizer and data.

    Fields that this version no longer has are left out.

    Returns:
        A configuration whose other sections are defaults; None if no run saved the checkpoint.

    Raises:
        ConfigError: A value is not one of this version.
    """
    run = extra.get("config") if isinstance(extra, Mapping) else None
    if not isinstance(run, Mapping) or not isinstance(run.get("model"), Mapping):
        return None
    default, values = Config().to_dict(), {}
    for section in _SECTIONS:
        stored = run.get(section, {})
        values[section] = {name: stored[name] for name in default[section] if name in stored}
    return config_from_dict(values)
