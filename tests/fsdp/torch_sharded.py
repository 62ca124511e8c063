"""Small models under torch's own ``fully_shard``, and what quantizing them in one process gives."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.quantize.recipes import recipe_of
from megafsdp.quantize.shard import QuantizedShard
from megafsdp.quantize.tensor import QuantizedTensor
from tests.quantize.weights import quantized

WIDTH = 256


def new_model(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> nn.Sequential:
    """Return two linears and a norm, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, width)
    ).to(dtype)


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh of one axis, or of replicas and shards."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "shards")[-len(sizes) :])


def shard(model: nn.Module, mesh: DeviceMesh, *, reshards: bool = True) -> nn.Module:
    """Shard each linear of a model and then the rest, by torch."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshards)


def sharded(recipe: str, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model that is sharded and then quantized."""
    return megafsdp.quantize_(shard(new_model(dtype), mesh_of(*sizes)), recipe)


def batch(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return an input."""
    return torch.randn(48, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def shards_of(model: nn.Module) -> dict[str, QuantizedShard]:
    """Return the quantized parameters of a model by name, this rank's rows of each."""
    found = {name: shard_of(parameter) for name, parameter in model.named_parameters()}
    return {name: each for name, each in found.items() if each is not None}


def whole(values: Tensor, recipe: str) -> QuantizedTensor:
    """Quantize a full weight in one process, unrounded; the oracle of codes and scales."""
    made = quantized(values.float(), recipe, dtype=torch.float32).detach()
    assert isinstance(made, QuantizedTensor)
    return made


def assert_codes_of(parameter: nn.Parameter, full: Tensor, recipe: str) -> None:
    """Assert that this rank's codes and scales are those of its rows of the quantized whole."""
    shard = shard_of(parameter)
    assert shard is not None
    made, form = whole(full, recipe), recipe_of(recipe).weight
    first = first_row(parameter)
    codes, table = form.rows_of(
        made.codes, made.table, made.stored_shape, first, first + shard.shape[0]
    )
    assert torch.equal(shard.codes, codes) and torch.equal(shard.table, table)


def first_row(parameter: nn.Parameter) -> int:
    """Return the first of this rank's rows, which the last axis divides as torch.chunk does."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    rank, num_ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return min(rank * -(-parameter.shape[0] // num_ranks), parameter.shape[0])
