"""A small model cut unevenly over the ranks, with a deterministic training history.

The cuts are made by hand, so that these tests need no engine: each parameter lies in a buffer of
its own, behind some rows of padding, which gives shards of different length and empty ones.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.mesh.model_part import whole_part

VOCABULARY = 321
GATE_AND_UP = ("{module}.{parameter}_w", "{module}.{parameter}_v")


class Toy(nn.Module):
    """Tied embeddings, a fused matrix, a vector, a frozen vector, buffers of both kinds."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.fused = nn.Linear(width, 10, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.norm.bias.requires_grad_(False)
        annotate(self.fused.weight, fused=FusedParts(("gate", "up"), (5, 5), stored_as=GATE_AND_UP))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def fixed(name: str, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """Return values that depend on the name alone, the same in every process."""
    digest = hashlib.sha256(f"{name}/{salt}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator)


def fill(model: nn.Module, salt: int = 0) -> None:
    """Give every parameter of a plain model its fixed values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(fixed(name, tuple(parameter.shape), salt))


def shard(model: nn.Module, mesh: DeviceMesh, *, padding_rows: int = 3) -> nn.Module:
    """Cut every parameter of a plain model over the last axis of a mesh, in place."""
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in cut:
                cut[parameter] = _cut(parameter, mesh, padding_rows)
            module._parameters[name] = cut[parameter]
    return model


def _cut(parameter: nn.Parameter, mesh: DeviceMesh, padding_rows: int) -> nn.Parameter:
    shape = tuple(parameter.shape)
    num_shards = mesh.size(mesh.ndim - 1)
    row_numel = parameter[0].numel()
    shard_rows = -(-(shape[0] + padding_rows) // num_shards)
    layout = UnevenLayout(
        part=whole_part(shape),
        row_numel=row_numel,
        buffer_offset=padding_rows * row_numel,
        shard_numel=shard_rows * row_numel,
        num_shards=num_shards,
        shard=mesh.get_local_rank(mesh.ndim - 1),
    )
    start, stop = layout.element_range()
    local = parameter.detach().reshape(-1)[start:stop].clone().view(layout.local_shape())
    dtensor = UnevenDTensor.from_local_rows(local, mesh, layout)
    result = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    annotate_like(result, parameter)
    return result


def annotate_like(result: nn.Parameter, parameter: nn.Parameter) -> None:
    """Carry the annotation over, as the engine does."""
    result._megafsdp_annotation = getattr(parameter, "_megafsdp_annotation", None) or None
    if result._megafsdp_annotation is None:
        del result._megafsdp_annotation


def whole_mesh(num_outer: int = 1) -> DeviceMesh:
    """Return a mesh over all ranks; 2-D where ``num_outer`` is more than 1."""
    world_size = dist.get_world_size()
    if num_outer == 1:
        return init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    shape = (num_outer, world_size // num_outer)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_outer", "dp_shard"))


def give_gradients(model: nn.Module, salt: int) -> None:
    """Set fixed gradients on trainable parameters, whole or cut; ``norm.weight`` gets none."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name == "norm.weight":
            continue
        gradient = fixed(f"grad {name}", tuple(parameter.shape), salt)
        if isinstance(parameter, UnevenDTensor):
            local = torch.empty_like(parameter.local)
            target = UnevenDTensor.from_local_rows(
                local, parameter.device_mesh, parameter.uneven_layout
            )
            target.copy_from_full_(gradient)
            gradient = target
        elif isinstance(parameter, DTensor):
            replicated = [Replicate()] * parameter.device_mesh.ndim
            gradient = DTensor.from_local(gradient, parameter.device_mesh, replicated)
        parameter.grad = gradient


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with two parameter groups over all trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim > 1]
    vectors = [p for p in trainable if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if kind == "adamw-fused":
        return torch.optim.AdamW(groups, lr=0.01, fused=True)
    return torch.optim.AdamW(groups, lr=0.01, foreach=kind == "adamw-foreach")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    """Take steps with fixed gradients and count them in a buffer."""
    for salt in range(num_steps):
        give_gradients(model, salt)
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole plain tensor; collective if it is a DTensor."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return tensor.detach().clone()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, object]:
    """Return everything that a resumed run needs, by name, as whole plain tensors; collective."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    state: dict[str, object] = {name: full(tensor) for name, tensor in model.state_dict().items()}
    if optimizer is None:
        return state
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            is_tensor = isinstance(value, torch.Tensor)
            state[f"{names[parameter]}/{key}"] = full(value) if is_tensor else value
    for index, group in enumerate(optimizer.param_groups):
        state[f"group {index}"] = {k: v for k, v in group.items() if k != "params"}
    return state


def differences(left: dict[str, object], right: dict[str, object]) -> list[str]:
    """List the names whose values or dtypes differ bit by bit."""
    odd = sorted(set(left) ^ set(right))
    for name in sorted(set(left) & set(right)):
        a, b = left[name], right[name]
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            if a.dtype != b.dtype or not torch.equal(a, b):
                odd.append(name)
        elif a != b:
            odd.append(name)
    return odd
