"""Quantized parameters below torch's FSDP2 and a tensor-parallel axis: whose maxima make scales."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megafsdp
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.parallel import Linear
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from tests.fsdp.torch_sharded import shards_of
from tests.ranks import Ranks


def _scales_are_equal(recipe: str, weight_mesh: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "parts"))
    torch.manual_seed(0)
    layer = Linear(64, 512, parallel_mode="column", bias=False)
    meshes = {
        "": None,
        "shards": mesh["shards"],
        "parts": mesh["parts"],
        "all": init_device_mesh("cpu", (4,)),
    }
    layer.set_device_mesh(tp_mesh=mesh["parts"], weight_mesh=meshes[weight_mesh])
    model = nn.Sequential(layer)
    full = model[0].weight
    assert isinstance(full, DTensor)
    whole = full.full_tensor().detach().clone()
    fully_shard(model, mesh=mesh["shards"])
    if weight_mesh == "parts":
        with pytest.raises(ValueError, match="all ranks that divide rows"):
            megafsdp.quantize_(model, recipe)
        return
    with record_collectives() as record:
        megafsdp.quantize_(model, recipe)
    form = recipe_of(recipe).weight
    found = shards_of(model)["0.weight"]
    if form.is_per_tensor:
        assert record.calls["all_reduce"] == (2 if weight_mesh == "" else 1)
        tables = [torch.empty_like(found.table) for _ in range(4)]
        dist.all_gather(tables, found.table)
        if weight_mesh in ("", "all"):
            scale = found.table[:4].view(torch.float32).item()
            assert scale == pytest.approx(whole.abs().max().item() / 448, rel=1e-6)
            assert all(torch.equal(each, tables[0]) for each in tables)
    elif not form.has_shared_scale((1, 1)):
        assert record.calls == {}
    x = torch.randn(8, 64)
    y = model(x)
    assert y.shape == (8, 256) and torch.isfinite(y).all() and y.abs().sum() > 0
    y.sum().backward()
    optimizer = megafsdp.FusedAdam(model.parameters(), lr=1e-2)
    before = found.codes.clone()
    optimizer.step()
    assert not torch.equal(shards_of(model)["0.weight"].codes, before)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_parallel_linear_is_quantized_by_its_part(ranks: Ranks, recipe: str) -> None:
    """Tiles lie in the part; one scale of the whole is combined over the model axis too."""
    ranks(4).run(_scales_are_equal, recipe, "")


def test_a_layer_chooses_the_ranks_of_its_maxima(ranks: Ranks) -> None:
    """By ``weight_mesh``, in place of those that divide the weight."""
    ranks(4).run(_scales_are_equal, "fp8_current", "all")
    ranks(4).run(_scales_are_equal, "fp8_current", "shards")
    ranks(4).run(_scales_are_equal, "fp8_current", "parts")
