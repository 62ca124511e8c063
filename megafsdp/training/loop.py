"""The training loop: one function from a configuration to a trained model on disk.

It joins the parts and decides when each acts; what they do is their own business. Between two
collectives all ranks follow the same path: a rank's signal, a full disk or a missing file becomes
everybody's at the next agreement.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from megafsdp.buffer.collectives import raise_together
from megafsdp.checkpoint.agreement import attempt
from megafsdp.data import Loader, Tokenizer, load_tokenizer
from megafsdp.fsdp import MixedPrecisionPolicy, fully_shard_model
from megafsdp.models import ModelConfig, build_model, flops_per_token, unit_classes
from megafsdp.training.config import Config, Precision, validate
from megafsdp.training.datasets import Datasets, build_datasets
from megafsdp.training.evaluation import EvaluationResult, evaluate, sample_text
from megafsdp.training.lr import LearningRate, Schedule
from megafsdp.training.metrics import Meter, Position, megatron_line, progress_line
from megafsdp.training.optimizers import build_optimizer
from megafsdp.training.parse import to_yaml
from megafsdp.training.resume import Restorable, RunState, restore, save
from megafsdp.training.signals import StopRequest
from megafsdp.training.step import StepResult, TrainStep
from megafsdp.training.tracker import EVALUATION_KEY, Trackers, check_trackers
from megafsdp.training.world import World, find_world, process_group

CONFIG_FILE = "config.yaml"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

StepObserver = Callable[[int, StepResult], None]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        step: Steps taken, those before a resume included.
        consumed_samples: Samples trained on.
        is_finished: False if a signal stopped it; the same command goes on.
        evaluation: The last evaluation of this process; None if there was none.
        text: What the model wrote; None if it was not asked.
    """

    step: int
    consumed_samples: int
    is_finished: bool
    evaluation: EvaluationResult | None
    text: str | None


def train(config: Config, *, on_step: StepObserver | None = None) -> RunSummary:
    """Train as configured, going on from the latest checkpoint; collective over all ranks.

    Runs under torchrun, in a single process, or in a process group that is open already. SIGTERM
    and SIGINT end it after the running step or evaluation batch with a checkpoint. A finished run
    is evaluated again.

    Args:
        config: The run.
        on_step: Called on every rank after each step with its number and result.

    Returns:
        How it ended, alike on all ranks.

    Raises:
        ConfigError: The configuration cannot be run as written.
        DataError: A data file is missing, damaged, or does not fit the model.
        CheckpointError: The latest checkpoint is damaged or of another model.
        RuntimeError: A loss is not finite; see ``train.nan_policy``.
    """
    world = find_world(config.run.device)
    validate(config, world_size=world.size)
    check_trackers(config)
    stop = StopRequest(world.device)
    with stop.listening(), process_group(world, timeout_s=config.run.timeout_s):
        run = _Run(config, world, stop, on_step)
        try:
            return run.train()
        finally:
            run.close()


class _Run:
    """All parts of a running job."""

    def __init__(
        self, config: Config, world: World, stop: StopRequest, on_step: StepObserver | None
    ) -> None:
        self.config = config
        self.world = world
        self.stop = stop
        self.on_step = on_step
        self.model_config = config.model.resolve()
        torch.manual_seed(config.run.seed + world.rank)
        self._open_data()
        self.model = _build_sharded(config, self.model_config, world)
        optimizer = build_optimizer(self.model, config.optimizer)
        self.learning_rate = LearningRate(
            optimizer, Schedule.of(config), follows_checkpoint=config.schedule.from_checkpoint
        )
        self.targets = Restorable(self.model, optimizer, self.learning_rate)
        self.state = restore(config, self.targets)
        self.resumed_step = self.saved_step = self.state.step
        left = max(config.num_samples - self.state.consumed_samples, 0)
        self.last_step = self.state.step + left // config.train.global_batch_size
        self.step = TrainStep(
            self.model,
            optimizer,
            device=world.device,
            clip_norm=config.optimizer.clip_norm,
            skips_nonfinite=config.train.nan_policy == "skip",
            max_skips=config.train.max_skips,
            stop=stop,
        )
        self.step.num_skips_in_a_row = self.state.num_skips_in_a_row
        self.meter = Meter(
            world.device,
            tokens_per_step=config.train.global_batch_size * config.data.sequence_length,
            flops_per_token=flops_per_token(self.model_config, config.data.sequence_length),
            num_devices=world.size,
        )
        self.evaluation: EvaluationResult | None = None
        self.trackers: Trackers | None = None
        self._open_trackers()

    def _open_data(self) -> None:
        """Read the data and the tokenizer; every rank raises if any cannot."""
        config = self.config

        def read() -> tuple[Datasets, Tokenizer | None]:
            spec = config.data.tokenizer
            tokenizer = None if spec is None else load_tokenizer(spec)
            return build_datasets(config, vocab_size=self.model_config.vocab_size), tokenizer

        found, error = attempt(read)
        raise_together(error)
        assert found is not None, "ranks without data have raised"
        datasets, self.tokenizer = found
        self.loader = self._loader(datasets.train, pad_last=False)
        self.validation = None
        if datasets.validation is not None:
            self.validation = self._loader(datasets.validation, pad_last=True)

    def _loader(self, samples: Datasets.train, *, pad_last: bool) -> Loader:
        return Loader(
            samples,
            global_batch_size=self.config.train.global_batch_size,
            micro_batch_size=self.config.micro_batch_size(self.world.size),
            dp_rank=self.world.rank,
            dp_size=self.world.size,
            pad_last=pad_last,
        )

    def _open_trackers(self) -> None:
        """Write config.yaml and open the trackers, on the first rank; every rank raises alike."""
        error = None
        if self.world.is_first:
            self.trackers, error = attempt(self._trackers)
        raise_together(error)

    def _trackers(self) -> Trackers:
        folder = self.config.run_directory
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG_FILE).write_text(to_yaml(self.config))
        trackers = Trackers(
            self.config,
            last_step=self.state.step,
            wandb_id=self.state.wandb_id,
            repeats_evaluation=self.state.step >= self.last_step,
        )
        self.state.wandb_id = trackers.wandb_id
        return trackers

    def close(self) -> None:
        """Close the trackers."""
        if self.trackers is not None:
            self.trackers.close()

    def train(self) -> RunSummary:
        """Run to the end, or until a signal; collective over all ranks."""
        self._say_start()
        if self._is_evaluation_due() and self.state.evaluated_step != self.state.step:
            # The run was stopped before or during this evaluation.
            self._evaluate()
        while self.state.step < self.last_step and not self.stop.agreed():
            self._train_step()
            if self._is_evaluation_due():
                self._evaluate()
            if _is_due(self.config.checkpoint.interval_steps, self.state.step):
                self._save()
        is_finished = self.state.step >= self.last_step and not self.stop.agreed()
        is_repeated = self.resumed_step == self.state.step
        if is_finished and (is_repeated or self.state.evaluated_step != self.state.step):
            self._evaluate()
            is_finished = not self.stop.is_agreed
        self._save()
        text = self._sample() if is_finished else None
        self._say_end(is_finished)
        return RunSummary(
            self.state.step, self.state.consumed_samples, is_finished, self.evaluation, text
        )

    def _train_step(self) -> None:
        state, size = self.state, self.config.train.global_batch_size
        self.meter.start_step()
        batches = self.loader.step_batch(state.consumed_samples)
        lr = self.learning_rate.set_for(state.consumed_samples + size)
        result = self.step(batches)
        self.meter.end_step()
        state.step += 1
        state.consumed_samples += size
        state.num_skipped += result.is_skipped
        state.num_skips_in_a_row = self.step.num_skips_in_a_row
        is_edge = state.step in (self.resumed_step + 1, self.last_step)
        if is_edge or _is_due(self.config.logging.interval_steps, state.step):
            self._log_step(result, lr)
        if self.on_step is not None:
            self.on_step(state.step, result)

    def _log_step(self, result: StepResult, lr: float) -> None:
        rates = self.meter.read(self.last_step - self.state.step)
        position = Position(
            self.state.step,
            self.last_step,
            self.state.consumed_samples,
            self.config.train.global_batch_size,
            self.state.num_skipped,
        )
        line = megatron_line if self.config.logging.style == "megatron" else progress_line
        self._say(line(position, result, lr, rates))
        if self.trackers is not None:
            self.trackers.log(
                {
                    "step": self.state.step,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "lr": lr,
                    "tokens_per_s": rates.tokens_per_s,
                    "tflops": rates.tflops,
                    "mfu": rates.mfu,
                    "memory_nbytes": rates.memory_nbytes,
                    "consumed_samples": self.state.consumed_samples,
                    "num_skipped": self.state.num_skipped,
                }
            )

    def _is_evaluation_due(self) -> bool:
        interval = self.config.evaluation.interval_steps
        return self.state.step > 0 and _is_due(interval, self.state.step)

    def _evaluate(self) -> None:
        if self.validation is None:
            return
        result = evaluate(
            self.model,
            self.validation,
            device=self.world.device,
            tokenizer=self.tokenizer,
            num_batches=self.config.evaluation.batches,
            should_stop=self.stop.agreed,
        )
        if result is None:
            return
        self.evaluation, self.state.evaluated_step = result, self.state.step
        bits = "" if result.bits_per_byte is None else f"  {result.bits_per_byte:.4f} bits/byte"
        self._say(
            f"evaluation at step {self.state.step}: {result.loss:.4f} nats/token{bits}"
            f"  ({result.num_tokens:,} tokens)"
        )
        if self.trackers is not None:
            row = {"step": self.state.step, EVALUATION_KEY: result.loss}
            self.trackers.log(row | {"bits_per_byte": result.bits_per_byte})

    def _save(self) -> None:
        if self.state.step == self.saved_step:
            return
        save(self.config, self.state, self.targets)
        self.saved_step = self.state.step
        self._say(f"saved step {self.state.step} in {self.config.checkpoint_directory}")

    def _sample(self) -> str | None:
        wanted = self.config.evaluation
        if wanted.sample_prompt is None or self.tokenizer is None or not wanted.sample_tokens:
            return None
        text = sample_text(
            self.model,
            self.tokenizer,
            prompt=wanted.sample_prompt,
            num_tokens=wanted.sample_tokens,
            temperature=wanted.sample_temperature,
            max_context=self.config.data.sequence_length,
            device=self.world.device,
            seed=self.config.run.seed,
        )
        self._say(f"---- sample ----\n{text}\n----------------")
        return text

    def _say(self, line: str) -> None:
        if self.world.is_first:
            print(line, flush=True)
