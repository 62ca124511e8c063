"""The arguments of ``fully_shard``: made into values, or refused with what, where and how to mend.

torch's own ``MixedPrecisionPolicy`` and ``CPUOffloadPolicy`` are accepted wherever ours are.
Nothing is changed and no collective issued here, but to build a default mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from megafsdp.errors import expected
from megafsdp.fsdp.grouping import FoundParameter
from megafsdp.fsdp.params.policy import Average, MixedPrecisionPolicy, OffloadPolicy, Strategy
from megafsdp.fsdp.runtime.unit import unit_of
from megafsdp.mesh.parallel_dims import default_mesh

_STAGES = tuple(Strategy)


def strategy_of(value: str | int) -> Strategy:
    """Return the strategy of a Megatron name or a ZeRO stage 0 to 3.

    Raises:
        ValueError: The name is unknown.
    """
    names = {s.value: s for s in Strategy} | dict(enumerate(_STAGES))
    if value not in names:
        raise ValueError(
            expected(
                f"one of {[s.value for s in Strategy]} or a ZeRO stage 0 to 3",
                repr(value),
                where="the strategy of fully_shard()",
                mend="Use 'optim_grads_params' for ZeRO-3",
            )
        )
    return names[value]


def average_of(value: str) -> Average:
    """Return the averaging rule of a name.

    Raises:
        ValueError: The name is unknown.
    """
    try:
        return Average(value)
    except ValueError:
        raise ValueError(
            expected(
                "'rank' or 'token'",
                repr(value),
                where="the average of fully_shard()",
                mend="Use 'rank' when each rank's loss is a mean, 'token' when it is a share of "
                "the sum over all tokens",
            )
        ) from None


def mixed_precision_of(
    policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy,
) -> MixedPrecisionPolicy:
    """Return our policy for ours or torch's; torch's unset ``reduce_dtype`` takes our default.

    Raises:
        TypeError: The value is neither.
    """
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    if isinstance(policy, TorchMixedPrecisionPolicy):
        return MixedPrecisionPolicy(
            policy.param_dtype,
            policy.reduce_dtype,
            policy.output_dtype,
            policy.cast_forward_inputs,
        )
    raise TypeError(
        expected(
            "a MixedPrecisionPolicy of megafsdp or of torch",
            type(policy).__name__,
            where="mp_policy of fully_shard()",
            mend="Build megafsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        )
    )


def offload_of(policy: OffloadPolicy | TorchOffloadPolicy) -> OffloadPolicy:
    """Return our policy for ours or torch's.

    Raises:
        TypeError: The value is neither.
    """
    if isinstance(policy, TorchCPUOffloadPolicy):
        return OffloadPolicy(params=True, pin_memory=policy.pin_memory)
    if isinstance(policy, TorchOffloadPolicy):
        return OffloadPolicy()
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            expected(
                "an OffloadPolicy of megafsdp or of torch",
                type(policy).__name__,
                where="offload_policy of fully_shard()",
                mend="Build megafsdp.OffloadPolicy()",
            )
        )
    return policy


def is_divided_over_outer_axis(outer_strategy: str, strategy: Strategy, mesh: DeviceMesh) -> bool:
    """Tell whether the first axis of the mesh divides main weights too.

    Raises:
        ValueError: The name is unknown, there is no outer axis to divide over, or compute weights
            or gradients are not divided over the inner one.
    """
    where = "outer_strategy of fully_shard()"
    if outer_strategy == "no_shard":
        return False
    if outer_strategy != "optim":
        raise ValueError(
            expected(
                "'no_shard' or 'optim'",
                repr(outer_strategy),
                where=where,
                mend="Use 'no_shard' to replicate shards over the outer axis (HSDP), 'optim' to "
                "divide main weights and optimizer states over it (HFSDP)",
            )
        )
    if mesh.ndim != 2:
        raise ValueError(
            expected(
                "a mesh of two axes",
                f"shape {tuple(mesh.shape)}",
                where=f"{where}, which is 'optim'",
                mend="Give a mesh of an outer and an inner axis, or leave outer_strategy out",
            )
        )
    if strategy is not Strategy.OPTIM_GRADS_PARAMS:
        raise ValueError(
            expected(
                "strategy 'optim_grads_params'",
                repr(strategy.value),
                where=f"{where}, which is 'optim'",
                mend="Divide everything over the inner axis, or leave outer_strategy out",
            )
        )
    return True


def check_modules(modules: Sequence[nn.Module], prefetch: int) -> None:
    """Check that the modules can become a unit.

    Raises:
        ValueError: There is none, one is a unit already, or ``prefetch`` is negative.
    """
    for module in modules:
        if unit_of(module) is not None:
            raise ValueError(
                expected(
                    "a module that is not a unit yet",
                    f"{type(module).__name__}, which was given to fully_shard() before",
                    where="fully_shard()",
                    mend="Call it once for each unit, on the root last",
                )
            )
    if not modules:
        raise ValueError(
            expected("a module", "an empty list", where="fully_shard()", mend="Give the unit")
        )
    if prefetch < 0:
        raise ValueError(
            expected(
                "0 or more units",
                prefetch,
                where="prefetch of fully_shard()",
                mend="Use 1; 0 gathers each unit when it runs",
            )
        )


def reshard_of(reshard_after_forward: bool | int | None, mesh: DeviceMesh) -> bool | int | None:
    """Return the choice of resharding after forward; one rank is False, all of them True.

    Raises:
        ValueError: It is a number that does not divide the ranks of the mesh's last axis.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    num_ranks = mesh.size(mesh.ndim - 1)
    if reshard_after_forward < 1 or num_ranks % reshard_after_forward:
        raise ValueError(
            expected(
                f"True, False, None, or a divisor of the {num_ranks} ranks that divide parameters",
                repr(reshard_after_forward),
                where="reshard_after_forward of fully_shard()",
                mend="Give the number of ranks of one node, or True to free parameters",
            )
        )
    return {1: False, num_ranks: True}.get(reshard_after_forward, reshard_after_forward)


def check_placements(
    found: Sequence[FoundParameter], placement_fn: Callable[[nn.Parameter], object] | None
) -> None:
    """Check that the user's placements cut dimension 0.

    Raises:
        NotImplementedError: One cuts another dimension.
    """
    for item in found:
        placement = None if placement_fn is None else placement_fn(item.parameter)
        if placement is not None and getattr(placement, "dim", 0) != 0:
            raise NotImplementedError(
                expected(
                    "Shard(0)",
                    placement,
                    where=f"shard_placement_fn for '{item.record.name}'",
                    mend="Return None: rows of flat buffers are cut on dimension 0",
                )
            )


def mesh_of(mesh: DeviceMesh | None, device_type: str) -> DeviceMesh:
    """Return the mesh, by default of all ranks.

    Raises:
        RuntimeError: There is neither a mesh nor a process group.
        ValueError: The mesh has more than two axes, or two without names.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise RuntimeError(
                expected(
                    "an initialised process group or a mesh",
                    "neither",
                    where="fully_shard()",
                    mend="Call torch.distributed.init_process_group() first, or use torchrun",
                )
            )
        return default_mesh(device_type)
    if mesh.ndim == 1 or (mesh.ndim == 2 and mesh.mesh_dim_names is not None):
        return mesh
    raise ValueError(
        expected(
            "a mesh of one axis, or of two named ones",
            f"shape {tuple(mesh.shape)} with axes {mesh.mesh_dim_names}",
            where="the mesh of fully_shard()",
            mend="Give the named data-parallel axes, for example mesh['dp_outer', 'dp_shard']",
        )
    )
