"""A mixture of experts with quantized weights, trained over tensor and expert parallelism."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megafsdp
from megafsdp import FusedAdam, ParallelDims, full_state_dict, full_tensor
from megafsdp import summon_full_params as summon
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.checkpoint import load, save
from megafsdp.models import TransformerLayer
from megafsdp.models.language_model import LanguageModel
from megafsdp.parallel import parallelize
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from tests.fsdp.quantized import policy_for, quantize, quantized_parameters
from tests.pairwise import gate_of
from tests.parallel.cases import MOE, batch_of, build
from tests.ranks import Ranks

# Every part that a rank of tp or of ep has is of sizes that all formats take.
CONFIG = dataclasses.replace(
    MOE,
    num_layers=1,
    hidden_size=64,
    head_dim=32,
    num_attention_heads=4,
    num_query_groups=2,
    moe_ffn_hidden_size=32,
    init_std=0.05,
)
# Four ranks: two data ranks beside tp; experts on two of four; experts on the ranks of tp.
DIMS = {
    "dp2 tp2": ParallelDims(tp=2),
    "ep2": ParallelDims(ep=2),
    "tp2 ep2": ParallelDims(tp=2, ep=2),
}
PRODUCT = [(recipe, name) for recipe in RECIPE_NAMES for name in DIMS]
SELECTED = [
    ("fp8_current", "dp2 tp2"),
    ("fp8_delayed", "tp2 ep2"),
    ("fp8_block", "dp2 tp2"),
    ("mxfp8", "ep2"),
    ("nvfp4", "tp2 ep2"),
]


def _new(recipe: str, dims: str) -> tuple[LanguageModel, FusedAdam, int]:
    """Return a sharded model, its optimizer, and this data rank's number."""
    meshes = DIMS[dims].build("cpu")
    model = parallelize(build(CONFIG, torch.float32), meshes)
    megafsdp.fully_shard_model(
        model,
        [TransformerLayer],
        mesh=meshes.data,
        expert_mesh=meshes.experts,
        mp_policy=policy_for(recipe),
    )
    return model, FusedAdam(model.parameters(), lr=1e-2, eps=1e-5), meshes.data_rank


def _train(model: LanguageModel, optimizer: FusedAdam, data_rank: int, steps: range) -> Tensor:
    losses = []
    for step in steps:
        torch.manual_seed(step)
        # Other tokens for each data rank.
        loss = model(*batch_of(2, 8, 10 * step + data_rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def _shown(model: LanguageModel) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return codes, scales and values of the gathered weights; assert that they are encoded so."""
    found, quantizable = {}, quantized_parameters(model)
    wholes = {name: full_tensor(p.detach()) for name, p in model.named_parameters()}
    with summon(model):
        for name, (group, item) in quantizable.items():
            recipe = group.quantization.recipe
            shown = local_object(item.unsharded)
            source = wholes[name].bfloat16()
            part = item.model.part.cut(source).contiguous()
            index = group.parameters.index(item)
            states = group.compute_weight.scales.states
            state = states[index] if recipe.history else None
            is_whole = part.ndim == 2 and recipe.weight.is_per_tensor and state is None
            wanted = quantize(part, recipe, state)
            if is_whole:
                # A scale of all parts: codes of the part are a part of the whole's codes.
                wanted = quantize(source, recipe)
                codes = item.model.part.cut(wanted.codes.view(source.shape))
                assert torch.equal(shown.codes, codes.flatten()), name
            else:
                # Values that are gathered first and quantized then have the same bytes.
                assert torch.equal(shown.codes, wanted.codes), name
                assert torch.equal(shown.decode(), wanted.decode()), name
            assert torch.equal(shown.table, wanted.table), name
            found[name] = (shown.codes.clone(), shown.table.clone(), shown.decode())
    return found


def _trains(recipe: str, dims: str, directory: str) -> None:
    model, optimizer, data_rank = _new(recipe, dims)
    names = set(quantized_parameters(model))
    layer = "decoder.layers.0."
    assert {
        f"{layer}mlp.experts.linear_fc1.weight",
        f"{layer}mlp.experts.linear_fc2.weight",
    } < names
    assert any(name.startswith(f"{layer}self_attention") for name in names)
    _train(model, optimizer, data_rank, range(1))
    first = _shown(model)
    _train(model, optimizer, data_rank, range(1, 2))
    tokens = batch_of(2, 8, data_rank)[0]
    outputs = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outputs.append(model(tokens).clone())
    assert torch.equal(*outputs)
    found = _shown(model)
    assert all(not torch.equal(found[name][0], first[name][0]) for name in names)
    for name in names:
        _equal_on(found[name][1], quantized_parameters(model)[name][0].axes.all_ranks)
    save(directory, step=2, model=model, optimizer=optimizer)
    resumed, other, _ = _new(recipe, dims)
    _train(resumed, other, data_rank, range(7, 8))
    load(directory, model=resumed, optimizer=other)
    losses = [
        _train(*pair, data_rank, range(2, 3)) for pair in ((model, optimizer), (resumed, other))
    ]
    assert torch.equal(*losses)
    states = [full_state_dict(each) for each in (model, resumed)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    if recipe_of(recipe).history:
        for name, (group, item) in quantized_parameters(model).items():
            others, again = quantized_parameters(resumed)[name]
            index = group.parameters.index(item)
            own = group.compute_weight.scales.states[index].histories()
            loaded = others.compute_weight.scales.states[others.parameters.index(again)].histories()
            assert all(map(torch.equal, own, loaded)), name


def _equal_on(table: Tensor, group: dist.ProcessGroup) -> None:
    by_rank = [torch.empty_like(table) for _ in range(group.size())]
    dist.all_gather(by_rank, table, group=group)
    assert all(torch.equal(other, table) for other in by_rank)


@pytest.mark.parametrize(("recipe", "dims"), gate_of(PRODUCT, "quantized_tp", SELECTED))
def test_gathered_codes_are_those_of_whole_values_and_training_resumes(
    ranks: Ranks, tmp_path: Path, recipe: str, dims: str
) -> None:
    """Of attention and of experts, after each step; a run from a checkpoint has the same bits."""
    ranks(4).run(_trains, recipe, dims, str(tmp_path))
