"""Remove the checkpoints and metrics of the run that options of ``megafsdp train`` describe.

Called by ``run.sh --fresh``, with the number of ranks to be started in ``WORLD_SIZE``. A mistake in
the options or a job that runs in the folder ends it before anything is removed, and files that are
not checkpoints stay.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from megafsdp.checkpoint.format.publication import saves_to
from megafsdp.errors import CheckpointError, ConfigError
from megafsdp.training.config.parse import parse_config
from megafsdp.training.config.sections import METRICS_FILE, Config
from megafsdp.training.config.validate import validate
from megafsdp.training.metrics.events import EVENTS_FILE
from megafsdp.training.process.run_lock import sole_job
from megafsdp.training.process.world import World, launch_number


def main(options: Sequence[str]) -> int:
    """Start a run over; return the process's exit code."""
    try:
        config = parse_config(options)
        validate(config, world_size=launch_number("WORLD_SIZE", 1))
        alone = World(0, 1, 0, 1, torch.device("cpu"))
        with sole_job(config.run_directory, alone, checkpoints=config.separate_checkpoints):
            _remove(config)
    except (CheckpointError, ConfigError, NotImplementedError) as error:
        print(f"run.sh: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _remove(config: Config) -> None:
    saves_to(config.checkpoint_directory).clear()
    for name in (METRICS_FILE, EVENTS_FILE):
        (config.run_directory / name).unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
