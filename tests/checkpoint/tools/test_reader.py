"""Reading without a model: whole tensors from any ranks' chunks, objects, damage by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.format.manifest import read_manifest, write_manifest
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from tests.checkpoint.faulty_store import FaultyStore
from tests.checkpoint.sharding import (
    Toy,
    fill,
    full,
    make_optimizer,
    shard,
    train,
    whole_mesh,
)
from tests.checkpoint.state.fused_toy import PARTS, TIED, save_fused
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _save_sharded(root: Path, num_outer: int) -> dict[str, torch.Tensor]:
    model = Toy()
    fill(model)
    shard(model, whole_mesh(num_outer))
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer, extra={"consumed": 7})
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {f"model.{name}": full(value) for name, value in model.state_dict().items()}
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            tensors[f"optimizer.state.{names[parameter]}.{name}"] = full(value)
    return tensors


@pytest.mark.parametrize(("num_ranks", "num_outer"), [(1, 1), (3, 1), (4, 2)])
def test_tensors_are_those_of_the_ranks(
    ranks: Ranks, tmp_path: Path, num_ranks: int, num_outer: int
) -> None:
    """Every stored tensor is joined from its chunks bit by bit, tied names included."""
    tensors = ranks(num_ranks).run(_save_sharded, tmp_path, num_outer)[0]
    with CheckpointReader(tmp_path) as reader:
        assert {*reader.whole_keys(), *reader.manifest.aliases} == set(tensors)
        assert list(reader.manifest.tensors) == reader.keys()
        num_chunks = len(reader.manifest.tensors["model.embed.weight"].chunks)
        assert num_chunks == num_ranks // num_outer
        for key, wanted in tensors.items():
            found = reader.tensor(key)
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
            assert reader.shape(key) == tuple(wanted.shape)
        assert reader.object("extra") == {"consumed": 7}


def test_unknown_keys_are_refused(tmp_path: Path) -> None:
    """Tensors and objects that are not there are named."""
    save(tmp_path, step=1, model=Toy())
    with CheckpointReader(tmp_path, step=1) as reader:
        with pytest.raises(CheckpointError, match=r"tensor 'model\.nothing'"):
            reader.tensor("model.nothing")
        with pytest.raises(CheckpointError, match="object 'nothing'"):
            reader.object("nothing")


def test_damaged_records_are_not_trusted(tmp_path: Path) -> None:
    """A flipped byte of a tensor or an object is found when it is read, with file and key."""
    path = save(tmp_path, step=1, model=Toy())
    manifest = read_manifest(path)
    (chunk,) = manifest.tensors["model.embed.weight"].chunks
    content = bytearray((path / chunk.record.file).read_bytes())
    for record in (chunk.record, manifest.objects["extra"]):
        content[record.offset + record.nbytes // 2] ^= 1
    (path / chunk.record.file).write_bytes(content)
    with CheckpointReader(path) as reader:
        for key in ("model.embed.weight", "model.head.weight"):
            with pytest.raises(CheckpointError, match=r"model\.embed\.weight.*__0_0\.distcp"):
                reader.tensor(key)
        with pytest.raises(CheckpointError, match=r"extra.*__0_0\.distcp"):
            reader.object("extra")
        assert reader.tensor("model.norm.weight").shape == (6,)


def test_chunks_must_be_those_of_the_manifest(tmp_path: Path) -> None:
    """Elements left out, and a record of another shape, are refused rather than guessed."""
    path = save(tmp_path, step=1, model=Toy())
    manifest = read_manifest(path)
    entry = manifest.tensors["model.embed.weight"]
    (chunk,) = entry.chunks
    shorter = chunk._replace(region=chunk.region._replace(sizes=(320, 6)))
    manifest.tensors["model.embed.weight"] = replace(entry, chunks=(shorter,))
    norm = manifest.tensors["model.norm.weight"]
    manifest.tensors["model.norm.weight"] = replace(norm, dtype="bfloat16")
    write_manifest(manifest, path)
    with CheckpointReader(path) as reader:
        with pytest.raises(CheckpointError, match=r"fill shape \(321, 6\)"):
            reader.tensor("model.embed.weight")
        with pytest.raises(CheckpointError, match=r"bfloat16.*float32"):
            reader.tensor("model.norm.weight")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_parts_are_joined_under_the_whole_name(
    ranks: Ranks, tmp_path: Path, num_ranks: int
) -> None:
    """Weights and states of fused parameters are whole again; the parts stay readable."""
    tensors = ranks(num_ranks).run(save_fused, tmp_path)[0]
    with CheckpointReader(tmp_path) as reader:
        names = {*reader.whole_keys(), *reader.whole_aliases()}
        assert names == set(tensors)
        assert reader.whole_aliases() == {"model.second.up.weight": "model.first.up.weight"}
        for key, wanted in tensors.items():
            assert reader.shape(key) == tuple(wanted.shape)
            assert reader.dtype(key) == wanted.dtype
            assert torch.equal(reader.tensor(key), wanted)
            own_memory = torch.full_like(wanted, -1)
            reader.read_into(own_memory, key)
            assert torch.equal(own_memory, wanted)
        for name, parts in (PARTS | TIED).items():
            assert f"model.{name}" not in reader.manifest.tensors
            dim = 1 if name == "across.weight" else 0
            pieces = [reader.tensor(f"model.{part}") for part in parts]
            assert torch.equal(torch.cat(pieces, dim), tensors[f"model.{name}"])
        gate, up = (reader.tensor(f"model.grouped.weight_{part}") for part in "wv")
        in_groups = torch.cat([gate[:4], up[:2], gate[4:], up[2:]])
        assert torch.equal(in_groups, tensors["model.grouped.weight"])


def test_scalars_of_parts_must_agree(tmp_path: Path) -> None:
    """A count of steps that differs between parts has no whole value."""
    with CheckpointWriter(tmp_path, step=1) as writer:
        for part, count in (("a", 3.0), ("b", 4.0)):
            writer.add_tensor(f"optimizer.state.{part}.step", torch.tensor(count))
        parts = ["optimizer.state.a.step", "optimizer.state.b.step"]
        writer.fuse("optimizer.state.whole.step", parts)
        writer.publish()
    with (
        CheckpointReader(tmp_path) as reader,
        pytest.raises(CheckpointError, match=r"one value.*'optimizer\.state\.b\.step': 4\.0"),
    ):
        reader.tensor("optimizer.state.whole.step")


def test_a_checkpoint_that_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    """As a save with keep_last makes it: the error is ours, which tools print without traceback."""
    fill(model := Toy())
    save(tmp_path, step=1, model=model)
    with CheckpointReader(tmp_path, 1) as reader:
        save(tmp_path, step=2, model=model, keep_last=1)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp.*keep_last"):
            reader.tensor("model.embed.weight")


def test_an_object_that_goes_while_it_is_read_is_named(tmp_path: Path) -> None:
    """An open object has no bytes any more, where an open file has: the bucket is not to blame."""
    root = FaultyStore(tmp_path).root
    # Longer than what is fetched at once.
    model = torch.nn.Linear(1024, 1100)
    save(root, step=1, model=model)
    with CheckpointReader(root, 1) as reader:
        reader.object("extra")
        save(root, step=2, model=model, keep_last=1)
        with pytest.raises(CheckpointError, match=r"__0_0.*retires or replaces this checkpoint"):
            reader.tensor("model.weight")
