"""Training: one configuration, one loop, and the command line over both.

The loop is built from public parts of the other packages; a loop of your own can use them alike.
Read first: loop.py, then config/sections.py.
"""

from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import config_from_dict, parse_config, to_yaml
from megafsdp.training.config.sections import Config
from megafsdp.training.loop import RunSummary, train
from megafsdp.training.metrics.tracker import Tracker

__all__ = [
    "Config",
    "ConfigError",
    "RunSummary",
    "Tracker",
    "config_from_dict",
    "parse_config",
    "to_yaml",
    "train",
]
