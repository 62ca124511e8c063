"""Directories of torch DCP are read whole, and damage is named."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from megafsdp.checkpoint.tools.dcp_reader import DCPDirectory
from megafsdp.errors import CheckpointError
from tests.checkpoint.megatron import megatron_toy as toy
from tests.ranks import Ranks


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "rows": torch.randn(5, 3, generator=generator),
        "columns": torch.randn(4, 3, generator=generator).bfloat16(),
        "one_row": torch.randn(1, 2, generator=generator),
    }


def _save_sharded(directory: Path) -> None:
    mesh = init_device_mesh("cpu", (3,))
    state: dict[str, object] = {
        name: distribute_tensor(tensor, mesh, [Shard(1 if name == "columns" else 0)])
        for name, tensor in _tensors().items()
    }
    dcp.save(
        state | {"scalar": torch.tensor(4.0), "words": ["a", (1, None)]}, checkpoint_id=directory
    )


def test_tensors_of_several_ranks_are_joined(ranks: Ranks, tmp_path: Path) -> None:
    """Chunks along either dim, a tensor with fewer rows than ranks, a scalar, an object."""
    ranks(3).run(_save_sharded, tmp_path / "saved")
    with DCPDirectory(tmp_path / "saved") as directory:
        wanted = _tensors() | {"scalar": torch.tensor(4.0)}
        assert set(directory.tensors) == set(wanted)
        for name, tensor in wanted.items():
            found = directory.tensor(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor)
        assert directory.value("words") == ["a", (1, None)]
        assert len(directory.tensors["rows"].chunks) == 3


def _flip_metadata(path: Path) -> None:
    metadata = path / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:-30])


def _lie_about_a_file(path: Path) -> None:
    metadata = path / ".metadata"
    facts = pickle.loads(metadata.read_bytes())
    next(iter(facts.storage_data.values())).relative_path = "../elsewhere"
    metadata.write_bytes(pickle.dumps(facts))


def _lose_a_chunk(path: Path) -> None:
    metadata = path / ".metadata"
    facts = pickle.loads(metadata.read_bytes())
    facts.state_dict_metadata["rows"].size = torch.Size((6, 3))
    metadata.write_bytes(pickle.dumps(facts))


def _cut_the_file(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def _zero_the_file(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(bytes(len(file.read_bytes())))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_metadata, ".metadata'"),
        (_lie_about_a_file, "'../elsewhere'"),
        (_lose_a_chunk, "'rows' of"),
        (_cut_the_file, "bytes. In"),
        (_zero_the_file, "a record of '"),
        (lambda path: (path / "__0_0.distcp").unlink(), "no such file"),
        (lambda path: (path / ".metadata").unlink(), "steps []"),
    ],
    ids=["metadata", "path", "chunk", "cut", "zeros", "file", "nothing"],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    """The file or the key is in the message."""
    path = toy.save(dict(_tensors()), tmp_path) / f"iter_{toy.STEP:07d}"
    damage(path)
    with pytest.raises(CheckpointError) as caught, DCPDirectory(path) as directory:
        for key in directory.tensors:
            directory.tensor(key)
    assert message in str(caught.value)


def test_metadata_runs_nothing(tmp_path: Path) -> None:
    """A call hidden in ``.metadata`` is not made, where torch's own reader makes it."""
    path = toy.save(dict(_tensors()), tmp_path) / f"iter_{toy.STEP:07d}"
    facts = pickle.loads((path / ".metadata").read_bytes())
    facts.planner_data = toy.Bomb(tmp_path / "sprung")
    (path / ".metadata").write_bytes(pickle.dumps(facts))
    with DCPDirectory(path) as directory:
        assert torch.equal(directory.tensor("rows"), _tensors()["rows"])
    assert not (tmp_path / "sprung").exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert (tmp_path / "sprung").exists()


def test_a_step_is_chosen_by_the_tracker_or_by_number(tmp_path: Path) -> None:
    """A root, one of its steps, a directory itself; a step that is not there is an error."""
    toy.save(dict(_tensors()), tmp_path)
    for place in (DCPDirectory(tmp_path), DCPDirectory(tmp_path, toy.STEP)):
        with place as directory:
            assert directory.directory == tmp_path / f"iter_{toy.STEP:07d}"
    with pytest.raises(CheckpointError, match="step 9, got published steps \\[2\\]"):
        DCPDirectory(tmp_path, 9)
