"""One training step with tensor and sequence parallelism, ours beside torch's.

The same GPT on both sides: ours from megafsdp.parallel under this package's ``fully_shard``;
torch's from nn.Linear cut by ``parallelize_module``, with its sequence-parallel norms and
``loss_parallel``, under FSDP2. Equal weights, batches, AdamW(fused=True) and clipping;
steps_in_turn.py says what the figure is.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import megafsdp
from benchmarks.launch import device_type, launch
from benchmarks.steps_in_turn import SIDES, TOLERANCE, Side, adamw, compare
from benchmarks.steps_in_turn import describe as describe_steps
from megafsdp.models import ModelConfig, TransformerLayer, build_model
from megafsdp.models.language_model import LanguageModel

_HEADS = 8


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size; 8 heads, feed-forward 4 times as wide.
        sequence: Tokens a row.
        batch: Rows a data rank.
        vocabulary: Number of tokens.
    """

    layers: int
    hidden: int
    sequence: int
    batch: int
    vocabulary: int


class _Attention(nn.Module):
    """Attention as in megafsdp.models, on nn.Linear; ``qkv`` repeats [q; k; v] for each head."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.head_dim = hidden // _HEADS
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(dim=3))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden, 4 * hidden)
        self.fc2 = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class _Layer(nn.Module):
    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden, eps)
        self.attention = _Attention(hidden)
        self.norm2 = nn.LayerNorm(hidden, eps)
        self.mlp = _MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _TorchGPT(nn.Module):
    """The model of the config in torch's own modules, in the order of our parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.max_sequence_length, hidden)
        self.layers = nn.ModuleList(
            _Layer(hidden, config.norm_eps) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(hidden, config.norm_eps)
        self.head = nn.Linear(hidden, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--data", type=int, nargs="+", default=[1, 2], help="data ranks")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10, help="blocks a side after warm-up")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of losses")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run the shape on each mesh; return the results.

    Raises:
        Exception: The sides disagree; no figure is given then.
    """
    shape = Shape(
        options.layers, options.hidden, options.sequence, options.batch, options.vocabulary
    )
    results: dict[str, object] = {"shape": asdict(shape)}
    for data in options.data:
        num_ranks = data * options.tp
        measured = launch(
            _measure, shape, options.tp, options.repeats, options.tolerance, num_ranks=num_ranks
        )
        results[f"dp {data} x tp {options.tp}"] = measured
    return results


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = ["megafsdp / parallelize_module with FSDP2"]
    for name, case in results.items():
        if isinstance(case, dict) and "ratio" in case:
            lines.append(describe_steps(name, case))
    return "\n".join(lines)


def _config(shape: Shape) -> ModelConfig:
    return ModelConfig(
        architecture="gpt",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=_HEADS,
        num_query_groups=_HEADS,
        head_dim=shape.hidden // _HEADS,
        ffn_hidden_size=4 * shape.hidden,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        tie_embeddings=False,
    )


def _build(shape: Shape, side: str, mesh: DeviceMesh) -> Side:
    data, tp = mesh["dp_shard"], mesh["tp"]
    config = _config(shape)
    with torch.device(mesh.device_type):
        ours = build_model(config, seed=0)
        theirs = _TorchGPT(config)
    if side == "megafsdp":
        ours.set_device_mesh(tp_mesh=tp)
        for layer in (m for m in ours.modules() if isinstance(m, TransformerLayer)):
            # FSDP2's default; ours would keep the last layer for backward.
            megafsdp.fully_shard(layer, mesh=data, reshard_after_forward=True)
        megafsdp.fully_shard(ours, mesh=data)
        return Side(ours, adamw(ours.parameters()), megafsdp.clip_grad_norm_)
    _copy(ours, theirs)
    _cut(theirs, tp)
    for module in (*theirs.layers, theirs):
        torch_fully_shard(module, mesh=data)
    return Side(theirs, adamw(theirs.parameters()), nn.utils.clip_grad_norm_, loss_parallel)


@torch.no_grad()
def _copy(ours: LanguageModel, theirs: _TorchGPT) -> None:
    """Copy our weights to torch's model: modules are in the same order on both sides."""
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.copy_(own)


def _cut(model: _TorchGPT, tp: DeviceMesh) -> None:
    """Cut torch's model as its tutorial does: matrices, vocabulary, and the sequence between."""
    sequence = Shard(1)
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=sequence, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, tp, plan)
    for layer in model.layers:
        parallelize_module(
            layer,
            tp,
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=sequence, desired_input_layouts=Replicate()
                ),
                "attention.qkv": ColwiseParallel(),
                "attention.proj": RowwiseParallel(output_layouts=sequence),
                "norm2": SequenceParallel(),
                "mlp": PrepareModuleInput(
                    input_layouts=sequence, desired_input_layouts=Replicate()
                ),
                "mlp.fc1": ColwiseParallel(),
                "mlp.fc2": RowwiseParallel(output_layouts=sequence),
            },
        )


def _batches(shape: Shape, mesh: DeviceMesh, num: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(mesh["dp_shard"].get_local_rank())
    size = (shape.batch, shape.sequence + 1)
    return [
        torch.randint(0, shape.vocabulary, size, generator=generator).to(mesh.device_type)
        for _ in range(num)
    ]


def _measure(shape: Shape, num_tp: int, repeats: int, tolerance: float) -> dict[str, object]:
    """Check the sides, then time them; called by every rank."""
    num_ranks = dist.get_world_size()
    mesh = init_device_mesh(
        device_type(num_ranks), (num_ranks // num_tp, num_tp), mesh_dim_names=("dp_shard", "tp")
    )
    sides = {name: _build(shape, name, mesh) for name in SIDES}
    return {
        "num_ranks": num_ranks,
        "device": mesh.device_type,
        "num_parameters": sum(p.numel() for p in sides["torch"].model.parameters()),
        **compare(sides, partial(_batches, shape, mesh), repeats=repeats, tolerance=tolerance),
    }
