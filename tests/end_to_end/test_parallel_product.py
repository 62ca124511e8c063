"""Tensor, context and expert parallelism times every way to divide the data: as one process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import ParallelDims, full_tensor, fully_shard, fully_shard_model, microbatch
from megafsdp.models import TransformerLayer
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from megafsdp.optimizer import clip_grad_norm_
from megafsdp.parallel import Router, end_router_step, parallelize
from tests.fsdp.llama import Llama
from tests.fsdp.llama import parallelize as parallelize_by_torch
from tests.fsdp.toy import full_tensors
from tests.pairwise import gate_of
from tests.parallel.cases import CONFIG, CONFIGS, EPS, batch_of, build
from tests.ranks import Ranks

NUM_STEPS, NUM_ROWS, LENGTH = 2, 4, 8
# Gradients of the mixtures are smaller, and are to be clipped too.
CLIP_NORM, CLIP_NORM_OF_MIXTURES = 1.0, 0.3
# The sides differ by the order of sums; two steps on, as the largest difference of any case.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}
STRATEGIES: dict[str, dict[str, str]] = {
    "no_shard": {"strategy": "no_shard"},
    "optim": {"strategy": "optim"},
    "optim_grads": {"strategy": "optim_grads"},
    "optim_grads_params": {"strategy": "optim_grads_params"},
    "hsdp": {"outer_strategy": "no_shard"},
    "hfsdp": {"outer_strategy": "optim"},
}
# Layers of this package, and a model that torch's parallelize_module has cut.
MODELS = ("qwen3", "gpt", "torch")

_MIXTURE = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 6}
MIXTURES = {
    "qwen3_moe": dataclasses.replace(
        CONFIG,
        architecture="qwen3_moe",
        router_balance="aux_loss",
        router_aux_loss_coefficient=0.05,
        **_MIXTURE,
    ),
    "qwen3_next": dataclasses.replace(
        CONFIG,
        architecture="qwen3_next",
        router_balance="bias",
        router_bias_update_rate=0.01,
        shared_expert_ffn_hidden_size=6,
        layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        rotary_fraction=0.5,
        # The first tokens' outputs of linear attention are nearly zero: a smaller eps would make
        # rounding noise of them, in fp32 1e-4 of the norm in one process too.
        norm_eps=0.1,
        **_MIXTURE,
    ),
}

# Model, dtype, microbatches, strategy, then the degrees of dp_outer, dp_shard, cp, tp and ep.
Case = tuple[str, torch.dtype, int, str, int, int, int, int, int]
NAMES = ("model", "dtype", "num_microbatches", "strategy", "outer", "inner", "cp", "tp", "ep")
DEGREES = ((1, 2), (1, 2), (1,), (1, 2))
PRODUCT: list[Case] = list(itertools.product(MODELS, TOLERANCE, (1, 3), STRATEGIES, *DEGREES, (1,)))


def _on_meshes(name: str, cp: int, eps: tuple[int, ...]) -> list[Case]:
    """Return the cases of a model whose meshes ParallelDims makes, on at most 8 ranks."""
    degrees = ((1, 2), (1, 2) if cp == 1 else (1,), (cp,), (1, 2), eps)
    # Two data axes for these two; experts are shared out among the ranks of a replica, and heads of
    # linear attention, of which there are two, among those of cp and tp.
    return [
        case
        for case in itertools.product([name], TOLERANCE, (1, 3), STRATEGIES, *degrees)
        if (case[4] > 1 or case[3] not in ("hsdp", "hfsdp"))
        and case[5] * cp * case[7] % case[8] == 0
        and (name != "qwen3_next" or cp * case[7] <= 2)
    ]


def _each_mesh(cases: list[Case]) -> list[Case]:
    """Return a case for each mesh and dtype, with a strategy and a number of microbatches each."""
    kinds: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case[1], case[4:]), []).append(case)
    return [kind[7 * i % len(kind)] for i, kind in enumerate(kinds.values())]


BOTH = (1, 2)
MIXTURE_PRODUCT = _on_meshes("qwen3_moe", 1, BOTH) + _each_mesh(_on_meshes("qwen3_next", 1, BOTH))
CONTEXT_PRODUCT = [
    case
    for name, eps in (("qwen3", (1,)), ("gpt", (1,)), ("qwen3_moe", BOTH), ("qwen3_next", BOTH))
    for case in _each_mesh(_on_meshes(name, 2, eps))
]


@dataclass(frozen=True)
class Trajectory:
    """What two steps of one process give, in whole tensors.

    Attributes:
        losses: The loss of each step, summed over microbatches.
        norms: The norm of each step's gradients.
        grads: Those of the first step.
        parameters: After the last step, with buffers.
    """

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _build(name: str, dtype: torch.dtype) -> nn.Module:
    return Llama().to(dtype) if name == "torch" else build((CONFIGS | MIXTURES)[name], dtype)


def _train(model: nn.Module, num_microbatches: int, share: tuple[int, int]) -> Trajectory:
    """Take two clipped AdamW steps on this rank's share of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses, norms, grads = [], [], {}
    rank, num_ranks = share
    # Ours returns a norm in fp32, whose rounding would show in fp64.
    is_double = next(model.parameters()).dtype == torch.float64
    clip = _clip_in_double if is_double else clip_grad_norm_
    is_mixture = any(isinstance(module, Router) for module in model.modules())
    max_norm = CLIP_NORM_OF_MIXTURES if is_mixture else CLIP_NORM
    for step in range(NUM_STEPS):
        loss = 0.0
        for k in range(num_microbatches):
            # Those from 0 on move a router's bias there and back.
            seed = 1 + step * num_microbatches + k
            tokens, labels, mask = batch_of(NUM_ROWS, LENGTH, seed)
            inputs = (tokens, labels) if isinstance(model, Llama) else (tokens, labels, mask)
            is_last = k == num_microbatches - 1
            is_sharded = num_ranks > 0
            context = microbatch(model, is_last) if is_sharded else contextlib.nullcontext()
            with context:
                own = [x.chunk(max(num_ranks, 1))[rank] for x in inputs]
                part = model(*own) / num_microbatches
                part.backward()
            loss += part.item()
        if not grads:
            grads = _copies({n: p.grad for n, p in model.named_parameters()})
        norms.append(float(full_tensor(clip(model.parameters(), max_norm))))
        optimizer.step()
        end_router_step(model)
        optimizer.zero_grad()
        losses.append(loss)
    found = _copies({n: t.detach() for n, t in model.state_dict().items()})
    return Trajectory(losses, norms, grads, found)


def _clip_in_double(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip as torch's function does, which takes no gradients on several meshes."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.stack([full_tensor(grad).norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _copies(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    whole = full_tensors(tensors) if dist.is_initialized() else tensors
    return {name: tensor.clone() for name, tensor in whole.items() if tensor is not None}


@functools.cache
def _wanted(name: str, dtype: torch.dtype, num_microbatches: int) -> Trajectory:
    model = _build(name, dtype)
    before = {n: t.detach().clone() for n, t in model.state_dict().items()}
    wanted = _train(model, num_microbatches, (0, 0))
    assert all(not torch.equal(before[n], t) for n, t in wanted.parameters.items())
    # Decay moves experts that no token passes: each has a gradient.
    assert all(g.flatten(1).any(1).all() for n, g in wanted.grads.items() if g.ndim == 3)
    return wanted


def _shard(case: Case) -> nn.Module:
    name, dtype, _, strategy, outer, inner, cp, tp, ep = case
    model = _build(name, dtype)
    if name in MIXTURES or cp > 1:
        meshes = ParallelDims(outer, inner, cp, tp, ep).build("cpu")
        parallelize(model, meshes)
        options = {"mesh": meshes.data, "expert_mesh": meshes.experts, **STRATEGIES[strategy]}
        return fully_shard_model(model, [TransformerLayer], **options)
    names = ("dp_outer", "dp_shard", "tp")
    root = init_device_mesh("cpu", (outer, inner, tp), mesh_dim_names=names)
    has_outer = outer > 1 or strategy in ("hsdp", "hfsdp")
    mesh = root[names[:2]] if has_outer else root[names[1]]
    if tp > 1 and isinstance(model, Llama):
        parallelize_by_torch(model, root["tp"])
    elif tp > 1:
        model.set_device_mesh(tp_mesh=root["tp"])
    blocks = model.blocks if isinstance(model, Llama) else model.decoder.layers
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, **STRATEGIES[strategy])
    return model


def _trajectory(case: Case, wanted: Trajectory) -> None:
    _, dtype, num_microbatches, _, outer, inner, cp, tp, _ = case
    model, num_data = _shard(case), outer * inner
    found = _train(model, num_microbatches, (dist.get_rank() // (cp * tp), num_data))
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    tolerance = TOLERANCE[dtype]
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close((losses / (num_data * cp * tp)).tolist(), wanted.losses)
    close(found.norms, wanted.norms)
    for own, expected in (
        (found.grads, wanted.grads),
        (found.parameters, wanted.parameters),
    ):
        assert own.keys() == expected.keys()
        for key, tensor in own.items():
            close(tensor, expected[key], msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(
    NAMES,
    gate_of(PRODUCT + MIXTURE_PRODUCT + CONTEXT_PRODUCT, "parallel-product"),
    ids=str,
)
def test_two_steps_equal_one_process(
    ranks: Ranks,
    model: str,
    dtype: torch.dtype,
    num_microbatches: int,
    strategy: str,
    outer: int,
    inner: int,
    cp: int,
    tp: int,
    ep: int,
) -> None:
    """Losses, every gradient, norms, and the parameters after two clipped steps of AdamW."""
    case = (model, dtype, num_microbatches, strategy, outer, inner, cp, tp, ep)
    ranks(outer * inner * cp * tp).run(_trajectory, case, _wanted(model, dtype, num_microbatches))
