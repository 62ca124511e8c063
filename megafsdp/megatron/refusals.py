"""Parts of Megatron-FSDP's interface that are refused, and errors that say what to do instead.

They are keywords and configuration fields, methods of its wrapper, and names of its package. The
tables are complete: docs/from-megatron-fsdp.md has a row for each entry.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from torch import nn

from megafsdp.errors import expected

_SEPARATE_GROUPS = (
    "Leave it out: on CUDA gathers and reductions have communicators of their own, and "
    "set_separate_reduce_scatter_group() of the model chooses"
)
_NAN_CHECK = (
    "Leave it out, and clip by megafsdp.clip_grad_norm_(model, max_norm, error_if_nonfinite=True), "
    "which raises on all ranks"
)
_NO_DOUBLE_BUFFER = (
    "Leave it out: torch's allocator gives the memory of one unit to the next; nccl_ub=True keeps "
    "registered memory"
)
_NO_DECOUPLED_GRAD = (
    "Leave it out: .grad of the sharded parameters is the gradient, and "
    "MixedPrecisionPolicy(main_grads_dtype=...) its dtype"
)
_SMALL_UNITS = "Name the smaller modules in fsdp_unit_modules: each unit is gathered by itself"
_NO_GRAPHS = (
    "Leave it out: hooks of units are in no graph; keep weights gathered (zero_dp_strategy=2 or "
    "less), and capture below units, as block.compile(mode='reduce-overhead') does"
)
_NO_BUCKETS = "Leave it out: a unit is a bucket, so fsdp_unit_modules chooses their sizes"

# The values that ask for what happens anyway, and what to do instead of the others. Keywords that
# are not here are translated; fields of the configuration have the same names.
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "fsdp_group_ag": ((None,), _SEPARATE_GROUPS),
    "expt_fsdp_group_ag": ((None,), _SEPARATE_GROUPS),
    "grad_reduce_in_fp32": (
        (True, None),
        "Leave it out: gradients are summed in fp32; another dtype is mixed_precision_policy="
        "MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)",
    ),
    "preserve_fp32_weights": (
        (True,),
        "Give mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None), which keeps the "
        "model's dtype",
    ),
    "overlap_grad_reduce": (
        (True, None),
        "Leave it out: a unit's reduction always runs beside the next unit's backward",
    ),
    "sync_model_each_microbatch": (
        (True,),
        "Leave it out, and run each microbatch within megafsdp.microbatch(model, is_last=...): "
        "reductions that can wait then do",
    ),
    "check_for_nan_in_grad": ((False,), _NAN_CHECK),
    "report_nan_in_param_grad": ((False,), _NAN_CHECK),
    "disable_bucketing": ((False,), _NO_BUCKETS),
    "keep_fp8_transpose_cache": (
        (False,),
        "Leave it out: codes of weights serve forward and backward, without a transposed copy",
    ),
    "fsdp_double_buffer": ((False,), _NO_DOUBLE_BUFFER),
    "fsdp_db_use_persist_buf_on_alloc_fail": ((False,), _NO_DOUBLE_BUFFER),
    "enable_fine_grained_param_gather": ((False,), _SMALL_UNITS),
    "use_decoupled_grad": ((False,), _NO_DECOUPLED_GRAD),
    "cuda_graph_mode": ((False,), _NO_GRAPHS),
    "maxpool_double_buffer": ((False,), _NO_DOUBLE_BUFFER),
    # Fields of the configuration only.
    "bucket_size": ((None,), _NO_BUCKETS),
    "suggested_communication_unit_size": (
        (None,),
        "Leave it out: prefetch of megafsdp.fully_shard_model() says how many units are gathered "
        "ahead",
    ),
    "fp8_param_gather": (
        (False,),
        "Give mixed_precision_policy=megafsdp.MixedPrecisionPolicy(recipe='fp8_block') to "
        "fully_shard_model(), which gathers codes of 8 bits",
    ),
    "fsdp_manual_registration": (
        (False,),
        "Leave it out: with nccl_ub=True memory is registered once, before the first forward",
    ),
    "delay_wgrad_compute": (
        (False,),
        "Leave it out: a unit's backward computes all its gradients",
    ),
    "reduce_scatter_with_fp32_accumulation": (
        (False,),
        "Leave it out: gradients are summed in fp32, or in grad_comm_dtype",
    ),
    "check_for_large_grads": ((False,), _NAN_CHECK),
    "pad_buckets_for_high_nccl_busbw": ((False,), _NO_BUCKETS),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        (False,),
        "Leave it out: a unit's gathered codes and its gradients are freed after their use",
    ),
    "num_distributed_optimizer_instances": (
        (1,),
        "Give a mesh of two axes to fully_shard_model(), and the outer one's name as dp_outer_dim",
    ),
    "megatron_fsdp_use_decoupled_grad": ((False,), _NO_DECOUPLED_GRAD),
    "megatron_fsdp_cuda_graph_mode": ((False,), _NO_GRAPHS),
    "megatron_fsdp_enable_fine_grained_param_gather": ((False,), _SMALL_UNITS),
    "megatron_fsdp_max_pool_double_buffer": ((False,), _NO_DOUBLE_BUFFER),
    "use_megatron_fsdp": (
        (True,),
        "Leave it out, or use torch's DistributedDataParallel for DDP without this engine",
    ),
    "use_distributed_optimizer": (
        (True,),
        "Leave it out: data_parallel_sharding_strategy says what is divided",
    ),
}

# Registered memory is several persistent buffers, so nccl_ub asks for these too.
_DOUBLE_BUFFERS = (
    "fsdp_double_buffer",
    "maxpool_double_buffer",
    "megatron_fsdp_max_pool_double_buffer",
)

# Methods of Megatron-FSDP's wrapper, and what a loop does here instead.
METHODS: dict[str, str] = {
    "sync": "Leave it out: gradients are complete when backward returns; is_last of "
    "megafsdp.microbatch() says which microbatch ends a step",
    "set_model_auto_sync": "Leave it out, and run each microbatch within "
    "megafsdp.microbatch(model, is_last=...)",
    "start_param_sync": "Leave it out: the next forward gathers what has changed",
    "synchronize_param_gather": "Leave it out: each unit waits for its own gather",
    "all_gather_and_wait_parameters_ready": "Leave it out: each unit gathers when it runs, or call "
    "unshard() of the unit",
    "start_grad_sync": "Leave it out: backward reduces gradients",
    "finish_grad_sync": "Leave it out: gradients are complete when backward returns",
    "synchronize_gradient_reduce": "Leave it out: gradients are complete when backward returns",
    "attach_grad_to_optimizer_state": "Leave it out: .grad of the model's parameters is the "
    "gradient",
    "zero_grad_buffer": "Call optimizer.zero_grad() or model.zero_grad()",
    "install_optimized_model_weights": "Leave it out after an optimizer's step; after edits by "
    "hand call megafsdp.mark_main_weights_changed(model)",
    "scale_gradients": "Multiply .grad of each parameter, or call set_gradient_divide_factor() of "
    "each unit",
    "broadcast_params": "Build the same model on all ranks, from one seed or one checkpoint",
    "get_distributed_index": "Use the mesh that was given as device_mesh",
    "mixed_precision_context": "Give mixed_precision_policy to fully_shard_model(), once for all "
    "steps",
    "reset_mixed_precision_policy": "Give mixed_precision_policy to fully_shard_model(), once for "
    "all steps",
    "stop_communication": "Leave it out: gradients are complete when backward returns, and gathers "
    "ahead are used by the next forward",
}

# A method of the wrapper that programs call after sharding, and which has nothing to do here.
NEEDLESS = "_replace_param_with_distributed_if_needed"

# Attributes of Megatron-FSDP's wrapper that loops set.
ATTRIBUTES: dict[str, str] = {
    "is_last_microbatch": "Leave it out, and run each microbatch within "
    "megafsdp.microbatch(model, is_last=...)",
    "microbatch_count": "Leave it out, and run each microbatch within "
    "megafsdp.microbatch(model, is_last=...)",
}

# Other names of Megatron-FSDP's package.
NAMES: dict[str, str] = {
    "MegatronFSDP": "Call fully_shard_model(), which changes the model in place; "
    "isinstance(model, megafsdp.FSDPModule) finds units",
    "FSDPDistributedIndex": "Give device_mesh and the names of its axes to fully_shard_model()",
    "experimental": "Call megafsdp.fully_shard(module, mesh=..., strategy=...) for its placements, "
    "and megafsdp.microbatch(); optimizers need no fully_shard_optimizer()",
}


def refuse_name(name: str, known: Iterable[str], module: str) -> NoReturn:
    """Raise for a name that a module does not have.

    Raises:
        ImportError: It is one of Megatron-FSDP's.
        AttributeError: It is not.
    """
    if name in NAMES:
        # Not an AttributeError: an import statement would show only the name of it.
        raise ImportError(
            expected(
                f"one of {', '.join(known)}",
                repr(name),
                where=f"an import from {module}",
                hint=NAMES[name],
            )
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def check_names(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Check that keywords are Megatron-FSDP's.

    Raises:
        TypeError: One is not; the nearest are named.
    """
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=2)
            advice = f"Did you mean {' or '.join(nearest)}" if nearest else "Leave it out"
            raise TypeError(
                expected(
                    "keywords of Megatron-FSDP",
                    repr(name),
                    where=where,
                    hint=f"{advice}; megafsdp.fully_shard_model() has keywords of its own",
                )
            )


def check_values(given: Mapping[str, object], where: str) -> None:
    """Check that keywords, or fields of the configuration, ask for nothing that is not built.

    Raises:
        NotImplementedError: One does; the error says what to do.
    """
    for name, value in given.items():
        accepted, hint = ONLY.get(name, ((value,), ""))
        is_implied = name in _DOUBLE_BUFFERS and given.get("nccl_ub")
        if value not in accepted and not is_implied:
            raise refusal(name, " or ".join(map(repr, accepted)), value, where=where, hint=hint)


def refusal(name: str, what: str, value: object, *, where: str, hint: str) -> NotImplementedError:
    """Return the error of a keyword that asks for what is not built."""
    return NotImplementedError(
        expected(f"{name} to be {what}", repr(value), where=where, hint=hint)
    )


def refuse_methods(module: nn.Module) -> None:
    """Give a model the methods of Megatron-FSDP's wrapper; they say what to do instead.

    The model's own method of the same name stays. Attributes that loops set are refused too.
    """
    names = tuple(name for name in METHODS | ATTRIBUTES if not hasattr(module, name))
    # mypy takes the hash of the class for that of its instances.
    module.__class__ = _class_with(type(module), names)  # type: ignore[arg-type]


@functools.cache
def _class_with(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """Return a class with refused methods; cached, since torch compiles anew for each class."""
    refused: dict[str, object] = {
        name: _refused_method(name) if name in METHODS else _refused_attribute(name)
        for name in names
    }
    needless = {NEEDLESS: lambda self: None}  # Parameters at rest are always sharded ones.
    return type(cls.__name__, (cls,), needless | refused | {"__doc__": cls.__doc__})


def _refused_method(name: str) -> Callable[..., NoReturn]:
    def refuse(self: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a method of Megatron-FSDP's wrapper, and say what to do."""
        raise NotImplementedError(
            expected(
                "methods of megafsdp.FSDPModule",
                f"{name}()",
                where="a model sharded by megafsdp.megatron",
                hint=METHODS[name],
            )
        )

    return refuse


def _refused_attribute(name: str) -> property:
    def missing(self: nn.Module) -> NoReturn:
        # As if there were no property: other code asks whether a model has the attribute.
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def refuse(self: nn.Module, value: object) -> NoReturn:
        raise NotImplementedError(
            expected(
                "attributes of megafsdp.FSDPModule",
                f"{name}={value!r}",
                where="a model sharded by megafsdp.megatron",
                hint=ATTRIBUTES[name],
            )
        )

    return property(missing, refuse)
