"""What the tests of parallel layers have in common: engines, small models, whole gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.mesh.annotation import ParameterAnnotation
from megafsdp.mesh.model_part import part_of
from megafsdp.models import ModelConfig, TransformerLayer, build_model
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import ParallelModule

# The trajectories' eps: a gradient that is zero in exact arithmetic, as of the bias of the keys, is
# rounding noise, which a smaller one would turn into steps.
EPS = 1e-5
CONFIG = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=4,
    ffn_hidden_size=12,
    vocab_size=24,
    max_sequence_length=11,
    init_std=0.2,
)
GPT = dataclasses.replace(CONFIG, architecture="gpt", tie_embeddings=False)
LLAMA = dataclasses.replace(CONFIG, architecture="llama", tie_embeddings=False)
MOE = dataclasses.replace(
    CONFIG,
    architecture="qwen3_moe",
    tie_embeddings=False,
    num_experts=4,
    num_experts_per_token=2,
    moe_ffn_hidden_size=12,
)
NEXT = dataclasses.replace(
    MOE,
    architecture="qwen3_next",
    shared_expert_ffn_hidden_size=6,
    layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
    linear_num_key_heads=12,
    linear_num_value_heads=24,
    linear_key_head_dim=4,
    linear_value_head_dim=2,
    rotary_fraction=0.5,
    norm_eps=0.1,
)
# Tied and untied, each architecture once.
CONFIGS = {"qwen3": CONFIG, "gpt": GPT, "llama": LLAMA}


def mesh_of(num_data: int, num_tp: int, *, outer: int = 1) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the data mesh, 2-D for HSDP, and the tp mesh of all ranks."""
    if outer > 1:
        names = ("dp_outer", "dp_shard", "tp")
        root = init_device_mesh("cpu", (outer, num_data, num_tp), mesh_dim_names=names)
        return root["dp_outer", "dp_shard"], root["tp"]
    root = init_device_mesh("cpu", (num_data, num_tp), mesh_dim_names=("dp_shard", "tp"))
    return root["dp_shard"], root["tp"]


def build(config: ModelConfig, dtype: torch.dtype = torch.float64) -> LanguageModel:
    """Build the model of seed 0, whole, with weights that differ from what their layers begin with.

    A norm's weight of one and a bias of zero would hide where they are applied.
    """
    model = build_model(config, seed=0).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=dtype)
            parameter.add_(0.1 * (noise - 0.5))
    return model


def shard_by_ours(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply this package's engine to each layer and to the root."""
    megafsdp.fully_shard_model(model, [TransformerLayer], mesh=mesh)


def shard_by_torch(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply FSDP2 to each layer and to the root."""
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            torch_fully_shard(module, mesh=mesh)
    torch_fully_shard(model, mesh=mesh)


def batch_of(rows: int, length: int, step: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and a mask that leaves some tokens out, equal on all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, length + 1), generator=generator)
    # As many in each row: the mean over ranks of masked means is then that of the whole batch.
    mask = torch.ones(rows, length)
    mask[:, 1::4] = 0
    return tokens[:, :-1], tokens[:, 1:], mask


def whole(tensor: Tensor, annotation: ParameterAnnotation) -> Tensor:
    """Return the whole of a parameter, or of its gradient, in the order of the unsharded model.

    A DTensor's own order is that of its parts, and of [gate; up] each part has a piece of both.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    full = tensor.full_tensor().detach()
    # That of our engine is in the order of the whole tensor.
    is_in_order = isinstance(tensor, UnevenDTensor) or annotation.tp_dim is None
    if annotation.fused is None or is_in_order:
        return full
    num_ranks = tensor.device_mesh.size(-1)
    part = part_of(tuple(full.shape), annotation.tp_dim, num_ranks, 0, annotation.fused)
    return part.join(list(full.chunk(num_ranks, annotation.tp_dim)))


def wholes(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the whole value and the whole gradient of each parameter; collective."""
    for name, parameter in model.named_parameters():
        module_name, _, attribute = name.rpartition(".")
        layer = model.get_submodule(module_name)
        assert isinstance(layer, ParallelModule) and parameter.grad is not None, name
        annotation = layer.declarations[attribute]
        yield name, whole(parameter, annotation), whole(parameter.grad, annotation)
