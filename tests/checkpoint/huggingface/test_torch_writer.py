"""The ``HuggingFaceStorageWriter`` and reader of torch on sharded models with stacks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from megafsdp import full_state_dict, fully_shard
from megafsdp.buffer.comm.collectives import barrier
from tests.ranks import Ranks


class _Experts(nn.Module):
    """A router and a stack of matrices, the second of which two ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.Parameter(torch.randn(3, 6, 6))


def _whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return {name: tensor.clone() for name, tensor in _Experts().state_dict().items()}


def _sharded() -> _Experts:
    model = _Experts()
    model.load_state_dict(_whole())
    return fully_shard(model)


def _assert_whole(got: dict[str, torch.Tensor]) -> None:
    whole = _whole()
    assert got.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(got[name], tensor), name


def _refused_then_whole(refused: str, folder: str) -> str:
    """Save shards, which is refused, and then as the error says; return the error."""
    model = _sharded()
    writer = dcp.HuggingFaceStorageWriter(refused, save_distributed=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(get_model_state_dict(model), storage_writer=writer)
    barrier()
    assert not os.path.exists(refused)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        whole = dcp.HuggingFaceStorageWriter(folder)
        with pytest.warns(UserWarning, match="save in a single process"):
            dcp.save(state, storage_writer=whole, no_dist=True)
    barrier()
    return str(caught.value)


def _load(folder: str) -> None:
    model = _sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(folder))
    _assert_whole(full_state_dict(model))


def test_a_refused_save_names_one_that_works(ranks: Ranks, tmp_path: Path) -> None:
    """Stacks go to the file whole, and a model that is cut otherwise reads them."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "whole"
    for error in ranks(2).run(_refused_then_whole, str(tmp_path / "refused"), str(folder)):
        assert "a save of 'experts' of shape (3, 6, 6)" in error
        for word in ("get_model_state_dict()", "full_state_dict=True", "no_dist=True"):
            assert word in error
    (file,) = folder.glob("*.safetensors")
    _assert_whole(safetensors.load_file(file))
    ranks(3).run(_load, str(folder))
