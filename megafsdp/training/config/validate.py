"""Checks of a configuration's values, together and alone, before anything is built.

Nothing here reads a file or talks to another rank: every rank finds the same, before the first
collective.


Checks of names that only the model knows; values are ``validate``'s.

Checks of values one by one, and the form of what is said about them.
"""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import torch

from megafsdp.errors import ConfigError, expected
from megafsdp.fsdp.grouping import find_units, policies_by_module
from megafsdp.models.build import build_model, unit_classes
from megafsdp.models.config import ModelConfig
from megafsdp.training.config.optimizer_sections import LossScaleSection, MuonSection
from megafsdp.training.config.sections import Config, DataSection, ParallelSection, TrainSection


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


# 31 years; torch counts a clock's nanoseconds in 64 bits.
_MAX_TIMEOUT_S = 10**9


def check_ranges(config: Config, *, world_size: int) -> None:
    """Check every value whose range depends on no other value; local.

    Args:
        config: The run.
        world_size: Number of ranks; each has a seed of its own.

    Raises:
        ConfigError: A value is out of its range.
    """
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
        "muon.ns_steps",
        "muon.bucket_numel",
    ):
        value = value_of(config, path)
        if value is not None and value < 1:
            raise bad_value(path, "a whole number of at least 1", value)
    for path in (
        "optimizer.weight_decay",
        "optimizer.eps",
        "optimizer.momentum",
        "muon.eps",
        "schedule.warmup_samples",
        "evaluation.sample_tokens",
        "evaluation.sample_temperature",
        "parallel.prefetch",
    ):
        if not 0 <= value_of(config, path) < math.inf:
            raise bad_value(path, "a finite number of at least 0", value_of(config, path))
    for path in ("optimizer.lr", "optimizer.clip_norm", "run.timeout_s"):
        value = value_of(config, path)
        if value is not None and not 0 < value < math.inf:
            raise bad_value(path, "a finite number above 0", value)
    if config.run.timeout_s > _MAX_TIMEOUT_S:
        what = f"at most {_MAX_TIMEOUT_S:,} seconds"
        raise bad_value("run.timeout_s", what, config.run.timeout_s)
    if not 0 <= config.schedule.min_lr_ratio <= 1:
        raise bad_value(
            "schedule.min_lr_ratio", "a share from 0 to 1", config.schedule.min_lr_ratio
        )
    if not config.run.directory:
        raise bad_value("run.directory", "a folder", "''")
    _check_seeds(config, world_size)


def _check_seeds(config: Config, world_size: int) -> None:
    # NumPy's stream of the samples takes 32 bits, torch's generators 64.
    for path, end in (("run.seed", 2**64 - world_size + 1), ("data.seed", 2**32)):
        if not 0 <= value_of(config, path) < end:
            what = f"a whole number from 0 to {end - 1}"
            raise bad_value(path, what, value_of(config, path))


def value_of(config: Config, path: str) -> Any:
    """Return the value at ``section.field``."""
    section, _, name = path.partition(".")
    return getattr(getattr(config, section), name)


def bad_value(path: str, what: str, got: object, hint: str | None = None) -> ConfigError:
    """Return the error of a value that cannot be run.

    Args:
        path: Its ``section.field``.
        what: What it must be.
        got: What it is.
        hint: What the user can do; None asks for a value of the range.
    """
    hint = hint or f"Set {path} within this range"
    return ConfigError(expected(what, got, where=f"the training configuration, {path}", hint=hint))


def validate(config: Config, *, world_size: int) -> None:
    """Check what can be known without files and without other ranks; local.

    Args:
        config: The run.
        world_size: Number of ranks it is started with.

    Raises:
        ConfigError: A value is out of its range, or values contradict each other.
        NotImplementedError: A degree is reserved.
    """
    validate_sharding(config, world_size=world_size)
    _check_length(config.train)
    decay_samples = config.schedule.decay_samples
    if config.schedule.kind != "constant" and decay_samples is not None and decay_samples < 1:
        raise bad_value("schedule.decay_samples", "at least 1 sample", decay_samples)
    _check_data(config.data, config.model.resolve())


def validate_schedule(config: Config, *, num_samples: int) -> None:
    """Check that warm-up and decay fit into a run; local.

    Args:
        config: The run.
        num_samples: All of its samples. Those before a resume may have come in other batches, so
            the configuration alone does not say how many they are.

    Raises:
        ConfigError: They do not.
    """
    schedule = config.schedule
    if schedule.kind != "wsd" or schedule.decay_samples is None:
        return
    if schedule.warmup_samples + schedule.decay_samples > num_samples:
        raise bad_value(
            "schedule",
            f"warm-up and decay within the run's {num_samples} samples",
            f"{schedule.warmup_samples} and {schedule.decay_samples}",
            "Shorten one of them, or train longer",
        )


def validate_sharding(config: Config, *, world_size: int) -> None:
    """Check what decides the model, how ranks share it, and a step's batches; local.

    Args:
        config: The run, perhaps without data and length.
        world_size: Number of ranks.

    Raises:
        ConfigError: A value is out of its range, or values contradict each other.
        NotImplementedError: A degree is reserved.
    """
    config.model.resolve()
    config.activation_checkpointing.resolve()
    check_ranges(config, world_size=world_size)
    _check_parallel(config.parallel, world_size)
    _check_batch(config, world_size)
    _check_optimizer(config)
    _check_loss_scale(config)
    _check_dtypes(config)
    check_kept_fp32(config)


def _check_parallel(parallel: ParallelSection, world_size: int) -> None:
    try:
        dims = parallel.dims().resolve(world_size)
    except NotImplementedError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if parallel.outer_strategy == "optim":
        if dims.dp_outer == 1:
            raise bad_value(
                "parallel.outer_strategy",
                "a parallel.dp_outer above 1 for optim",
                dims.dp_outer,
                "Set parallel.dp_outer to the number of nodes, or leave outer_strategy at no_shard",
            )
        if parallel.strategy != "optim_grads_params":
            raise bad_value(
                "parallel.outer_strategy",
                "the parallel.strategy optim_grads_params for optim",
                parallel.strategy,
                "Divide everything over dp_shard, or leave outer_strategy at no_shard",
            )
    reshard = parallel.reshard_after_forward
    if reshard is None or isinstance(reshard, bool):
        return
    if reshard < 1 or dims.dp_shard % reshard:
        raise bad_value(
            "parallel.reshard_after_forward",
            f"true, false, null, or a divisor of the {dims.dp_shard} ranks of dp_shard",
            reshard,
            "Give the number of ranks of one node, or true to free gathered parameters",
        )


def _check_dtypes(config: Config) -> None:
    precision, optimizer = config.precision, config.optimizer
    is_mixed = precision.main_grads_dtype not in (None, precision.main_params_dtype)
    # torch's Adam and its fused kernels take gradients of the weights' dtype only.
    is_narrow = optimizer.form == "fused" or (
        optimizer.kind in ("adamw", "adam") and not optimizer.is_fused_adam
    )
    if is_mixed and is_narrow:
        raise bad_value(
            "precision.main_grads_dtype",
            f"main_params_dtype, {precision.main_params_dtype}, for {optimizer.kind} in its"
            f" {optimizer.form} form",
            precision.main_grads_dtype,
            "Leave it null, or use implementation megafsdp, or foreach or loop for sgd",
        )


def _check_optimizer(config: Config) -> None:
    optimizer, form = config.optimizer, config.optimizer.form
    decays = {"optimizer.betas": config.optimizer.betas, "muon.momentum": (config.muon.momentum,)}
    for path, values in decays.items():
        if not all(0 <= value < 1 for value in values):
            raise bad_value(path, "numbers of at least 0 and below 1", value_of(config, path))
    forms = {"sgd": ("fused", "foreach", "loop"), "muon": ("megafsdp",)}.get(optimizer.kind)
    if forms is not None and form not in forms:
        raise bad_value(
            "optimizer.implementation",
            f"null or {' or '.join(forms)} for {optimizer.kind}",
            form,
            "Leave it null, or choose another optimizer.kind",
        )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(optimizer, name)
        if dtype != "fp32" and not optimizer.is_fused_adam:
            raise bad_value(
                f"optimizer.{name}",
                f"fp32 for {optimizer.kind} in its {form} form",
                dtype,
                "Use adamw or adam with implementation megafsdp for narrower states",
            )
    main = config.precision.main_params_dtype
    if optimizer.store_param_remainders and not (optimizer.is_fused_adam and main == "bf16"):
        raise bad_value(
            "optimizer.store_param_remainders",
            "false, or bf16 main weights with adamw or adam in the megafsdp form",
            f"{main} with {optimizer.kind} in the {form} form",
            "Leave it out, or set precision.main_params_dtype to bf16",
        )
    if optimizer.kind == "sgd" and form == "fused":
        _check_fused_sgd(config)
    _check_offload(config)
    if optimizer.kind != "muon" and config.muon != MuonSection():
        raise bad_value(
            "muon", "its defaults, or optimizer.kind muon", optimizer.kind, "Leave it out"
        )
    _check_lr_multipliers(config)


def _check_fused_sgd(config: Config) -> None:
    parallel, device = config.parallel, config.run.device
    has_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    is_on_host = parallel.offload_parameters or not has_gpu
    if parallel.strategy == "no_shard":
        # Replicated parameters are plain DTensors, for which torch has no fused SGD.
        what = "under the parallel.strategy no_shard"
    elif config.precision.main_params_dtype != "fp32" and is_on_host:
        # torch's kernel leaves out whole vectors of narrow weights there, without a word.
        what = "of narrow main weights on a CPU"
    else:
        return
    hint = "Leave it null, or use one of these"
    raise bad_value(
        "optimizer.implementation", f"null, foreach or loop for sgd {what}", "fused", hint
    )


def _check_offload(config: Config) -> None:
    optimizer, main = config.optimizer, config.precision.main_params_dtype
    fraction = optimizer.offload_fraction
    if fraction != "auto" and (isinstance(fraction, str) or not 0.0 <= fraction <= 1.0):
        raise bad_value(
            "optimizer.offload_fraction", "auto or a number from 0 to 1", fraction, "Use 1 for all"
        )
    if optimizer.speculate is True and not (fraction and optimizer.offload_overlap):
        raise bad_value(
            "optimizer.speculate",
            "auto or false, or an offload_fraction above 0 with offload_overlap",
            f"true with {fraction} and offload_overlap {optimizer.offload_overlap}",
            "Leave it out: only a step that runs beside the device can begin early",
        )
    if fraction and config.parallel.offload_parameters:
        raise bad_value(
            "optimizer.offload_fraction",
            "0 where parallel.offload_parameters is true",
            fraction,
            "Choose one of the two",
        )
    is_plain = optimizer.state_dtypes == (torch.float32, torch.float32)
    is_built = optimizer.is_fused_adam and optimizer.kind == "adamw" and is_plain
    if fraction and not (is_built and main == "fp32" and not optimizer.store_param_remainders):
        raise bad_value(
            "optimizer.offload_fraction",
            "0, or adamw in the megafsdp form with fp32 states and fp32 main weights",
            f"{fraction} with {optimizer.kind} in the {optimizer.form} form, states in"
            f" {optimizer.exp_avg_dtype} and {optimizer.exp_avg_sq_dtype}, weights in {main}",
            "Leave it out, or leave the dtypes at their defaults",
        )


def _check_lr_multipliers(config: Config) -> None:
    multipliers = config.optimizer.lr_multipliers
    if not multipliers:
        return
    where = "optimizer.lr_multipliers"
    for pattern, factor in multipliers.items():
        if not 0 <= factor < math.inf:
            raise bad_value(f"{where}, '{pattern}'", "a finite number of at least 0", factor)
    with torch.device("meta"):
        names = [name for name, _ in build_model(config.model.resolve()).named_parameters()]
    idle = [p for p in multipliers if not fnmatch.filter(names, p)]
    if idle:
        raise bad_value(
            where,
            f"patterns of parameter names such as '{names[0]}'",
            f"{idle} that match none",
            "Correct or remove them",
        )


def _check_loss_scale(config: Config) -> None:
    section, dtype = config.loss_scale, config.precision.param_dtype
    if dtype != "fp16" and section != LossScaleSection():
        raise bad_value(
            "loss_scale",
            "its defaults, or precision.param_dtype fp16",
            dtype,
            "Leave the section out, as only fp16 needs a loss scale",
        )
    try:
        section.rule()
    except ValueError as error:
        raise bad_value("loss_scale", "values that work together", str(error)) from error


def _check_batch(config: Config, world_size: int) -> None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    if size % world_size:
        raise bad_value(
            "train.global_batch_size",
            f"a multiple of the {world_size} ranks",
            size,
            f"Use {-(-size // world_size) * world_size}, or a number of ranks that divides {size}",
        )
    if micro is not None and size % (micro * world_size):
        share = size // world_size
        fitting = [str(n) for n in range(1, share + 1) if share % n == 0]
        raise bad_value(
            "train.micro_batch_size",
            f"a divisor of the {share} samples of a rank",
            micro,
            f"Use {' or '.join(fitting[-6:])}, or leave it null",
        )


def _check_length(train: TrainSection) -> None:
    if (train.steps is None) == (train.samples is None):
        raise bad_value(
            "train",
            "either steps or samples",
            f"steps {train.steps} and samples {train.samples}",
            "Set one of train.steps and train.samples, and leave the other null",
        )
    if train.steps is not None and train.steps < 1:
        raise bad_value("train.steps", "a whole number of at least 1", train.steps)
    if train.samples is not None and train.samples < train.global_batch_size:
        raise bad_value(
            "train.samples", f"at least one global batch, {train.global_batch_size},", train.samples
        )


def _check_data(data: DataSection, model: ModelConfig) -> None:
    if not data.train:
        raise bad_value(
            "data.train",
            "at least one prefix of token files",
            "none",
            "Write files with `megafsdp prep` and give their path without .bin",
        )
    if data.weights is not None and (
        len(data.weights) != len(data.train) or not all(0 < w < math.inf for w in data.weights)
    ):
        raise bad_value(
            "data.weights",
            f"one positive weight for each of {len(data.train)} prefixes",
            data.weights,
        )
    if data.validation and data.split is not None:
        raise bad_value(
            "data",
            "either validation prefixes or a split",
            f"both, {data.validation} and {data.split!r}",
            "Leave one of data.validation and data.split out",
        )
    if data.split is not None:
        split_shares(data.split)
    if data.sequence_length > model.max_sequence_length:
        raise bad_value(
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
        raise bad_value(
            "data.split",
            "shares for training and validation",
            repr(split),
            'Write it like "99,1", in percent or any other unit',
        )
    return shares
