"""Build the model of a configuration, divided among the ranks of a run."""

from __future__ import annotations

import logging

import torch
from torch import nn

from megafsdp.fsdp import OffloadPolicy, fully_shard_model, materialize
from megafsdp.mesh.parallel_dims import Meshes
from megafsdp.models import ModelConfig, build_model, unit_classes
from megafsdp.parallel import parallelize
from megafsdp.training.config.sections import Config

_LOGGER = logging.getLogger("megafsdp.training")
# Inductor writes matrix products into its own buffers, by operators that no policy can save.
_RECOMPUTES_PRODUCTS = ("inductor", "selective")


def build_sharded(
    config: Config, model_config: ModelConfig, device: torch.device, meshes: Meshes
) -> nn.Module:
    """Divide the model among the ranks and initialise it, a unit at a time; collective.

    The weights are those of ``build_model`` with the run's seed, whatever the number of ranks.

    Args:
        config: How the model is divided, compiled and initialised.
        model_config: What to build.
        device: Where it computes.
        meshes: The ranks.
    """
    with torch.device("meta"):
        model = parallelize(build_model(model_config), meshes)
    model.activation_checkpointing = config.activation_checkpointing.resolve()
    layers, parallel = unit_classes(model_config), config.parallel
    if config.compile.layers:
        if (config.compile.backend, config.activation_checkpointing.mode) == _RECOMPUTES_PRODUCTS:
            _LOGGER.warning(
                "Layers that inductor compiles recompute matrix products under selective"
                " checkpointing, and keep attention alone. Choose another compile.backend to keep"
                " them."
            )
        for layer in (module for module in model.modules() if isinstance(module, layers)):
            # Compiling in place keeps the FQNs. Hooks of units run outside the graph.
            layer.compile(backend=config.compile.backend)
    fully_shard_model(
        model,
        layers,
        mesh=meshes.data,
        expert_mesh=meshes.experts,
        strategy=parallel.strategy,
        outer_strategy=parallel.outer_strategy,
        prefetch=parallel.prefetch,
        reshard_after_forward=parallel.reshard_after_forward,
        nccl_user_buffers=parallel.nccl_user_buffers,
        mp_policy=config.precision.policy(),
        offload_policy=OffloadPolicy(params=parallel.offload_parameters),
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.run.seed)
        return materialize(model)
