"""One file of plain torch: what its user loads, and the way back, bit by bit."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.tools.diff import diff
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.torch_file import _mapped, from_torch, to_torch
from megafsdp.checkpoint.tools.verify import verify
from megafsdp.errors import CheckpointError
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
from tests.checkpoint.state.fused_toy import TIED, FusedToy, save_fused
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _trained(kind: str = "adamw", salt: int = 0) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy()
    fill(model, salt)
    optimizer = make_optimizer(kind, model)
    train(model, optimizer)
    return model, optimizer


def _save_sharded(root: Path) -> None:
    model = Toy()
    fill(model)
    shard(model, whole_mesh())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer, extra={"consumed": 7})


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_plain_torch_loads_the_file(ranks: Ranks, tmp_path: Path, num_ranks: int) -> None:
    """``load_state_dict`` of a module and of an optimizer take it as it is; no step is needed."""
    ranks(num_ranks).run(_save_sharded, tmp_path / "a")
    file = to_torch(tmp_path / "a", tmp_path / "new" / "whole.pt")
    tree = torch.load(file, weights_only=True)
    wanted_model, wanted_optimizer = _trained()
    model = Toy()
    optimizer = make_optimizer("adamw", model)
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    wanted = full_state(wanted_model, wanted_optimizer)
    assert differences(wanted, full_state(model, optimizer)) == []
    assert tree["extra"] == {"consumed": 7} and tree["common"]["step"] == 2
    assert set(tree["rng"]) == {str(rank) for rank in range(num_ranks)}
    # The random states are those of ranks of these degrees, on the way back too.
    assert tree["common"]["degrees"] == {}
    tree["common"]["degrees"] = {"tp": 2}
    torch.save(tree, file)
    with CheckpointReader(from_torch(file, tmp_path / "b")) as reader:
        assert reader.object("common") == tree["common"]
    # Tied names are one tensor, and the scratch files are gone.
    assert tree["model"]["head.weight"].data_ptr() == tree["model"]["embed.weight"].data_ptr()
    assert [path.name for path in file.parent.iterdir()] == ["whole.pt"]


def test_scratch_files_have_their_room_before_they_are_mapped(tmp_path: Path) -> None:
    """A page without a place on a full disk would end the process with SIGBUS."""
    mapped = _mapped(tmp_path / "0", (1 << 18,), torch.float32)
    assert (tmp_path / "0").stat().st_blocks * 512 >= mapped.nbytes
    mapped.fill_(1)


@pytest.mark.parametrize("name", ["a.txt/whole.pt", "a.txt/new/whole.pt"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """With the path, and before anything is read."""
    (tmp_path / "a.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"a folder for the file.*a\.txt"):
        to_torch(tmp_path / "missing", tmp_path / name)


@pytest.mark.parametrize("what", ["os.posix_fallocate", "torch.save"])
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, what: str) -> None:
    """Scratch files go, of this conversion and of one that died, and an older file stays."""
    model, _ = _trained()
    save(tmp_path / "a", step=1, model=model)
    file = tmp_path / "new" / "whole.pt"
    died = tmp_path / "new" / ".tmp-whole.pt-0123abcd"
    died.mkdir(parents=True)
    file.write_text("older")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch(what, side_effect=full), pytest.raises(CheckpointError, match="room for"):
        to_torch(tmp_path / "a", file)
    assert [path.name for path in file.parent.iterdir()] == ["whole.pt"]
    assert file.read_text() == "older"


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_the_way_back_is_exact(tmp_path: Path, kind: str) -> None:
    """Checkpoint, file, checkpoint: every key is equal, and a run resumes from it."""
    model, optimizer = _trained(kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    extra = {"ids": torch.arange(3), "name": "x"}
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    save(tmp_path / "a", step=5, extra=extra, **given)
    file = to_torch(tmp_path / "a", tmp_path / "whole.pt")
    path = from_torch(file, tmp_path / "b", fused_like=tmp_path / "a")
    assert path.name == "iter_0000005"
    report = diff(tmp_path / "a", tmp_path / "b")
    assert set(report.objects) <= {"common"} and not report.tensors
    assert report.only_left == report.only_right == ()
    assert verify(path).is_sound
    other = Toy()
    other_optimizer = make_optimizer(kind, other)
    load(tmp_path / "b", model=other, optimizer=other_optimizer)
    wanted = full_state(model, optimizer)
    assert differences(wanted, full_state(other, other_optimizer)) == []


def test_a_state_dict_of_torch_becomes_a_checkpoint(tmp_path: Path) -> None:
    """What ``get_state_dict`` returns, and a module's own state dict alone."""
    model, optimizer = _trained()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    torch.save({"model": of_model, "optimizer": of_optimizer, "epoch": 3}, tmp_path / "both.pt")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    wanted = full_state(model, optimizer)
    other = Toy()
    other_optimizer = make_optimizer("adamw", other)
    like = save(tmp_path / "like", step=1, model=Toy())
    from_torch(tmp_path / "both.pt", tmp_path / "both", step=9, fused_like=like)
    load(tmp_path / "both", model=other, optimizer=other_optimizer, step=9)
    assert differences(wanted, full_state(other, other_optimizer)) == []
    with CheckpointReader(tmp_path / "both") as reader:
        assert reader.object("epoch") == 3
    other = Toy()
    from_torch(tmp_path / "model.pt", tmp_path / "model", fused_like=like)
    load(tmp_path / "model", model=other, step=0)
    assert differences(full_state(model, None), full_state(other, None)) == []


def test_a_flattened_optimizer_is_refused(tmp_path: Path) -> None:
    """Its states would be left out, as no key of theirs is one that is read."""
    model, optimizer = _trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    torch.save({"model": of_model, "optimizer": of_optimizer}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"'state\.\S+ beside state and param_groups"):
        from_torch(tmp_path / "a.pt", tmp_path / "b")


def test_random_states_of_another_form_are_left_alone_by_a_load(tmp_path: Path) -> None:
    """They are not those of ranks, so the ranks keep their own."""
    model, optimizer = _trained()
    states = {"torch": {"seed": 3}}
    of_model, of_optimizer = get_state_dict(model, optimizer)
    tree = {"model": of_model, "optimizer": of_optimizer, "rng": states}
    torch.save(tree, tmp_path / "a.pt")
    path = from_torch(
        tmp_path / "a.pt", tmp_path / "b", fused_like=save(tmp_path / "like", step=0, model=Toy())
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    load(path, model=model, optimizer=optimizer)
    assert torch.equal(torch.get_rng_state(), before)
    with CheckpointReader(path) as reader:
        assert reader.object("rng.torch") == states["torch"]


def test_extra_values_without_names_are_refused(tmp_path: Path) -> None:
    """A load returns a dict of them."""
    torch.save({"model": Toy().state_dict(), "extra": 5}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a dict of the caller's values, got 5.*'extra'"):
        from_torch(tmp_path / "a.pt", tmp_path / "b")


def test_numbered_parameters_need_names(tmp_path: Path) -> None:
    """An optimizer's own state dict is taken if it lists names, and refused if not."""
    model, optimizer = _trained()
    file = tmp_path / "a.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    with pytest.raises(CheckpointError, match=r"numbered, not named.*a\.pt"):
        from_torch(file, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(named, lr=0.01)
    train(model, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    like = save(tmp_path / "like", step=1, model=Toy())
    from_torch(file, tmp_path / "b", fused_like=like)
    other = Toy()
    other_optimizer = torch.optim.AdamW([p for p in other.parameters() if p.requires_grad])
    load(tmp_path / "b", model=other, optimizer=other_optimizer)
    assert torch.equal(
        other_optimizer.state[other.embed.weight]["exp_avg"],
        optimizer.state[model.embed.weight]["exp_avg"],
    )


class _WithExtraState(nn.Linear):
    def __init__(self, value: object) -> None:
        super().__init__(2, 2)
        self.value = value

    def get_extra_state(self) -> object:
        return self.value

    def set_extra_state(self, state: object) -> None:
        self.value = state


@pytest.mark.parametrize("value", [{"count": 3}, torch.arange(4)], ids=["dict", "tensor"])
def test_extra_state_goes_both_ways(tmp_path: Path, value: object) -> None:
    """It is the module's own, whatever its type."""
    save(tmp_path / "a", step=1, model=nn.Sequential(_WithExtraState(value)))
    from_torch(to_torch(tmp_path / "a", tmp_path / "a.pt"), tmp_path / "b")
    model = nn.Sequential(_WithExtraState(None))
    load(tmp_path / "b", model=model)
    model.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True)["model"])
    found = model[0].value
    assert torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value


@pytest.mark.parametrize(
    "content", [None, b"nonsense", [1, 2], {"a": 1}, {"model": 3}, {3: torch.ones(2)}], ids=str
)
def test_other_files_are_refused(tmp_path: Path, content: object) -> None:
    """A missing file, no file of torch's, and what is no state dict, by name."""
    file = tmp_path / "a.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        from_torch(file, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_old_file_stays_if_the_checkpoint_is_damaged(tmp_path: Path) -> None:
    """The file is replaced in one step, when all of it is written."""
    save(tmp_path / "a", step=1, model=Toy())
    file = to_torch(tmp_path / "a", tmp_path / "out" / "a.pt")
    before = file.read_bytes()
    data = tmp_path / "a/iter_0000001/__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[1000] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.embed\.weight"):
        to_torch(tmp_path / "a", file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_torch_itself_reads_the_directory(ranks: Ranks, tmp_path: Path, num_ranks: int) -> None:
    """``dcp_to_torch_save`` gives the tensors that the reader gives, under the same names."""
    ranks(num_ranks).run(_save_sharded, tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a/iter_0000002", tmp_path / "by_torch.pt")
    to_torch(tmp_path / "a", tmp_path / "by_us.pt")
    by_torch, by_us = (
        torch.load(tmp_path / f"by_{who}.pt", weights_only=True) for who in ("torch", "us")
    )
    # .metadata names the parts of a fused tensor, too.
    parts = {"fused.weight_w", "fused.weight_v"}
    assert by_torch["model"].keys() - parts == by_us["model"].keys()
    for name, tensor in by_us["model"].items():
        assert by_torch["model"][name].dtype == tensor.dtype
        assert torch.equal(by_torch["model"][name], tensor)
    states = by_us["optimizer"]["state"]
    assert by_torch["optimizer"]["state"].keys() - parts == states.keys() and len(states) == 2
    for name, state in states.items():
        for state_name, tensor in state.items():
            assert torch.equal(by_torch["optimizer"]["state"][name][state_name], tensor)
    assert by_torch["extra"] == by_us["extra"] == {"consumed": 7}


def test_fused_parameters_are_whole_in_the_file(tmp_path: Path) -> None:
    """Plain torch finds the names of its modules; split like the original, all is as before."""
    tensors = save_fused(tmp_path / "a")
    file = to_torch(tmp_path / "a", tmp_path / "a.pt")
    tree = torch.load(file, weights_only=True)
    model = FusedToy()
    model.load_state_dict(tree["model"])
    assert all(torch.equal(tensors[f"model.{k}"], v) for k, v in tree["model"].items())
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(tree["optimizer"])
    key = "optimizer.state.first.up.bias.exp_avg"
    assert torch.equal(optimizer.state[model.first.up.bias]["exp_avg"], tensors[key])
    for like in (tmp_path / "a", tmp_path / "a/iter_0000002"):
        path = from_torch(file, tmp_path / "split", fused_like=like, step=len(str(like)))
        assert diff(tmp_path / "a", path, ignore=["common"]).is_equal
        with CheckpointReader(path) as found, CheckpointReader(tmp_path / "a") as wanted:
            assert found.fused == wanted.fused
            assert found.manifest.aliases == wanted.manifest.aliases
            assert set(found.keys()) == set(wanted.keys())
        assert verify(path).is_sound
        other = FusedToy()
        load(path, model=other, optimizer=torch.optim.AdamW(other.parameters()))
        assert torch.equal(other.across.weight, model.across.weight)


def test_a_file_alone_is_stored_whole(tmp_path: Path) -> None:
    """Nothing is split without a declaration; the values are the same under the whole names."""
    tensors = save_fused(tmp_path / "a")
    path = from_torch(to_torch(tmp_path / "a", tmp_path / "a.pt"), tmp_path / "whole")
    with CheckpointReader(path) as reader:
        assert {*reader.keys(), *(f"model.{name}" for name in TIED)} == set(
            tensors
        ) and reader.fused == {}
        assert reader.manifest.aliases == {"model.second.up.weight": "model.first.up.weight"}
    report = diff(tmp_path / "a", path, ignore=["common"])
    assert report.is_equal and report.num_equal >= len(tensors)


def test_parts_of_other_sizes_are_refused(tmp_path: Path) -> None:
    """A file of another model is not split by force; both shapes are named."""
    save_fused(tmp_path / "a")
    torch.save({"first.up.weight": torch.ones(9, 6)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"shape \(10, 6\).*got \(9, 6\).*first\.up\.weight"):
        from_torch(tmp_path / "a.pt", tmp_path / "b", fused_like=tmp_path / "a")
    assert not list((tmp_path / "b").iterdir())
