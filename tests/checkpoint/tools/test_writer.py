"""Writing without a model: what a load, a reader and torch find is what was added."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megafsdp.checkpoint import latest_step, load, save
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from tests.checkpoint.sharding import Toy, differences, fill, full_state, make_optimizer, train


def test_a_copy_made_by_hand_loads_as_the_original(tmp_path: Path) -> None:
    """Reader to writer is a checkpoint that load() and torch read, with one file of records."""
    model = Toy()
    fill(model)
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    save(tmp_path / "a", step=3, model=model, optimizer=optimizer)
    with (
        CheckpointReader(tmp_path / "a") as reader,
        CheckpointWriter(tmp_path / "b", step=3, world_size=1) as writer,
    ):
        keys = reader.keys()
        for key in keys:
            writer.add_tensor(key, reader.tensor(key), chunk_rows=4)
        for key in reader.manifest.objects:
            writer.add_object(key, reader.object(key))
        for key, target in reader.manifest.aliases.items():
            writer.alias(key, target)
        for key, joining in reader.fused.items():
            writer.fuse(key, **joining)
        path = writer.publish()
    assert read_manifest(path).fused_into == reader.fused != {}
    assert latest_step(tmp_path / "b") == 3
    assert {file.name for file in path.iterdir()} == {
        file.name for file in (tmp_path / "a" / path.name).iterdir()
    }
    other = Toy()
    other_optimizer = make_optimizer("adamw", other)
    load(tmp_path / "b", model=other, optimizer=other_optimizer)
    assert differences(full_state(model, optimizer), full_state(other, other_optimizer)) == []
    dcp_to_torch_save(path, tmp_path / "by_torch.pt")
    by_torch = torch.load(tmp_path / "by_torch.pt", weights_only=True)
    assert torch.equal(by_torch["model"]["embed.weight"], model.embed.weight)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(3.5), torch.zeros(0, 4), torch.arange(7), torch.randn(5, 3).t(), torch.ones(1)],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
@pytest.mark.parametrize("chunk_rows", [None, 1, 2, 100])
def test_any_shape_comes_back(tmp_path: Path, tensor: torch.Tensor, chunk_rows: int | None) -> None:
    """Scalars, empty tensors, transposed ones, in chunks of any number of rows."""
    with CheckpointWriter(tmp_path, step=0) as writer:
        writer.add_tensor("extra_tensor", tensor, chunk_rows=chunk_rows)
        writer.publish()
    with CheckpointReader(tmp_path) as reader:
        found = reader.tensor("extra_tensor")
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        assert reader.object("extra") == {}


def test_a_weights_only_checkpoint_loads_beside_an_optimizer(tmp_path: Path) -> None:
    """Objects that load() asks for are made, and random states are left alone."""
    model = Toy()
    fill(model)
    with CheckpointWriter(tmp_path, step=0) as writer:
        for name, tensor in model.state_dict().items():
            if name == "fused.weight":
                writer.add_tensor("model.fused.weight_w", tensor[:5])
                writer.add_tensor("model.fused.weight_v", tensor[5:])
            elif name != "head.weight":
                writer.add_tensor(f"model.{name}", tensor)
        writer.alias("model.head.weight", "model.embed.weight")
        writer.publish()
    other = Toy()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    optimizer = make_optimizer("adamw", other)
    assert load(tmp_path, model=other, optimizer=optimizer, strict="model") == {}
    assert differences(full_state(model, None), full_state(other, None)) == []
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_published_after_an_error(tmp_path: Path) -> None:
    """What was written before is discarded, and an older step stays the latest."""
    with CheckpointWriter(tmp_path, step=1) as writer:
        writer.publish()
    with pytest.raises(ZeroDivisionError), CheckpointWriter(tmp_path, step=2) as writer:
        writer.add_tensor("model.a", torch.ones(2))
        raise ZeroDivisionError
    with CheckpointWriter(tmp_path, step=3):
        pass
    assert latest_step(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "iter_0000001",
        "latest_checkpointed_iteration.txt",
    ]


@pytest.mark.parametrize("step", [-1, 1.5, None])
def test_what_is_no_step_is_refused(tmp_path: Path, step: object) -> None:
    """Its directory and tracker would be none that a load can read."""
    with pytest.raises(CheckpointError, match=f"at least 0, got {step}"):
        CheckpointWriter(tmp_path / "new", step=step)
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_numpys(tmp_path: Path) -> None:
    """It is published as an integer of Python."""
    with CheckpointWriter(tmp_path, step=np.int64(3)) as writer:
        writer.publish()
    assert latest_step(tmp_path) == 3


def test_a_file_is_no_save_root(tmp_path: Path) -> None:
    """It is named, and stays."""
    (tmp_path / "a.pt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"a directory to save in, got a file.*a\.pt"):
        CheckpointWriter(tmp_path / "a.pt", step=1)
    assert (tmp_path / "a.pt").read_text() == "mine"


def test_keys_are_used_once(tmp_path: Path) -> None:
    """A second tensor, object or tie of the same key, and a tie to nothing, are refused."""
    with CheckpointWriter(tmp_path, step=1) as writer:
        writer.add_tensor("model.a", torch.ones(2))
        for add in (
            lambda: writer.add_tensor("model.a", torch.ones(2)),
            lambda: writer.add_object("model.a", 1),
            lambda: writer.alias("model.a", "model.a"),
            lambda: writer.fuse("model.a", ["model.a"]),
        ):
            with pytest.raises(CheckpointError, match=r"'model\.a' again"):
                add()
        with pytest.raises(CheckpointError, match=r"no tensors \['model\.c'\]"):
            writer.alias("model.b", "model.c")
