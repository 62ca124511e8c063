"""What of a model goes to Hugging Face files: whole parameters and persistent buffers, by name.

Checkpoints store fused parameters in parts; Hugging Face's layouts are made from the whole, so the
parts are of no use here. Tensors stay where they are, sharded as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.checkpoint.format.regions import underlying
from megafsdp.checkpoint.huggingface.plan import ConfigLike, HasJson
from megafsdp.checkpoint.state.canonical import canonical_name, model_state, parameter_names
from megafsdp.errors import expected
from megafsdp.fsdp import FSDPModule
from megafsdp.mesh.annotation import annotation_of
from megafsdp.models.config import ModelConfig

_log = logging.getLogger("megafsdp.checkpoint")

_PREFIX = "model."
_WRAPPERS = frozenset({"DistributedDataParallel", "OptimizedModule"})


@dataclass(frozen=True, slots=True)
class HubState:
    """A model's tensors by name, as they are spread over the ranks.

    Attributes:
        tensors: Every distinct one.
        tied: Further names of tied ones: name -> name in ``tensors``.
        rank_zero: Names of buffers, whose values may differ between ranks.
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    rank_zero: frozenset[str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the global shapes by name."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


@runtime_checkable
class _HasConfig(Protocol):
    config: object


@runtime_checkable
class _HasGenerationConfig(Protocol):
    generation_config: object


def hub_state(model: nn.Module) -> HubState:
    """List what goes to Hugging Face files; local, nothing is copied.

    Args:
        model: Any module at rest, sharded or not.

    Raises:
        CheckpointError: The model is not at rest.
        NotImplementedError: A tensor is not whole within data parallelism.
    """
    listed = model_state(model)
    if listed.objects:
        _log.warning("Hugging Face files have no place for %s", sorted(listed.objects)[:20])
    names = parameter_names(model)
    tensors: dict[str, torch.Tensor] = {name: parameter for parameter, name in names.items()}
    for name, tensor in tensors.items():
        _require_data_parallel(name, tensor)
    bare = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    spelt = {canonical_name(f): p for f, p in bare.named_parameters(remove_duplicate=False)}
    tied = {name: names[p] for name, p in spelt.items() if names[p] != name}
    buffers = {key.removeprefix(_PREFIX): listed.tensors[key] for key in sorted(listed.rank_zero)}
    tensors.update((name, underlying(buffer)) for name, buffer in buffers.items())
    return HubState(tensors, tied, frozenset(buffers))


def config_of(model: nn.Module) -> ConfigLike | None:
    """Return the config that a model carries; None without one."""
    config = model.config if isinstance(model, _HasConfig) else None
    return config if isinstance(config, ModelConfig | Mapping | HasJson) else None


def generation_config_of(model: nn.Module) -> str | None:
    """Return the text of the generation config that a model carries; None without one."""
    config = model.generation_config if isinstance(model, _HasGenerationConfig) else None
    return config.to_json_string() if isinstance(config, HasJson) else None


def architecture_of(model: nn.Module) -> str:
    """Return the name of the class that the user built."""
    built = next(m for m in model.modules() if type(m).__name__ not in _WRAPPERS)
    return next(c.__name__ for c in type(built).__mro__ if not issubclass(c, FSDPModule))


def _require_data_parallel(name: str, tensor: torch.Tensor) -> None:
    experts = annotation_of(tensor).experts
    got = None
    if isinstance(tensor, UnevenDTensor):
        layout = tensor.uneven_layout
        if layout.box_shape != layout.shape:
            got = f"the part {layout.box_shape} of {layout.shape}"
    if experts is not None and experts.count < experts.total:
        got = f"{experts.count} of {experts.total} experts"
    if got is not None:
        raise NotImplementedError(
            expected(
                "tensors that are sharded by data parallelism alone",
                got,
                where=f"'{name}', to or from Hugging Face files",
                mend="Go by a checkpoint: save() and megafsdp ckpt export-hf, or import-hf and "
                "load()",
            )
        )
