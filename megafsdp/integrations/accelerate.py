"""accelerate's ``Accelerator``, whose FSDP2 plugin shards by this engine, on CPUs too.

``prepare(model, optimizer)`` shards the model as the plugin says and gives the optimizer the
sharded parameters; ``clip_grad_norm_`` clips with one collective. All else is accelerate's own:
``accumulate``, ``save_state``, ``load_state`` and ``get_state_dict`` take units of megafsdp as they
are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, parse_flag_from_env
from accelerate.utils.fsdp_utils import get_parameters_from_modules
from torch import nn

from megafsdp.errors import expected
from megafsdp.fsdp.fsdp_module import FSDPModule
from megafsdp.fsdp.fully_shard import fully_shard, fully_shard_model
from megafsdp.fsdp.params.policy import MixedPrecisionPolicy, OffloadPolicy
from megafsdp.fsdp.weight_sync import optimizers_follow
from megafsdp.integrations.refusals import check_settings
from megafsdp.optimizer.grads.clip import clip_grad_norm_

_ON_CPU_OR_ALONE = (DistributedType.MULTI_CPU, DistributedType.NO)


class ShardedAccelerator(Accelerator):
    """An accelerator that shards; arguments are accelerate's, ``fsdp_plugin`` among them.

    Raises:
        NotImplementedError: There is no plugin of ``fsdp_version=2``, or it asks for something that
            is not translated.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("fsdp_plugin") is None and parse_flag_from_env("ACCELERATE_USE_FSDP"):
            # accelerate's launcher has chosen FSDP, which accelerate ignores on CPUs.
            kwargs["fsdp_plugin"] = FullyShardedDataParallelPlugin()
        super().__init__(*args, **kwargs)
        plugin: Any = kwargs.get("fsdp_plugin") or getattr(self.state, "fsdp_plugin", None)
        where = "ShardedAccelerator()"
        check_settings({"fsdp_version": plugin and plugin.fsdp_version}, where)
        policy = plugin.auto_wrap_policy
        policy = policy.func if isinstance(policy, functools.partial) else policy
        given = {
            "auto_wrap_policy": policy and getattr(policy, "__name__", policy),
            "activation_checkpointing": plugin.activation_checkpointing,
            "cpu_ram_efficient_loading": plugin.cpu_ram_efficient_loading,
            "dynamo_backend": self.state.dynamo_plugin.backend.value,
        }
        check_settings(given, where)
        if self.distributed_type in _ON_CPU_OR_ALONE and dist.is_initialized():
            # accelerate has FSDP for several GPUs only.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.state.distributed_type, self.state.fsdp_plugin = DistributedType.FSDP, plugin
            if self.mixed_precision != "no":
                plugin.set_mixed_precision(self.mixed_precision)

    def shard_model(self, model: nn.Module) -> nn.Module:
        """Shard a model as the plugin says; override it to choose more. Called on all ranks.

        Raises:
            ValueError: The plugin wraps by class, and neither it nor the model names classes.
        """
        plugin, mesh = self.state.fsdp_plugin, self.torch_device_mesh
        # Modules, or a pattern of their names.
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, self.device)
        options: dict[str, Any] = {
            "mesh": mesh and mesh[tuple(self.parallelism_config.fsdp_dim_names)],
            "reshard_after_forward": plugin.reshard_after_forward,
            "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            "offload_policy": plugin.cpu_offload or OffloadPolicy(),
            "ignored_params": ignored,
        }
        if plugin.auto_wrap_policy is None:
            return fully_shard(model, **options)
        units = plugin.transformer_cls_names_to_wrap
        if not (units or getattr(model, "_no_split_modules", None)):
            raise ValueError(
                expected(
                    "classes to wrap, of the plugin or of the model",
                    f"{type(model).__name__}, which names none in _no_split_modules",
                    where="auto_wrap_policy TRANSFORMER_BASED_WRAP",
                    hint="Give transformer_cls_names_to_wrap to the plugin, or use NO_WRAP, which "
                    "makes the model one unit",
                )
            )
        return fully_shard_model(model, units, **options)

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip the norm of all gradients and return it; collective, one small all-reduce."""
        # accelerate's own compares parameters by ==, which fails for parameters of several models.
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        others = [each for each in args if not isinstance(each, nn.Module)]
        optimizers = [each for each in others if isinstance(each, torch.optim.Optimizer)]
        for model in (each for each in args if isinstance(each, nn.Module)):
            if not isinstance(model, FSDPModule):
                with optimizers_follow(model, optimizers):
                    self.shard_model(_on_device(model, self.device))
            if not any(model is known for known in self._models):
                self._models.append(model)
        prepared = iter(super()._prepare_fsdp2(*others))
        return tuple(x if isinstance(x, nn.Module) else next(prepared) for x in args)


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model, or only its buffers if it is on the meta device: parameters follow later."""
    if not any(parameter.is_meta for parameter in model.parameters()):
        return model.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    return model
