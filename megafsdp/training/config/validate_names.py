"""Checks of names that only the model knows; values are ``validate``'s."""

from __future__ import annotations

import torch

from megafsdp.errors import ConfigError
from megafsdp.fsdp.grouping import find_units
from megafsdp.fsdp.kept_fp32 import policies_by_module
from megafsdp.models.build import build_model, unit_classes
from megafsdp.training.config.sections import Config


def check_kept_fp32(config: Config) -> None:
    """Check that every name in ``precision.keep_fp32`` is one of the model's; local.

    Raises:
        ConfigError: One matches nothing.
    """
    if not config.precision.keep_fp32:
        return
    with torch.device("meta"):
        model = build_model(config.model.resolve())
    units = find_units(model, unit_classes(model.config))
    try:
        policies_by_module(model, units, config.precision.policy())
    except ValueError as error:
        raise ConfigError(f"{error} It is precision.keep_fp32 of the run.") from error
