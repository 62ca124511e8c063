"""Training: one configuration, one loop, and the command line over both."""

from megafsdp.errors import ConfigError
from megafsdp.training.config.parse import config_from_dict, parse_config, to_yaml
from megafsdp.training.config.sections import Config
from megafsdp.training.loop import RunSummary, train

__all__ = [
    "Config",
    "ConfigError",
    "RunSummary",
    "config_from_dict",
    "parse_config",
    "to_yaml",
    "train",
]
