"""A model whose layers declare parts: SwiGLU, gated delta net, latent attention, grouped queries.

The widths are odd, so that shards end inside of parts and some ranks hold no row of one.
"""

from __future__ import annotations

import torch
from torch import nn

from megafsdp import fully_shard
from megafsdp.fsdp import MixedPrecisionPolicy
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.models.common import MLP
from megafsdp.models.config import ModelConfig
from tests.checkpoint.sharding import fill

WIDTH = 6
CONFIG = ModelConfig(
    hidden_size=WIDTH, num_attention_heads=2, num_query_groups=1, head_dim=4, ffn_hidden_size=7
)


class GatedDelta(nn.Module):
    """The fused parameters of a gated delta net, in a simple forward."""

    ROWS = (4, 4, 6, 6, 1, 1)

    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(WIDTH, sum(self.ROWS), bias=False)
        self.conv1d = nn.Conv1d(14, 14, 3, padding=1, groups=14)
        self.out_proj = nn.Linear(sum(self.ROWS), WIDTH, bias=False)
        names = ("query", "key", "value", "z", "beta", "alpha")
        annotate(self.in_proj.weight, fused=_by_suffix(names, self.ROWS))
        for parameter in self.conv1d.parameters():
            annotate(parameter, fused=_by_suffix(names[:3], self.ROWS[:3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T, H)."""
        mixed, rest = self.in_proj(x).split((14, 8), dim=-1)
        mixed = self.conv1d(mixed.transpose(1, 2)).transpose(1, 2)
        return x + self.out_proj(torch.cat((mixed, rest), dim=-1).tanh())


class Latent(nn.Module):
    """The fused down projection of latent attention, and a plain matrix split along columns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv_down_proj = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.Parameter(torch.zeros(WIDTH, 8))
        down = ("linear_q_down_proj.{parameter}", "linear_kv_down_proj.{parameter}")
        annotate(
            self.linear_qkv_down_proj.weight, fused=FusedParts(("q", "kv"), (5, 3), stored_as=down)
        )
        columns = ("{module}.{parameter}_left", "{module}.{parameter}_right")
        annotate(self.up, fused=FusedParts(("left", "right"), (3, 5), dim=1, stored_as=columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T, H)."""
        return x + self.linear_qkv_down_proj(x).tanh() @ self.up.T


class Grouped(nn.Module):
    """Query groups, which stay whole, behind a real SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP(CONFIG, has_bias=True)
        self.linear_qkv = nn.Linear(WIDTH, WIDTH, bias=False)
        groups = FusedParts(("query", "key", "value"), (1, 1, 1), num_groups=2)
        annotate(self.linear_qkv.weight, fused=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T, H)."""
        return x + self.linear_qkv(self.mlp(x))


class Model(nn.Module):
    """One of each; the head is tied to the first SwiGLU."""

    def __init__(self, salt: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Grouped(), GatedDelta(), Latent()])
        self.tied = MLP(CONFIG, has_bias=True)
        self.tied.linear_fc1 = self.layers[0].mlp.linear_fc1
        fill(self, salt)
        with torch.no_grad():
            for parameter in self.parameters():
                # Large values overflow in a few steps, and NaN equals nothing.
                parameter.mul_(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, T, H) to (B, T, H)."""
        for layer in self.layers:
            x = layer(x)
        return self.tied(x)


# Whole name -> its parts, the dim along which they lie, and their sizes.
PARTS = {
    "layers.0.mlp.linear_fc1.weight": ("layers.0.mlp.linear_fc1.weight_{}", "w v", 0, (7, 7)),
    "layers.0.mlp.linear_fc1.bias": ("layers.0.mlp.linear_fc1.bias_{}", "w v", 0, (7, 7)),
    "layers.1.in_proj.weight": (
        "layers.1.in_proj.weight.{}",
        "query key value z beta alpha",
        0,
        GatedDelta.ROWS,
    ),
    "layers.1.conv1d.weight": ("layers.1.conv1d.weight.{}", "query key value", 0, (4, 4, 6)),
    "layers.1.conv1d.bias": ("layers.1.conv1d.bias.{}", "query key value", 0, (4, 4, 6)),
    "layers.2.linear_qkv_down_proj.weight": (
        "layers.2.linear_{}_down_proj.weight",
        "q kv",
        0,
        (5, 3),
    ),
    "layers.2.up": ("layers.2.up_{}", "left right", 1, (3, 5)),
}


def split(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace whole tensors by name with what a checkpoint holds of them, by plain slicing."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if name not in PARTS:
            stored[name] = tensor
            continue
        template, words, dim, sizes = PARTS[name]
        pieces = [tensor] * len(sizes) if tensor.ndim == 0 else tensor.split(sizes, dim)
        stored.update((template.format(w), p) for w, p in zip(words.split(), pieces, strict=True))
    return stored


def build(salt: int, policy: MixedPrecisionPolicy | None = None) -> Model:
    """Return the model cut over all ranks, a unit for each layer."""
    model = Model(salt)
    options = {"mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model.layers[1:]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    """Train on the same fixed batch on every rank."""
    for number in range(num_steps):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, 5, WIDTH, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _by_suffix(names: tuple[str, ...], sizes: tuple[int, ...]) -> FusedParts:
    stored_as = tuple("{module}.{parameter}." + name for name in names)
    return FusedParts(names, sizes, stored_as=stored_as)
