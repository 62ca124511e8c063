"""torchft: replicas of a sharded model that may die and come back while the others train on.

Each replica is a group of ranks with a launcher and a mesh of its own, over which units shard. The
mean over the replicas that are alive is made on each sum of gradients by torchft's manager. Its
functions ``state_dict`` and ``load_state_dict`` are those of :class:`ReplicaState`.
"""

from __future__ import annotations

import torch
from torch import nn
from torchft.manager import Manager

from megafsdp.checkpoint.replica_state import ReplicaState
from megafsdp.errors import expected
from megafsdp.fsdp.fsdp_module import FSDPModule

__all__ = ["ReplicaState", "average_over_replicas"]


def average_over_replicas(model: nn.Module, manager: Manager) -> None:
    """Make the manager average each new sum of gradients over the replicas that are alive; local.

    Args:
        model: The root given to ``fully_shard``, after its units.
        manager: This rank's manager.

    Raises:
        ValueError: No module is a unit.
    """

    def average(sums: torch.Tensor) -> None:
        manager.allreduce(sums).wait()

    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not units:
        raise ValueError(
            expected(
                "a model with units",
                type(model).__name__,
                where="average_over_replicas()",
                hint="Call fully_shard() first",
            )
        )
    for unit in units:
        unit.set_all_reduce_hook(average)
