"""The GPT whose training step is timed: its sizes, its two engines, its batches, and a step.

Every engine has the same model, batches, clipping and optimizer. The cases decide which engines are
compared and what is measured of a step (fsdp_step.py, quantized_step.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import megafsdp
from benchmarks.launch import device_type
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer
from megafsdp.quantize.recipes import QuantizationRecipe

PHASES = ("forward", "backward", "optimizer")
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Shape:
    """What is trained.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size; 8 heads, feed-forward 4 times as wide.
        sequence: Tokens a row.
        batch: Rows a rank.
        vocabulary: Number of tokens.
        dtype: ``fp32``, or ``bf16`` compute with fp32 main weights and sums.
    """

    layers: int
    hidden: int
    sequence: int
    batch: int
    vocabulary: int
    dtype: str


@dataclass
class Side:
    """One engine with its model and optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clip: Callable[..., object]


def build(
    shape: Shape,
    engine: str,
    *,
    recipe: QuantizationRecipe | None = None,
    has_fused_adam: bool = False,
) -> Side:
    """Build the model under an engine; collective.

    Args:
        shape: What is trained.
        engine: ``megafsdp`` or ``fsdp2``.
        recipe: Recipe of our engine.
        has_fused_adam: Whether our optimizer steps, which clips within its step.
    """
    config = type(presets["gpt-toy"])(
        architecture="gpt",
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=8,
        num_query_groups=8,
        head_dim=shape.hidden // 8,
        ffn_hidden_size=4 * shape.hidden,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.sequence,
        tie_embeddings=False,
    )
    with torch.device(device_type(dist.get_world_size())):
        model = build_model(config, seed=0)
    layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
    param_dtype = torch.bfloat16 if shape.dtype == "bf16" else None
    is_ours = engine == "megafsdp"
    if is_ours:
        policy = megafsdp.MixedPrecisionPolicy(param_dtype, torch.float32, recipe=recipe)
        for module in layers:
            # FSDP2's default; ours would keep the last layer for backward.
            megafsdp.fully_shard(module, mp_policy=policy, reshard_after_forward=True)
        megafsdp.fully_shard(model, mp_policy=policy)
    else:
        reduce_dtype = torch.float32 if param_dtype else None
        torch_policy = TorchMixedPrecisionPolicy(param_dtype, reduce_dtype)
        for module in [*layers, model]:
            torch_fully_shard(module, mp_policy=torch_policy)
    if has_fused_adam:
        adam = megafsdp.FusedAdam(
            model.parameters(), eps=1e-5, weight_decay=1e-2, max_grad_norm=_MAX_NORM
        )
        return Side(model, adam, lambda *_: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    return Side(model, optimizer, megafsdp.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_)


def draw_batches(shape: Shape, num: int) -> list[torch.Tensor]:
    """Return batches of tokens of this rank, ``(batch, sequence + 1)`` int64."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (shape.batch, shape.sequence + 1)
    device = device_type(dist.get_world_size())
    return [
        torch.randint(0, shape.vocabulary, size, generator=generator).to(device) for _ in range(num)
    ]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_step(side: Side, tokens: torch.Tensor) -> dict[str, float]:
    """Run one step; return its milliseconds, those of its phases, and its loss.

    ``processor`` is what all threads of the process computed, which busy neighbours on the machine
    hardly change.
    """
    _synchronize()
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = side.model(tokens[:, :-1], tokens[:, 1:])
    _synchronize()
    forward = time.perf_counter()
    loss.backward()
    _synchronize()
    backward = time.perf_counter()
    side.clip(side.model.parameters(), _MAX_NORM)
    side.optimizer.step()
    side.optimizer.zero_grad()
    _synchronize()
    end, cpu_end = time.perf_counter(), time.process_time()
    return {
        "step": 1e3 * (end - start),
        "processor": 1e3 * (cpu_end - cpu_start),
        "forward": 1e3 * (forward - start),
        "backward": 1e3 * (backward - forward),
        "optimizer": 1e3 * (end - backward),
        "loss": loss.item(),
    }
