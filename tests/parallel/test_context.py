"""Context parallelism: what ranks exchange, and models against themselves in one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import ParallelDims, full_tensor, fully_shard_model
from megafsdp.buffer.comm.trace import record_collectives
from megafsdp.models import ActivationCheckpointing, TransformerLayer, sample
from megafsdp.models.causal_attention import causal_attention
from megafsdp.models.common import rotary_table
from megafsdp.models.config import FULL_ATTENTION
from megafsdp.parallel import parallelize
from megafsdp.parallel.context import (
    heads_of,
    own_part,
    sum_over_cp,
    tokens_of,
    whole_logits,
    whole_sequence,
)
from tests.parallel.cases import CONFIG, CONFIGS, MOE, NEXT, batch_of, build, wholes
from tests.ranks import Ranks

THREE_HEADS = dataclasses.replace(CONFIG, num_attention_heads=3, num_query_groups=3)
MODELS = CONFIGS | {"qwen3_moe": MOE, "qwen3_next": NEXT, "three_heads": THREE_HEADS}
close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
# Sums on a GPU are made in another order.
_close_on_cuda = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-5)


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def _exchanges() -> None:
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    # Chunks of two tokens; each rank has one from the beginning and one from the end.
    names = torch.arange(4 * size)
    mine = [2 * rank, 2 * rank + 1, 2 * (2 * size - 1 - rank), 2 * (2 * size - 1 - rank) + 1]
    assert own_part(names, group, dim=0).tolist() == mine
    # The ranks divide the second length, their chunks do not.
    for missing in (1, size):
        with pytest.raises(ValueError, match=rf"the {2 * size} chunks .*got {4 * size - missing}"):
            own_part(names[missing:], group, dim=0)

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

    def twice(x: Tensor, enter: Callable[..., Tensor], leave: Callable[..., Tensor]) -> Tensor:
        y = leave(enter(x).cumsum(1)).sin().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), x)[0]

    exchanges = [functools.partial(f, group=group) for f in (heads_of, tokens_of)]
    wanted = twice(whole, torch.clone, torch.clone)
    close(twice(own, *exchanges), own_part(wanted, group, dim=1))

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
    name: str,
    dims: ParallelDims,
    length: int,
    options: dict[str, Any],
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> None:
    reference = build(MODELS[name], dtype).to(device)
    model = copy.deepcopy(reference)
    lengths = options.pop("document_lengths", None)
    meshes = dims.build(device)
    parallelize(model, meshes)
    if "activation_checkpointing" in options:
        model.activation_checkpointing = options.pop("activation_checkpointing")
    fully_shard_model(
        model, [TransformerLayer], mesh=meshes.data, expert_mesh=meshes.experts, **options
    )
    tokens, labels, mask = (x.to(device) for x in batch_of(4, length))
    of_rank = [None] * meshes.data_size
    if lengths is not None:
        rows = 4 // meshes.data_size
        of_rank = [lengths[rows * r : rows * (r + 1)] for r in range(meshes.data_size)]
    near = close if dtype == torch.float64 else _close_on_cuda
    # Another number in each row, and none in one of the ranks' parts.
    mask[0, : length // 2] = 0
    for masked in (mask, None):
        own = [
            x if x is None else x.chunk(meshes.data_size)[meshes.data_rank]
            for x in (tokens, labels, masked)
        ]
        expected = [
            reference(
                *(x if x is None else x.chunk(meshes.data_size)[r] for x in whole),
                document_lengths=of_rank[r],
            )
            for r in range(meshes.data_size)
            for whole in [(tokens, labels, masked)]
        ]
        loss = model(*own, document_lengths=of_rank[meshes.data_rank])
        near(loss, expected[meshes.data_rank])
        loss.backward()
        torch.stack(expected).mean().backward()
        found, wanted = _grads_of(model), _grads_of(reference)
        assert found.keys() == wanted.keys()
        for key in wanted:
            near(found[key], wanted[key], msg=lambda m, k=key: f"{k}: {m}")
        model.zero_grad()
        reference.zero_grad()


CP2, TP2_CP2 = ParallelDims(cp=2), ParallelDims(cp=2, tp=2)
CASES: list[tuple[str, ParallelDims, int, dict[str, Any]]] = [
    *[(name, CP2, 8, {}) for name in (*CONFIGS, "qwen3_moe", "qwen3_next")],
    # Lengths that are padded, one of them so that a rank has nothing else.
    *[(name, CP2, length, {}) for name in ("gpt", "qwen3_next") for length in (7, 1)],
    ("llama", ParallelDims(cp=3), 11, {}),
    ("gpt", TP2_CP2, 8, {}),
    # Two chunks of two tokens would suit cp, and not the ranks of tp.
    ("three_heads", ParallelDims(cp=2, tp=3), 8, {}),
    ("qwen3", TP2_CP2, 11, {"strategy": "optim_grads"}),
    ("qwen3_next", TP2_CP2, 8, {}),
    ("qwen3", ParallelDims(dp_shard=2, cp=2), 7, {"strategy": "optim"}),
    ("qwen3_next", ParallelDims(dp_outer=2, cp=2), 8, {"outer_strategy": "optim"}),
    ("qwen3_moe", ParallelDims(cp=2, ep=2), 8, {}),
    ("qwen3_moe", ParallelDims(cp=2, tp=2, ep=4), 8, {"strategy": "no_shard"}),
    ("qwen3_next", CP2, 8, {"activation_checkpointing": ActivationCheckpointing("full")}),
    ("qwen3_next", CP2, 8, {"activation_checkpointing": ActivationCheckpointing("selective")}),
    # Documents that end within a chunk, at its end, and in a chunk of another rank.
    ("gpt", CP2, 7, {"document_lengths": [[3, 4], [7], [1, 1, 5], [2, 2, 3]]}),
    ("gpt", ParallelDims(tp=2), 7, {"document_lengths": [[3, 4], [7], [1, 1, 5], [2, 2, 3]]}),
    ("three_heads", ParallelDims(cp=3), 8, {"document_lengths": [[3, 5], [8], [1] * 8, [7, 1]]}),
    ("qwen3_next", TP2_CP2, 8, {"document_lengths": [[3, 5], [8], [4, 1, 3], [2, 6]]}),
    (
        "qwen3_next",
        ParallelDims(dp_shard=2, cp=2),
        7,
        {
            "document_lengths": [[3, 4], [7], [1, 1, 5], [2, 2, 3]],
            "activation_checkpointing": ActivationCheckpointing("full"),
        },
    ),
]


@pytest.mark.parametrize(("name", "dims", "length", "options"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_process(
    ranks: Ranks, name: str, dims: ParallelDims, length: int, options: dict[str, Any]
) -> None:
    """Of every architecture, beside every other kind of parallelism, with and without a mask."""
    num_ranks = dims.dp_outer * max(dims.dp_shard, 1) * dims.cp * dims.tp
    ranks(num_ranks).run(_equals_one_process, name, dims, length, options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt", "qwen3", "qwen3_next"])
def test_two_ranks_that_share_a_gpu_share_sequences_out(ranks: Ranks, name: str) -> None:
    """CUDA tensors through gloo, and torch's kernels there for the last of many keys."""
    ranks(2, "gloo").run(_equals_one_process, name, CP2, 8, {}, "cuda", torch.float32)


def _shows(name: str, dims: ParallelDims) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return logits, a text, and gradients of a loss that a user makes of logits."""
    model = build(MODELS[name])
    if dist.is_initialized():
        meshes = dims.build("cpu")
        parallelize(model, meshes)
        for module in (*model.decoder.layers, model):
            torch_fully_shard(module, mesh=meshes.data)
    tokens, labels, _ = batch_of(2, model.config.max_sequence_length)
    generator = torch.Generator().manual_seed(2)
    text = sample(
        model, tokens[:, :1], num_tokens=4, max_context=9, temperature=1.0, generator=generator
    )
    logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    # tp has cut rows that lie in another order.
    grads = {n: g.clone() for n, _, g in wholes(model)} if dims.tp > 1 else _grads_of(model)
    return logits.detach(), text, grads


# Logits of a padded length are a slice; torch warns that an edit of it in place loses its hook.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize(
    ("name", "dims"), [("gpt", CP2), ("qwen3", TP2_CP2), ("qwen3_next", ParallelDims(cp=3))]
)
def test_logits_text_and_gradients_of_logits_are_those_of_one_process(
    ranks: Ranks, name: str, dims: ParallelDims
) -> None:
    """Under torch's FSDP2, of lengths that are padded, up to the longest."""
    logits, text, grads = _shows(name, dims)
    for found in ranks(dims.cp * dims.tp).run(_shows, name, dims):
        close(found[0], logits)
        assert torch.equal(found[1], text)
        assert found[2].keys() == grads.keys()
        for key in grads:
            close(found[2][key], grads[key], msg=lambda m, k=key: f"{k}: {m}")


def _collectives_of_layers(name: str) -> list[tuple[dict[str, int], dict[str, int]]]:
    model = build(MODELS[name])
    parallelize(model, CP2.build("cpu"))
    found = []
    for layer in model.decoder.layers:
        x = torch.randn(2, 4, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
        with record_collectives() as forward:
            out = layer.self_attention(x, rotary_table(4, model.config.rotary_dim, 1e4))
        with record_collectives() as backward:
            out.sum().backward()
        found.append((dict(forward.nbytes), dict(backward.nbytes)))
    return found


def test_attention_gathers_keys_and_values_and_linear_attention_exchanges_heads(
    ranks: Ranks,
) -> None:
    """By formula: of 8 tokens in 2 rows, of fp64."""
    # Query, key and value, beta and alpha of each token's heads; then their outputs.
    into_heads = 12 * 4 + 12 * 4 + 24 * 2 + 24 + 24
    exchanged = {"all_to_all": 2 * 4 * (into_heads + 24 * 2) * 8}
    gathered = 2 * 8 * 2 * 2 * 4 * 8
    wanted = [(exchanged, exchanged), ({"all_gather": gathered}, {"reduce_scatter": gathered})]
    assert ranks(2).run(_collectives_of_layers, "qwen3_next") == [wanted] * 2


def _compiles(name: str) -> None:
    torch._dynamo.reset()
    model, whole = build(MODELS[name]), build(MODELS[name])
    meshes = CP2.build("cpu")
    parallelize(model, meshes)
    for layer in model.decoder.layers:
        layer.compile(backend="aot_eager")
    fully_shard_model(model, [TransformerLayer], mesh=meshes.data)
    batch = batch_of(2, 8)
    for side in (model, whole):
        side(*batch).backward()
    found, wanted = _grads_of(model), _grads_of(whole)
    for key in wanted:
        close(found[key], wanted[key])


# The tracer asks every input for .grad, and torch warns where it is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
# It makes an object of a function's class, which torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_layers_share_sequences_out(ranks: Ranks) -> None:
    """A graph ends at each exchange, of full attention and of linear attention."""
    ranks(2).run(_compiles, "qwen3_next")


def _is_refused() -> None:
    dims = ParallelDims(cp=2, tp=2)
    model = build(dataclasses.replace(NEXT, linear_num_key_heads=2, linear_num_value_heads=4))
    meshes = dims.build("cpu")
    with pytest.raises(ValueError, match=r"times the context-parallel one.* 2 key heads.*got 4"):
        parallelize(model, meshes)
    # Nothing has changed.
    assert all(module.tp_mesh is None for module in model.modules() if hasattr(module, "tp_mesh"))
    with pytest.raises(ValueError, match=r"layers of megafsdp\.parallel, got Linear"):
        parallelize(nn.Linear(2, 2), meshes)


def test_heads_that_the_ranks_cannot_share_out_are_refused(ranks: Ranks) -> None:
    """On all ranks, before anything is cut."""
    ranks(4).run(_is_refused)


def _saved_nbytes(name: str, length: int) -> int:
    """Return the bytes that autograd keeps for backward, but for parameters."""
    model = build(dataclasses.replace(MODELS[name], max_sequence_length=length))
    if dist.is_initialized():
        parallelize(model, ParallelDims(cp=dist.get_world_size()).build("cpu"))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(*batch_of(1, length))
    loss.backward()
    return sum(saved.values())


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_each_rank_keeps_its_part_of_the_activations(ranks: Ranks, name: str) -> None:
    """Half of them, and in full attention the keys and values of the other half."""
    length, config = 128, MODELS[name]
    num_full = config.layer_types.count(FULL_ATTENTION) if config.layer_types else config.num_layers
    keys_and_values = 2 * length * config.num_query_groups * config.head_dim * 8
    # A CPU makes masks, as numbers, for the quarters of the queries that see what is before them.
    mask = length // 4 * (length // 4 * 5) * 8
    most = _saved_nbytes(name, length) / 2 + num_full * (keys_and_values + mask)
    # What linear attention reads of parameters is a copy.
    assert max(ranks(2).run(_saved_nbytes, name, length)) <= 1.01 * most
