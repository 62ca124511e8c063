"""The configuration of a model that transformers has saved, as a run begins from it."""

from __future__ import annotations

import json
from pathlib import Path

from megafsdp.errors import ConfigError, expected
from megafsdp.models.config import ModelConfig
from megafsdp.models.hf_config import config_from_hugging_face

_CONFIG_FILE = "config.json"


def read_saved_config(folder: Path) -> ModelConfig:
    """Return the model that the ``config.json`` of a folder describes; local.

    Raises:
        ConfigError: There is no such file, or its model is none that we have.
    """
    path = folder / _CONFIG_FILE
    try:
        found = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            expected(
                f"a folder with the {_CONFIG_FILE} of a model",
                f"{type(error).__name__}: {error}",
                where=f"the training configuration, model.from_hf '{folder}'",
                hint="Give a folder that save_pretrained() of transformers or export_hf() wrote;"
                " nothing is fetched from the Hub",
            )
        ) from error
    try:
        return config_from_hugging_face(found)
    except ConfigError as error:
        raise ConfigError(f"{error} It is model.from_hf of the run, '{path}'.") from error
