"""Checkpoints of parts: files do not depend on degrees, and any degrees load any."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megafsdp import full_state_dict, load_full_state_dict
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.mesh.annotation import annotate, annotation_of
from tests.buffer.parts import cut_model, joined
from tests.checkpoint.sharding import (
    Toy,
    differences,
    fill,
    full_state,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.ranks import Ranks


def _toy(shape: tuple[int, ...] | None, salt: int, num_shard_axes: int = 1) -> Toy:
    """Return a toy: plain, or cut over data axes and tp; no extent is a multiple of tp's 2."""
    model = Toy()
    annotate(model.embed.weight, tp_dim=0)
    annotate(model.fused.weight, tp_dim=0, fused=annotation_of(model.fused.weight).fused)
    fill(model, salt)
    if shape is not None and len(shape) == 1:
        shard(model, whole_mesh())
    elif shape is not None:
        cut_model(model, joined(*shape), num_shard_axes=num_shard_axes)
    return model


def _save(root: Path, shape: tuple[int, ...], num_shard_axes: int) -> dict[str, object]:
    model = _toy(shape, 0, num_shard_axes)
    optimizer = make_optimizer("adamw-foreach", model)
    train(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer)
    state = full_state(model, optimizer)
    # Full state dicts go the same way as full tensors, and back.
    whole = full_state_dict(model)
    other = _toy(shape, 5, num_shard_axes)
    load_full_state_dict(other, whole)
    assert differences(whole, full_state_dict(other)) == []
    return state


def _load(root: Path, shape: tuple[int, ...] | None) -> dict[str, object]:
    model = _toy(shape, 1)
    optimizer = make_optimizer("adamw-foreach", model)
    load(root, model=model, optimizer=optimizer)
    return full_state(model, optimizer)


def _one_process() -> dict[str, object]:
    model = _toy(None, 0)
    optimizer = make_optimizer("adamw-foreach", model)
    train(model, optimizer)
    return full_state(model, optimizer)


def _stored(root: Path) -> dict[str, torch.Tensor]:
    """Read all tensors by torch alone."""
    (directory,) = root.glob("iter_*")
    keys = json.loads((directory / "manifest.json").read_text())["tensors"]
    plain = {
        key: torch.zeros(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for key, entry in keys.items()
    }
    dcp.load(plain, checkpoint_id=str(directory))
    return plain


@pytest.mark.parametrize(
    ("shape", "num_shard_axes"), [((4, 2), 1), ((2, 2), 0), ((2, 1, 2), 1), ((2, 1, 2), 2)]
)
def test_any_degrees_load_the_files_of_any(
    ranks: Ranks, shape: tuple[int, ...], num_shard_axes: int, tmp_path: Path
) -> None:
    """Weights, moments, fused parts; 321 and 5 rows over tp 2: bitwise on 1, 2, 3, 4 ranks."""
    wanted = ranks(1).run(_one_process)[0]
    world_size = torch.Size(shape).numel()
    for state in ranks(world_size).run(_save, tmp_path, shape, num_shard_axes):
        assert differences(wanted, state) == []
    for target in (None, (3,), (1, 2), (2, 2)):
        num_ranks = torch.Size(target or ()).numel()
        for state in ranks(num_ranks).run(_load, tmp_path, target):
            assert differences(wanted, state) == []


def _write(root: Path, shape: tuple[int, ...] | None) -> None:
    save(root, step=1, model=_toy(shape, 0))


def test_files_of_all_degrees_hold_the_same_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """Names, shapes and values are those of one process; what tp repeats is written once."""
    ranks(1).run(_write, tmp_path / "plain", None)
    (wanted,) = ranks(1).run(_stored, tmp_path / "plain")
    for shape in ((2, 2), (1, 3), (2, 1, 2), (2, 1)):
        root = tmp_path / str(shape)
        ranks(torch.Size(shape).numel()).run(_write, root, shape)
        assert differences(wanted, ranks(1).run(_stored, root)[0]) == []
        (manifest,) = root.glob("iter_*/manifest.json")
        for key, entry in json.loads(manifest.read_text())["tensors"].items():
            num_written = sum(math.prod(sizes) for _, sizes, *_ in entry["chunks"])
            assert num_written == wanted[key].numel(), key
        with CheckpointReader(manifest.parent) as reader:
            # An axis of one rank says nothing.
            wanted_degrees = {"tp": shape[-1]} if shape[-1] > 1 else {}
            assert reader.object("common")["degrees"] == wanted_degrees
