"""The one tree of dataclasses that describes a training run, and the checks across its fields.

Values are plain, so YAML, a command line and a checkpoint can spell them;
``megafsdp.training.parse`` reads them. Nothing here touches torch.distributed: every check runs on
every rank alike, before the first collective.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from megafsdp.errors import ConfigError, expected
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models.config import Architecture, ModelConfig
from megafsdp.models.presets import presets

# jsonargparse reads the instances' __dict__, so these classes have no slots.


@dataclass(frozen=True)
class RunSection:
    """What the run is called and where it lives.

    Attributes:
        directory: Folder of config.yaml, metrics.jsonl, checkpoints and the index cache.
        name: Name for trackers; empty takes the last part of the directory.
        seed: Seeds the initial weights and each rank's random state.
        device: cpu, cuda, or auto for CUDA where there is a GPU.
        timeout_s: How long a collective may wait for another rank.
    """

    directory: str = "runs/default"
    name: str = ""
    seed: int = 1234
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout_s: float = 1800.0


@dataclass(frozen=True)
class ModelSection:
    """A preset, and the values of ModelConfig that differ from it; null keeps the preset's.

    Attributes:
        preset: Name of a preset in megafsdp.models.presets.
        architecture: The kind of block.
        num_layers: Number of transformer layers.
        hidden_size: Width of the residual stream.
        num_attention_heads: Number of query heads.
        num_query_groups: Number of key and value heads.
        head_dim: Width of one head.
        ffn_hidden_size: Inner width of the MLP.
        vocab_size: Rows of the embedding, padding included.
        max_sequence_length: Longest sequence that the model takes.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the variance under each norm's root.
        tie_embeddings: Whether the output layer's weight is the word embedding's.
        init_std: Standard deviation of the initial weights.
    """

    preset: str = "qwen3-toy"
    architecture: Architecture | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    num_attention_heads: int | None = None
    num_query_groups: int | None = None
    head_dim: int | None = None
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    max_sequence_length: int | None = None
    rope_theta: float | None = None
    norm_eps: float | None = None
    tie_embeddings: bool | None = None
    init_std: float | None = None

    def resolve(self) -> ModelConfig:
        """Return the preset with the overrides applied.

        Raises:
            ConfigError: There is no such preset, or the values do not make a model.
        """
        if self.preset not in presets:
            raise _bad("model.preset", f"one of {', '.join(presets)}", repr(self.preset))
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "preset"}
        overrides = {name: value for name, value in given.items() if value is not None}
        return replace(presets[self.preset], **overrides)


@dataclass(frozen=True)
class DataSection:
    """Token files, as ``megafsdp prep`` or Megatron-LM write them.

    Attributes:
        train: Prefixes (paths without .bin and .idx) to train on.
        weights: One weight a training prefix; null weighs by number of tokens.
        validation: Prefixes to evaluate on, each read once from end to end.
        split: Instead of validation prefixes, shares of each training prefix, such as "99,1".
        tokenizer: "byte" or the path of a tokenizers JSON file, for bits per byte and text samples;
            null does without.
        sequence_length: Tokens in a sample.
        seed: Seed of the order of samples.
        num_samples: Length that the order of samples is made for; null for the length of the run.
            Set it to the longest run you plan: another length gives another order.
        cache: Folder that keeps indices between runs; null for index_cache in the run's directory.
    """

    train: list[str] = field(default_factory=list)
    weights: list[float] | None = None
    validation: list[str] = field(default_factory=list)
    split: str | None = None
    tokenizer: str | None = "byte"
    sequence_length: int = 1024
    seed: int = 1234
    num_samples: int | None = None
    cache: str | None = None


@dataclass(frozen=True)
class ParallelSection:
    """How ranks share the model.

    Attributes:
        dp_outer: Replicas of the sharded group.
        dp_shard: Ranks that divide parameters; -1 takes what is left.
        cp: Context parallel degree.
        tp: Tensor parallel degree.
        ep: Expert parallel degree.
        strategy: What is divided: nothing, optimizer states, and gradients, and parameters.
        outer_strategy: What is divided over dp_outer.
        prefetch: Units gathered ahead of the running one.
        reshard_after_forward: Free gathered parameters between forward and backward; null frees all
            but those needed again at once.
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
    prefetch: int = 1
    reshard_after_forward: bool | None = None

    def dims(self) -> ParallelDims:
        """Return the degrees.

        Raises:
            ValueError: A degree is out of its range.
            NotImplementedError: A degree is reserved.
        """
        return ParallelDims(self.dp_outer, self.dp_shard, self.cp, self.tp, self.ep)


Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class PrecisionSection:
    """Dtypes; main weights and optimizer states are fp32.

    Attributes:
        param_dtype: Compute weights and activations.
        reduce_dtype: The sum of gradients over ranks.
        keep_fp32: Names of parameters or modules that compute in fp32.
    """

    param_dtype: Precision = "fp32"
    reduce_dtype: Precision = "fp32"
    keep_fp32: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class OptimizerSection:
    """The optimizer.

    Attributes:
        kind: adamw or sgd.
        lr: Highest learning rate.
        betas: Decay rates of Adam's two moments.
        eps: Added to Adam's denominator.
        momentum: Momentum of SGD.
        weight_decay: Decoupled for adamw, added to the gradient for sgd.
        decay_vectors: Decay parameters of one dimension too (norms, biases).
        implementation: torch's fused, foreach or loop form.
        clip_norm: Largest norm of all gradients; null does not clip.
    """

    kind: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    weight_decay: float = 0.1
    decay_vectors: bool = False
    implementation: Literal["fused", "foreach", "loop"] = "fused"
    clip_norm: float | None = 1.0


@dataclass(frozen=True)
class ScheduleSection:
    """The learning rate over consumed samples.

    Attributes:
        kind: cosine, wsd (warm-up, stable, decay) or constant.
        warmup_samples: Length of the linear rise from 0.
        decay_samples: Length of the fall; null for the rest of the run (cosine) or its last fifth
            (wsd).
        decay_shape: Shape of wsd's fall.
        min_lr_ratio: Lowest learning rate, as a share of the highest.
        from_checkpoint: On resume follow the checkpoint's schedule where this one differs.
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_samples: int = 0
    decay_samples: int | None = None
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = "linear"
    min_lr_ratio: float = 0.1
    from_checkpoint: bool = False


@dataclass(frozen=True)
class TrainSection:
    """Length and batch of the run.

    Attributes:
        steps: Optimizer steps; null if samples is given.
        samples: Samples to train on, instead of steps; an incomplete last batch is not trained.
        global_batch_size: Samples of one step over all ranks.
        micro_batch_size: Samples of one forward on one rank; null for a rank's whole share.
        nan_policy: On a loss or gradient norm that is not finite: raise, or skip the step.
        max_skips: Steps that may be skipped in a row.
    """

    steps: int | None = None
    samples: int | None = None
    global_batch_size: int = 32
    micro_batch_size: int | None = None
    nan_policy: Literal["raise", "skip"] = "raise"
    max_skips: int = 10


@dataclass(frozen=True)
class EvaluationSection:
    """Evaluation on held-out data, and the text sample at the end.

    Attributes:
        interval_steps: Steps between evaluations; null evaluates at the end only.
        batches: Global batches of an evaluation; null for all held-out data.
        sample_prompt: What the text sample goes on from; null for none.
        sample_tokens: Length of the text sample.
        sample_temperature: 0 takes the likeliest token.
    """

    interval_steps: int | None = None
    batches: int | None = None
    sample_prompt: str | None = None
    sample_tokens: int = 120
    sample_temperature: float = 0.8


@dataclass(frozen=True)
class CheckpointSection:
    """Checkpoints; one is always saved at the end and on SIGTERM and SIGINT.

    Attributes:
        directory: Where; null for checkpoints in the run's directory.
        interval_steps: Steps between checkpoints; null saves at the end only.
        keep_last: Number of newest checkpoints to keep; null keeps all.
        keep_every: Keep also steps that are multiples of this.
        resume: Go on from the latest checkpoint, if there is one.
    """

    directory: str | None = None
    interval_steps: int | None = None
    keep_last: int | None = 2
    keep_every: int | None = None
    resume: bool = True


@dataclass(frozen=True)
class LoggingSection:
    """What is told, and to whom; metrics.jsonl is always written.

    Attributes:
        interval_steps: Steps between progress lines and metrics rows; the first and the last step
            are always told.
        style: Progress lines in our form or in Megatron-LM's.
        wandb: Log to Weights & Biases; offline unless WANDB_API_KEY or WANDB_MODE is set.
        wandb_project: Project in Weights & Biases.
        tensorboard: Log to TensorBoard, in the folder tensorboard of the run's directory.
    """

    interval_steps: int = 10
    style: Literal["megafsdp", "megatron"] = "megafsdp"
    wandb: bool = False
    wandb_project: str = "megafsdp"
    tensorboard: bool = False


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    Attributes:
        run: What the run is called and where it lives.
        model: The model.
        data: Token files.
        parallel: How ranks share the model.
        precision: Dtypes.
        optimizer: The optimizer.
        schedule: The learning rate.
        train: Length and batch.
        evaluation: Evaluation and the text sample.
        checkpoint: Checkpoints.
        logging: Progress lines and trackers.
    """

    run: RunSection = field(default_factory=RunSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    precision: PrecisionSection = field(default_factory=PrecisionSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    train: TrainSection = field(default_factory=TrainSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)

    @property
    def num_steps(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        if self.train.steps is not None:
            return self.train.steps
        return (self.train.samples or 0) // self.train.global_batch_size

    @property
    def num_samples(self) -> int:
        """Return the number of samples of the whole run."""
        return self.num_steps * self.train.global_batch_size

    @property
    def run_directory(self) -> Path:
        """Return the run's folder."""
        return Path(self.run.directory)

    @property
    def run_name(self) -> str:
        """Return the run's name."""
        return self.run.name or self.run_directory.name

    @property
    def checkpoint_directory(self) -> Path:
        """Return the folder of the checkpoints."""
        given = self.checkpoint.directory
        return self.run_directory / "checkpoints" if given is None else Path(given)

    def micro_batch_size(self, dp_size: int) -> int:
        """Return the number of samples of one forward on one of ``dp_size`` ranks."""
        given = self.train.micro_batch_size
        return self.train.global_batch_size // dp_size if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as plain dicts, lists and values."""
        plain = asdict(self)
        plain["optimizer"]["betas"] = list(self.optimizer.betas)
        return plain


def validate(config: Config, *, world_size: int) -> None:
    """Check what can be known without files and without other ranks; local.

    Args:
        config: The run.
        world_size: Number of ranks it is started with.

    Raises:
        ConfigError: A value is out of its range, or values contradict each other.
        NotImplementedError: A degree is reserved.
    """
    model = config.model.resolve()
    _check_ranges(config)
    _check_length(config.train)
    _check_schedule(config)
    _check_data(config.data, model)
    _check_batch(config, world_size)


def _check_batch(config: Config, world_size: int) -> None:
    try:
        config.parallel.dims().resolve(world_size)
    except NotImplementedError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    if size % world_size:
        raise _bad(
            "train.global_batch_size",
            f"a multiple of the {world_size} ranks",
            size,
            f"Use {-(-size // world_size) * world_size}, or a number of ranks that divides {size}",
        )
    if micro is not None and size % (micro * world_size):
        share = size // world_size
        fitting = [str(n) for n in range(1, share + 1) if share % n == 0]
        raise _bad(
            "train.micro_batch_size",
            f"a divisor of the {share} samples of a rank",
            micro,
            f"Use {' or '.join(fitting[-6:])}, or leave it null",
        )


def _check_ranges(config: Config) -> None:
    for path in (
        "train.global_batch_size",
        "train.max_skips",
        "train.micro_batch_size",
        "data.sequence_length",
        "data.num_samples",
        "evaluation.interval_steps",
        "evaluation.batches",
        "checkpoint.interval_steps",
        "checkpoint.keep_last",
        "checkpoint.keep_every",
        "logging.interval_steps",
    ):
        value = _value_of(config, path)
        if value is not None and value < 1:
            raise _bad(path, "a whole number of at least 1", value)
    for path in (
        "optimizer.weight_decay",
        "optimizer.eps",
        "optimizer.momentum",
        "schedule.warmup_samples",
        "evaluation.sample_tokens",
        "evaluation.sample_temperature",
        "parallel.prefetch",
    ):
        if not 0 <= _value_of(config, path) < math.inf:
            raise _bad(path, "a finite number of at least 0", _value_of(config, path))
    for path in ("optimizer.lr", "optimizer.clip_norm", "run.timeout_s"):
        value = _value_of(config, path)
        if value is not None and not 0 < value < math.inf:
            raise _bad(path, "a finite number above 0", value)
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise _bad(
            "optimizer.betas", "two numbers of at least 0 and below 1", config.optimizer.betas
        )
    if not 0 <= config.schedule.min_lr_ratio <= 1:
        raise _bad("schedule.min_lr_ratio", "a share from 0 to 1", config.schedule.min_lr_ratio)
    if not config.run.directory:
        raise _bad("run.directory", "a folder", "''")


def _check_length(train: TrainSection) -> None:
    if (train.steps is None) == (train.samples is None):
        raise _bad(
            "train",
            "either steps or samples",
            f"steps {train.steps} and samples {train.samples}",
            "Set one of train.steps and train.samples, and leave the other null",
        )
    if train.steps is not None and train.steps < 1:
        raise _bad("train.steps", "a whole number of at least 1", train.steps)
    if train.samples is not None and train.samples < train.global_batch_size:
        raise _bad(
            "train.samples", f"at least one global batch, {train.global_batch_size},", train.samples
        )


def _check_schedule(config: Config) -> None:
    schedule = config.schedule
    if schedule.kind != "constant" and schedule.decay_samples is not None:
        if schedule.decay_samples < 1:
            raise _bad("schedule.decay_samples", "at least 1 sample", schedule.decay_samples)
        both = schedule.warmup_samples + schedule.decay_samples
        if schedule.kind == "wsd" and both > config.num_samples:
            raise _bad(
                "schedule",
                f"warm-up and decay within the run's {config.num_samples} samples",
                f"{schedule.warmup_samples} and {schedule.decay_samples}",
                "Shorten one of them, or train longer",
            )
    if schedule.warmup_samples > config.num_samples:
        raise _bad(
            "schedule.warmup_samples",
            f"at most the run's {config.num_samples} samples",
            schedule.warmup_samples,
            "Shorten the warm-up, or train longer",
        )


def _check_data(data: DataSection, model: ModelConfig) -> None:
    if not data.train:
        raise _bad(
            "data.train",
            "at least one prefix of token files",
            "none",
            "Write files with `megafsdp prep` and give their path without .bin",
        )
    if data.weights is not None and (
        len(data.weights) != len(data.train) or not all(0 < w < math.inf for w in data.weights)
    ):
        raise _bad(
            "data.weights",
            f"one positive weight for each of {len(data.train)} prefixes",
            data.weights,
        )
    if data.validation and data.split is not None:
        raise _bad(
            "data",
            "either validation prefixes or a split",
            f"both, {data.validation} and {data.split!r}",
            "Leave one of data.validation and data.split out",
        )
    if data.split is not None:
        split_shares(data.split)
    if data.sequence_length > model.max_sequence_length:
        raise _bad(
            "data.sequence_length",
            f"at most the model's max_sequence_length, {model.max_sequence_length},",
            data.sequence_length,
            "Shorten it, or raise model.max_sequence_length",
        )


def split_shares(split: str) -> list[float]:
    """Return the shares of a split such as ``"99,1"``.

    Raises:
        ConfigError: It is not two or three numbers of which the first two are positive.
    """
    try:
        shares = [float(part) for part in split.split(",")]
    except ValueError:
        shares = []
    is_sound = len(shares) in (2, 3) and all(0 <= s < math.inf for s in shares)
    if not is_sound or min(shares[:2]) <= 0:
        raise _bad(
            "data.split",
            "shares for training and validation",
            repr(split),
            'Write it like "99,1", in percent or any other unit',
        )
    return shares


def _value_of(config: Config, path: str) -> Any:
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def _bad(path: str, what: str, got: object, mend: str | None = None) -> ConfigError:
    mend = mend or f"Set {path} within this range"
    return ConfigError(expected(what, got, where=f"the training configuration, {path}", mend=mend))
