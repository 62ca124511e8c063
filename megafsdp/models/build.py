"""Build a model from a config, and name the classes that sharding takes as its units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from megafsdp.errors import expected
from megafsdp.models.common import TransformerLayer
from megafsdp.models.config import Architecture, ModelConfig
from megafsdp.models.gpt import gpt
from megafsdp.models.language_model import LanguageModel
from megafsdp.models.qwen3 import llama, qwen3
from megafsdp.models.qwen3_moe import qwen3_moe
from megafsdp.models.qwen3_next import qwen3_next

_CONSTRUCTORS: Mapping[Architecture, Callable[[ModelConfig], LanguageModel]] = MappingProxyType(
    {"gpt": gpt, "qwen3": qwen3, "llama": llama, "qwen3_moe": qwen3_moe, "qwen3_next": qwen3_next}
)


def build_model(config: ModelConfig, *, seed: int | None = None) -> LanguageModel:
    """Build an initialised model on torch's default device and in its default dtype.

    Under ``with torch.device("meta")`` no memory is taken; ``megafsdp.materialize()`` after
    ``fully_shard_model()``, or ``to_empty()`` and ``reset_parameters()`` of each module in the
    order of ``modules()``, draw the same numbers. The call is local; ranks that give the same seed
    get the same weights.

    Args:
        config: What to build.
        seed: Seeds the initial weights and leaves the caller's random state as it was; None draws
            from the caller's.

    Returns:
        The model, in training mode.

    Raises:
        TypeError: ``config`` is not a :class:`ModelConfig`, e.g. the name of a preset.
    """
    if not isinstance(config, ModelConfig):
        raise TypeError(
            expected(
                "a ModelConfig",
                repr(config),
                where="build_model()",
                hint="Take one of megafsdp.models.presets, such as presets['qwen3-toy']",
            )
        )
    construct = _CONSTRUCTORS[config.architecture]
    if seed is None:
        return construct(config)
    device = torch.get_default_device()
    forked = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=forked):
        torch.manual_seed(seed)
        return construct(config)


def unit_classes(config: ModelConfig) -> tuple[type[nn.Module], ...]:
    """Return the module classes that should each be one unit of ``fully_shard_model``."""
    del config  # Every architecture so far is a stack of one class.
    return (TransformerLayer,)
