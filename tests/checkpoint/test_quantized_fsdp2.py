"""Checkpoints of quantized parameters under torch's FSDP2: torch's own, and ours."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

import megafsdp
from megafsdp import FusedAdam, MixedPrecisionPolicy, checkpoint, full_state_dict
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.checkpoint.format.records import RecordReader
from megafsdp.checkpoint.tools.torch_file import to_torch
from megafsdp.errors import CheckpointError
from megafsdp.quantize.recipes import RECIPE_NAMES
from tests.fsdp.torch_sharded import (
    assert_codes_of,
    batch,
    mesh_of,
    new_model,
    shard,
    sharded,
    shards_of,
)
from tests.ranks import Ranks

# Each of 4, 2, 3 and 1 ranks has whole tiles of 128 rows.
ROWS = 1536


def _step(model: nn.Module, optimizer: FusedAdam, step: int) -> list[Tensor]:
    """Train a step, and return what it computes."""
    torch.manual_seed(step)
    output = model(batch(step))
    loss = (output.float() - 1).pow(2).mean()
    loss.backward()
    found = [output.detach(), loss.detach()]
    found += [local_object(p.grad).clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return found


def _artifacts(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    """Return everything that a model and its optimizer go on from, of this rank."""
    found = []
    for parameter in model.parameters():
        if parameter in optimizer.state:
            states = sorted(optimizer.state[parameter].items())
            found += [local_object(value).clone() for _, value in states]
    for each in shards_of(model).values():
        found += [each.codes.clone(), each.table.clone()]
        found += [h.clone() for h in each.state.histories()] if each.state else []
    return found


def _save(model: nn.Module, optimizer: FusedAdam, path: Path, *, is_async: bool) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    if is_async:
        dcp.async_save(state, checkpoint_id=path).result()
    else:
        dcp.save(state, checkpoint_id=path)


def _load(model: nn.Module, optimizer: FusedAdam, path: Path) -> None:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def _fork_equals_uninterrupted(recipe: str, is_async: bool, path: Path) -> None:
    model = sharded(recipe, 2)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for step in range(2):
        _step(model, optimizer, step)
    _save(model, optimizer, path, is_async=is_async)
    saved = _artifacts(model, optimizer)
    other = sharded(recipe, 2)
    others = FusedAdam(other.parameters(), lr=1e-3)
    _step(other, others, 7)
    assert not all(map(torch.equal, _artifacts(other, others), saved))
    _load(other, others, path)
    assert all(map(torch.equal, _artifacts(other, others), saved))
    for step in (2, 3):
        found, expected = _step(other, others, step), _step(model, optimizer, step)
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, _artifacts(other, others), _artifacts(model, optimizer)))
    files = [each for each in path.iterdir() if each.suffix == ".distcp"]
    assert files and not any(b"ProcessGroup" in each.read_bytes() for each in files)


@pytest.mark.filterwarnings("ignore:.*cpu device mesh.*:UserWarning")
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_fork_after_a_load_of_dcp_equals_the_uninterrupted_run(
    ranks: Ranks, tmp_path: Path, recipe: str, is_async: bool
) -> None:
    """In outputs, losses, gradients, main weights, moments, counts, codes, scales, histories."""
    ranks(2).run(_fork_equals_uninterrupted, recipe, is_async, tmp_path / "dcp")


def _set_grads(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        full = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(full, parameter.device_mesh, parameter.placements)


def _reshard(recipe: str, source: Path | None, target: Path) -> dict[str, list[Tensor]]:
    """Load or train, save, and return the rows of this rank."""
    model = shard(new_model(width=ROWS)[:1], mesh_of(dist.get_world_size()))
    megafsdp.quantize_(model, recipe)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for step in range(2 if source is None else 1):
        # Whatever stands there before a load, and other values than those that are loaded.
        _set_grads(model, step if source is None else 5)
        optimizer.step()
    if source is not None:
        _load(model, optimizer, source)
    _save(model, optimizer, target, is_async=False)
    weight = next(model.parameters())
    (found,) = shards_of(model).values()
    scales = found.scales()
    states = [local_object(optimizer.state[weight][n]) for n in ("main_param", "exp_avg")]
    histories = [] if found.state is None else list(found.state.histories())
    return {
        "rows": [found.codes, *(s.reshape(-1) for s in scales.own), *(s.view(-1) for s in states)],
        "all": [*scales.shared, *histories],
    }


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_dcp_moves_between_numbers_of_ranks(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Of 4, 2, 1 and 3 ranks each loads what the one before has saved, bit for bit."""
    seen: list[list[Tensor]] = []
    source = None
    for world_size in (4, 2, 1, 3):
        target = tmp_path / str(world_size)
        answers: list[dict[str, Any]] = ranks(world_size).run(_reshard, recipe, source, target)
        rows = [torch.cat(parts) for parts in zip(*(a["rows"] for a in answers), strict=True)]
        for answer in answers:
            assert all(map(torch.equal, answer["all"], answers[0]["all"]))
        seen.append([*rows, *answers[0]["all"]])
        source = target
    for found in seen[1:]:
        assert all(map(torch.equal, found, seen[0]))


def _interchange(recipe: str, root: Path) -> None:
    """FSDP2 -> engine -> FSDP2; parameters are quantized on both sides."""
    model = sharded(recipe, 2)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for step in range(2):
        _step(model, optimizer, step)
    checkpoint.save(root / "fsdp2", model=model, optimizer=optimizer, step=2)
    policy = MixedPrecisionPolicy(torch.bfloat16, recipe=recipe)
    engine = megafsdp.fully_shard(new_model(), mesh=mesh_of(2), mp_policy=policy)
    engines = FusedAdam(engine.parameters(), lr=1e-3)
    # Beside quantized ones FSDP2 has bf16 parameters, our engine fp32 main weights of all.
    checkpoint.load(root / "fsdp2", model=engine, optimizer=engines, strict="none")
    full = full_state_dict(engine)
    for name, parameter in model.named_parameters():
        main = optimizer.state[parameter].get("main_param", parameter)
        assert isinstance(main, DTensor)
        assert torch.equal(full[name], main.full_tensor().float())
    checkpoint.save(root / "engine", model=engine, optimizer=engines, step=2)
    before = _artifacts(model, optimizer)
    other = sharded(recipe, 2)
    others = FusedAdam(other.parameters(), lr=1e-3)
    _step(other, others, 9)
    checkpoint.load(root / "engine", model=other, optimizer=others, strict="none")
    if recipe == "fp8_delayed":
        # Histories are not in it: scales begin anew.
        for name in shards_of(other):
            assert_codes_of(other.get_parameter(name), full[name], recipe)
        return
    for parameter, mine in zip(other.parameters(), model.parameters(), strict=True):
        found, expected = others.state[parameter], optimizer.state[mine]
        assert found["step"] == expected["step"]
        assert torch.equal(local_object(found["exp_avg"]), local_object(expected["exp_avg"]))
    for name, each in shards_of(other).items():
        mine = shards_of(model)[name]
        assert torch.equal(each.codes, mine.codes) and torch.equal(each.table, mine.table)
    for step in (2, 3):
        assert all(map(torch.equal, _step(other, others, step), _step(model, optimizer, step)))
    assert before and all(map(torch.equal, _artifacts(other, others), _artifacts(model, optimizer)))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_our_checkpoints_go_to_the_engine_and_back(
    ranks: Ranks, tmp_path: Path, recipe: str
) -> None:
    """Main weights are stored under the parameters' names; codes are made of them anew."""
    ranks(2).run(_interchange, recipe, tmp_path)


def _trained(recipe: str) -> tuple[nn.Module, FusedAdam, dict[str, Tensor]]:
    """Return a model after a step, its optimizer, and its whole main weights."""
    model = sharded(recipe, 2)
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    _step(model, optimizer, 0)
    wholes = {
        name: optimizer.state[p].get("main_param", p).full_tensor()  # type: ignore[union-attr]
        for name, p in model.named_parameters()
    }
    return model, optimizer, wholes


def _save_trained(recipe: str, path: Path) -> dict[str, Tensor]:
    model, optimizer, wholes = _trained(recipe)
    checkpoint.save(path, model=model, optimizer=optimizer, step=1)
    assert set(model.state_dict()) == set(new_model().state_dict()), "nothing beside the values"
    result = sharded(recipe, 2).load_state_dict(model.state_dict(), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    return wholes


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_exports_have_main_weights_in_fp32(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Whole, under the names of the plain model, which a strict load takes too."""
    wholes = ranks(2).run(_save_trained, recipe, tmp_path / "saved")[0]
    to_torch(tmp_path / "saved", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)["model"]
    assert set(found) == set(wholes)
    for name, whole in wholes.items():
        assert torch.equal(found[name], whole)
        assert (found[name].dtype == torch.float32) == (whole.ndim == 2)


def _to_hub_and_back(recipe: str, path: Path) -> None:
    model, _, wholes = _trained(recipe)
    config = {"model_type": "toy"}
    checkpoint.export_hf(model, path, config=config)
    found = load_file(path / "model.safetensors")
    assert set(found) == set(wholes)
    for name, whole in wholes.items():
        assert found[name].dtype == whole.dtype and torch.equal(found[name], whole)
    imported, expected = sharded(recipe, 2), sharded(recipe, 2)
    before = {name: each.clone() for name, each in shards_of(imported).items()}
    checkpoint.import_hf(imported, path, config=config)
    megafsdp.requantize_(expected, {name: wholes[name] for name in before})
    for name, each in shards_of(expected).items():
        got = shards_of(imported)[name]
        assert torch.equal(got.codes, each.codes) and torch.equal(got.table, each.table)
        assert not torch.equal(got.codes, before[name].codes)
    again = checkpoint.export_hf(imported, path.with_name("again"), config=config)
    assert all(map(torch.equal, load_file(again / "model.safetensors").values(), found.values()))


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_hugging_face_files_have_main_weights(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """In fp32, bit for bit; an import makes codes of them, and loses none of their bits."""
    ranks(2).run(_to_hub_and_back, recipe, tmp_path / "hub")


def _unreadable_on_one_rank(path: Path) -> None:
    model, optimizer, _ = _trained("mxfp8")
    checkpoint.save(path, model=model, optimizer=optimizer, step=1)
    other = sharded("mxfp8", 2)

    def broken(reader: RecordReader, record: object) -> Tensor:
        raise OSError("the disk is gone")

    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(RecordReader, "read_tensor", broken))
        with pytest.raises(CheckpointError, match=r"the disk is gone \(raised on 1 of 2 ranks"):
            checkpoint.load(path, model=other)
    checkpoint.load(path, model=other)
    for name, each in shards_of(model).items():
        got = shards_of(other)[name]
        assert torch.equal(got.codes, each.codes) and torch.equal(got.table, each.table)


def test_what_one_rank_cannot_read_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """Not waited for in the collective that makes codes; the next load makes them."""
    ranks(2).run(_unreadable_on_one_rank, tmp_path)


def _other_format(path: Path) -> None:
    dcp.save({"model": sharded("mxfp8", 2).state_dict()}, checkpoint_id=path)
    for recipe in ("fp8_block", "nvfp4", "fp8_current"):
        model = sharded(recipe, 2)
        name = "3.weight"
        before = shards_of(model)[name].clone()
        with pytest.raises(dcp.CheckpointException, match=f"a tensor of format {recipe}"):
            dcp.load({"model": {name: model.state_dict()[name]}}, checkpoint_id=path)
        now = shards_of(model)[name]
        assert torch.equal(now.codes, before.codes) and torch.equal(now.table, before.table)


def test_files_of_another_format_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """By torch's own load, on all ranks; the parameter stays as it is."""
    ranks(2).run(_other_format, tmp_path / "dcp")
