"""The training loop: one function from a configuration to a trained model on disk.

It builds the parts of a run and decides when each acts; what they do is in their own modules.
Between two collectives all ranks take the same path: a signal, a full disk or a missing file of one
rank takes effect on all ranks at the next agreement.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from megafsdp import checkpoint
from megafsdp.buffer.comm.agreement import attempt, raise_together
from megafsdp.buffer.comm.collectives import all_gather_objects, broadcast_object
from megafsdp.data import Loader, SampleSource, Tokenizer, load_tokenizer
from megafsdp.device.host_threads import default_host_threads, torch_threads
from megafsdp.errors import ConfigError, DataError, NonFiniteError, expected
from megafsdp.mesh.parallel_dims import Meshes
from megafsdp.models import ModelConfig, flops_per_token
from megafsdp.optimizer.loss_scaler import LossScaler
from megafsdp.training.config.parse import differences
from megafsdp.training.config.sections import Config
from megafsdp.training.config.validate import validate, validate_schedule
from megafsdp.training.datasets import build_datasets
from megafsdp.training.metrics.metrics import Meter, Position
from megafsdp.training.metrics.profile import StepProfiler
from megafsdp.training.metrics.tracker import check_trackers
from megafsdp.training.process.run_lock import sole_job
from megafsdp.training.process.signals import StopRequest
from megafsdp.training.process.world import World, find_world, process_group
from megafsdp.training.report import Report
from megafsdp.training.resume import (
    Restorable,
    RunState,
    Saver,
    find_stored,
    require_writable,
    restore,
)
from megafsdp.training.sharded_model import build_sharded
from megafsdp.training.step.evaluation import (
    EvaluationResult,
    TextRequest,
    check_prompt,
    evaluate,
    sample_text,
    warn_of_idle_options,
)
from megafsdp.training.step.lr import LearningRate, Schedule
from megafsdp.training.step.optimizers import build_optimizer
from megafsdp.training.step.train_step import QueuedStep, StepResult, TrainStep
from megafsdp.training.step.update import StatisticsRequest

StepObserver = Callable[[int, StepResult], None]

# Machines may keep the same files in folders of different names.
_MAY_DIFFER = (
    *("run.directory", "data.train", "data.validation", "data.cache", "data.tokenizer"),
    "model.from_hf",
)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run.

    Attributes:
        step: Steps taken, those before a resume included.
        consumed_samples: Samples trained on.
        is_finished: False if a signal stopped it; the same command resumes it.
        evaluation: The last evaluation of this process; None if there was none.
        text: The text sample; None if none is configured.
    """

    step: int
    consumed_samples: int
    is_finished: bool
    evaluation: EvaluationResult | None
    text: str | None


def train(config: Config, *, on_step: StepObserver | None = None) -> RunSummary:
    """Train as configured, resuming from the latest checkpoint; collective over all ranks.

    Runs under torchrun, in a single process, or in a process group that is open already. SIGTERM,
    SIGINT and SIGHUP (if it is not ignored, as under nohup) end it after the running step or
    evaluation batch, with a checkpoint. A finished run is evaluated again.

    Args:
        config: The run.
        on_step: Called on every rank after each step with its number and result.

    Returns:
        How the run ended; the same on all ranks.

    Raises:
        ConfigError: The configuration cannot be run as written, or another job runs in its folders.
        DataError: A data file is missing, damaged, does not fit the model, or is not the same on
            all ranks.
        CheckpointError: The latest checkpoint is damaged or of another model, the folder of
            checkpoints cannot be written, or a save failed.
        RuntimeError: A loss is not finite; see ``train.nan_policy``. The step before it is saved.
    """
    config = config.with_filled_model()
    world = find_world(config.run.device)
    validate(config, world_size=world.size)
    check_trackers(config)
    warn_of_idle_options(config)
    stop = StopRequest(world.device)
    with stop.listening(), process_group(world, timeout_s=config.run.timeout_s):
        _require_same_config(config)
        with (
            _threads_on_host(config, world),
            sole_job(config.run_directory, world, checkpoints=config.separate_checkpoints),
        ):
            run = _Run(config, world, stop=stop, on_step=on_step)
            try:
                return run.train()
            finally:
                # Saves in the background need the process groups, which the outer block ends.
                checkpoint.wait_for_saves()
                run.profiler.close()
                run.report.close()


def _require_same_config(config: Config) -> None:
    """Check that all ranks have the same configuration, folders aside; collective over all ranks.

    Ranks that differ in a parallel degree or in how experts are balanced would wait for each other
    forever.

    Raises:
        ConfigError: They differ; on all ranks.
    """
    found = _first_difference(config.to_dict(), may_differ=_MAY_DIFFER)
    if found is not None:
        raise ConfigError(
            expected(
                "the same configuration on all ranks",
                found,
                where="the training configuration",
                hint="Start all ranks with the same options",
            )
        )


def _require_same_data(fingerprints: Mapping[str, str]) -> None:
    """Check that the files of an option have the same content on all ranks; collective.

    Otherwise each rank would train in an order of its own, or wait for ranks that have more to
    evaluate.

    Raises:
        DataError: They differ; on all ranks.
    """
    found = _first_difference(fingerprints)
    if found is not None:
        raise DataError(
            expected(
                "the same data on all ranks",
                found,
                where="the token files of the training configuration",
                hint="Copy the .bin and .idx files of one machine to the other",
            )
        )


def _first_difference(own: Mapping[str, object], *, may_differ: Collection[str] = ()) -> str | None:
    """Return how the first rank unlike rank 0 differs from it, or None; collective."""
    changed = differences(broadcast_object(own), own)
    changed = [line for line in changed if line.partition(":")[0] not in may_differ]
    for rank, lines in enumerate(all_gather_objects(changed)):
        if lines:
            return f"{'; '.join(lines)} between rank 0 and rank {rank}"
    return None


def _threads_on_host(config: Config, world: World) -> AbstractContextManager[None]:
    """Return a context that sets torch's threads, if parameters are stepped on the host.

    Optimizers, norms and sums on the host use torch's threads; torchrun leaves a rank only one.
    """
    if not config.parallel.offload_parameters:
        return nullcontext()
    number = config.optimizer.host_threads or default_host_threads(world.device.type)
    return torch_threads(number)


def _seed_all(seed: int) -> None:
    """Seed every generator that a checkpoint keeps: torch's, Python's and NumPy's."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True, slots=True)
class _RunData:
    """What a run reads: training batches, held-out batches, and the tokenizer of their text."""

    train: Loader
    held_out: Loader | None
    tokenizer: Tokenizer | None
    order: dict[str, object]


class _Run:
    """A job whose parts are built and whose checkpoint is loaded."""

    def __init__(
        self, config: Config, world: World, *, stop: StopRequest, on_step: StepObserver | None
    ) -> None:
        self.config, self.world, self.stop = config, world, stop
        self.on_step = on_step
        meshes = config.parallel.dims().build(world.device.type)
        # Ranks that share out a layer must draw the same numbers.
        _seed_all(config.run.seed + meshes.data_rank)
        stored = find_stored(config)
        self.state = RunState() if stored is None else stored.state
        step, consumed_samples = self.state.step, self.state.consumed_samples
        num_left = config.num_steps_left(step=step, consumed_samples=consumed_samples)
        # Steps before a resume may have had another batch size.
        num_samples = consumed_samples + num_left * config.train.global_batch_size
        if num_left and (stored is None or not config.schedule.from_checkpoint):
            validate_schedule(config, num_samples=num_samples)
        self.last_step = step + num_left
        model_config = config.model.resolve()
        self.data = _read_data(config, model_config, num_samples, world, meshes)
        model = build_sharded(config, model_config, world.device, meshes)
        if stored is None and config.model.from_hf is not None:
            checkpoint.import_hf(model, config.model.from_hf)
        self.targets = _restorable(config, model, num_samples=num_samples)
        if stored is not None:
            restore(config, self.targets, stored, order=self.data.order)
        self.train_step = TrainStep(
            self.targets.model,
            self.targets.optimizer,
            device=world.device,
            clip_norm=config.optimizer.clip_norm,
            skips_nonfinite=config.train.nan_policy == "skip",
            max_skips=config.train.max_skips,
            stop=stop,
            scaler=self.targets.loss_scaler,
        )
        self.train_step.num_skips_in_a_row = self.state.num_skips_in_a_row
        # The step whose numbers are not read yet, and whether it is logged.
        self.queued: tuple[QueuedStep, bool] | None = None
        self.evaluation: EvaluationResult | None = None
        self.meter = Meter(
            world.device,
            tokens_per_step=config.train.global_batch_size * config.data.sequence_length,
            flops_per_token=flops_per_token(model_config, config.data.sequence_length),
            num_devices=world.size,
        )
        self.report = Report(config, world, meter=self.meter, state=self.state)
        self.profiler = StepProfiler(
            config.logging.profile,
            config.run_directory,
            world,
            next_step=step + 1,
            last_step=self.last_step,
            print_line=self.report.print_line,
        )
        self.saver = Saver(
            config,
            self.state,
            self.targets,
            order=self.data.order,
            on_saved=self.report.log_saved,
        )

    @property
    def _is_complete(self) -> bool:
        return self.state.step >= self.last_step

    @property
    def _is_evaluation_due(self) -> bool:
        """Return whether this step asks for an evaluation that was not made, or not finished."""
        interval = self.config.evaluation.interval_steps
        return _is_due(interval, self.state.step) and self.state.evaluated_step != self.state.step

    def train(self) -> RunSummary:
        """Run to the end, or until a signal; collective over all ranks."""
        state = self.state
        if not self._is_complete:
            require_writable(self.config)
        num_parameters = sum(p.numel() for p in self.targets.model.parameters())
        self.report.start(num_parameters, self.last_step)
        if self._is_evaluation_due and not self._is_complete:
            self._evaluate()
        while not (self._is_complete or self.stop.is_agreed):
            try:
                self._train_step()
            except NonFiniteError as error:
                raise NonFiniteError(f"{error} {self.saver.save_before_error()}") from error
            # A state that skips every step would push the last good checkpoints out.
            is_sound = not state.num_skips_in_a_row
            if is_sound and _is_due(self.config.checkpoint.interval_steps, state.step):
                self.saver.save()
            if self._is_evaluation_due and not self.stop.is_agreed:
                self._evaluate()
        self.saver.save()
        text = None
        if not self.stop.agreed():
            if state.evaluated_step != state.step or self.evaluation is None:
                self._evaluate()
            text = None if self.stop.is_agreed else self._sample()
        self.saver.wait()
        is_finished = self._is_complete and not self.stop.is_agreed
        self.report.end(is_finished=is_finished)
        return RunSummary(state.step, state.consumed_samples, is_finished, self.evaluation, text)

    def _train_step(self) -> None:
        """Queue a step; settle it now if it is the last, or its state is saved or evaluated."""
        config, size = self.config, self.config.train.global_batch_size
        is_followed = self.queued is not None
        if not is_followed:
            self.meter.start_step()
        step = self.state.step + is_followed + 1
        batches = self.data.train.step_batch(self.state.consumed_samples + size * is_followed)
        is_logged = step in (1, self.last_step) or _is_due(config.logging.interval_steps, step)
        wanted = StatisticsRequest(
            group_norms=is_logged and config.logging.group_grad_norms,
            num_zeros=is_logged and config.logging.num_zero_grads,
            expert_loads=is_logged and config.model.resolve().has_experts,
        )
        self.profiler.before(step)
        queued = self.train_step.queue(batches, wanted=wanted, before_backward=self._begin_backward)
        self.queued = queued, is_logged
        is_awaited = step == self.last_step or self.profiler.is_edge(step)
        is_awaited |= any(
            _is_due(interval, step)
            for interval in (config.checkpoint.interval_steps, config.evaluation.interval_steps)
        )
        if is_awaited or self.stop.is_agreed or not self.train_step.reads_late:
            self._settle()

    def _begin_backward(self) -> None:
        """Settle the previous step: the next learning rate depends on whether it was skipped.

        The weights are still those of that step, so it can be saved and reported as it is.
        """
        self._settle(is_last=False)
        state = self.state
        num_scheduled = state.consumed_samples - state.skipped_samples
        num_scheduled += self.config.train.global_batch_size
        self.targets.learning_rate.set_for(num_scheduled)

    def _settle(self, *, is_last: bool = True) -> None:
        """Read the numbers of the queued step, if there is one, and count, log and report it."""
        if self.queued is None:
            return
        (queued, is_logged), self.queued = self.queued, None
        state, size = self.state, self.config.train.global_batch_size
        result = self.train_step.settle(queued)
        self.meter.end_step()
        state.step += 1
        state.consumed_samples += size
        state.consumed_tokens += size * self.config.data.sequence_length
        state.num_skipped += result.is_skipped
        state.skipped_samples += size * result.is_skipped
        state.num_skips_in_a_row = self.train_step.num_skips_in_a_row
        if result.is_skipped:
            self.report.log_skipped(state.step)
        if is_logged or (is_last and self.stop.is_agreed):
            position = Position(
                state.step, self.last_step, state.consumed_samples, size, state.num_skipped
            )
            self.report.log_step(position, result, self.targets.learning_rate.rate)
        if self.on_step is not None:
            self.on_step(state.step, result)
        self.profiler.after(state.step)
        self.saver.poll()

    def _evaluate(self) -> None:
        if self.data.held_out is None:
            return
        result = evaluate(
            self.targets.model,
            self.data.held_out,
            device=self.world.device,
            tokenizer=self.data.tokenizer,
            num_batches=self.config.evaluation.batches,
            should_stop=self.stop.agreed,
        )
        if result is not None:
            self.evaluation, self.state.evaluated_step = result, self.state.step
            self.report.log_evaluation(self.state.step, result)

    def _sample(self) -> str | None:
        wanted = self.config.evaluation
        if wanted.sample_prompt is None or self.data.tokenizer is None or not wanted.sample_tokens:
            return None
        request = TextRequest(
            prompt=wanted.sample_prompt,
            num_tokens=wanted.sample_tokens,
            max_context=self.config.data.sequence_length,
            temperature=wanted.sample_temperature,
            seed=self.config.run.seed,
        )
        model, device = self.targets.model, self.world.device
        text = sample_text(model, self.data.tokenizer, request, device=device)
        self.report.log_text(text)
        return text


def _is_due(interval_steps: int | None, step: int) -> bool:
    return interval_steps is not None and step > 0 and step % interval_steps == 0


def _read_data(
    config: Config, model_config: ModelConfig, num_samples: int, world: World, meshes: Meshes
) -> _RunData:
    """Open data and tokenizer; collective: every rank raises if any of them cannot.

    Raises:
        ConfigError, DataError: A rank cannot read them, or the ranks' files differ.
    """

    def loader(
        samples: SampleSource, end_of_document: int | None, *, pad_last: bool = False
    ) -> Loader:
        return Loader(
            samples,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.micro_batch_size(meshes.data_size),
            dp_rank=meshes.data_rank,
            dp_size=meshes.data_size,
            pin_memory=world.device.type == "cuda",
            pad_last=pad_last,
            end_of_document=end_of_document,
        )

    def read() -> tuple[_RunData, dict[str, str]]:
        spec = config.tokenizer
        tokenizer = None if spec is None else load_tokenizer(spec)
        vocab_size, prompt = model_config.vocab_size, config.evaluation.sample_prompt
        if tokenizer is not None and prompt is not None:
            check_prompt(tokenizer, prompt, vocab_size)
        datasets = build_datasets(
            config, vocab_size=vocab_size, tokenizer=tokenizer, num_samples=num_samples
        )
        end = None if tokenizer is None or not config.data.document_mask else tokenizer.eod
        validation = datasets.validation
        held_out = None if validation is None else loader(validation, end, pad_last=True)
        data = _RunData(loader(datasets.train, end), held_out, tokenizer, datasets.order)
        return data, datasets.fingerprints

    found, error = attempt(read)
    raise_together(error)
    assert found is not None, "ranks without data have raised"
    data, fingerprints = found
    _require_same_data(fingerprints)
    return data


def _restorable(config: Config, model: torch.nn.Module, *, num_samples: int) -> Restorable:
    """Build what a checkpoint fills besides the model: optimizer, schedule and loss scaler."""
    optimizer = build_optimizer(model, config.optimizer, config.muon)
    schedule = Schedule.of(config, num_samples=num_samples)
    follows_checkpoint = config.schedule.from_checkpoint
    learning_rate = LearningRate(optimizer, schedule, follows_checkpoint=follows_checkpoint)
    is_scaled = config.precision.param_dtype == "fp16"
    scaler = LossScaler(config.loss_scale.rule()) if is_scaled else None
    return Restorable(model, optimizer, learning_rate, scaler)
