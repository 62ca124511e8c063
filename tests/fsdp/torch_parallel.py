"""Parallel layers under torch's ``fully_shard``, beside tensor parallelism, and their values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import megafsdp
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.mesh.torch_private import spec_of
from megafsdp.parallel import Linear

# Two ranks of tp and two of data have whole tiles of 128 rows, and of columns.
WIDTH, INNER = 256, 512


class Axes(NamedTuple):
    """The meshes of a run.

    Attributes:
        data: Of torch's ``fully_shard``: shards, or replicas and shards.
        tp: Of the layers.
        root: Both in one.
    """

    data: DeviceMesh
    tp: DeviceMesh
    root: DeviceMesh


def axes_of(*sizes: int, names: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp")) -> Axes:
    """Return meshes of a size an axis; the last one is tp."""
    names = names[-len(sizes) :]
    root = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data = root[names[:-1]] if len(sizes) > 2 else root[names[0]]
    return Axes(data, root[names[-1]], root)


class Mlp(nn.Module):
    """A map by columns, one by rows, and one that all ranks of tp have whole."""

    def __init__(self, tp: DeviceMesh | None, weight_mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = Linear(64, INNER, parallel_mode="column", init_std=0.1)
        self.down = Linear(INNER, WIDTH, parallel_mode="row", init_std=0.1)
        self.whole = Linear(WIDTH, WIDTH, init_std=0.1)
        self.bfloat16()
        with torch.no_grad():
            # The largest values are on one rank of tp and of data.
            self.up.weight[5].mul_(8)
            self.down.weight[:, 3].mul_(8)
            self.whole.weight[7].mul_(8)
        for layer in (self.up, self.down, self.whole):
            layer.set_device_mesh(tp, weight_mesh)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows of 64 to rows of WIDTH."""
        return self.whole(self.down(F.gelu(self.up(x))))


def shard(model: Mlp, data: DeviceMesh) -> Mlp:
    """Shard each layer of a model and then the rest, by torch."""
    for layer in model.children():
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data)
    return model


def sharded(recipe: str, axes: Axes, weight_mesh: DeviceMesh | None = None) -> Mlp:
    """Return a model that tp and then torch has cut, and that is quantized."""
    model = shard(Mlp(axes.tp, weight_mesh), axes.data)
    megafsdp.quantize_(model, recipe)
    return model


def whole_of(like: DTensor, own: Tensor) -> Tensor:
    """Join what each rank has of its rows and columns of a parameter, such as their codes.

    Args:
        like: The parameter.
        own: ``(rows, ...)``, this rank's part of a tensor that is cut as the parameter is.
    """
    return DTensor.from_local(
        own.contiguous(), like.device_mesh, like.placements, run_check=False
    ).full_tensor()


def codes_of(model: nn.Module) -> dict[str, list[Tensor]]:
    """Return the codes and tile scales of all parameters, whole, and then scales of the whole."""
    found = {}
    for name, parameter in model.named_parameters():
        own = shard_of(parameter)
        if own is not None:
            assert isinstance(parameter, DTensor)
            scales = own.scales()
            parts = [own.codes.view(own.stored_shape[0], -1), *scales.own]
            found[name] = [whole_of(parameter, each) for each in parts] + scales.shared
    return found


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Return all parameters that are not quantized, and all states, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        states = dict(optimizer.state[parameter])
        if shard_of(parameter) is None:
            states["parameter"] = parameter.detach()
        found[name] = {
            key: whole_of(value, local_object(value)) if isinstance(value, DTensor) else value
            for key, value in states.items()
        }
    return found


def histories_of(model: nn.Module) -> list[Tensor]:
    """Return the histories of delayed scaling; none without."""
    own = [shard_of(parameter) for parameter in model.parameters()]
    return [
        h.clone() for each in own if each is not None and each.state for h in each.state.histories()
    ]


def placements_of(tensor: Tensor) -> object:
    """Return mesh and placements of a DTensor."""
    assert isinstance(tensor, DTensor)
    return spec_of(tensor).mesh, tensor.placements
