"""Record some steps of a run by torch's profiler, and on CUDA the memory of these steps.

A trace is read by Perfetto (ui.perfetto.dev) and by Chrome's ``about:tracing``, a snapshot of the
memory by torch's page pytorch.org/memory_viz. If there is a step before the first, the profiler
runs on it too without keeping it: the first events of a profiler take longer than later ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from megafsdp.device.torch_private import dump_memory_history, record_memory_history
from megafsdp.training.config.sections import ProfileOptions
from megafsdp.training.process.world import World

_LOGGER = logging.getLogger("megafsdp.training")

PROFILE_FOLDER = "profile"


class StepProfiler:
    """Record the steps that a configuration names, on the ranks that it names; local.

    Args:
        options: Which steps and ranks; None for none.
        folder: The run's.
        world: Its processes.
        next_step: The step that the run continues with.
        last_step: The step that it ends with.
        print_line: Prints a line of progress.
    """

    def __init__(
        self,
        options: ProfileOptions | None,
        folder: Path,
        world: World,
        *,
        next_step: int,
        last_step: int,
        print_line: Callable[[str], None],
    ) -> None:
        self._folder = folder / PROFILE_FOLDER
        self._world = world
        self._print_line = print_line
        self._options = options if options is not None and options.start >= next_step else None
        if self._options is not None and self._options.start > last_step and world.is_first:
            _LOGGER.warning(
                "Nothing is profiled: logging.profile.start is %d and the run ends with step %d."
                " Begin earlier, or train longer.",
                self._options.start,
                last_step,
            )
        self._first = 0 if self._options is None else max(self._options.start - 1, next_step)
        self._recorded_last = 0
        self._profiler: torch.profiler.profile | None = None

    def is_edge(self, step: int) -> bool:
        """Return whether a step must be done before the next one is queued, alike on all ranks."""
        return self._options is not None and step in (self._first - 1, self._options.last)

    def before(self, step: int) -> None:
        """Before a step is queued, begin to record if it is the first, or count it."""
        options = self._options
        if self._profiler is not None:
            self._profiler.step()
        elif options is not None and step == self._first and self._world.rank in options.ranks:
            self._start(options)
        self._recorded_last = step

    def after(self, step: int) -> None:
        """After a step is done, write the files if it is the last."""
        if self._options is not None and step == self._options.last:
            self.close()

    def close(self) -> None:
        """Write the files of the steps so far, if some are recorded."""
        if self._profiler is not None:
            # Stopping writes the files.
            self._profiler.stop()
            self._profiler = None
            if self._world.device.type == "cuda":
                record_memory_history(is_wanted=False)

    def _start(self, options: ProfileOptions) -> None:
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            if ProfilerActivity.CUDA in torch.profiler.supported_activities():
                activities.append(ProfilerActivity.CUDA)
            record_memory_history(is_wanted=True)

        def action(step: int) -> ProfilerAction:
            # The profiler also asks for step 0, in its constructor.
            is_kept = max(step, self._first) >= options.start
            return ProfilerAction.RECORD if is_kept else ProfilerAction.WARMUP

        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=action,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
        )
        # Steps have the numbers of the run in the trace.
        self._profiler.step_num = self._first
        self._profiler.start()

    def _write(self, profiler: torch.profiler.profile) -> None:
        """Write trace and snapshot; a full disk loses them and does not end the run."""
        options = self._options
        assert options is not None, "only what was asked for is recorded"
        name = f"steps_{options.start}-{self._recorded_last}_rank_{self._world.rank}"
        trace = self._folder / f"{name}.trace.json.gz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            if self._world.device.type == "cuda":
                dump_memory_history(str(self._folder / f"{name}.memory.pickle"))
        except (OSError, RuntimeError) as error:
            _LOGGER.warning("no profile: %s: %s", type(error).__name__, error)
            return
        self._print_line(f"profiled steps {options.start} to {self._recorded_last}: {trace}")
