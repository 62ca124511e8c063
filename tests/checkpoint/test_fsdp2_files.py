"""Checkpoints of torch's FSDP2 with AdamW, by torch.distributed.checkpoint, into ours and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megafsdp import FusedAdam, full_tensor, fully_shard
from tests.ranks import Ranks

Values = dict[str, torch.Tensor]


def _train(side: str, directory: str, *, loads: bool) -> Values:
    """Take two steps and save, or load; return weights, moments and rates as whole tensors."""
    torch.manual_seed(int(loads))
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    shard = fully_shard if side == "ours" else torch_fully_shard
    for module in (*model, model):
        shard(module)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    make = FusedAdam if side == "ours" else torch.optim.AdamW
    optimizer = make(groups, lr=1.0 if loads else 0.01)
    if not loads:
        for _ in range(2):
            model(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    if loads:
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=directory)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    else:
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=directory)
    found = {f"rate {i}": torch.tensor(g["lr"]) for i, g in enumerate(optimizer.param_groups)}
    for name, parameter in model.named_parameters():
        found[name] = full_tensor(parameter).detach()
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = full_tensor(torch.as_tensor(value))
    return found


@pytest.mark.parametrize(("writer", "reader"), [("fsdp2", "ours"), ("ours", "fsdp2")])
def test_files_of_fsdp2_and_adamw_are_files_of_ours(
    ranks: Ranks, tmp_path: Path, writer: str, reader: str
) -> None:
    """On 3 ranks and on 1 what 2 have saved: weights, moments, steps and rates, bit for bit."""
    written = ranks(2).run(_saved, writer, str(tmp_path))[0]
    for num_ranks in (3, 1):
        for read in ranks(num_ranks).run(_loaded, reader, str(tmp_path)):
            assert read.keys() == written.keys()
            for name, value in written.items():
                assert torch.equal(read[name], value), name


def _saved(side: str, directory: str) -> Values:
    return _train(side, directory, loads=False)


def _loaded(side: str, directory: str) -> Values:
    return _train(side, directory, loads=True)
