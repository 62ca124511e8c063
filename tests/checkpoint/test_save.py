"""Saving: a format that torch DCP reads alone, few collectives, and nothing lost at any instant."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven_layout import Region
from megafsdp.checkpoint import async_save, latest_step, load, save
from megafsdp.checkpoint.format import save_root as on_disk
from megafsdp.checkpoint.format.manifest import Chunk, Record, read_manifest
from megafsdp.checkpoint.format.regions import ReplicaBalance
from megafsdp.checkpoint.state.canonical import CanonicalState
from megafsdp.checkpoint.state.merge import Table, Written, checksum_of_common, describe
from megafsdp.checkpoint.tools.torch_file import from_torch
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
from tests.ranks import RankPool

Ranks = Callable[[int], RankPool]


def _trained(*, is_sharded: bool) -> tuple[Toy, torch.optim.Optimizer]:
    model = Toy()
    fill(model)
    if is_sharded:
        shard(model, whole_mesh())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    return model, optimizer


def _save_sharded(root: Path) -> tuple[Path, dict[str, object]]:
    model, optimizer = _trained(is_sharded=True)
    path = save(root, step=50, model=model, optimizer=optimizer, extra={"consumed": 7})
    return path, full_state(model, optimizer)


def _read_with_dcp(path: Path) -> dict[str, torch.Tensor]:
    model = shard(Toy(), whole_mesh(), padding_rows=5)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    return full_state(model, None)


def test_torch_dcp_alone_reads_it(ranks: Ranks, tmp_path: Path) -> None:
    """``dcp.load`` of ``{"model": model.state_dict()}`` works anywhere, tied names included."""
    (path, saved), *_ = ranks(2).run(_save_sharded, tmp_path)
    assert path == tmp_path / "iter_0000050"
    weights = {name: saved[name] for name in Toy().state_dict()}
    for loaded in ranks(3).run(_read_with_dcp, path):
        assert differences(weights, loaded) == []


def test_dcp_to_torch_save_gives_nested_states(ranks: Ranks, tmp_path: Path) -> None:
    """The converter of torch gives whole tensors under model and optimizer."""
    (path, saved), *_ = ranks(2).run(_save_sharded, tmp_path)
    with warnings.catch_warnings():
        # torch's converter loads without a process group and says so.
        warnings.simplefilter("ignore", UserWarning)
        dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    parts = [whole["model"][f"fused.weight_{suffix}"] for suffix in "wv"]
    assert torch.equal(torch.cat(parts), saved["fused.weight"])
    state = whole["optimizer"]["state"]["embed.weight"]
    assert torch.equal(state["exp_avg_sq"], saved["embed.weight/exp_avg_sq"])
    assert state["step"].item() == 2.0
    assert whole["optimizer"]["param_groups"][0]["names"] == ["embed.weight", "fused.weight"]
    assert whole["extra"] == {"consumed": 7}
    assert set(whole["rng"]) == {"0", "1"}
    assert whole["common"]["step"] == 50
    assert whole["common"]["degrees"] == {}


def test_manifest_states_shapes_parts_ties_and_versions(ranks: Ranks, tmp_path: Path) -> None:
    """The manifest says in JSON what the files hold."""
    (path, _), *_ = ranks(2).run(_save_sharded, tmp_path)
    manifest = read_manifest(path)
    assert (manifest.step, manifest.world_size) == (50, 2)
    assert manifest.versions["torch"] == str(torch.__version__)
    entry = manifest.tensors["model.fused.weight_v"]
    assert (entry.shape, entry.dtype) == ((5, 6), "float32")
    parts = ["model.fused.weight_w", "model.fused.weight_v"]
    assert manifest.fused_into["model.fused.weight"] == {"parts": parts, "dim": 0}
    assert manifest.aliases == {"model.head.weight": "model.embed.weight"}
    assert "model.scratch" not in manifest.tensors
    assert "optimizer.state.norm.weight.exp_avg" not in manifest.tensors
    assert set(manifest.files) == {"__0_0.distcp", "__1_0.distcp", ".metadata"}


def test_every_record_loads_with_weights_only(tmp_path: Path) -> None:
    """No record needs a class that torch would not unpickle by default."""
    model, optimizer = _trained(is_sharded=False)
    path = save(tmp_path, step=1, model=model, optimizer=optimizer)
    manifest = read_manifest(path)
    keys = [*manifest.tensors, *manifest.objects]
    assert len(keys) > 10
    for record in manifest.records(keys):
        with (path / record.file).open("rb") as stream:
            stream.seek(record.offset)
            content = stream.read(record.nbytes)
        (tmp_path / "record").write_bytes(content)
        torch.load(tmp_path / "record", weights_only=True)


_VERBS = (
    "all_gather",
    "gather",
    "broadcast",
    "scatter",
    "reduce",
    "all_reduce",
    "barrier",
    "all_to_all",
)
_DOORS = [name for name in dir(dist) if name.startswith(_VERBS) or name in ("send", "recv")]


@contextmanager
def _counted_calls() -> Iterator[Counter[str]]:
    """Count calls from outside ``torch.distributed`` to any of its collectives."""
    calls: Counter[str] = Counter()
    depth = 0

    def counting(name: str, original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal depth
            # What torch's object collectives call themselves is part of one of ours.
            calls[name] += depth == 0
            depth += 1
            try:
                return original(*args, **kwargs)
            finally:
                depth -= 1

        return call

    with ExitStack() as stack:
        for name in _DOORS:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        yield calls


def _count_collectives(root: Path, num_layers: int) -> list[dict[str, int]]:
    model = nn.Sequential(*(nn.Linear(3, 5) for _ in range(num_layers)))
    fill(model)
    shard(model, whole_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    counts = []
    for action in (
        lambda: save(root, step=num_layers, model=model, optimizer=optimizer),
        lambda: load(root, model=model, optimizer=optimizer),
    ):
        with record_collectives() as record, _counted_calls() as calls:
            action()
        assert sum(record.calls.values()) == sum(calls.values())
        counts.append(dict(record.calls))
    return counts


def test_collectives_are_three_for_a_save_and_two_for_a_load(ranks: Ranks, tmp_path: Path) -> None:
    """The constants do not depend on the number of tensors, and no call bypasses the counters."""
    few = ranks(2).run(_count_collectives, tmp_path / "few", 1)
    many = ranks(2).run(_count_collectives, tmp_path / "many", 40)
    assert few == many
    assert few[0] == [{"broadcast_object": 2, "gather_objects": 1}, {"all_gather_objects": 2}]


def _save_replicated(root: Path) -> tuple[list[int], bool]:
    mesh = whole_mesh()
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    fill(model)
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            module._parameters[name] = nn.Parameter(replicated)
    path = save(root, step=1, model=model)
    manifest = read_manifest(path)
    files = [c.record.file for entry in manifest.tensors.values() for c in entry.chunks]
    before = full_state(model, None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load(root, model=model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [files.count(f"__{r}_0.distcp") for r in range(3)], not differences(
        before, full_state(model, None)
    )


def test_replicated_tensors_are_written_once_and_spread(ranks: Ranks, tmp_path: Path) -> None:
    """Sixteen equal tensors on three ranks are stored once each, by all three."""
    for counts, is_equal in ranks(3).run(_save_replicated, tmp_path):
        assert sum(counts) == 16 and min(counts) >= 4
        assert is_equal


def _save_lying_dtensor(root: Path) -> str:
    mesh = whole_mesh()
    rows = (4, 0)[dist.get_rank()]
    model = nn.Linear(1, 1)
    lying = DTensor.from_local(
        torch.ones(rows, 2),
        mesh,
        [dist.tensor.Shard(0)],
        run_check=False,
        shape=(4, 2),
        stride=(2, 1),
    )
    model.weight = nn.Parameter(lying)
    with pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=model)
    return str(caught.value)


def test_uneven_rows_in_a_plain_dtensor_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Rows that torch would file in the wrong place raise on all ranks; nothing is published."""
    for message in ranks(2).run(_save_lying_dtensor, tmp_path):
        assert "'model.weight'" in message
    assert os.listdir(tmp_path) == []


def test_a_tensor_that_nobody_writes_is_refused(tmp_path: Path) -> None:
    """Chunks that do not fill a tensor are found before anything is published."""
    with (
        mock.patch.object(ReplicaBalance, "is_mine", lambda *unused: False),
        pytest.raises(CheckpointError, match="fill the 1 elements"),
    ):
        save(tmp_path, step=1, model=nn.Linear(1, 1))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("region", [Region((0, 0), (2, 3)), Region((1, 0), (2, 4))])
def test_chunks_of_whole_rows_begin_at_the_first_and_have_all_columns(region: Region) -> None:
    """Two rows of three of the four columns do not fill two rows, nor do the second and third."""
    state = CanonicalState(tensors={"weight": torch.zeros(2, 4)})
    chunk = Chunk(region, Record("file", 0, 1, 0))
    part = Written(checksum_of_common(state), Table({}, {}, {}), [("weight", chunk)])
    with pytest.raises(CheckpointError, match="fill the 8 elements"):
        describe(1, state, [part])


class _Block(nn.Module):
    """Two maps that tp cuts, and a norm that it leaves to each of its ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def _train_beside_tp() -> tuple[_Block, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = _Block()
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    torch_fully_shard(parallelize_module(block, mesh["tp"], styles), mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    block(torch.linspace(-1, 1, 32).view(4, 8)).square().sum().backward()
    optimizer.step()
    return block, optimizer


def _save_beside_tp(root: Path) -> dict[str, object]:
    block, optimizer = _train_beside_tp()
    save(root, step=1, model=block, optimizer=optimizer)
    wanted = full_state(block, optimizer)
    for parameter in block.parameters():
        parameter.data.zero_()
    load(root, model=block, optimizer=optimizer)
    assert differences(full_state(block, optimizer), wanted) == []
    return wanted


def test_parts_on_data_axes_beside_tp_are_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    """Each rank of tp has the norm's rows on a mesh of its own; one chunk of them is described."""
    wanted = ranks(4).run(_save_beside_tp, tmp_path)[0]
    block = _Block()
    optimizer = torch.optim.AdamW(block.parameters(), lr=1e-2)
    load(tmp_path, model=block, optimizer=optimizer)
    assert differences(full_state(block, optimizer), wanted) == []
    assert verify(tmp_path).is_sound


def _save_own_norms(root: Path) -> str:
    block, _ = _train_beside_tp()
    with torch.no_grad():
        block.norm.bias += dist.get_rank() % 2
    with pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=block)
    return str(caught.value)


def test_parts_on_data_axes_with_values_of_their_own_are_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks of tp that hold other values, as experts do, would lose all but one."""
    for message in ranks(4).run(_save_own_norms, tmp_path):
        assert "the same values on all ranks" in message
        assert "'model.norm.bias'" in message
    assert os.listdir(tmp_path) == []


def _save_own_statistics(root: Path) -> None:
    model = nn.BatchNorm1d(4)
    value = 1.0 + dist.get_rank()
    model.running_mean.fill_(value)
    model.running_var.fill_(value)
    model.num_batches_tracked.fill_(int(value))
    save(root, step=1, model=model)


def test_buffers_are_those_of_rank_zero(ranks: Ranks, tmp_path: Path) -> None:
    """Statistics that differ between ranks are never a mixture of several ranks'."""
    ranks(3).run(_save_own_statistics, tmp_path)
    model = nn.BatchNorm1d(4)
    load(tmp_path, model=model)
    assert torch.equal(model.running_mean, torch.ones(4))
    assert torch.equal(model.running_var, torch.ones(4))
    assert model.num_batches_tracked.item() == 1


def _save_with_failing_rank(root: Path) -> str:
    model = shard(Toy(), whole_mesh())
    save(root, step=1, model=model)

    def full_disk(point: str) -> None:
        if point == "file opened" and dist.get_rank() == 1:
            raise OSError(28, "No space left on device")

    with mock.patch.object(on_disk, "reached", full_disk), pytest.raises(CheckpointError) as caught:
        save(root, step=2, model=model)
    return str(caught.value)


def test_a_rank_that_cannot_write_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    """A full disk on one rank raises everywhere and leaves no trace; the older step stays."""
    for message in ranks(2).run(_save_with_failing_rank, tmp_path):
        assert "No space left on device" in message and "first on rank 1" in message
        assert message.startswith("Expected to write step 2, got OSError: [Errno 28]")
        assert f"In '{tmp_path}'. Make room on its disk" in message
    assert latest_step(tmp_path) == 1
    assert sorted(os.listdir(tmp_path)) == ["iter_0000001", on_disk.TRACKER_FILE]


@pytest.mark.parametrize("call", [save, async_save])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, call: Any) -> None:
    """With the step that is not saved, before anything is copied."""
    (tmp_path / "file").touch()
    message = r"to write step 3, got NotADirectoryError: .*file/root'\. Mend what the system names"
    with pytest.raises(CheckpointError, match=message):
        call(tmp_path / "file" / "root", step=3, model=Toy())


def _save_without_random_states(root: Path) -> str:
    model = shard(Toy(), whole_mesh())

    def other_generator() -> dict[str, object]:
        if dist.get_rank() == 1:
            raise ValueError("too many values to unpack")
        return {}

    generators = mock.patch.object(import_module(save.__module__), "rng_state", other_generator)
    with generators, pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=model)
    return str(caught.value)


def test_a_rank_without_random_states_stops_all(ranks: Ranks, tmp_path: Path) -> None:
    """As where one rank has given numpy another generator."""
    for message in ranks(2).run(_save_without_random_states, tmp_path):
        assert "too many values to unpack" in message and "first on rank 1" in message
    assert os.listdir(tmp_path) == []


def _save_different_models(root: Path, differs_in: str) -> str:
    rank = dist.get_rank()
    model = nn.Linear(2, 2 + rank) if differs_in == "shape" else nn.Linear(2, 2)
    if differs_in == "dtype":
        model.to((torch.float32, torch.bfloat16)[rank])
    with pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=model)
    return str(caught.value)


@pytest.mark.parametrize("differs_in", ["shape", "dtype"])
def test_ranks_with_different_models_are_refused(
    ranks: Ranks, tmp_path: Path, differs_in: str
) -> None:
    """Ranks that disagree on names, shapes or dtypes publish nothing."""
    for message in ranks(2).run(_save_different_models, tmp_path, differs_in):
        assert "others on ranks [1]" in message


def _save_other_arguments(root: Path, odd_rank: int, how: str, in_background: bool) -> str:
    arguments = {"directory": root, "step": 5, "keep_last": None}
    if dist.get_rank() == odd_rank:
        arguments[how] = {"directory": root / "other", "step": 6, "keep_last": 0}[how]
    model = shard(Toy(), whole_mesh())
    own = (ValueError, CheckpointError) if dist.get_rank() == odd_rank else CheckpointError
    with pytest.raises(own) as caught:
        if in_background:
            async_save(model=model, **arguments).result()
        else:
            save(model=model, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("odd_rank", [0, 1])
@pytest.mark.parametrize("how", ["directory", "step", "keep_last"])
def test_ranks_that_save_something_else_are_refused(
    ranks: Ranks, tmp_path: Path, how: str, odd_rank: int, in_background: bool
) -> None:
    """All ranks raise, none waits, and nothing is published."""
    words = {
        "directory": f"got step 5 in '{tmp_path / ('' if odd_rank == 0 else 'other')}'",
        "step": f"got step {5 if odd_rank == 0 else 6} in",
        "keep_last": "keep_last to be a whole number of at least 1, got 0",
    }
    for message in ranks(2).run(_save_other_arguments, tmp_path, odd_rank, how, in_background):
        assert words[how] in message
    assert latest_step(tmp_path) is None


@pytest.mark.parametrize(
    ("extra", "place", "kind"),
    [
        ({"path": Path("x")}, "'extra.path'", "PosixPath"),
        ({"f": {"g": [1, len]}}, "'extra.f.g.1'", "builtin_function"),
        ({3: {1, 2}}, "'extra.3'", "builtins.set"),
        ({"seed": 1 << 3000}, "'extra.seed'", "an integer of 3001 bits"),
        ({"day": np.datetime64("2026-01-01")}, "'extra.day'", "numpy.datetime64"),
        ({"time": np.datetime64("2026-01-01", "ns")}, "'extra.time'", "numpy.datetime64"),
        ({"took": np.timedelta64(3, "s")}, "'extra.took'", "numpy.timedelta64"),
        ({"loss": np.longdouble(1.5)}, "'extra.loss'", "numpy.longdouble"),
    ],
)
def test_only_plain_values_are_stored(
    tmp_path: Path, extra: dict[str, object], place: str, kind: str
) -> None:
    """What would not load with ``weights_only=True`` is refused with its place and type."""
    with pytest.raises(CheckpointError, match=place) as caught:
        save(tmp_path, step=1, model=nn.Linear(1, 1), extra=extra)
    assert kind in str(caught.value)
    assert latest_step(tmp_path) is None


def test_integers_come_back_up_to_the_bound(tmp_path: Path) -> None:
    """Seeds of 128 bits are stored, and so is the largest integer that is not refused."""
    extra = {"seed": (1 << 128) - 1, "most": (1 << 2039) - 1, "least": 1 - (1 << 2039)}
    save(tmp_path, step=1, model=nn.Linear(1, 1), extra=extra)
    assert load(tmp_path) == extra


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (torch.Tensor.to_sparse_csr, "sparse_csr"),
        (lambda eye: torch.quantize_per_tensor(eye, 0.1, 0, torch.qint8), "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_dense_are_refused(
    tmp_path: Path, make: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> None:
    """By a save, and by a load before it touches the model; a buffer that is not stored may be."""
    model = nn.Linear(3, 3)
    model.register_buffer("graph", torch.eye(3))
    save(tmp_path, step=1, model=model)
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    model.graph = make(torch.eye(3))
    with pytest.raises(CheckpointError, match=rf"a dense tensor.*{kind}.*'model\.graph'"):
        save(tmp_path, step=2, model=model)
    with pytest.raises(CheckpointError, match=r"model\.graph"):
        load(tmp_path, model=model)
    assert torch.equal(model.weight, before + 1)
    model._non_persistent_buffers_set.add("graph")
    save(tmp_path, step=2, model=model)


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """A parameter that the model does not have is named by its position."""
    optimizer = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"position 0 of optimizer.param_groups\[0\]"):
        save(tmp_path, step=1, model=nn.Linear(4, 3), optimizer=optimizer)


def _save_a_ranks_own_state(root: Path) -> str:
    model = shard(Toy(), whole_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["count"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as caught:
        save(root, step=1, model=model, optimizer=optimizer)
    return str(caught.value)


def test_states_that_are_no_dtensors_are_refused_and_counts_have_a_cure(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A count of one element would be taken for a state of elements."""
    for message in ranks(2).run(_save_a_ranks_own_state, tmp_path):
        assert "got a plain tensor of shape (1,)" in message
        assert "Keep a count as a number or a tensor without dimensions" in message


@pytest.mark.parametrize(
    ("key", "name"), [("counts", "'counts'"), (torch.ones(2, 3), r"a tensor of shape \(2, 3\)")]
)
def test_optimizer_states_of_no_parameter_are_refused(
    tmp_path: Path, key: object, name: str
) -> None:
    """They have no name on disk; an entry that was merely looked up is empty and no matter."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not optimizer.state[key]
    save(tmp_path, step=1, model=model, optimizer=optimizer)
    optimizer.state[key] = {"sum": torch.ones(3)}
    with pytest.raises(CheckpointError, match=f"1 of something else: {name}"):
        save(tmp_path, step=2, model=model, optimizer=optimizer)


def test_the_name_of_the_members_is_reserved(tmp_path: Path) -> None:
    """A group's own option of that name would stand in their place, in torch files too."""
    model = nn.Linear(1, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "names": ["b"]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(CheckpointError, match=r"an option 'names'.*optimizer\.param_groups\[1\]"):
        save(tmp_path, step=1, model=model, optimizer=optimizer)
    of_optimizer = {"state": {}, "param_groups": [{"params": ["weight"], "names": ["b"]}]}
    torch.save({"model": model.state_dict(), "optimizer": of_optimizer}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"an option 'names'.*param_groups\[0\] of .*a\.pt"):
        from_torch(tmp_path / "a.pt", tmp_path / "b")


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1, "keep_last": 0}, {"step": 1.5}])
def test_bad_numbers_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    """Steps and retention counts are whole and not negative."""
    with pytest.raises(ValueError, match="whole number"):
        save(tmp_path, model=nn.Linear(1, 1), **options)


@pytest.mark.parametrize("one", [True, np.int64(1), torch.tensor(1)])
def test_integers_of_other_types_are_numbers(tmp_path: Path, one: Any) -> None:
    """A step names a directory, which has the name of an integer of Python."""
    model = nn.Linear(1, 1)
    save(tmp_path, step=0, model=model)
    assert save(tmp_path, step=one, model=model, keep_last=one).name == "iter_0000001"
    assert [path.name for path in tmp_path.glob("iter*")] == ["iter_0000001"]
    assert latest_step(tmp_path) == 1
    load(tmp_path, model=model, step=one)


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    """By every call, before it writes; and what the message advises works."""
    model, other = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    both, others = ([torch.optim.Adam(part.parameters()) for part in m] for m in (model, other))
    for call in (save, load, async_save):
        step = {} if call is load else {"step": 1}
        with pytest.raises(TypeError, match=r"got a list of 2\..*a directory of its own"):
            call(tmp_path, model=model, optimizer=both, **step)
    assert list(tmp_path.iterdir()) == []
    model(torch.ones(2, 2)).sum().backward()
    for index, (optimizer, empty) in enumerate(zip(both, others, strict=True)):
        optimizer.step()
        save(tmp_path / f"{index}", step=1, model=model, optimizer=optimizer)
        load(tmp_path / f"{index}", model=other, optimizer=empty)
        for name in ("weight", "bias"):
            wanted = optimizer.state[getattr(model[index], name)]["exp_avg"]
            assert torch.equal(empty.state[getattr(other[index], name)]["exp_avg"], wanted)


def _changed_since_step_2(root: Path) -> tuple[nn.Linear, torch.Tensor]:
    """Save steps 1 and 2; return the model, changed since, and the weight that was saved."""
    model = nn.Linear(2, 2)
    for step in (1, 2):
        save(root, step=step, model=model)
    kept = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1)
    return model, kept


def test_the_latest_step_is_not_overwritten(tmp_path: Path) -> None:
    """Saving the published step again is refused; a directory of another step is replaced."""
    model, kept = _changed_since_step_2(tmp_path)
    with pytest.raises(CheckpointError, match="not the latest published one"):
        save(tmp_path, step=2, model=model)
    load(tmp_path, model=model)
    assert torch.equal(model.weight, kept)
    with torch.no_grad():
        model.weight.add_(1)
    save(tmp_path, step=1, model=model)
    assert latest_step(tmp_path) == 1
    load(tmp_path, model=model)
    assert torch.equal(model.weight, kept + 1)


def test_a_step_that_cannot_be_replaced_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory moved away for a checkpoint that cannot have its name comes back."""
    model, kept = _changed_since_step_2(tmp_path)
    rename, refused = Path.rename, []

    def fail_once(path: Path, target: Path) -> Path:
        if target.name == "iter_0000001" and not refused:
            refused.append(path)
            raise OSError("no answer")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises(CheckpointError, match="no answer"):
        save(tmp_path, step=1, model=model)
    assert len(refused) == 1
    assert latest_step(tmp_path) == 2
    load(tmp_path, model=model, step=1)
    assert torch.equal(model.weight, kept)
    save(tmp_path, step=3, model=model)
    assert sorted(path.name for path in tmp_path.glob("*iter_*")) == [
        f"iter_000000{step}" for step in (1, 2, 3)
    ]
