"""Tensor parallelism times every way to divide the data, against one process on the whole batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megafsdp import full_tensor, fully_shard, microbatch
from megafsdp.optimizer import clip_grad_norm_
from tests.fsdp.llama import Llama
from tests.fsdp.llama import parallelize as parallelize_by_torch
from tests.fsdp.toy import full_tensors
from tests.pairwise import gate_of
from tests.parallel.cases import CONFIGS, EPS, batch_of, build
from tests.ranks import Ranks

NUM_STEPS, NUM_ROWS, LENGTH = 3, 4, 8
CLIP_NORM = 1.0
# The sides differ by the order of sums; three steps on, as the largest difference of any case.
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

# Model, dtype, microbatches, strategy, then the degrees of dp_outer, dp_shard and tp.
Case = tuple[str, torch.dtype, int, str, int, int, int]
NAMES = ("model", "dtype", "num_microbatches", "strategy", "outer", "inner", "tp")
PRODUCT: list[Case] = list(
    itertools.product(MODELS, TOLERANCE, (1, 3), STRATEGIES, (1, 2), (1, 2), (1, 2))
)


@dataclass(frozen=True)
class Trajectory:
    """What three steps of one process give, in whole tensors.

    Attributes:
        losses: The loss of each step, summed over microbatches.
        norms: The norm of each step's gradients.
        grads: Those of the first step.
        parameters: After the last step.
    """

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]


def _build(name: str, dtype: torch.dtype) -> nn.Module:
    return Llama().to(dtype) if name == "torch" else build(CONFIGS[name], dtype)


def _train(model: nn.Module, num_microbatches: int, share: tuple[int, int]) -> Trajectory:
    """Take three clipped AdamW steps on this rank's share of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    losses, norms, grads = [], [], {}
    rank, num_ranks = share
    # Ours returns a norm in fp32, whose rounding would show in fp64.
    is_double = next(model.parameters()).dtype == torch.float64
    clip = nn.utils.clip_grad_norm_ if is_double else clip_grad_norm_
    for step in range(NUM_STEPS):
        loss = 0.0
        for k in range(num_microbatches):
            tokens, labels, mask = batch_of(NUM_ROWS, LENGTH, step * num_microbatches + k)
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
        norms.append(float(full_tensor(clip(model.parameters(), CLIP_NORM))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    found = _copies({n: p.detach() for n, p in model.named_parameters()})
    return Trajectory(losses, norms, grads, found)


def _copies(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    whole = full_tensors(tensors) if dist.is_initialized() else tensors
    return {name: tensor.clone() for name, tensor in whole.items() if tensor is not None}


@functools.cache
def _wanted(name: str, dtype: torch.dtype, num_microbatches: int) -> Trajectory:
    model = _build(name, dtype)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    wanted = _train(model, num_microbatches, (0, 0))
    assert all(not torch.equal(before[n], p) for n, p in wanted.parameters.items())
    return wanted


def _trajectory(case: Case, wanted: Trajectory) -> None:
    name, dtype, num_microbatches, strategy, outer, inner, tp = case
    names = ("dp_outer", "dp_shard", "tp")
    root = init_device_mesh("cpu", (outer, inner, tp), mesh_dim_names=names)
    has_outer = outer > 1 or strategy in ("hsdp", "hfsdp")
    mesh = root[names[:2]] if has_outer else root[names[1]]
    model = _build(name, dtype)
    if tp > 1 and isinstance(model, Llama):
        parallelize_by_torch(model, root["tp"])
    elif tp > 1:
        model.set_device_mesh(tp_mesh=root["tp"])
    blocks = model.blocks if isinstance(model, Llama) else model.decoder.layers
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, **STRATEGIES[strategy])
    num_data = outer * inner
    found = _train(model, num_microbatches, (dist.get_rank() // tp, num_data))
    losses = torch.tensor(found.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    tolerance = TOLERANCE[dtype]
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close((losses / (num_data * tp)).tolist(), wanted.losses)
    close(found.norms, wanted.norms)
    for own, expected in (
        (found.grads, wanted.grads),
        (found.parameters, wanted.parameters),
    ):
        assert own.keys() == expected.keys()
        for key, tensor in own.items():
            close(tensor, expected[key], msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize(NAMES, gate_of(PRODUCT, "parallel-product"), ids=str)
def test_three_steps_equal_one_process(
    ranks: Ranks,
    model: str,
    dtype: torch.dtype,
    num_microbatches: int,
    strategy: str,
    outer: int,
    inner: int,
    tp: int,
) -> None:
    """Losses, every gradient, norms, and the parameters after three clipped steps of AdamW."""
    case = (model, dtype, num_microbatches, strategy, outer, inner, tp)
    ranks(outer * inner * tp).run(_trajectory, case, _wanted(model, dtype, num_microbatches))
