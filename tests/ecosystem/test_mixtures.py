"""Experts of transformers, declared by one call: stacks, and a list of modules."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

from megafsdp import (
    FusedParts,
    Muon,
    annotate,
    checkpoint,
    full_state_dict,
    fully_shard_model,
)
from megafsdp.checkpoint.format.manifest import read_manifest
from tests.ecosystem.models import build, global_batch, own_rows, train_beside
from tests.fsdp.toy import assert_same_grads, assert_same_parameters
from tests.ranks import Ranks

# transformers warns of its own future.
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("default")]
NAMES = ("{module}.gate_proj", "{module}.up_proj")


def _declare(model: PreTrainedModel) -> PreTrainedModel:
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            inner = parameter.shape[1] // 2
            fused = FusedParts(("gate", "up"), (inner, inner), dim=1, stored_as=NAMES)
            annotate(parameter, is_expert=True, fused=fused)
        elif ".experts." in name:
            annotate(parameter, is_expert=True)
    return model


def _muon(model: nn.Module) -> Muon:
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        kinds["embed" not in name and "lm_head" not in name].append(parameter)
    groups = [{"params": kinds[True]}, {"params": kinds[False], "use_muon": False}]
    return Muon(groups, lr=1e-3, adamw_eps=1e-5)


def _steps(name: str, directory: Path) -> None:
    reference = _declare(build(name))
    model = fully_shard_model(_declare(build(name)))
    optimizers = [_muon(reference), _muon(model)]
    for step in range(2):
        reference(**global_batch(step)).loss.backward()
        model(**own_rows(global_batch(step))).loss.backward()
        assert_same_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, reference, rtol=1e-4, atol=1e-5)
    # As one matrix gate and up together take another step.
    whole = copy.deepcopy(build(name))
    optimizer = _muon(whole)
    whole(**global_batch(0)).loss.backward()
    optimizer.step()
    stack = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.allclose(whole.get_parameter(stack), reference.get_parameter(stack), atol=1e-5)
    checkpoint.save(directory, step=2, model=model, optimizer=optimizers[1])


def _load(name: str, directory: Path) -> dict[str, torch.Tensor]:
    model = fully_shard_model(_declare(build(name)))
    checkpoint.load(directory, model=model, optimizer=_muon(model))
    return full_state_dict(model)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_declared_stacks_are_stepped_and_stored_in_parts(
    ranks: Ranks, name: str, tmp_path: Path
) -> None:
    """Muon's matrices are those of one process; files name gate and up; other ranks load them."""
    ranks(2).run(_steps, name, tmp_path)
    stored = read_manifest(tmp_path / "iter_0000002").tensors
    experts = {
        key.rpartition(".")[2] for key in stored if key.startswith("model.") and "exp" in key
    }
    assert experts == {"gate_proj", "up_proj", "down_proj"}
    (alone,), (first, *_) = (ranks(n).run(_load, name, tmp_path) for n in (1, 3))
    assert alone.keys() == first.keys()
    assert all(torch.equal(alone[key], tensor) for key, tensor in first.items())


class _Listed(nn.Module):
    """A stack of experts as a list of modules, with the forward of earlier transformers."""

    def __init__(self, stack: Any, config: Any) -> None:
        super().__init__()
        self.listed = nn.ModuleList(
            Qwen3MoeMLP(config, intermediate_size=stack.intermediate_dim)
            for _ in range(stack.num_experts)
        )
        with torch.no_grad():
            for index, expert in enumerate(self.listed):
                gate, up = stack.gate_up_proj[index].chunk(2)
                expert.gate_proj.weight.copy_(gate)
                expert.up_proj.weight.copy_(up)
                expert.down_proj.weight.copy_(stack.down_proj[index])

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Call the experts that some token of this rank has chosen."""
        mixed = torch.zeros_like(x)
        for index in indices.unique().tolist():
            rows, places = torch.where(indices == index)
            y = self.listed[index](x[rows]) * weights[rows, places, None]
            mixed = mixed.index_add(0, rows, y)
        return mixed


def _list_experts(model: PreTrainedModel) -> PreTrainedModel:
    for layer in model.model.layers:
        layer.mlp.experts = _Listed(layer.mlp.experts, model.config)
    return _declare(model)


def _train_listed() -> None:
    stacked, listed = build("qwen3-moe"), _list_experts(build("qwen3-moe"))
    batch = global_batch(0)
    torch.testing.assert_close(listed(**batch).loss, stacked(**batch).loss, rtol=1e-6, atol=0)
    own = own_rows(batch)
    calls = [0] * 16
    for index, expert in enumerate(listed.model.layers[0].mlp.experts.listed):
        expert.register_forward_hook(lambda *_, i=index: calls.__setitem__(i, 1))
    listed(**own)
    used = torch.tensor(calls)
    everywhere = used.clone()
    dist.all_reduce(everywhere)
    assert (used == 0).any() and (everywhere == 1).any(), "an expert of one rank alone"
    train_beside(_list_experts(build("qwen3-moe")), fully_shard_model(listed))


def test_a_list_of_expert_modules_trains_as_one_process(ranks: Ranks) -> None:
    """Ranks call other experts, some of them none; the list gives the outputs of the stack."""
    ranks(2).run(_train_listed)
