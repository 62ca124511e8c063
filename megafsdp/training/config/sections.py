"""The one tree of dataclasses that describes a training run, with the bounds of each value.

Values are plain, so YAML, a command line and a checkpoint can spell them. The types and bounds are
pydantic's, but building a section by code checks nothing: ``megafsdp.training.config.parse`` checks
each value alone, and ``megafsdp.training.config.validate`` all of them together. The section of the
model is in ``megafsdp.training.config.model_section``, those of the optimizer in
``megafsdp.training.config.optimizer_sections``.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megafsdp.checkpoint.storage.locations import Location, location_of
from megafsdp.data.tokenizer import BYTE_SPEC, TOKENIZER_FILE
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models.activation_checkpointing import ActivationCheckpointing, CheckpointingMode
from megafsdp.training.config.model_section import ModelSection, UserPath
from megafsdp.training.config.optimizer_sections import (
    LossScaleSection,
    MuonSection,
    OptimizerSection,
)
from megafsdp.training.config.requirement import require as require

# Files in the folder of a run.
CONFIG_FILE, METRICS_FILE = "config.yaml", "metrics.jsonl"
# The tokenizer of model.from_hf, or else bytes.
AUTO_TOKENIZER = "auto"
# 31 years; torch counts a clock's nanoseconds in 64 bits.
_MAX_TIMEOUT_S = 10**9


@dataclass(frozen=True)
class ParallelSection:
    """How ranks share the model.

    Attributes:
        dp_outer: Replicas of the sharded group.
        dp_shard: Ranks that divide parameters; -1 takes what is left.
        cp: Context parallel degree: ranks that share out every sequence, inside attention too, and
            read the same samples; they divide parameters as ranks of dp_shard do. tp x cp must
            divide the key heads of linear attention.
        tp: Tensor parallel degree: neighbouring ranks that share out each layer and read the same
            samples; a divisor of the model's query groups, MLP width and vocabulary.
        ep: Expert parallel degree: neighbouring ranks, those of tp first, that share out each
            layer's experts; a divisor of the model's experts and of dp_shard x cp x tp.
        strategy: What is divided: nothing, optimizer states, also gradients, or also parameters.
        outer_strategy: What is divided over dp_outer: nothing (HSDP), or optimizer states (HFSDP),
            which needs dp_outer above 1 and strategy optim_grads_params.
        prefetch: Units gathered ahead of the running one.
        reshard_after_forward: Free gathered parameters between forward and backward; null frees all
            but those needed again at once; a divisor of dp_shard x cp keeps them divided among
            that many neighbours.
        nccl_user_buffers: Gather into memory that is registered with NCCL, which then needs no
            copy; a few units' bytes stay allocated. Only for strategy optim_grads_params; ignored
            with a warning on CPU.
        offload_parameters: Keep main weights, gradients and optimizer states on the host and step
            there. Unlike optimizer.offload_fraction it takes any optimizer, but does not overlap.
    """

    dp_outer: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    strategy: Literal["no_shard", "optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads_params"
    )
    outer_strategy: Literal["no_shard", "optim"] = "no_shard"
    prefetch: NonNegativeInt = 1
    reshard_after_forward: bool | PositiveInt | None = None
    nccl_user_buffers: bool = False
    offload_parameters: bool = False

    def dims(self) -> ParallelDims:
        """Return the degrees.

        Raises:
            ValueError: A degree is out of its range.
        """
        return ParallelDims(self.dp_outer, self.dp_shard, self.cp, self.tp, self.ep)


Precision = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class PrecisionSection:
    """Dtypes, and which weights are quantized.

    Attributes:
        param_dtype: Compute weights and activations; fp16 scales the loss (section loss_scale).
        reduce_dtype: The sum of gradients over ranks.
        main_params_dtype: Main weights, which the optimizer steps on, and its states.
        main_grads_dtype: Gradients that the optimizer sees; null for main_params_dtype, which
            torch's adamw, adam and fused sgd require.
        keep_fp32: What computes in fp32: names of parameters, of modules or of their classes, or
            patterns (``fnmatch``), each of which must match something.
        recipe: Quantize the weights of linear layers and experts; null gathers and computes in
            param_dtype.
        keep_unquantized: Weights that the recipe leaves alone, by names like those of keep_fp32.
        quantize_activations: Whether inputs and gradients of linear layers are quantized as the
            recipe says; false gathers codes but computes with the values that they stand for.
    """

    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce_dtype: Precision = "fp32"
    main_params_dtype: Precision = "fp32"
    main_grads_dtype: Precision | None = None
    keep_fp32: list[str] = field(default_factory=list)
    recipe: Literal["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"] | None = None
    keep_unquantized: list[str] = field(default_factory=list)
    quantize_activations: bool = True

    def policy(self) -> MixedPrecisionPolicy:
        """Return the dtypes as sharding takes them."""
        return MixedPrecisionPolicy(
            param_dtype=_DTYPES[self.param_dtype],
            reduce_dtype=_DTYPES[self.reduce_dtype],
            main_params_dtype=_DTYPES[self.main_params_dtype],
            main_grads_dtype=_DTYPES[self.main_grads_dtype or self.main_params_dtype],
            keep_fp32=tuple(self.keep_fp32),
            recipe=self.recipe,
            keep_unquantized=tuple(self.keep_unquantized),
            quantize_activations=self.quantize_activations,
        )


@dataclass(frozen=True)
class ActivationCheckpointingSection:
    """What backward recomputes instead of saving it; losses stay the same in every bit.

    Attributes:
        mode: none saves all activations; full saves only each layer's input; selective also saves
            the outputs of matrix products and attention (only of attention, in layers that inductor
            compiles).
        every: Checkpoint layers 0, every, 2 * every and so on.
        use_reentrant: torch's older implementation, for full only.
    """

    mode: CheckpointingMode = "none"
    every: int = 1
    use_reentrant: bool = False

    def resolve(self) -> ActivationCheckpointing:
        """Return what the model is given.

        Raises:
            ConfigError: A value is out of its range, or values contradict each other.
        """
        return ActivationCheckpointing(self.mode, self.every, self.use_reentrant)


@dataclass(frozen=True)
class CompileSection:
    """Compilation of the layers' forward by torch; losses change by rounding alone.

    Attributes:
        layers: Compile each layer, in one graph that all of them share. The first step waits for
            the compiler, and so does the first evaluation.
        backend: torch's name of the compiler. inductor needs Triton on CUDA and a C++ compiler on
            a CPU.
    """

    layers: bool = False
    backend: str = "inductor"


@dataclass(frozen=True)
class RunSection:
    """What the run is called and where it lives.

    Attributes:
        directory: Folder of config.yaml, metrics.jsonl, checkpoints and the index cache, for one
            job at a time.
        name: Name for trackers; empty takes the last part of the directory.
        seed: Seeds the initial weights and each data-parallel rank's random state.
        device: cpu, cuda, or auto for CUDA where there is a GPU.
        timeout_s: How long ranks may wait for each other, to meet and in a collective.
    """

    directory: UserPath = "runs/default"
    name: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: Annotated[float, Field(gt=0, le=_MAX_TIMEOUT_S)] = 1800.0


@dataclass(frozen=True)
class DataSection:
    """Token files, as ``megafsdp prep`` or Megatron-LM write them.

    Attributes:
        train: Prefixes (paths without .bin and .idx) to train on; or Megatron-LM's blend, weights
            and prefixes in turn, as a list or as one string such as "0.3 a 0.7 b". A prefix with
            spaces needs a list, such as [my data/train].
        weights: One weight for each training prefix; null weighs by number of tokens.
        validation: Prefixes to evaluate on, each read once from end to end.
        split: Instead of validation prefixes, shares of each training prefix, such as "99,1".
        tokenizer: "byte", the path of a tokenizers JSON file or its folder, or "auto" for that of
            model.from_hf, else byte. It gives bits per byte and text samples; null does without.
        sequence_length: Tokens in a sample.
        document_mask: Tokens see only those of their own document, at the positions that they have
            in it. Documents end with the tokenizer's end-of-document token.
        seed: Seed of the order of samples.
        num_samples: Length that the order of samples is made for; null for the length of the run.
            Set it to the longest run you plan: another length gives another order.
        cache: Folder that keeps indices between runs; null for index_cache in the run's directory.
    """

    train: list[UserPath] = field(default_factory=list)
    weights: list[PositiveFloat] | None = None
    validation: list[UserPath] = field(default_factory=list)
    split: str | None = None
    tokenizer: UserPath | None = AUTO_TOKENIZER
    sequence_length: PositiveInt = 1024
    document_mask: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    num_samples: PositiveInt | None = None
    cache: UserPath | None = None


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over consumed samples, without those of skipped steps.

    Attributes:
        kind: cosine, wsd (warm-up, stable, decay) or constant.
        warmup_samples: Length of the linear rise from 0.
        decay_samples: Length of the fall; null for the rest of the run (cosine) or its last fifth
            (wsd).
        decay_shape: Shape of wsd's fall.
        min_lr_ratio: Lowest learning rate, as a share of the highest. The last step of the fall
            uses it, so with 0 that step changes nothing.
        from_checkpoint: On resume, follow the checkpoint's schedule where this one differs.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_samples: NonNegativeInt = 0
    decay_samples: PositiveInt | None = None
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = "linear"
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    from_checkpoint: bool = False


@dataclass(frozen=True)
class TrainSection:
    """Length and batch of the run.

    Attributes:
        steps: Optimizer steps, those before a resume included, whatever their batch was; null if
            samples is given.
        samples: Samples to train on, instead of steps; an incomplete last batch is not trained.
        global_batch_size: Samples of one step over all data-parallel ranks (dp_outer x dp_shard).
        micro_batch_size: Samples of one forward on one rank; null for a rank's whole share.
        nan_policy: On a loss or gradient norm that is not finite: save the step before it and
            raise, or skip the step. With fp16, steps whose gradients overflow are always skipped;
            see the section loss_scale.
        max_skips: Steps that may be skipped in a row.
    """

    steps: PositiveInt | None = None
    samples: int | None = None
    global_batch_size: PositiveInt = 32
    micro_batch_size: PositiveInt | None = None
    nan_policy: Literal["raise", "skip"] = "raise"
    max_skips: PositiveInt = 10


@dataclass(frozen=True)
class EvaluationSection:
    """Evaluation on held-out data, and the text sample at the end.

    Attributes:
        interval_steps: Steps between evaluations; null evaluates at the end only.
        batches: Global batches of an evaluation; null for all held-out data.
        sample_prompt: What the text sample continues; null for none.
        sample_tokens: Length of the text sample.
        sample_temperature: 0 takes the likeliest token.
    """

    interval_steps: PositiveInt | None = None
    batches: PositiveInt | None = None
    sample_prompt: str | None = None
    sample_tokens: NonNegativeInt = 120
    sample_temperature: NonNegativeFloat = 0.8


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints; one is always saved at the end, also on SIGTERM, SIGINT, SIGHUP or NaN.

    Attributes:
        directory: Where they are saved, for one job at a time; null for checkpoints in the run's
            directory. A URL such as s3://bucket/run is a folder of an object store.
        interval_steps: Steps between checkpoints; null saves at the end only. After a step that was
            skipped for NaN none is saved until a step is taken again.
        keep_last: Number of newest checkpoints to keep; null keeps all.
        keep_every: Also keep steps that are multiples of this, besides those of keep_last.
        resume: Continue from the latest checkpoint, if there is one.
        in_background: Write while training goes on; takes host memory for a copy of this rank's
            share of weights and states.
    """

    directory: UserPath | None = None
    interval_steps: PositiveInt | None = None
    keep_last: PositiveInt | None = 2
    keep_every: PositiveInt | None = None
    resume: bool = True
    in_background: bool = False


@dataclass(frozen=True)
class ProfileOptions:
    """Which steps of which ranks are recorded.

    Attributes:
        start: The first step.
        steps: How many steps.
        ranks: Which ranks.
    """

    start: PositiveInt = 10
    steps: PositiveInt = 3
    ranks: list[NonNegativeInt] = field(default_factory=lambda: [0])

    @property
    def last(self) -> int:
        """Return the last step."""
        return self.start + self.steps - 1


@dataclass(frozen=True)
class LoggingSection:
    """Progress lines and trackers; metrics.jsonl is always written.

    A line or row that cannot be written, on a full disk for example, is left out with a warning.

    Attributes:
        interval_steps: Steps between progress lines and metrics rows; the first and the last step
            are always logged.
        style: Progress lines in our form or in Megatron-LM's.
        wandb: Log to Weights & Biases; offline unless WANDB_API_KEY or WANDB_MODE is set.
        wandb_project: Project in Weights & Biases.
        tensorboard: Log to TensorBoard, in the folder tensorboard of the run's directory.
        group_grad_norms: Log the gradient norm of each of the optimizer's parameter groups too,
            before clipping: grad_norm/0 and so on, those with weight decay first.
        num_zero_grads: Log how many elements of all gradients are zero.
        trackers: Trackers of your own, each as "module:Class"; the class is called with the
            configuration and the step that the run resumes from, as megafsdp.training.Tracker says.
        profile: Record some steps for Perfetto and Chrome, and on CUDA the memory too, in the
            folder profile of the run's directory; null for none.
    """

    interval_steps: PositiveInt = 10
    style: Literal["megafsdp", "megatron"] = "megafsdp"
    wandb: bool = False
    wandb_project: str = "megafsdp"
    tensorboard: bool = False
    group_grad_norms: bool = False
    num_zero_grads: bool = False
    trackers: list[str] = field(default_factory=list)
    profile: ProfileOptions | None = None


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    Attributes:
        run: What the run is called and where it lives.
        model: The model.
        data: Token files.
        parallel: How ranks share the model.
        precision: Dtypes.
        activation_checkpointing: What backward recomputes.
        compile: What torch compiles.
        optimizer: The optimizer.
        muon: What only Muon takes.
        loss_scale: Loss scale of fp16.
        schedule: The learning rate.
        train: Length and batch.
        evaluation: Evaluation and the text sample.
        checkpoint: Checkpoints.
        logging: Progress lines and trackers.
    """

    # Applies to the sections too. Text is not read as a number, nor true as 1.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    activation_checkpointing: ActivationCheckpointingSection = field(
        default_factory=ActivationCheckpointingSection
    )
    compile: CompileSection = field(default_factory=CompileSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    muon: MuonSection = field(default_factory=MuonSection)
    loss_scale: LossScaleSection = field(default_factory=LossScaleSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of a whole run of one batch size."""
        if self.train.steps is not None:
            return self.train.steps
        return (self.train.samples or 0) // self.train.global_batch_size

    @property
    def num_samples(self) -> int:
        """Return the number of samples of a whole run of one batch size."""
        return self.num_steps * self.train.global_batch_size

    def num_steps_left(self, *, step: int, consumed_samples: int) -> int:
        """Return the number of steps that a run still takes.

        Args:
            step: Steps taken, whatever their batch was.
            consumed_samples: Their samples.
        """
        if self.train.steps is not None:
            return max(self.train.steps - step, 0)
        num_samples_left = (self.train.samples or 0) - consumed_samples
        return max(num_samples_left, 0) // self.train.global_batch_size

    @property
    def run_directory(self) -> Path:
        """Return the run's folder."""
        return Path(self.run.directory)

    @property
    def run_name(self) -> str:
        """Return the run's name."""
        return self.run.name or self.run_directory.name

    def with_filled_model(self) -> Config:
        """Return the same run with all values of a saved model given, as its folder may change.

        Raises:
            ConfigError: As ``model.resolve``.
        """
        if self.model.from_hf is None:
            return self
        return replace(self, model=self.model.filled())

    @property
    def tokenizer(self) -> str | None:
        """Return the name that the tokenizer is loaded by, ``auto`` resolved; None for none."""
        spec, saved = self.data.tokenizer, self.model.from_hf
        if spec != AUTO_TOKENIZER:
            return spec
        return BYTE_SPEC if saved is None else str(Path(saved) / TOKENIZER_FILE)

    @property
    def separate_checkpoints(self) -> Location | None:
        """Return the folder of the checkpoints if it is set; None if it is in the run's."""
        return None if self.checkpoint.directory is None else self.checkpoint_directory

    @property
    def checkpoint_directory(self) -> Location:
        """Return the folder of the checkpoints, which may be in an object store."""
        given = self.checkpoint.directory
        return self.run_directory / "checkpoints" if given is None else location_of(given)

    def micro_batch_size(self, dp_size: int) -> int:
        """Return the number of samples of one forward on one of ``dp_size`` data ranks."""
        given = self.train.micro_batch_size
        return self.train.global_batch_size // dp_size if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain dicts, lists and values."""
        plain = asdict(self)
        plain["optimizer"]["betas"] = list(self.optimizer.betas)
        return plain
