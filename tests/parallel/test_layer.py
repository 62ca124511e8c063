"""set_device_mesh(): what it cuts, when it may be called, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import megafsdp
from megafsdp.mesh.annotation import annotation_of
from megafsdp.mesh.fused_parts import FusedParts
from megafsdp.mesh.parallel_dims import ParallelDims
from megafsdp.models import build_model
from megafsdp.parallel import (
    GroupedExperts,
    GroupedLinear,
    LayerNorm,
    Linear,
    OutputLayer,
    ParallelModule,
    PositionEmbedding,
    RMSNorm,
    Router,
    VocabParallelEmbedding,
    parallelize,
)
from tests.parallel.cases import CONFIG, CONFIGS, build, mesh_of, shard_by_ours
from tests.ranks import Ranks

_LAYERS: dict[str, Any] = {
    "Linear": lambda **kwargs: Linear(4, 6, parallel_mode="column", **kwargs),
    "RMSNorm": lambda **kwargs: RMSNorm(4, **kwargs),
    "LayerNorm": lambda **kwargs: LayerNorm(4, **kwargs),
    "VocabParallelEmbedding": lambda **kwargs: VocabParallelEmbedding(4, 6, **kwargs),
    "PositionEmbedding": lambda **kwargs: PositionEmbedding(4, 6, **kwargs),
    "OutputLayer": lambda **kwargs: OutputLayer(6, 4, **kwargs),
    "Router": lambda **kwargs: Router(4, 6, 2, **kwargs),
    "GroupedLinear": lambda **kwargs: GroupedLinear(2, 4, 6, **kwargs),
    "GroupedExperts": lambda **kwargs: GroupedExperts(2, 4, 6, **kwargs),
}


def _tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def _check_meshes() -> None:
    tp = _tp_mesh()
    two_axes = init_device_mesh("cpu", (2, 1))
    foreign = DeviceMesh("cpu", [1 - dist.get_rank()], _init_backend=False)
    other_device = DeviceMesh("meta", [0, 1], _init_backend=False)
    bad = [
        (two_axes, "a mesh of one axis, got 2 axes"),
        (foreign, "a mesh that contains this rank"),
        (other_device, "a mesh of cpu, got one of meta"),
    ]
    for make in _LAYERS.values():
        for (mesh, message), keyword in itertools.product(bad, ("tp_mesh", "weight_mesh")):
            layer = make()
            before = list(layer.parameters())
            with pytest.raises(ValueError, match=message):
                layer.set_device_mesh(**{keyword: mesh})
            with pytest.raises(ValueError, match=message):
                make(**{keyword: mesh})
            assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))
        by_method, by_keyword = make(), make(tp_mesh=tp, weight_mesh=tp)
        by_method.requires_grad_(False).set_device_mesh(tp_mesh=tp, weight_mesh=tp)
        assert not any(p.requires_grad for p in by_method.parameters())
        for layer in (by_method, by_keyword):
            assert all(isinstance(p, DTensor) for p in layer.parameters())
            assert layer.weight_mesh is tp and layer.tp_mesh is tp
            assert all(annotation_of(p).weight_mesh is tp for p in layer.parameters())


def test_every_layer_takes_a_mesh_of_one_axis_with_this_rank(ranks: Ranks) -> None:
    """As keywords and by the method; any other mesh is refused before anything is changed."""
    ranks(2).run(_check_meshes)


_INSTRUCTION = r"construct the model, set_device_mesh\(\), fully_shard\(\), reset_parameters\(\)"


def _check_orders() -> None:
    """Run every order of the calls; those after sharding or cutting raise, and change nothing."""
    data, tp = mesh_of(2, 2)
    for shard in (torch_fully_shard, megafsdp.fully_shard):
        calls: dict[str, Any] = {
            "cut": lambda layer: layer.set_device_mesh(tp_mesh=tp),
            "shard": lambda layer, shard=shard: shard(layer, mesh=data),
            "reset": lambda layer: layer.reset_parameters(),
            "forward": lambda layer: layer(torch.ones(2, 4)),
        }
        for order in itertools.permutations(calls):
            layer = Linear(4, 4, parallel_mode="column")
            # Ours refuses at once what torch's would shard: the mesh was sliced from one with tp.
            late = "cut" if shard is torch_fully_shard else "shard"
            is_wrong = order.index("shard") < order.index("cut")
            for name in order:
                if is_wrong and name == late:
                    before = list(layer.parameters())
                    with pytest.raises((RuntimeError, ValueError), match=r"set_device_mesh\("):
                        calls[name](layer)
                    assert all(a is b for a, b in zip(before, layer.parameters(), strict=True))
                    break
                calls[name](layer)
    layer = Linear(4, 4, parallel_mode="column")
    torch_fully_shard(layer, mesh=data)
    with pytest.raises(RuntimeError, match="got the unit .*" + _INSTRUCTION):
        layer.set_device_mesh(tp_mesh=tp)
    layer = Linear(4, 4, parallel_mode="column", tp_mesh=tp)
    with pytest.raises(RuntimeError, match="got a second call.*" + _INSTRUCTION):
        layer.set_device_mesh(tp_mesh=tp)


def test_a_mesh_comes_before_sharding_and_once(ranks: Ranks) -> None:
    """Under torch's engine and ours; the error says the one order of calls."""
    ranks(4).run(_check_orders)


def _check_degrees() -> list[str]:
    tp = _tp_mesh()
    messages = []
    for changed in (
        {"num_query_groups": 2},
        {"ffn_hidden_size": 8},
        {"vocab_size": 25},
    ):
        sizes = {"num_attention_heads": 6, "num_query_groups": 3, "ffn_hidden_size": 9}
        model = build_model(dataclasses.replace(CONFIG, **{**sizes, **changed}), seed=0)
        before = list(model.parameters())
        with pytest.raises(ValueError, match="tensor-parallel degree that divides") as caught:
            model.set_device_mesh(tp_mesh=tp)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match=r"that divides \[4, 5\], got 3"):
        fused = FusedParts(("a", "b"), (4, 5))
        Linear(3, 9, parallel_mode="column", fused=fused, tp_mesh=tp)
    return messages


def test_a_degree_that_does_not_divide_is_refused(ranks: Ranks) -> None:
    """By the name of the config's field, on all ranks alike, before anything is changed."""
    by_rank = ranks(3).run(_check_degrees)
    assert all(found == by_rank[0] for found in by_rank)
    groups, width, vocabulary = by_rank[0]
    assert "the 2 query groups, got 3. In ModelConfig.num_query_groups" in groups
    assert "ModelConfig.ffn_hidden_size" in width and "ModelConfig.vocab_size" in vocabulary


def _check_meta(name: str) -> None:
    """Cut shapes on the meta device; draw afterwards, with and without FSDP2."""
    config = CONFIGS[name]
    data, tp = mesh_of(2, 2)
    whole = build_model(config, seed=0)
    whole.set_device_mesh(tp_mesh=tp)
    cut = {name: p.to_local().clone() for name, p in whole.named_parameters()}
    for is_sharded in (False, True):
        with torch.device("meta"):
            model = build_model(config)
        for parameter in model.parameters():
            parameter.note = "kept"
        model.set_device_mesh(tp_mesh=tp)
        assert all(p.is_meta and p.note == "kept" for p in model.parameters())
        if is_sharded:
            for layer in model.decoder.layers:
                torch_fully_shard(layer, mesh=data)
            torch_fully_shard(model, mesh=data)
        model.to_empty(device="cpu")
        torch.manual_seed(0)
        for module in model.modules():
            if isinstance(module, ParallelModule):
                module.reset_parameters()
        for parameter_name, parameter in model.named_parameters():
            expected = cut[parameter_name]
            if is_sharded:
                rows = expected.chunk(2)
                rank = data.get_local_rank()
                expected = rows[rank] if rank < len(rows) else expected[:0]
            assert torch.equal(parameter.to_local(), expected), parameter_name


def _reset(module: nn.Module) -> None:
    if isinstance(module, ParallelModule):
        module.reset_parameters()


def _materialize(name: str) -> None:
    """Draw under this package's engine, a unit at a time, and once more layer by layer."""
    data, tp = mesh_of(2, 2)
    with torch.device("meta"):
        model = build_model(CONFIGS[name])
    model.set_device_mesh(tp_mesh=tp)
    shard_by_ours(model, data)
    with torch.device("meta"):
        plain = build_model(CONFIGS[name])
    plain.to_empty(device="cpu")
    # As materialize() and apply() walk: children first.
    for seed, draw in enumerate((megafsdp.materialize, lambda m: m.apply(_reset))):
        torch.manual_seed(seed)
        draw(model)
        torch.manual_seed(seed)
        plain.apply(_reset)
        pairs = zip(model.named_parameters(), plain.parameters(), strict=True)
        for (key, parameter), wanted in pairs:
            assert torch.equal(megafsdp.full_tensor(parameter.detach()), wanted), key


@pytest.mark.parametrize("name", ["qwen3", "gpt"])
def test_initial_values_are_parts_of_the_whole_draw(ranks: Ranks, name: str) -> None:
    """Bit for bit, from the meta device too, and attributes of parameters stay."""
    ranks(4).run(_check_meta, name)
    ranks(4).run(_materialize, name)


def _check_ties() -> None:
    data, tp = mesh_of(1, 2)
    # Ours: one call for both users.
    model = build(CONFIG)
    model.set_device_mesh(tp_mesh=tp)
    assert model.output_layer.weight is model.embedding.word_embeddings.weight
    # Ours below a module of the user's.
    embedding = VocabParallelEmbedding(8, 4)
    meshes = ParallelDims(dp_shard=1, tp=2).build("cpu")
    both = nn.ModuleDict({"a": embedding, "b": OutputLayer(4, 8, tied_weight=embedding.weight)})
    parallelize(both, meshes)
    assert both["a"].weight is both["b"].weight
    assert isinstance(both["a"].weight, DTensor)
    # torch's embedding and our output layer.
    for mesh, style, is_taken in (
        (tp, RowwiseParallel(input_layouts=Replicate()), True),
        (tp, ColwiseParallel(), False),
        (data, RowwiseParallel(input_layouts=Replicate()), False),
    ):
        torch.manual_seed(0)
        table = nn.Embedding(8, 4)
        whole = table.weight.detach().clone()
        parallelize_module(table, mesh, style)
        output = OutputLayer(4, 8, tied_weight=table.weight)
        if not is_taken:
            # Columns are no rows of the vocabulary, and ranks of another mesh have others.
            with pytest.raises(RuntimeError, match=_INSTRUCTION):
                output.set_device_mesh(tp_mesh=tp)
            continue
        output.set_device_mesh(tp_mesh=tp)
        assert output.weight is table.weight
        x, tokens = torch.randn(1, 2, 4), torch.tensor([[1, 6]])
        columns = (x @ whole.T).chunk(2, dim=-1)[tp.get_local_rank()]
        torch.testing.assert_close(output(x), columns)
        (output(x).sum() + table(tokens).sum()).backward()
        assert isinstance(table.weight.grad, DTensor)
        expected = whole.clone().requires_grad_()
        ((x @ expected.T).sum() + F.embedding(tokens, expected).sum()).backward()
        torch.testing.assert_close(table.weight.grad.full_tensor(), expected.grad)


def test_tied_weights_stay_tied(ranks: Ranks) -> None:
    """Within our layers, and where torch's parallelize_module has cut the embedding."""
    ranks(2).run(_check_ties)


def test_a_model_without_parallel_layers_is_refused() -> None:
    """Its parameters would stay whole without a word; without tp there is nothing to cut."""
    model = nn.Linear(2, 2)
    meshes: Any = SimpleNamespace(tp=object(), cp=None, ep=None)
    with pytest.raises(ValueError, match="parallel, got Linear without any"):
        parallelize(model, meshes)
    meshes.tp = None
    assert parallelize(model, meshes) is model


def _check_copies() -> None:
    model = build(CONFIG)
    model.set_device_mesh(tp_mesh=_tp_mesh())
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(tokens), model(tokens))


def test_a_cut_model_can_be_copied(ranks: Ranks) -> None:
    """Averages of weights are kept in copies."""
    ranks(2).run(_check_copies)
