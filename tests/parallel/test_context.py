"""Context parallelism: what ranks exchange, and models against themselves in one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafsdp import ParallelDims, full_tensor, fully_shard_model
from megafsdp.models import ActivationCheckpointing, TransformerLayer
from megafsdp.models.causal_attention import causal_attention
from megafsdp.models.config import FULL_ATTENTION, LINEAR_ATTENTION
from megafsdp.parallel import parallelize
from megafsdp.parallel.context import (
    heads_of,
    own_part,
    sum_over_cp,
    tokens_of,
    whole_logits,
    whole_sequence,
)
from tests.parallel.cases import CONFIGS, MOE, batch_of, build
from tests.ranks import Ranks

NEXT = dataclasses.replace(
    MOE,
    architecture="qwen3_next",
    shared_expert_ffn_hidden_size=6,
    layer_types=(LINEAR_ATTENTION, FULL_ATTENTION),
    linear_num_key_heads=12,
    linear_num_value_heads=24,
    linear_key_head_dim=4,
    linear_value_head_dim=2,
    rotary_fraction=0.5,
    norm_eps=0.1,
)
MODELS = CONFIGS | {"qwen3_moe": MOE, "qwen3_next": NEXT}
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def _exchanges() -> None:
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    # Chunks of two tokens; each rank has one from the beginning and one from the end.
    names = torch.arange(4 * size)
    mine = [2 * rank, 2 * rank + 1, 2 * (2 * size - 1 - rank), 2 * (2 * size - 1 - rank) + 1]
    assert own_part(names, group, dim=0).tolist() == mine

    whole = _random(3, 4 * size, 5 * size)
    own = own_part(whole.detach(), group, dim=1).requires_grad_()
    joined = whole_sequence(own, group, dim=1)
    assert torch.equal(joined, whole)
    # Each rank weighs tokens by itself; a token's gradient is the sum.
    weights = [_random(3, 4 * size, 5 * size, seed=1 + r).detach() for r in range(size)]
    (joined * weights[rank]).sum().backward()
    close(own.grad, own_part(sum(weights), group, dim=1))

    own.grad = None
    logits = whole_logits(own, group)
    assert torch.equal(logits, whole)
    # All ranks compute the same loss, and the engine divides by their number.
    (logits * weights[0]).sum().backward()
    close(own.grad, size * own_part(weights[0], group, dim=1))

    own.grad = None
    heads = heads_of(own, group)
    assert torch.equal(heads, whole.chunk(size, -1)[rank])
    assert torch.equal(tokens_of(heads, group), own)
    (tokens_of(heads * weights[0].chunk(size, -1)[rank], group) * own.detach()).sum().backward()
    close(own.grad, own_part(weights[0] * whole.detach(), group, dim=1))

    share = torch.full((), float(rank), dtype=torch.float64, requires_grad=True)
    total = sum_over_cp(share, group)
    total.backward()
    assert total.item() == size * (size - 1) / 2 and share.grad == size


@pytest.mark.parametrize("cp", [2, 3])
def test_parts_and_exchanges_are_those_of_whole_sequences(ranks: Ranks, cp: int) -> None:
    """Values are equal in every bit, and gradients are those of the transposed exchange."""
    ranks(cp).run(_exchanges)


def _attends(dtype: torch.dtype, tolerance: float) -> None:
    group, size = dist.group.WORLD, dist.get_world_size()
    shapes = (2, 4, 6 * size, 8), (2, 2, 6 * size, 8), (2, 2, 6 * size, 8)
    whole = [_random(*shape, seed=i).detach().to(dtype) for i, shape in enumerate(shapes)]
    parts = [own_part(x, group, dim=2).requires_grad_() for x in whole]
    for x in whole:
        x.requires_grad_()
    expected = causal_attention(*whole)
    found = causal_attention(*parts, cp_group=group)
    near = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    near(found, own_part(expected, group, dim=2))
    weights = _random(*expected.shape, seed=9).detach().to(dtype)
    (expected * weights).sum().backward()
    (found * own_part(weights, group, dim=2)).sum().backward()
    for part, x in zip(parts, whole, strict=True):
        near(part.grad, own_part(x.grad, group, dim=2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("cp", [2, 3])
def test_attention_of_parts_is_that_of_the_whole(
    ranks: Ranks, cp: int, dtype: torch.dtype, tolerance: float
) -> None:
    """With grouped queries, values and gradients."""
    ranks(cp).run(_attends, dtype, tolerance)


def _grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: full_tensor(p.grad).clone() for n, p in model.named_parameters()}


def _equals_one_process(
    name: str, dims: ParallelDims, length: int, options: dict[str, Any]
) -> None:
    reference = build(MODELS[name])
    model = copy.deepcopy(reference)
    meshes = dims.build("cpu")
    parallelize(model, meshes)
    if "activation_checkpointing" in options:
        model.activation_checkpointing = options.pop("activation_checkpointing")
    fully_shard_model(
        model, [TransformerLayer], mesh=meshes.data, expert_mesh=meshes.experts, **options
    )
    tokens, labels, mask = batch_of(4, length)
    # Another number in each row, and none in one of the ranks' parts.
    mask[0, : length // 2] = 0
    for masked in (mask, None):
        own = [
            x if x is None else x.chunk(meshes.data_size)[meshes.data_rank]
            for x in (tokens, labels, masked)
        ]
        expected = [
            reference(*(x if x is None else x.chunk(meshes.data_size)[r] for x in whole))
            for r in range(meshes.data_size)
            for whole in [(tokens, labels, masked)]
        ]
        loss = model(*own)
        close(loss, expected[meshes.data_rank])
        loss.backward()
        torch.stack(expected).mean().backward()
        found, wanted = _grads_of(model), _grads_of(reference)
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key], msg=lambda m, k=key: f"{k}: {m}")
        model.zero_grad()
        reference.zero_grad()


CP2, TP2_CP2 = ParallelDims(cp=2), ParallelDims(cp=2, tp=2)
CASES: list[tuple[str, ParallelDims, int, dict[str, Any]]] = [
    *[(name, CP2, 8, {}) for name in MODELS],
    # Lengths that are padded, one of them so that a rank has nothing else.
    *[(name, CP2, length, {}) for name in ("gpt", "qwen3_next") for length in (7, 1)],
    ("llama", ParallelDims(cp=3), 11, {}),
    ("gpt", TP2_CP2, 8, {}),
    ("qwen3", TP2_CP2, 11, {"strategy": "optim_grads"}),
    ("qwen3_next", TP2_CP2, 8, {}),
    ("qwen3", ParallelDims(dp_shard=2, cp=2), 7, {"strategy": "optim"}),
    ("qwen3_next", ParallelDims(dp_outer=2, cp=2), 8, {"outer_strategy": "optim"}),
    ("qwen3_moe", ParallelDims(cp=2, ep=2), 8, {}),
    ("qwen3_moe", ParallelDims(cp=2, tp=2, ep=4), 8, {"strategy": "no_shard"}),
    ("qwen3_next", CP2, 8, {"activation_checkpointing": ActivationCheckpointing("full")}),
    ("qwen3_next", CP2, 8, {"activation_checkpointing": ActivationCheckpointing("selective")}),
]


@pytest.mark.parametrize(("name", "dims", "length", "options"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Ranks, name: str, dims: ParallelDims, length: int, options: dict[str, Any]
) -> None:
    """Of every architecture, beside every other kind of parallelism, with and without a mask."""
    num_ranks = dims.dp_outer * max(dims.dp_shard, 1) * dims.cp * dims.tp
    ranks(num_ranks).run(_equals_one_process, name, dims, length, options)
