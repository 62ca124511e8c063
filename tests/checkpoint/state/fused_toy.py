"""A model whose fused parameters are stored in parts, along either dimension and tied."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from megafsdp.checkpoint import save
from megafsdp.mesh.annotation import annotate
from megafsdp.mesh.fused_parts import FusedParts
from tests.checkpoint.sharding import fill, fixed, full, shard, whole_mesh

# The whole names and what they are on disk.
PARTS = {
    "first.up.weight": ["first.up.weight_w", "first.up.weight_v"],
    "first.up.bias": ["first.up.bias_w", "first.up.bias_v"],
    "across.weight": ["left.weight", "right.weight"],
}
TIED = {"second.up.weight": ["second.up.weight_w", "second.up.weight_v"]}


class FusedToy(nn.Module):
    """Uneven parts of rows, a vector, columns and groups; a tied fused matrix; a plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleDict({"up": nn.Linear(6, 10)})
        self.second = nn.ModuleDict({"up": nn.Linear(6, 10, bias=False)})
        self.across = nn.Linear(10, 3, bias=False)
        self.plain = nn.Linear(3, 6, bias=False)
        self.second.up.weight = self.first.up.weight
        templates = ("{module}.{parameter}_w", "{module}.{parameter}_v")
        rows = FusedParts(("gate", "up"), (7, 3), stored_as=templates)
        annotate(self.first.up.weight, fused=rows)
        annotate(self.first.up.bias, fused=rows)
        self.grouped = nn.Linear(3, 12, bias=False)
        groups = FusedParts(("gate", "up"), (4, 2), num_groups=2, stored_as=templates)
        annotate(self.grouped.weight, fused=groups)
        names = ("left.{parameter}", "right.{parameter}")
        columns = FusedParts(("left", "right"), (4, 6), dim=1, stored_as=names)
        annotate(self.across.weight, fused=columns)


def save_fused(root: Path, *, num_steps: int = 1) -> dict[str, torch.Tensor]:
    """Save a trained sharded model as step 2; return every whole tensor by key; collective."""
    model = FusedToy()
    fill(model)
    if torch.distributed.is_initialized():
        shard(model, whole_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for salt in range(num_steps):
        for name, parameter in model.named_parameters():
            parameter.grad = parameter.detach() * 0 + float(fixed(name, (), salt))
        optimizer.step()
    save(root, step=2, model=model, optimizer=optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": full(value) for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            tensors[f"optimizer.state.{names[parameter]}.{name}"] = full(value)
    return tensors
