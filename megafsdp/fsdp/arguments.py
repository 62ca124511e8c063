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
from megafsdp.fsdp.policy import Average, MixedPrecisionPolicy, OffloadPolicy, Strategy
from megafsdp.fsdp.unit import unit_of
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
        NotImplementedError: The policy asks for offloaded parameters.
    """
    if isinstance(policy, TorchOffloadPolicy):
        policy = OffloadPolicy(params=isinstance(policy, TorchCPUOffloadPolicy))
    if not isinstance(policy, OffloadPolicy):
        raise TypeError(
            expected(
                "an OffloadPolicy of megafsdp or of torch",
                type(policy).__name__,
                where="offload_policy of fully_shard()",
                mend="Build megafsdp.OffloadPolicy()",
            )
        )
    if policy.params:
        raise NotImplementedError(
            expected(
                "OffloadPolicy(params=False)",
                "params=True",
                where="offload_policy of fully_shard()",
                mend="Leave the parameters on the device",
            )
        )
    return policy


def check_modules(modules: Sequence[nn.Module], outer_strategy: str, prefetch: int) -> None:
    """Check that the modules can become a unit.

    Raises:
        ValueError: There is none, one is a unit already, or ``prefetch`` is negative.
        NotImplementedError: The outer strategy is not built.
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
    if outer_strategy != "no_shard":
        raise NotImplementedError(
            expected(
                "outer_strategy 'no_shard'",
                repr(outer_strategy),
                where="fully_shard()",
                mend="Leave outer_strategy at its default",
            )
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


def reshard_of(reshard_after_forward: bool | int | None) -> bool | None:
    """Return the choice of resharding after forward.

    Raises:
        NotImplementedError: It is a number of ranks.
    """
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    raise NotImplementedError(
        expected(
            "True, False or None",
            repr(reshard_after_forward),
            where="reshard_after_forward of fully_shard()",
            mend="Use True to free parameters after forward, False to keep them",
        )
    )


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
