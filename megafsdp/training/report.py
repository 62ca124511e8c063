"""Print a run's progress lines and log its rows to the trackers.

No other module of a training run prints.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time

from megafsdp.buffer.comm.agreement import attempt, raise_together
from megafsdp.data.output_files import replace_text
from megafsdp.errors import ConfigError, expected
from megafsdp.models import num_idle_parameters
from megafsdp.training.config.parse import to_yaml
from megafsdp.training.config.sections import CONFIG_FILE, Config
from megafsdp.training.metrics.events import Event
from megafsdp.training.metrics.metrics import Meter, Position, megatron_line, progress_line
from megafsdp.training.metrics.terminal import Screen, escape_controls
from megafsdp.training.metrics.tracker import EVALUATION_KEY, Trackers
from megafsdp.training.process.machine import describe_machine, versions
from megafsdp.training.process.world import World
from megafsdp.training.resume import RunState, SaveTimes
from megafsdp.training.step.evaluation import EvaluationResult
from megafsdp.training.step.train_step import StepResult

_LOGGER = logging.getLogger("megafsdp.training")


class Report:
    """Report where a run stands, on the first rank only.

    The constructor is collective: it writes the run's config.yaml and opens the trackers, and every
    rank raises if the first cannot. After that, a line or a row that cannot be written is dropped
    with one warning, and the run goes on.

    Args:
        config: The run.
        world: Its processes.
        meter: Times the steps.
        state: Where the run stands, read at each row; the constructor sets its wandb_id.
    """

    def __init__(self, config: Config, world: World, *, meter: Meter, state: RunState) -> None:
        self._config = config
        self._world = world
        self._meter = meter
        self._state = state
        self._started_s = time.perf_counter()
        self._trackers: Trackers | None = None
        self._is_output_lost = False
        error = None
        if world.is_first:
            self._trackers, error = attempt(self._open)
        raise_together(error)
        if self._trackers is not None:
            state.wandb_id = self._trackers.wandb_id
            # The elapsed time leaves out pauses between jobs.
            self._started_s -= self._trackers.elapsed_s

    def _open(self) -> Trackers:
        folder = self._config.run_directory
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / CONFIG_FILE, to_yaml(self._config))
            step, wandb_id = self._state.step, self._state.wandb_id
            return Trackers(self._config, last_step=step, wandb_id=wandb_id)
        except OSError as error:
            what, found = "a folder that can be written to", f"{type(error).__name__}: {error}"
            where = f"the training configuration, run.directory '{folder}'"
            hint = "Make room on its disk, or make it a folder that this user may write to"
            raise ConfigError(expected(what, found, where=where, hint=hint)) from error

    def close(self) -> None:
        """Close the trackers."""
        if self._trackers is not None:
            self._trackers.close()

    def print_line(self, line: str) -> None:
        """Print a line; a full disk or a closed pipe loses it and does not end the run."""
        if not self._world.is_first:
            return
        try:
            print(line, flush=True)
        except (OSError, ValueError) as error:
            # ValueError: a closed stream, or characters that its encoding lacks.
            if not self._is_output_lost:
                self._is_output_lost = True
                _LOGGER.warning("lines are lost: %s: %s", type(error).__name__, error)

    @property
    def _too_short(self) -> str:
        """Return a note if the run asks for less than its checkpoint has already; else empty."""
        train, state = self._config.train, self._state
        for name, wanted, done in (
            ("steps", train.steps, state.step),
            ("samples", train.samples, state.consumed_samples),
        ):
            if wanted is not None and wanted < done:
                return f"; train.{name} {wanted} counts those before a resume too: nothing is left"
        return ""

    def start(self, num_parameters: int, last_step: int) -> None:
        """Print what is about to run."""
        config, world, parallel = self._config, self._world, self._config.parallel
        num_idle = num_idle_parameters(config.model.resolve())
        cp, tp, ep = parallel.cp, parallel.tp, parallel.ep
        axes = "".join(
            f" x {n} {k}-parallel" for n, k in ((cp, "context"), (tp, "tensor")) if n > 1
        )
        parts = [f"{world.size // (cp * tp)}{axes}"] if axes else []
        parts += [f"{ep} expert-parallel"] if ep > 1 else []
        shared = f" ({', '.join(parts)})" if parts else ""
        active = f" ({num_parameters - num_idle:,} active)" if num_idle else ""
        self.print_line(
            f"{config.run_name}: {config.model.name} with {num_parameters:,} parameters{active}"
            f" on {world.size} {world.device.type} rank(s){shared}, {parallel.strategy},"
            f" compute in {config.precision.param_dtype}; global batch"
            f" {config.train.global_batch_size} x {config.data.sequence_length} tokens"
        )
        if self._state.step:
            self.print_line(f"resumed from step {self._state.step} of {last_step}{self._too_short}")
        self._log_event(
            Event.STARTED,
            self._state.step,
            num_steps=last_step,
            num_ranks=world.size,
            ranks_a_machine=world.local_size,
            num_parameters=num_parameters,
            num_active_parameters=num_parameters - num_idle,
            machine=describe_machine(world.device),
            versions=versions(),
        )

    def _now(self) -> dict[str, float]:
        """Return the time of a row or an event: wall clock, and seconds since the run began."""
        return {"time": time.time(), "elapsed_s": time.perf_counter() - self._started_s}

    def _log_event(self, event: Event, step: int, **values: object) -> None:
        if self._trackers is not None:
            self._trackers.log_event(event, {"step": step, **self._now(), **values})

    def log_saved(self, step: int, times: SaveTimes) -> None:
        """Print that a checkpoint is published, and log it with its times."""
        self.print_line(f"saved step {step} in {self._config.checkpoint_directory}")
        self._log_event(Event.SAVED, step, stall_s=times.stall_s, save_s=times.save_s)

    def log_skipped(self, step: int) -> None:
        """Log that a step was skipped; its progress line says so if it has one."""
        self._log_event(Event.SKIPPED, step)

    def log_text(self, text: str) -> None:
        """Print and log how the model continues the prompt.

        Control characters are escaped in print, as a terminal would obey them; the log keeps them.
        """
        self.print_line(f"---- sample ----\n{escape_controls(text)}\n----------------")
        self._log_event(Event.TEXT, self._state.step, text=text)

    def log_step(self, position: Position, result: StepResult, lr: float) -> None:
        """Print a step's progress line and log its row."""
        rates = self._meter.read(position.num_steps - position.step)
        if self._config.logging.style == "megatron":
            line = megatron_line(position, result, lr, rates)
        else:
            line = progress_line(position, result, lr, rates, Screen.of(sys.stdout))
        self.print_line(line)
        if self._trackers is not None:
            norms = {f"grad_norm/{i}": n for i, n in enumerate(result.statistics.group_norms)}
            self._trackers.log(
                {
                    "step": position.step,
                    **self._now(),
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "loss_scale": result.loss_scale,
                    "lr": lr,
                    "step_s": rates.step_s,
                    "tokens_per_s": rates.tokens_per_s,
                    "tflops": rates.tflops,
                    "mfu": rates.mfu,
                    "memory_nbytes": rates.memory_nbytes,
                    "consumed_samples": position.consumed_samples,
                    "consumed_tokens": self._state.consumed_tokens,
                    "num_skipped": position.num_skipped,
                    "num_zero_grads": result.statistics.num_zeros,
                    "expert_max_load": result.statistics.max_load,
                    "router_aux_loss": result.statistics.aux_loss,
                    **norms,
                }
            )

    def log_evaluation(self, step: int, result: EvaluationResult) -> None:
        """Print an evaluation and log its row."""
        bits = "" if result.bits_per_byte is None else f"  {result.bits_per_byte:.4f} bits/byte"
        self.print_line(
            f"evaluation at step {step}: {result.loss:.4f} nats/token{bits}"
            f"  ({result.num_tokens:,} tokens)"
        )
        if self._trackers is not None:
            self._trackers.log(
                {
                    "step": step,
                    **self._now(),
                    "consumed_tokens": self._state.consumed_tokens,
                    EVALUATION_KEY: result.loss,
                    "bits_per_byte": result.bits_per_byte,
                }
            )

    def end(self, *, is_finished: bool) -> None:
        """Print how the run ended and which command resumes it."""
        config, world = self._config, self._world
        self._log_event(Event.ENDED, self._state.step, is_finished=is_finished)
        words = ["-m", "megafsdp", "train", "--config", str(config.run_directory / CONFIG_FILE)]
        is_one_machine = world.size == world.local_size
        if world.size > 1:
            num_machines = world.size // world.local_size
            machines = "--standalone" if is_one_machine else f"--nnodes={num_machines}"
            ranks = f"--nproc-per-node={world.local_size}"
            words = ["-m", "torch.distributed.run", machines, ranks, *words]
        python = min(sys.executable, os.path.relpath(sys.executable), key=len)
        command = shlex.join([python, *words])
        state = "finished; evaluate again" if is_finished else "stopped; resume"
        where = "" if is_one_machine else " on every machine, its rendezvous options added,"
        self.print_line(f"{state}{where} with: {command}")
