"""The types of the keyword arguments of ``fully_shard``, for type checkers; nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, TypedDict

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as TorchOffloadPolicy

from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, OffloadPolicy
from megafsdp.mesh.spmd import DataParallelDims

# Values of megafsdp.fsdp.params.policy.Strategy, and its ZeRO stages.
StrategyChoice = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", 0, 1, 2, 3]
OuterStrategyChoice = Literal["no_shard", "optim"]
AverageChoice = Literal["rank", "token"]
PlacementFunction = Callable[[nn.Parameter], object]


class ModelKeywords(TypedDict, total=False):
    """Keyword arguments of ``fully_shard`` that are the same for all units of a model."""

    mesh: DeviceMesh | None
    strategy: StrategyChoice
    outer_strategy: OuterStrategyChoice
    reshard_after_forward: bool | int | None
    shard_placement_fn: PlacementFunction | None
    offload_policy: OffloadPolicy | TorchOffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    average: AverageChoice
    prefetch: int
    nccl_user_buffers: bool
    dp_mesh_dims: DataParallelDims | None
    expert_mesh: DeviceMesh | None
    even_shards: bool


class ShardKeywords(ModelKeywords, total=False):
    """Keyword arguments of ``fully_shard``, for its overloads."""

    mp_policy: MixedPrecisionPolicy | TorchMixedPrecisionPolicy
