"""Checks of a configuration's values together, before anything is built.

Values are checked against each other, the number of ranks, and the names of the model's parameters
and modules; the bounds of each value alone are in ``megafsdp.training.config.sections``. Nothing
here reads a file or talks to another rank: every rank finds the same, before the first collective.
"""

from __future__ import annotations

import fnmatch
import math

import torch

from megafsdp.errors import ConfigError
from megafsdp.fsdp.grouping import find_units
from megafsdp.fsdp.policy_names import policies_by_module
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models.build import build_model, unit_classes
from megafsdp.models.config import ModelConfig
from megafsdp.training.config.optimizer_sections import LossScaleSection, MuonSection
from megafsdp.training.config.parse import config_from_dict
from megafsdp.training.config.sections import (
    Config,
    DataSection,
    ParallelSection,
    TrainSection,
    require,
)


def validate(config: Config, *, world_size: int) -> None:
    """Check what can be known without files and without other ranks; local.

    Args:
        config: The run.
        world_size: Number of ranks it is started with.

    Raises:
        ConfigError: A value is missing or out of its range, or values contradict each other.
    """
    validate_given(config, world_size=world_size)
    _check_length(config.train)
    require(
        bool(config.data.train),
        "data.train",
        "at least one prefix of token files",
        "none",
        "Write files with `megafsdp prep` and give their path without .bin",
    )


def validate_given(config: Config, *, world_size: int) -> None:
    """Check like :func:`validate`, but data and length may be missing; local.

    Args:
        config: The run.
        world_size: Number of ranks.

    Raises:
        ConfigError: A value is out of its range, or values contradict each other.
    """
    require(
        "://" not in config.run.directory,
        "run.directory",
        "a local folder, to which metrics are appended",
        f"the URL '{config.run.directory}'",
        "Set checkpoint.directory to the URL, and run.directory to a folder of this machine",
    )
    _check_sharding(config, world_size)
    if config.train.steps is not None or config.train.samples is not None:
        _check_length(config.train)
    _check_profile(config, world_size)
    _check_data(config.data, config.model.resolve())


def validate_schedule(config: Config, *, num_samples: int) -> None:
    """Check that warm-up and decay fit into a run; local.

    Args:
        config: The run.
        num_samples: All samples of the run. Steps before a resume may have had another batch size,
            so the configuration alone does not say how many there are.

    Raises:
        ConfigError: They do not fit.
    """
    schedule = config.schedule
    if schedule.kind != "wsd" or schedule.decay_samples is None:
        return
    require(
        schedule.warmup_samples + schedule.decay_samples <= num_samples,
        "schedule",
        f"warm-up and decay within the run's {num_samples} samples",
        f"{schedule.warmup_samples} and {schedule.decay_samples}",
        "Shorten one of them, or train longer",
    )


def _check_sharding(config: Config, world_size: int) -> None:
    """Check what decides the model, how ranks share it, and a step's batches."""
    model = config.model.resolve()
    config.activation_checkpointing.resolve()
    config_from_dict(config.to_dict())
    dims = _check_parallel(config.parallel, world_size)
    _check_tensor_parallel(model, dims.tp)
    _check_context_parallel(model, dims)
    _check_expert_parallel(model, dims.ep)
    # torch's generators take 64 bits, and each data-parallel rank has a seed of its own.
    largest, seed = 2**64 - dims.data_size, config.run.seed
    what = f"at most {largest} for {dims.data_size} data-parallel ranks"
    require(seed <= largest, "run.seed", what, seed, "Choose a smaller one")
    _check_batch(config, dims.data_size)
    _check_optimizer(config)
    _check_dtypes(config)
    _check_quantization(config)
    _check_compile(config)
    _check_names(config)


def _check_parallel(parallel: ParallelSection, world_size: int) -> ParallelDims:
    """Check the degrees and how the data axes are used; return the degrees for these ranks."""
    try:
        dims = parallel.dims().resolve(world_size)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if parallel.outer_strategy == "optim":
        require(
            dims.dp_outer > 1,
            "parallel.outer_strategy",
            "a parallel.dp_outer above 1 for optim",
            dims.dp_outer,
            "Set parallel.dp_outer to the number of nodes, or leave outer_strategy at no_shard",
        )
        require(
            parallel.strategy == "optim_grads_params",
            "parallel.outer_strategy",
            "the parallel.strategy optim_grads_params for optim",
            parallel.strategy,
            "Divide everything over dp_shard, or leave outer_strategy at no_shard",
        )
    require(
        parallel.strategy == "optim_grads_params" or not parallel.nccl_user_buffers,
        "parallel.nccl_user_buffers",
        f"false with the parallel.strategy {parallel.strategy}",
        parallel.nccl_user_buffers,
        "Leave it out: only optim_grads_params gathers for each use",
    )
    reshard, num_ranks = parallel.reshard_after_forward, dims.dp_shard * dims.cp
    require(
        reshard is None or isinstance(reshard, bool) or num_ranks % reshard == 0,
        "parallel.reshard_after_forward",
        f"true, false, null, or a divisor of the {num_ranks} ranks of dp_shard x cp",
        reshard,
        "Give the number of ranks of one node, or true to free gathered parameters",
    )
    return dims


def _check_tensor_parallel(model: ModelConfig, tp: int) -> None:
    """Check that each tensor-parallel rank gets as much of every layer as the others."""
    for name, what in (
        ("num_query_groups", "query groups, and the heads that belong to them,"),
        ("linear_num_key_heads", "key heads, and the value heads that belong to them,"),
        (
            "shared_expert_ffn_hidden_size" if model.has_experts else "ffn_hidden_size",
            "an MLP width",
        ),
        ("vocab_size", "a vocabulary"),
    ):
        extent = getattr(model, name)
        require(
            extent % tp == 0,
            "parallel.tp",
            f"a divisor of model.{name}, {extent}",
            tp,
            f"Choose a smaller degree, or {what} that it divides",
        )


def _check_context_parallel(model: ModelConfig, dims: ParallelDims) -> None:
    """Check that each rank of cp and tp gets as many heads of linear attention as the others."""
    require(
        model.linear_num_key_heads % (dims.cp * dims.tp) == 0,
        "parallel.cp",
        f"a degree that with parallel.tp {dims.tp} divides model.linear_num_key_heads, "
        f"{model.linear_num_key_heads}",
        dims.cp,
        "Choose a smaller degree, or key heads, and the value heads that belong to them, that it "
        "divides",
    )


def _check_expert_parallel(model: ModelConfig, ep: int) -> None:
    """Check that each expert-parallel rank gets as many experts of a layer as the others."""
    require(
        ep == 1 or model.has_experts,
        "parallel.ep",
        f"1 for the architecture {model.architecture}, which has no experts",
        ep,
        "Leave it out, or choose a mixture of experts such as qwen3_moe",
    )
    require(
        model.num_experts % ep == 0,
        "parallel.ep",
        f"a divisor of model.num_experts, {model.num_experts}",
        ep,
        "Choose a smaller degree, or a number of experts that it divides",
    )


def _check_optimizer(config: Config) -> None:
    optimizer, form = config.optimizer, config.optimizer.form
    forms = {"sgd": ("fused", "foreach", "loop"), "muon": ("megafsdp",)}.get(
        optimizer.kind, (form,)
    )
    require(
        form in forms,
        "optimizer.implementation",
        f"null or {' or '.join(forms)} for {optimizer.kind}",
        form,
        "Leave it null, or choose another optimizer.kind",
    )
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        dtype = getattr(optimizer, name)
        require(
            dtype == "fp32" or optimizer.is_fused_adam,
            f"optimizer.{name}",
            f"fp32 for {optimizer.kind} in its {form} form",
            dtype,
            "Use adamw or adam with implementation megafsdp for narrower states",
        )
    main = config.precision.main_params_dtype
    require(
        not optimizer.store_param_remainders or (optimizer.is_fused_adam and main == "bf16"),
        "optimizer.store_param_remainders",
        "false, or bf16 main weights with adamw or adam in the megafsdp form",
        f"{main} with {optimizer.kind} in the {form} form",
        "Leave it out, or set precision.main_params_dtype to bf16",
    )
    if optimizer.kind == "sgd" and form == "fused":
        _check_fused_sgd(config)
    _check_offload(config)
    is_muon = optimizer.kind == "muon" or config.muon == MuonSection()
    what = "its defaults, or optimizer.kind muon"
    require(is_muon, "muon", what, optimizer.kind, "Leave it out")


def _check_fused_sgd(config: Config) -> None:
    parallel, device = config.parallel, config.run.device
    has_gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    is_on_host = parallel.offload_parameters or not has_gpu
    # Replicated parameters are plain DTensors, for which torch has no fused SGD.
    is_replicated = parallel.strategy == "no_shard"
    # On a CPU torch's kernel skips whole vectors of narrow weights, without an error.
    is_incomplete = config.precision.main_params_dtype != "fp32" and is_on_host
    require(
        not (is_replicated or is_incomplete),
        "optimizer.implementation",
        "null, foreach or loop for sgd under the parallel.strategy no_shard, or of narrow main"
        " weights on a CPU",
        "fused",
        "Leave it null, or use one of these",
    )


def _check_offload(config: Config) -> None:
    optimizer, main = config.optimizer, config.precision.main_params_dtype
    fraction = optimizer.offload_fraction
    require(
        optimizer.speculate is not True or bool(fraction and optimizer.offload_overlap),
        "optimizer.speculate",
        "auto or false, or an offload_fraction above 0 with offload_overlap",
        f"true with {fraction} and offload_overlap {optimizer.offload_overlap}",
        "Leave it out: only a step that runs beside the device can begin early",
    )
    require(
        optimizer.host_threads is None or bool(fraction) or config.parallel.offload_parameters,
        "optimizer.host_threads",
        "null without an offload_fraction and without parallel.offload_parameters",
        optimizer.host_threads,
        "Leave it out: nothing is stepped by these threads",
    )
    if not fraction:
        return
    require(
        not config.parallel.offload_parameters,
        "optimizer.offload_fraction",
        "0 where parallel.offload_parameters is true",
        fraction,
        "Choose one of the two",
    )
    is_plain = optimizer.state_dtypes == (torch.float32, torch.float32)
    is_built = optimizer.is_fused_adam and optimizer.kind == "adamw" and is_plain
    require(
        is_built and main == "fp32",
        "optimizer.offload_fraction",
        "0, or adamw in the megafsdp form with fp32 states and fp32 main weights",
        f"{fraction} with {optimizer.kind} in the {optimizer.form} form, states in"
        f" {optimizer.exp_avg_dtype} and {optimizer.exp_avg_sq_dtype}, weights in {main}",
        "Leave it out, or leave the dtypes at their defaults",
    )


def _check_names(config: Config) -> None:
    """Check that each pattern of parameters and each name of modules matches something."""
    multipliers, precision = config.optimizer.lr_multipliers, config.precision
    if not (multipliers or precision.keep_fp32 or precision.keep_unquantized):
        return
    with torch.device("meta"):
        model = build_model(config.model.resolve())
    names = [name for name, _ in model.named_parameters()]
    idle = [pattern for pattern in multipliers if not fnmatch.filter(names, pattern)]
    require(
        not idle,
        "optimizer.lr_multipliers",
        f"patterns of parameter names such as '{names[0]}'",
        f"{idle} that match none",
        "Correct or remove them",
    )
    units = find_units(model, unit_classes(model.config))
    try:
        policies_by_module(model, units, precision.policy())
    except ValueError as error:
        raise ConfigError(
            f"{error} The name stands in the section precision of the run."
        ) from error


def _check_dtypes(config: Config) -> None:
    precision, optimizer = config.precision, config.optimizer
    # torch's Adam and its fused kernels take gradients of the weights' dtype only.
    is_narrow = optimizer.form == "fused" or (
        optimizer.kind in ("adamw", "adam") and not optimizer.is_fused_adam
    )
    require(
        precision.main_grads_dtype in (None, precision.main_params_dtype) or not is_narrow,
        "precision.main_grads_dtype",
        f"main_params_dtype, {precision.main_params_dtype}, for {optimizer.kind} in its"
        f" {optimizer.form} form",
        precision.main_grads_dtype,
        "Leave it null, or use implementation megafsdp, or foreach or loop for sgd",
    )
    require(
        precision.param_dtype == "fp16" or config.loss_scale == LossScaleSection(),
        "loss_scale",
        "its defaults, or precision.param_dtype fp16",
        precision.param_dtype,
        "Leave the section out, as only fp16 needs a loss scale",
    )
    try:
        config.loss_scale.rule()
    except ValueError as error:
        raise ConfigError(f"{error} It is loss_scale of the run.") from error


def _check_quantization(config: Config) -> None:
    """Check that options of a recipe have one, and that no option rules the recipe out."""
    precision = config.precision
    if precision.recipe is None:
        for name, is_default in (
            ("keep_unquantized", not precision.keep_unquantized),
            ("quantize_activations", precision.quantize_activations),
        ):
            require(
                is_default,
                f"precision.{name}",
                "its default where precision.recipe is null",
                getattr(precision, name),
                "Choose a recipe, or leave it out",
            )
        return
    require(
        not (config.parallel.offload_parameters or config.optimizer.offload_fraction),
        "precision.recipe",
        "null where parameters or optimizer states are offloaded",
        precision.recipe,
        "Leave out the recipe, or parallel.offload_parameters and optimizer.offload_fraction:"
        " codes are made on the device",
    )


def _check_compile(config: Config) -> None:
    """Check that torch has the compiler; its list takes seconds to import, so only if asked."""
    if not config.compile.layers:
        return
    known, backend = torch.compiler.list_backends(exclude_tags=()), config.compile.backend
    require(
        backend in known,
        "compile.backend",
        f"one of {', '.join(known)}",
        repr(backend),
        "Use inductor, or install the package that adds it",
    )


def _check_batch(config: Config, num_data_ranks: int) -> None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    multiple = -(-size // num_data_ranks) * num_data_ranks
    require(
        size % num_data_ranks == 0,
        "train.global_batch_size",
        f"a multiple of the {num_data_ranks} data-parallel ranks (dp_outer x dp_shard)",
        size,
        f"Use {multiple}, or a number of data-parallel ranks that divides {size}",
    )
    share = size // num_data_ranks
    is_divisor = micro is None or share % micro == 0
    fitting = [] if is_divisor else [str(n) for n in range(1, share + 1) if share % n == 0]
    require(
        is_divisor,
        "train.micro_batch_size",
        f"a divisor of the {share} samples of a data-parallel rank",
        micro,
        f"Use {' or '.join(fitting[-6:])}, or leave it null",
    )


def _check_length(train: TrainSection) -> None:
    require(
        (train.steps is None) != (train.samples is None),
        "train",
        "either steps or samples",
        f"steps {train.steps} and samples {train.samples}",
        "Set one of train.steps and train.samples, and leave the other null",
    )
    require(
        train.samples is None or train.samples >= train.global_batch_size,
        "train.samples",
        f"at least one global batch, {train.global_batch_size}",
        train.samples,
        "Train longer, or make the batch smaller",
    )


def _check_profile(config: Config, world_size: int) -> None:
    ranks = [] if config.logging.profile is None else config.logging.profile.ranks
    require(
        all(rank < world_size for rank in ranks),
        "logging.profile.ranks",
        f"ranks below the {world_size} of the run",
        ranks,
        "Name ranks that there are, such as [0]",
    )


def _check_data(data: DataSection, model: ModelConfig) -> None:
    require(
        data.weights is None or not data.train or len(data.weights) == len(data.train),
        "data.weights",
        f"one weight for each of {len(data.train)} prefixes",
        data.weights,
        "Leave it null to weigh prefixes by their tokens",
    )
    require(
        not data.validation or data.split is None,
        "data",
        "either validation prefixes or a split",
        f"both, {data.validation} and {data.split!r}",
        "Leave one of data.validation and data.split out",
    )
    if data.split is not None:
        split_shares(data.split)
    require(
        not data.document_mask or data.tokenizer is not None,
        "data.document_mask",
        "a tokenizer, whose end-of-document token ends documents",
        "data.tokenizer null",
        "Set data.tokenizer to the one of the data, or data.document_mask to false",
    )
    require(
        data.sequence_length <= model.max_sequence_length,
        "data.sequence_length",
        f"at most the model's max_sequence_length, {model.max_sequence_length}",
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
    require(
        is_sound and min(shares[:2]) > 0,
        "data.split",
        "shares for training and validation",
        repr(split),
        'Write it like "99,1", in percent or any other unit',
    )
    return shares
