"""One training step of megafsdp beside one of torch FSDP2: time, collectives and bytes.

The same model, batches, AdamW(fused=True) and clipping on both sides, in one process group, in
blocks of a few steps that alternate. The first step of a block is dropped, and so are the first
blocks. The figure is the ratio of medians, ours over FSDP2's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import megafsdp
from benchmarks.launch import device_type, launch
from benchmarks.memory import peak_nbytes, resting_nbytes
from benchmarks.record import spread
from megafsdp.models import build_model, presets
from megafsdp.models.common import TransformerLayer

SIDES = ("megafsdp", "fsdp2")
_WARM_UP_BLOCKS = 2
_STEPS_A_BLOCK = 4
# Loss after each of five steps, and gradients of the first relative to their largest element.
_TOLERANCE_VARIABLE = "MEGAFSDP_BENCHMARK_TOLERANCE"
_TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}


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
    clip: Callable[..., torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--ranks", type=int, default=0, help="0: two, or one on a single GPU")
    parser.add_argument("--repeats", type=int, default=10, help="blocks a side after warm-up")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 64])
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run every shape in every dtype; return their results.

    Raises:
        AssertionError: The two sides disagree; no figure is given then.
    """
    num_ranks = options.ranks or (1 if torch.cuda.device_count() == 1 else 2)
    results: dict[str, object] = {"num_ranks": num_ranks, "device": device_type(num_ranks)}
    for layers, hidden in zip(options.layers, options.hidden, strict=True):
        for dtype in options.dtypes:
            shape = Shape(
                layers, hidden, options.sequence, options.batch, options.vocabulary, dtype
            )
            timed = launch(_time_both, shape, options.repeats, num_ranks=num_ranks)
            sizes = {
                side: launch(_measure_bytes, shape, side, num_ranks=num_ranks) for side in SIDES
            }
            assert isinstance(timed, dict)
            results[f"{layers}x{hidden} {dtype}"] = {
                "shape": asdict(shape),
                **timed,
                "bytes": sizes,
            }
    return results


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = [f"{results['num_ranks']} ranks on {results['device']}, megafsdp / FSDP2"]
    for name, case in results.items():
        if not isinstance(case, dict):
            continue
        step, peak = case["step_ms"], case["bytes"]
        ours, theirs = (step[side]["median"] for side in SIDES)
        lines.append(
            f"{name}: {ours:.1f} / {theirs:.1f} ms, ratio {case['ratio']:.3f} "
            f"({case['ratio_range'][0]:.3f} to {case['ratio_range'][1]:.3f}); peak "
            f"{peak['megafsdp']['peak'] / 1e6:.1f} / {peak['fsdp2']['peak'] / 1e6:.1f} MB"
        )
    return "\n".join(lines)


def _build(shape: Shape, side: str) -> Side:
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
    model = build_model(config, seed=0).to(device_type(dist.get_world_size()))
    layers = [m for m in model.modules() if isinstance(m, TransformerLayer)]
    param_dtype = torch.bfloat16 if shape.dtype == "bf16" else None
    if side == "megafsdp":
        policy = megafsdp.MixedPrecisionPolicy(param_dtype, torch.float32)
        for module in [*layers, model]:
            megafsdp.fully_shard(module, mp_policy=policy)
    else:
        reduce_dtype = torch.float32 if param_dtype else None
        torch_policy = TorchMixedPrecisionPolicy(param_dtype, reduce_dtype)
        for module in [*layers, model]:
            torch_fully_shard(module, mp_policy=torch_policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, fused=True)
    is_ours = side == "megafsdp"
    return Side(model, optimizer, megafsdp.clip_grad_norm_ if is_ours else nn.utils.clip_grad_norm_)


def _batches(shape: Shape, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (shape.batch, shape.sequence + 1)
    device = device_type(dist.get_world_size())
    return [
        torch.randint(0, shape.vocabulary, size, generator=generator).to(device) for _ in range(num)
    ]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _step(side: Side, tokens: torch.Tensor) -> dict[str, float]:
    """Run one step; return the milliseconds of its phases and its loss."""
    _synchronize()
    start = time.perf_counter()
    loss = side.model(tokens[:, :-1], tokens[:, 1:])
    _synchronize()
    forward = time.perf_counter()
    loss.backward()
    _synchronize()
    backward = time.perf_counter()
    side.clip(side.model.parameters(), 1.0)
    side.optimizer.step()
    side.optimizer.zero_grad()
    _synchronize()
    end = time.perf_counter()
    return {
        "step": 1e3 * (end - start),
        "forward": 1e3 * (forward - start),
        "backward": 1e3 * (backward - forward),
        "optimizer": 1e3 * (end - backward),
        "loss": loss.item(),
    }


def _check(sides: dict[str, Side], shape: Shape) -> None:
    """Compare gradients of a first step and losses of five; raise on all ranks alike."""
    tolerance = float(os.environ.get(_TOLERANCE_VARIABLE, _TOLERANCES[shape.dtype]))
    batches = _batches(shape, 5)
    for side in sides.values():
        side.model(batches[0][:, :-1], batches[0][:, 1:]).backward()
    pairs = zip(*(s.model.named_parameters() for s in sides.values()), strict=True)
    for (name, ours), (_, theirs) in pairs:
        assert isinstance(ours.grad, DTensor) and isinstance(theirs.grad, DTensor), name
        first, second = ours.grad.full_tensor(), theirs.grad.full_tensor()
        difference = (first - second).abs().max() / second.abs().max().clamp(min=1e-6)
        assert difference < tolerance, f"gradient of {name} differs by {difference:.1e}"
    for side in sides.values():
        side.optimizer.zero_grad()
    for batch in batches:
        ours_loss, theirs_loss = (_step(side, batch)["loss"] for side in sides.values())
        assert abs(ours_loss - theirs_loss) < tolerance, f"losses {ours_loss} and {theirs_loss}"


class _CountCollectives(TorchDispatchMode):
    """Count c10d operators and the bytes of their largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            leaves = tree_flatten((args, kwargs))[0]
            sizes = [t.numel() * t.element_size() for t in leaves if isinstance(t, torch.Tensor)]
            self.calls[name] += 1
            self.nbytes[name] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def _time_both(shape: Shape, repeats: int) -> dict[str, object]:
    first_step = {}
    sides = {side: _build(shape, side) for side in SIDES}
    _check(sides, shape)
    fresh = {side: _build(shape, side) for side in SIDES}
    batches = _batches(shape, _STEPS_A_BLOCK)
    for name in SIDES:
        first_step[name] = _step(fresh[name], batches[0])["step"]
    times: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for block in range(_WARM_UP_BLOCKS + repeats):
        for name in SIDES if block % 2 else reversed(SIDES):
            dist.barrier()
            steps = [_step(fresh[name], tokens) for tokens in batches]
            if block >= _WARM_UP_BLOCKS:
                times[name] += steps[1:]
    collectives = {}
    for name in SIDES:
        with _CountCollectives() as counted:
            _step(fresh[name], batches[0])
        collectives[name] = {"calls": dict(counted.calls), "nbytes": dict(counted.nbytes)}
    n = _STEPS_A_BLOCK - 1
    medians = {
        name: [
            spread([s["step"] for s in rows[k : k + n]])["median"] for k in range(0, len(rows), n)
        ]
        for name, rows in times.items()
    }
    ratios = [a / b for a, b in zip(*(medians[name] for name in SIDES), strict=True)]
    total = {name: spread([s["step"] for s in times[name]]) for name in SIDES}
    return {
        "num_parameters": sum(p.numel() for p in fresh[SIDES[0]].model.parameters()),
        "step_ms": total,
        "phases_ms": {
            name: {
                phase: spread([s[phase] for s in times[name]])["median"]
                for phase in ("forward", "backward", "optimizer")
            }
            for name in SIDES
        },
        "first_step_ms": first_step,
        "ratio": total[SIDES[0]]["median"] / total[SIDES[1]]["median"],
        "ratio_range": [min(ratios), max(ratios)],
        "repeats": repeats,
        "collectives": collectives,
    }


def _measure_bytes(shape: Shape, name: str) -> dict[str, int]:
    """Return the bytes at rest and at the peak of a step, of one side alone in its process."""
    side = _build(shape, name)
    tokens = _batches(shape, 1)[0]
    for _ in range(3):
        _step(side, tokens)
    resting = resting_nbytes()
    above = peak_nbytes(lambda: _step(side, tokens))
    return {"resting": resting, "peak_above_resting": above, "peak": resting + above}
