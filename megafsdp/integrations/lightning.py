"""Lightning on ``ModelParallelStrategy``: a strategy of all ranks, and a mix-in that shards.

The strategy divides data among all ranks that tensor parallelism leaves. The mix-in shards the
module's children in ``configure_model``, which Lightning calls on every rank, and clips with one
collective. Checkpoints are Lightning's own, a folder in which each rank writes its rows.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.fully_shard import fully_shard, fully_shard_model, is_container
from megafsdp.fsdp.params.parameter_group import group_of
from megafsdp.integrations.refusals import check_settings
from megafsdp.optimizer.grads.clip import clip_grad_norm_


class ShardedStrategy(ModelParallelStrategy):
    """``ModelParallelStrategy`` whose data-parallel ranks are all but those of tensor parallelism.

    Args:
        tensor_parallel_size: Neighbouring ranks that share out each layer.
        **kwargs: The strategy's further arguments.
    """

    def __init__(self, tensor_parallel_size: int = 1, **kwargs: Any) -> None:
        super().__init__(tensor_parallel_size=tensor_parallel_size, **kwargs)

    def setup_environment(self) -> None:
        """Count the ranks, once Lightning knows them, and make the mesh; collective."""
        num_ranks = self.num_nodes * self.num_processes
        self._data_parallel_size = num_ranks // int(self._tensor_parallel_size)
        super().setup_environment()


class ShardedModule(LightningModule):
    """A module whose children with parameters are sharded; it works under ``ShardedStrategy``."""

    # Classes of units, or their names; None takes the classes that a model of transformers names,
    # and makes each other child one unit.
    fsdp_unit_modules: list[type[nn.Module] | str] | None = None

    def configure_model(self) -> None:
        """Shard each child, once: Lightning calls this before each of fit, validate and test.

        Lists and dicts of modules have no forward: each module in them counts as a child.

        Raises:
            NotImplementedError: The module has parameters of its own, whose gradients no unit sums,
                or is to be converted to another dtype.
        """
        check_settings({"precision": self.trainer.precision}, "Trainer of a ShardedModule")
        containers: list[nn.Module] = [self, *_containers_below(self)]
        ids = {id(p) for each in containers for p in each.parameters(recurse=False)}
        own = [name for name, p in self.named_parameters() if id(p) in ids and p.requires_grad]
        # An evaluation has no gradients.
        if own and self.trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                expected(
                    "a module whose parameters are its children's",
                    f"its own {own}",
                    where=f"configure_model() of {type(self).__name__}",
                    hint="Put them into a child module, which is sharded",
                )
            )
        for child in (child for each in containers for child in each.children()):
            if is_container(child) or isinstance(child, FSDPModule):
                continue
            # The child has no parameters, or is a part of one that is sharded.
            if all(group_of(parameter) is not None for parameter in child.parameters()):
                continue
            if not any(parameter.is_meta for parameter in child.parameters()):
                child.to(self.trainer.strategy.root_device)
            self.shard_model(child)

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard one child; override it to choose strategy or dtypes. Called on all ranks."""
        mesh = self.device_mesh and self.device_mesh["data_parallel"]
        units = self.fsdp_unit_modules or getattr(model, "_no_split_modules", None)
        if not units:
            return fully_shard(model, mesh=mesh)
        return fully_shard_model(model, list(units), mesh=mesh)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the norm of all gradients; called by Lightning before each step.

        Raises:
            NotImplementedError: Values are to be clipped, not the norm.
        """
        if gradient_clip_val is not None:
            given = {"gradient_clip_algorithm": gradient_clip_algorithm}
            check_settings(given, "configure_gradient_clipping() of ShardedModule")
            clip_grad_norm_(self, gradient_clip_val)


def _containers_below(module: nn.Module) -> list[nn.Module]:
    """Return the lists and dicts among a module's children, and those in them."""
    found = [child for child in module.children() if is_container(child)]
    return found + [deeper for each in found for deeper in _containers_below(each)]
