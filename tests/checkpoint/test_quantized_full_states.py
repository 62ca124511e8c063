"""Full states of quantized parameters under torch's FSDP2, and forks of replicas that record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

import megafsdp
from megafsdp import FusedAdam
from megafsdp.quantize.recipes import RECIPE_NAMES
from megafsdp.quantize.shard import QuantizedShard
from tests.fsdp.torch_sharded import (
    assert_codes_of,
    batch,
    mesh_of,
    new_model,
    shard,
    sharded,
    shards_of,
)
from tests.pairwise import pairwise
from tests.ranks import Ranks


def _fill(model: nn.Module) -> dict[str, Tensor]:
    """Return values for all parameters that no rank of a test has yet."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(p.shape, generator=generator).to(p.dtype)
        for name, p in model.named_parameters()
    }


def _set_full(recipe: str, num_ranks: int, is_from_first: bool) -> None:
    model = sharded(recipe, num_ranks)
    optimizer = FusedAdam(model.parameters(), lr=0.0)
    given = _fill(new_model())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_from_first)
    has_values = not is_from_first or dist.get_rank() == 0
    set_model_state_dict(model, dict(given) if has_values else {}, options=options)
    for name, each in shards_of(model).items():
        parameter = model.get_parameter(name)
        assert each.main is not None
        assert_codes_of(parameter, given[name].float(), recipe)
    # The next step goes on from them, without a word on codes that overtook main weights.
    model(batch()).sum().backward()
    optimizer.step()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, parameter in model.named_parameters():
        found = optimizer.state[parameter].get("main_param", parameter).full_tensor()
        assert torch.equal(found, given[name].to(found.dtype)), name
        # Of one rank torch gathers nothing, and returns what it has.
        values = full[name].decode() if isinstance(full[name], QuantizedShard) else full[name]
        assert type(values) is Tensor and values.shape == parameter.shape
        assert isinstance(full[name], QuantizedShard) == (
            num_ranks == 1 and name in shards_of(model)
        )
    # And back: a model that takes what was gathered computes the same with it.
    other = sharded(recipe, num_ranks)
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True))
    for name, each in shards_of(other).items():
        assert torch.allclose(each.decode(), shards_of(model)[name].decode(), rtol=0.07)


@pytest.mark.parametrize(
    ("recipe", "num_ranks", "is_from_first"),
    pairwise([(r, n, b) for r in RECIPE_NAMES for n in (1, 2) for b in (False, True)]),
)
def test_full_states_set_main_weights_and_codes(
    ranks: Ranks, recipe: str, num_ranks: int, is_from_first: bool
) -> None:
    """Given by every rank or by the first; what is got decodes to values on several ranks."""
    ranks(num_ranks).run(_set_full, recipe, num_ranks, is_from_first)


def _of_one_rank(recipe: str, path: Path) -> None:
    if dist.get_world_size() == 1:
        model = sharded(recipe, 1)
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        torch.save(full, path)
        return
    full = torch.load(path, weights_only=True)
    for is_from_first in (False, True):
        model = shard(new_model(), mesh_of(2))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        megafsdp.quantize_(model, recipe)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_from_first)
        set_model_state_dict(model, dict(full), options=options)
        for name, each in shards_of(model).items():
            assert each.main is not None
            rows = full[name].decode().float().chunk(2)[dist.get_rank()]
            assert torch.equal(each.main.values, rows)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_full_states_of_one_rank_go_to_two(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """They are quantized parameters: their values are taken."""
    path = tmp_path / "full.pt"
    ranks(1).run(_of_one_rank, recipe, path)
    ranks(2).run(_of_one_rank, recipe, path)


def _train(model: nn.Module, optimizer: FusedAdam, steps: range) -> list[Tensor]:
    """Train on other batches on each rank, and return losses and what goes on."""
    found = []
    for step in steps:
        rank = dist.get_rank()
        loss = (model((1 + rank) * batch(10 * step + rank)).float() - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    for each in shards_of(model).values():
        assert each.state is not None
        found += [each.codes.clone(), *(h.clone() for h in each.state.histories())]
    return found


def _replicas_resume(path: Path) -> list[Tensor]:
    def build() -> tuple[nn.Module, FusedAdam, dict[str, Any]]:
        model = sharded("fp8_delayed", 2, 1)
        return model, (optimizer := FusedAdam(model.parameters(), lr=1e-2)), state(model, optimizer)

    def state(model: nn.Module, optimizer: FusedAdam) -> dict[str, Any]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    model, optimizer, _ = build()
    saved = _train(model, optimizer, range(3))
    dcp.save(state(model, optimizer), checkpoint_id=path)
    expected = _train(model, optimizer, range(3, 6))
    model, optimizer, loaded = build()
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
    assert all(map(torch.equal, _train(model, optimizer, range(3, 6)), expected))
    return [each for each in saved if each.ndim > 0]


@pytest.mark.filterwarnings("ignore:.*cpu device mesh.*:UserWarning")
def test_replicas_with_histories_resume(ranks: Ranks, tmp_path: Path) -> None:
    """Each has other inputs and all have one scale, for a checkpoint has those of one of them."""
    ours, theirs = ranks(2).run(_replicas_resume, tmp_path / "dcp")
    assert all(map(torch.equal, ours, theirs))
