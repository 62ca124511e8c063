"""Megatron-FSDP's names for choices: strategies, dtypes, keywords, and its configuration class.

Values only; :mod:`megafsdp.megatron.fully_shard` translates them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafsdp.errors import expected
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy as OwnPolicy
from megafsdp.fsdp.params.policy import Strategy
from megafsdp.megatron.refusals import ONLY, check_values, refusal

F = TypeVar("F", bound=Callable[..., Any])


class ShardingStrategy(IntEnum):
    """Megatron-FSDP's numbers of its strategies: the stages of ZeRO."""

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of weights and gradients, under Megatron-FSDP's names.

    Attributes:
        main_params_dtype: Main weights, which the optimizer sees; None takes the model's dtype.
        main_grads_dtype: Accumulated gradients; None takes the dtype of main weights.
        grad_comm_dtype: The sum of gradients over ranks; None takes ``main_grads_dtype``.
        grad_accum_dtype: Refused unless it is None or ``main_grads_dtype``.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    grad_accum_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check that sums are accumulated in the dtype in which they are stored.

        Raises:
            NotImplementedError: They are to be accumulated in another dtype.
        """
        if self.grad_accum_dtype not in (None, self.main_grads_dtype):
            raise refusal(
                "grad_accum_dtype",
                "None or main_grads_dtype",
                self.grad_accum_dtype,
                where="MixedPrecisionPolicy()",
                hint="Give that dtype as main_grads_dtype: gradients are accumulated as stored",
            )


class MegatronKeywords(TypedDict, total=False):
    """Keywords of Megatron-FSDP's ``fully_shard_model``, those of earlier releases included.

    Attributes:
        dp_shard_dim: The axis of ``device_mesh`` that divides; not needed for a mesh of one axis.
        dp_outer_dim: The axis of replicas (HSDP, HFSDP).
        tp_dim: The axis of tensor parallelism, whose parameters are DTensors over it.
        hybrid_fsdp_group: Not needed; a group of other ranks than the two axes is refused.
        hybrid_fsdp_expt_group: Likewise for experts.
        expt_device_mesh: The mesh of experts' parameters, with axes of the same names.
        fsdp_group_ag: Refused unless None.
        expt_fsdp_group_ag: Refused unless None.
        fsdp_unit_modules: Classes of units, or their names; None makes the model one unit.
        zero_dp_strategy: What is divided, by name or stage of ZeRO.
        outer_dp_sharding_strategy: What the outer axis divides: "no_shard" or 0, "optim" or 1.
        device: Where the model is moved before it is sharded.
        init_model_with_meta_device: Initialise what is on the meta device, by ``materialize``.
        mixed_precision_policy: A policy of this module, of megafsdp or of torch.
        grad_reduce_in_fp32: Refused if False.
        preserve_fp32_weights: Refused if False.
        overlap_grad_reduce: Refused if False.
        overlap_param_gather: False gathers each unit when it runs.
        sync_model_each_microbatch: Refused if False.
        preproc_state_dict_for_dcp_ckpt: Of ``fully_shard``: make the optimizer's states at once.
        check_for_nan_in_grad: Refused if True.
        report_nan_in_param_grad: Refused if True.
        average_in_collective: Either value: gradients are the mean.
        disable_bucketing: Refused if True.
        calculate_per_token_loss: True sums gradients instead of averaging them.
        keep_fp8_transpose_cache: Refused if True.
        nccl_ub: Gather into memory that is registered with NCCL.
        fsdp_double_buffer: Refused if True, unless ``nccl_ub`` asks for it too.
        fsdp_db_use_persist_buf_on_alloc_fail: Refused if True.
        disable_symmetric_registration: Either value: registration is never symmetric.
        enable_fine_grained_param_gather: Refused if True.
        use_decoupled_grad: Refused if True.
        cuda_graph_mode: Refused if True.
        maxpool_double_buffer: Refused if True, unless ``nccl_ub`` asks for it too.
    """

    dp_shard_dim: str | None
    dp_outer_dim: str | None
    tp_dim: str | None
    hybrid_fsdp_group: dist.ProcessGroup | None
    hybrid_fsdp_expt_group: dist.ProcessGroup | None
    expt_device_mesh: DeviceMesh | None
    fsdp_group_ag: dist.ProcessGroup | None
    expt_fsdp_group_ag: dist.ProcessGroup | None
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None
    zero_dp_strategy: str | int
    outer_dp_sharding_strategy: str | int
    device: torch.device | str | None
    init_model_with_meta_device: bool
    mixed_precision_policy: MixedPrecisionPolicy | OwnPolicy
    grad_reduce_in_fp32: bool
    preserve_fp32_weights: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    sync_model_each_microbatch: bool
    preproc_state_dict_for_dcp_ckpt: bool
    check_for_nan_in_grad: bool
    report_nan_in_param_grad: bool
    average_in_collective: bool
    disable_bucketing: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    fsdp_db_use_persist_buf_on_alloc_fail: bool
    disable_symmetric_registration: bool
    enable_fine_grained_param_gather: bool
    use_decoupled_grad: bool
    cuda_graph_mode: bool
    maxpool_double_buffer: bool


# What keywords mean that are left out; the other keywords have one value, which refusals.py has.
DEFAULTS: MegatronKeywords = {
    "dp_shard_dim": None,
    "dp_outer_dim": None,
    "tp_dim": None,
    "hybrid_fsdp_group": None,
    "hybrid_fsdp_expt_group": None,
    "expt_device_mesh": None,
    "fsdp_unit_modules": None,
    "zero_dp_strategy": 3,
    "outer_dp_sharding_strategy": 0,
    "device": None,
    "init_model_with_meta_device": False,
    "mixed_precision_policy": MixedPrecisionPolicy(),
    "overlap_param_gather": True,
    "preproc_state_dict_for_dcp_ckpt": True,
    "average_in_collective": False,
    "calculate_per_token_loss": False,
    "nccl_ub": False,
    "disable_symmetric_registration": False,
}


def show_keywords(function: F) -> F:
    """Let ``inspect.signature()`` of a function list all keywords, which programs look up there."""
    signature = inspect.signature(function)
    names = MegatronKeywords.__annotations__
    accepted = {name: ONLY[name][0][0] for name in names if name in ONLY}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in ({**DEFAULTS} | accepted).items()
    ]
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    function.__signature__ = signature.replace(parameters=own + keywords)  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """The fields of Megatron's configuration that concern FSDP, checked when it is made.

    ``fully_shard_model(model, **config.keywords())`` shards by it. Fields that ask for something
    else than what happens anyway are refused by name.

    Attributes:
        data_parallel_sharding_strategy: The keyword ``zero_dp_strategy``.
        outer_dp_sharding_strategy: The keyword of this name.
        overlap_param_gather: The keyword of this name; None leaves the overlap on.
        average_in_collective: The keyword of this name.
        nccl_ub: The keyword of this name.
        megatron_fsdp_main_params_dtype: As in :class:`MixedPrecisionPolicy`; so are the next two.
        megatron_fsdp_main_grads_dtype: Accumulated gradients.
        megatron_fsdp_grad_comm_dtype: The sum of gradients over ranks.
        gradient_reduce_div_fusion: Either value: gradients are divided where that is cheapest.
        fsdp_all_gather_in_start_param_sync: Either value: the first forward gathers.
        disable_symmetric_registration: Either value: registration is never symmetric.
        align_param_gather: Either value: a unit is gathered when it is needed.
        use_custom_fsdp: Either value: an earlier name of the next field.
        use_megatron_fsdp: Refused if False; all other fields are like the keywords of their names.
    """

    data_parallel_sharding_strategy: str | int = "no_shard"
    outer_dp_sharding_strategy: str | int = "no_shard"
    overlap_param_gather: bool | None = None
    average_in_collective: bool = False
    nccl_ub: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    gradient_reduce_div_fusion: bool = True
    fsdp_all_gather_in_start_param_sync: bool = True
    disable_symmetric_registration: bool = False
    align_param_gather: bool = False
    use_custom_fsdp: bool = False
    use_megatron_fsdp: bool = True
    use_distributed_optimizer: bool = True
    grad_reduce_in_fp32: bool | None = None
    preserve_fp32_weights: bool = True
    overlap_grad_reduce: bool | None = None
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    suggested_communication_unit_size: int | None = None
    num_distributed_optimizer_instances: int = 1
    fp8_param_gather: bool = False
    keep_fp8_transpose_cache: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            NotImplementedError: One asks for what is not built.
            ValueError: A strategy is unknown.
        """
        where = "DistributedDataParallelConfig()"
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        check_values(given, where=where)
        strategies = [strategy.value for strategy in Strategy]
        for name, allowed in (
            ("data_parallel_sharding_strategy", strategies),
            ("outer_dp_sharding_strategy", ["no_shard", "optim"]),
        ):
            if given[name] not in [*allowed, *range(len(allowed))]:
                raise ValueError(
                    expected(
                        f"one of {allowed}, or its number from 0 on",
                        repr(given[name]),
                        where=f"{name} of {where}",
                        hint="Correct the name",
                    )
                )

    def keywords(self) -> MegatronKeywords:
        """Return what :func:`~megafsdp.megatron.fully_shard.fully_shard_model` takes."""
        policy = MixedPrecisionPolicy(
            self.megatron_fsdp_main_params_dtype,
            self.megatron_fsdp_main_grads_dtype,
            self.megatron_fsdp_grad_comm_dtype,
        )
        return {
            "zero_dp_strategy": self.data_parallel_sharding_strategy,
            "outer_dp_sharding_strategy": self.outer_dp_sharding_strategy,
            "overlap_param_gather": self.overlap_param_gather is not False,
            "average_in_collective": self.average_in_collective,
            "nccl_ub": self.nccl_ub,
            "mixed_precision_policy": policy,
        }
