"""One training step of a mixture of experts with expert parallelism, ours beside torch's.

The toy Qwen3-MoE on both sides: ours from megafsdp.parallel under this package's ``fully_shard``,
torch's from moe_rival.py under FSDP2, which exchanges tokens as ours does. Equal weights, batches,
AdamW(fused=True) and clipping; steps_in_turn.py says what the figure is. There is no figure if
torch's mixture makes needless copies, of tensors that its operators would take as they are: its
forward and backward are profiled. The bytes of the experts' gathers are counted with and without
expert parallelism.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import megafsdp
from benchmarks import moe_rival
from benchmarks.launch import device_type, launch
from benchmarks.record import CheckError
from benchmarks.steps_in_turn import SIDES, TOLERANCE, Side, adamw, compare, step
from benchmarks.steps_in_turn import describe as describe_steps
from megafsdp.buffer.comm.agreement import raise_together
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.mesh.parallel_dims import Meshes, ParallelDims
from megafsdp.models import ModelConfig, TransformerLayer, build_model, presets
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import parallelize

# The name of a copy in a profile.
_COPY = "aten::copy_"


@dataclass(frozen=True)
class Shape:
    """What is trained: the toy mixture, with these sizes.

    Attributes:
        layers: Number of layers.
        hidden: Hidden size; 4 heads in 2 groups.
        experts: Experts a layer; 4 a token.
        width: Inner width of an expert.
        sequence: Tokens a row.
        batch: Rows a rank.
    """

    layers: int
    hidden: int
    experts: int
    width: int
    sequence: int
    batch: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the case."""
    parser.add_argument("--ep", type=int, default=2, help="above 1")
    parser.add_argument("--edp", type=int, nargs="+", default=[1, 2], help="ranks an expert")
    parser.add_argument("--repeats", type=int, default=10, help="blocks a side after warm-up")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of losses")


def run(options: argparse.Namespace) -> dict[str, object]:
    """Run the shape on each mesh; return the results.

    Raises:
        Exception: The sides disagree, or torch's makes needless copies; no figure is given then.
    """
    shape = Shape(
        options.layers,
        options.hidden,
        options.experts,
        options.width,
        options.sequence,
        options.batch,
    )
    results: dict[str, object] = {"shape": asdict(shape)}
    for edp in options.edp:
        results[f"ep {options.ep} x edp {edp}"] = launch(
            _measure,
            shape,
            options.ep,
            options.repeats,
            options.tolerance,
            num_ranks=options.ep * edp,
        )
    return results


def describe(results: dict[str, object]) -> str:
    """Return the results as lines for people."""
    lines = ["megafsdp / FSDP2 with all-to-all"]
    for name, case in results.items():
        if isinstance(case, dict) and "ratio" in case:
            with_ep, without = (case["expert_gather_nbytes"][key] for key in ("ep", "no ep"))
            lines += [
                describe_steps(name, case),
                f"    gathers of experts: {with_ep / 1e6:.3f} MB a step, {without / 1e6:.3f} "
                "without expert parallelism",
            ]
    return "\n".join(lines)


def _config(shape: Shape) -> ModelConfig:
    return replace(
        presets["qwen3-moe-toy"],
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_experts=shape.experts,
        moe_ffn_hidden_size=shape.width,
    )


def _build(shape: Shape, side: str, meshes: Meshes) -> Side:
    config = _config(shape)
    device = meshes.data.device_type
    with torch.device(device):
        ours = build_model(config, seed=0)
    if side == SIDES[0]:
        return _shard(ours, meshes, meshes.experts)
    with torch.device(device):
        theirs = moe_rival.TorchMoE(config)
    _copy(ours, theirs)
    assert meshes.ep is not None, "the case asks for a degree above 1"
    return moe_rival.build(theirs, meshes.ep.size(), device)


def _shard(model: LanguageModel, meshes: Meshes, experts: DeviceMesh | None) -> Side:
    parallelize(model, meshes)
    for layer in (m for m in model.modules() if isinstance(m, TransformerLayer)):
        # FSDP2's default; ours would keep the last layer for backward.
        megafsdp.fully_shard(
            layer, mesh=meshes.data, expert_mesh=experts, reshard_after_forward=True
        )
    megafsdp.fully_shard(model, mesh=meshes.data, expert_mesh=experts)
    return Side(model, adamw(model.parameters()), megafsdp.clip_grad_norm_)


@torch.no_grad()
def _copy(ours: nn.Module, theirs: nn.Module) -> None:
    """Copy our weights to torch's model: modules are in the same order on both sides."""
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.copy_(own)


def _batches(shape: Shape, device: str, num: int) -> list[Tensor]:
    # With these seeds no token has equal scores in the checked steps; their last bit would choose.
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    size = (shape.batch, shape.sequence + 1)
    vocab_size = _config(shape).vocab_size
    return [torch.randint(0, vocab_size, size, generator=generator).to(device) for _ in range(num)]


def _measure(shape: Shape, num_ep: int, repeats: int, tolerance: float) -> dict[str, object]:
    """Check the sides, then time them; called by every rank."""
    num_ranks = dist.get_world_size()
    device = device_type(num_ranks)
    meshes = ParallelDims(ep=num_ep).build(device)
    copies = _copies_of_rival(shape, meshes)
    raise_together(CheckError(f"torch's mixture copies {copies}") if copies else None)
    sides = {name: _build(shape, name, meshes) for name in SIDES}
    draw = partial(_batches, shape, device)
    return {
        "num_ranks": num_ranks,
        "device": device,
        "num_parameters": sum(p.numel() for p in sides["torch"].model.parameters()),
        "expert_gather_nbytes": _expert_gather_nbytes(shape, meshes),
        **compare(sides, draw, repeats=repeats, tolerance=tolerance),
    }


def _copies_of_rival(shape: Shape, meshes: Meshes) -> dict[str, int]:
    """Return what torch's mixture copies in forward and backward, by shape; without FSDP2.

    Tables of counts, which are smaller than one token, are left out.
    """
    config = _config(shape)
    mixture = moe_rival.Mixture(config).to(meshes.data.device_type)
    for weight in mixture.parameters():
        nn.init.normal_(weight, std=config.init_std)
    assert meshes.ep is not None, "the case asks for a degree above 1"
    moe_rival.cut_experts(mixture, meshes.ep)
    size = (shape.batch, shape.sequence, shape.hidden)
    x = torch.randn(size, device=meshes.data.device_type, requires_grad=True)
    # Random weights: the gradient of a plain sum is expanded and would be copied.
    weights = torch.randn(size, device=x.device)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        (mixture(x) * weights).sum().backward()
    shapes = [e.input_shapes[0] for e in profiler.events() if e.name == _COPY]
    return dict(Counter(str(s) for s in shapes if len(s) > 1 and math.prod(s) > shape.hidden))


def _expert_gather_nbytes(shape: Shape, meshes: Meshes) -> dict[str, int]:
    """Count the bytes of a step's gathers of experts, with expert parallelism and without."""
    device, num_ranks = meshes.data.device_type, dist.get_world_size()
    whole = ParallelDims().build(device)
    # A mesh of the same ranks under another name, so that experts have gathers of their own.
    every = init_device_mesh(device, (num_ranks,), mesh_dim_names=("edp",))
    data = meshes.data.get_group().group_name
    nbytes, dense_nbytes = [], 0
    for own, experts in ((meshes, meshes.experts), (whole, every)):
        side = _shard(build_model(_config(shape), seed=0).to(device), own, experts)
        (tokens,) = _batches(shape, device, 1)
        with record_collectives() as record:
            step(side, tokens)
        dense_nbytes = dense_nbytes or record.nbytes_by_group["all_gather", data]
        nbytes.append(record.nbytes["all_gather"] - dense_nbytes)
    return dict(zip(("ep", "no ep"), nbytes, strict=True))
