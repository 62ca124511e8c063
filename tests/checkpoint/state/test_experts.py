"""Experts: stored by their index in the layer, written once, loaded by any number of ranks."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megafsdp import fully_shard
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.state.canonical import model_state
from megafsdp.errors import CheckpointError
from megafsdp.mesh.annotation import ExpertRange, FusedParts, annotate
from tests.checkpoint.sharding import GATE_AND_UP, differences, fixed
from tests.ranks import RankPool
from tests.training.runs import stored_tensors

Ranks = Callable[[int], RankPool]

TOTAL = 4
WIDTH = 5
INNER = 3


class Expert(nn.Module):
    """A SwiGLU of one expert; its parameters exist on the ranks of that expert alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 2 * INNER)
        self.fc2 = nn.Linear(INNER, WIDTH, bias=False)

    def declare(self, experts: ExpertRange) -> None:
        """Write the annotations."""
        fused = FusedParts(("gate", "up"), (INNER, INNER), stored_as=GATE_AND_UP)
        for parameter in self.fc1.parameters():
            annotate(parameter, fused=fused, experts=experts)
        annotate(self.fc2.weight, experts=experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, H) to (B, H)."""
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(gate.sigmoid() * up)


class Stacked(nn.Module):
    """The experts of a rank in two stacks, the first fused along its rows."""

    def __init__(self, experts: ExpertRange) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.zeros(experts.count, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(experts.count, WIDTH, INNER))
        fused = FusedParts(("gate", "up"), (INNER, INNER), dim=1, stored_as=GATE_AND_UP)
        annotate(self.up, fused=fused, experts=experts)
        annotate(self.down, experts=experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, H) to (B, H)."""
        gate, up = torch.einsum("bh,enh->ben", x, self.up).chunk(2, dim=-1)
        return torch.einsum("ben,ehn->bh", gate.sigmoid() * up, self.down)


class Layer(nn.Module):
    """A dense matrix, stacked experts and experts one by one, as one expert-parallel rank has them.

    Args:
        first: Index in the layer of this rank's first expert.
        count: Number of experts on this rank.
        ranks: Ranks that hold the same experts, where nothing is sharded.
    """

    def __init__(self, first: int, count: int, ranks: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.stacked = Stacked(ExpertRange(first, count, TOTAL, ranks=ranks))
        self.experts = nn.ModuleList(Expert() for _ in range(count))
        for expert in self.experts:
            expert.declare(ExpertRange(first, count, TOTAL, name_component=-3, ranks=ranks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, H) to (B, H)."""
        x = self.dense(x) + self.stacked(x)
        for expert in self.experts:
            x = x + expert(x)
        return x


def _full_values(salt: int) -> dict[str, torch.Tensor]:
    """Return every parameter of a layer with all experts, by name."""
    layer = Layer(0, TOTAL)
    return {n: fixed(n, tuple(p.shape), salt) for n, p in layer.named_parameters()}


def _filled(layer: Layer, first: int, salt: int) -> Layer:
    values = _full_values(salt)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            kind, *rest = name.split(".")
            if kind == "stacked":
                parameter.copy_(values[name][first : first + len(parameter)])
            elif kind == "experts":
                parameter.copy_(values[".".join((kind, str(first + int(rest[0])), *rest[1:]))])
            else:
                parameter.copy_(values[name])
    return layer


def _build(degree: int, salt: int, *, is_sharded: bool) -> Layer:
    """Return this rank's layer: experts over ``degree`` groups, each sharded or replicated."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    shape, names = (world_size // degree, degree), ("edp", "ep")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    count = TOTAL // degree
    first = rank % degree * count
    ranks = tuple(range(rank % degree, world_size, degree))
    layer = _filled(Layer(first, count, None if is_sharded else ranks), first, salt)
    if is_sharded:
        _shard(layer, mesh)
    return layer


def _shard(layer: Layer, mesh: DeviceMesh) -> None:
    for module in (layer.stacked, *layer.experts):
        fully_shard(module, mesh=mesh["edp"])
    fully_shard(layer)


def _adam(layer: Layer) -> torch.optim.AdamW:
    dense = [p for n, p in layer.named_parameters() if n.startswith("dense")]
    experts = [p for n, p in layer.named_parameters() if not n.startswith("dense")]
    groups = [{"params": dense}, {"params": experts, "weight_decay": 0.5}]
    return torch.optim.AdamW(groups, lr=0.01)


def _save_trained(root: Path, degree: int, is_sharded: bool) -> int:
    layer = _build(degree, 0, is_sharded=is_sharded)
    optimizer = _adam(layer)
    for name, parameter in layer.named_parameters():
        # Equal where ranks have the same, different for every expert.
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        gradient = local.sin() + (0 if name.startswith("dense") else 1)
        is_whole = not isinstance(parameter, DTensor)
        parameter.grad = gradient if is_whole else parameter.detach().like(gradient.contiguous())
    optimizer.step()
    with record_collectives() as record:
        save(root, step=2, model=layer, optimizer=optimizer)
    return sum(record.calls.values())


def _load_and_save(source: Path, target: Path, degree: int, is_sharded: bool) -> int:
    layer = _build(degree, 1, is_sharded=is_sharded)
    optimizer = _adam(layer)
    with record_collectives() as record:
        load(source, model=layer, optimizer=optimizer)
    save(target, step=2, model=layer, optimizer=optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.5]
    return sum(record.calls.values())


def _on_disk(root: Path) -> dict[str, torch.Tensor]:
    tensors = stored_tensors(root, 2)
    return {key: tensors[key] for key in read_manifest(root / "iter_0000002").tensors}


def _plain_oracle() -> dict[str, torch.Tensor]:
    """Return what one process with all experts stores, with names and slices made by hand."""
    layer = _filled(Layer(0, TOTAL), 0, 0)
    optimizer = _adam(layer)
    for name, parameter in layer.named_parameters():
        parameter.grad = parameter.detach().sin() + (0 if name.startswith("dense") else 1)
    optimizer.step()
    stored: dict[str, torch.Tensor] = {}
    for name, parameter in layer.named_parameters():
        dim = 1 if name == "stacked.up" else 0
        for key, tensor in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            where = "optimizer.state.{}." + key if key else "model.{}"
            if name == "stacked.up" or ".fc1." in name:
                pair = tensor.chunk(2, dim) if tensor.ndim else (tensor, tensor)
                for suffix, half in zip("wv", pair, strict=True):
                    stored[where.format(f"{name}_{suffix}")] = half
            else:
                stored[where.format(name)] = tensor
    return stored


_MATRIX = pytest.mark.matrix("round-trips")
# World size and number of groups of experts, one load and save after the other.
_ALL_PLACES = ((2, 1), (4, 4), (4, 2), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("is_sharded", "places"),
    [
        pytest.param(True, ((2, 1), (4, 4), (4, 2)), id="sharded"),
        pytest.param(False, ((1, 1), (4, 4), (2, 1)), id="plain"),
        pytest.param(True, _ALL_PLACES, id="sharded-all", marks=_MATRIX),
        pytest.param(False, _ALL_PLACES, id="plain-all", marks=_MATRIX),
    ],
)
def test_experts_go_from_2_groups_to_1_to_4_and_back_bitwise(
    ranks: Ranks, tmp_path: Path, is_sharded: bool, places: tuple[tuple[int, int], ...]
) -> None:
    """Weights and states are those of one process that has all experts, whoever has them."""
    calls = ranks(4).run(_save_trained, tmp_path / "first", 2, is_sharded)
    assert max(calls) <= 3
    wanted = _plain_oracle()
    assert differences(wanted, _on_disk(tmp_path / "first")) == []
    source = tmp_path / "first"
    for index, (world_size, degree) in enumerate(places):
        target = tmp_path / str(index)
        calls = ranks(world_size).run(_load_and_save, source, target, degree, is_sharded)
        assert max(calls) <= 2
        assert differences(wanted, _on_disk(target)) == []
        source = target


@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "plain"])
def test_replicas_of_experts_are_written_once(
    ranks: Ranks, tmp_path: Path, is_sharded: bool
) -> None:
    """The chunks of every tensor cover it once, and all ranks write a share."""
    ranks(4).run(_save_trained, tmp_path, 2, is_sharded)
    manifest = read_manifest(tmp_path / "iter_0000002")
    for key, entry in manifest.tensors.items():
        written = Counter(tuple(chunk.region.offsets) for chunk in entry.chunks)
        assert set(written.values()) == {1}, key
    files = Counter(c.record.file for e in manifest.tensors.values() for c in e.chunks)
    assert set(files) == {f"__{rank}_0.distcp" for rank in range(4)}
    assert manifest.tensors["model.stacked.up_v"].shape == (TOTAL, INNER, WIDTH)
    joined = manifest.fused_into["model.experts.3.fc1.weight"]
    assert joined == {"parts": [f"model.experts.3.fc1.weight_{s}" for s in "wv"], "dim": 0}


def _load_damaged(roots: list[Path]) -> list[str]:
    layer = _build(2, 1, is_sharded=True)
    optimizer, messages = _adam(layer), []
    for root in roots:
        with pytest.raises(CheckpointError) as caught:
            load(root, model=layer, optimizer=optimizer)
        messages.append(str(caught.value))
    return messages


@pytest.mark.parametrize("state", ["", ".exp_avg"])
def test_damage_of_any_expert_is_found_by_all_ranks(
    ranks: Ranks, tmp_path: Path, state: str
) -> None:
    """No record escapes the checksums, though the groups of ranks read different ones."""
    ranks(4).run(_save_trained, tmp_path / "sound", 2, True)
    roots = [tmp_path / str(expert) for expert in range(TOTAL)]
    for expert, root in enumerate(roots):
        shutil.copytree(tmp_path / "sound", root)
        path, section = root / "iter_0000002", "optimizer.state" if state else "model"
        key = f"{section}.experts.{expert}.fc2.weight{state}"
        record = read_manifest(path).tensors[key].chunks[-1].record
        data = path / record.file
        content = bytearray(data.read_bytes())
        content[record.offset + record.nbytes // 2] ^= 1
        data.write_bytes(content)
    for messages in ranks(4).run(_load_damaged, roots):
        for expert, message in enumerate(messages):
            assert f"experts.{expert}.fc2.weight{state}" in message


def _save_of_any_order(root: Path) -> None:
    """Name the two ranks that have the same experts in another order on each of them."""
    rank = dist.get_rank()
    first = 2 * (rank % 2)
    layer = Layer(first, 2, ranks=(rank, (rank + 2) % 4))
    save(root, step=2, model=_filled(layer, first, 1))


def test_ranks_of_the_same_experts_are_declared_in_any_order(ranks: Ranks, tmp_path: Path) -> None:
    """They agree on who writes what."""
    ranks(4).run(_save_of_any_order, tmp_path)
    layer = Layer(0, TOTAL)
    load(tmp_path, model=layer)
    wanted = _full_values(1)
    assert all(torch.equal(p, wanted[name]) for name, p in layer.named_parameters())


def _load_fewer(root: Path) -> list[str]:
    messages = []
    layer = _build(2, 1, is_sharded=True)
    for options in ({}, {"allow_missing": ["experts.3.*"]}):
        try:
            load(root, model=layer, **options)
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_a_missing_expert_is_named_by_its_index_in_the_layer(ranks: Ranks, tmp_path: Path) -> None:
    """A rank misses its own experts only; all ranks refuse."""
    layer = _filled(Layer(0, TOTAL), 0, 0)
    del layer.experts[3]
    save(tmp_path, step=2, model=layer)
    for messages in ranks(4).run(_load_fewer, tmp_path):
        assert len(messages) == 1
        assert "experts.3.fc1.weight_w" in messages[0] and "experts.2" not in messages[0]


def _save_words(root: Path) -> None:
    layer = _build(2, 0, is_sharded=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for name, parameter in layer.named_parameters():
        _, *local = name.split(".")
        index = str(dist.get_rank() % 2 * 2 + int(local[0])) if local[0].isdecimal() else "all"
        optimizer.state[parameter]["note"] = f"{index} of {name.split('.')[-2]}"
    save(root, step=2, model=layer, optimizer=optimizer)
    again = torch.optim.SGD(layer.parameters(), lr=0.1)
    load(root, model=layer, optimizer=again)
    for parameter, state in optimizer.state.items():
        assert again.state[parameter] == state


def test_states_that_are_no_tensors_follow_their_expert(ranks: Ranks, tmp_path: Path) -> None:
    """Each is written by a rank that has the expert, and read by all that have it."""
    ranks(4).run(_save_words, tmp_path)
    objects = read_manifest(tmp_path / "iter_0000002").objects
    for expert in range(TOTAL):
        for part in ("fc1.weight_w", "fc1.weight_v", "fc2.weight"):
            assert f"optimizer.state.experts.{expert}.{part}.note" in objects


def _of_two_names(layer: Layer) -> nn.ModuleDict:
    return nn.ModuleDict({"first": layer, "second": layer})


def _save_of_two_names(root: Path) -> None:
    first = 2 * dist.get_rank()
    save(root, step=2, model=_of_two_names(_filled(Layer(first, 2), first, 1)))


def test_experts_have_both_names_of_their_layer(ranks: Ranks, tmp_path: Path) -> None:
    """Whichever rank has them: one process finds all of them under either name."""
    ranks(2).run(_save_of_two_names, tmp_path)
    aliases = read_manifest(tmp_path / "iter_0000002").aliases
    for expert in range(TOTAL):
        weight = f"experts.{expert}.fc2.weight"
        assert aliases[f"model.second.{weight}"] == f"model.first.{weight}"
    layer = Layer(0, TOTAL)
    load(tmp_path, model=_of_two_names(layer))
    wanted = _full_values(1)
    assert all(torch.equal(p, wanted[name]) for name, p in layer.named_parameters())


def _save_undeclared(root: Path, firsts: tuple[int, ...]) -> str:
    first = firsts[dist.get_rank()]
    layer = _filled(Layer(first, 2), first, 0)
    with pytest.raises(CheckpointError) as caught:
        save(root, step=2, model=layer)
    return str(caught.value)


@pytest.mark.parametrize("firsts", [(0, 2, 0, 2), (0, 0), (0, 1)], ids=str)
def test_undeclared_replicas_of_plain_experts_are_refused(
    ranks: Ranks, tmp_path: Path, firsts: tuple[int, ...]
) -> None:
    """Ranks that declare the same experts must say so, where others are left out instead too."""
    for message in ranks(len(firsts)).run(_save_undeclared, tmp_path, firsts):
        assert "ExpertRange" in message and "stacked.up_w" in message


def _save_overlapping(root: Path) -> str:
    rank = dist.get_rank()
    layer = Layer(rank, 2)
    layer.stacked = nn.Identity()
    if rank == 1:
        # Expert 1 of rank 0 has other columns.
        layer.experts[0].fc2 = nn.Linear(INNER + 1, WIDTH, bias=False)
        annotate(layer.experts[0].fc2.weight, experts=ExpertRange(1, 2, TOTAL, name_component=-3))
    with pytest.raises(CheckpointError) as caught:
        save(root, step=2, model=layer)
    return str(caught.value)


def test_one_name_for_two_tensors_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Ranks that mean different tensors by one expert's name all raise, naming it."""
    for message in ranks(2).run(_save_overlapping, tmp_path):
        assert "experts.1.fc2.weight" in message and "(5, 4)" in message


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (ExpertRange(0, 2, 4, name_component=-2), "'weight'|'fc1'"),
        (ExpertRange(0, 1, 4, name_component=-3), "'1'"),
        (ExpertRange(0, 2, 4, name_component=-9), "''"),
        (ExpertRange(0, 3, 4), "stack of 3 experts"),
    ],
)
def test_wrong_ranges_are_refused(experts: ExpertRange, message: str) -> None:
    """The component must be a local index, a stack as long as declared."""
    layer = Layer(0, 2)
    annotate(layer.experts[1].fc1.weight, experts=experts)
    with pytest.raises(CheckpointError, match=message):
        model_state(layer)


def test_experts_of_a_layer_stay_in_one_group(tmp_path: Path) -> None:
    """Groups that tell experts apart would not be known on other ranks."""
    layer = _filled(Layer(0, TOTAL), 0, 0)
    first, *rest = layer.experts[0].parameters(), *layer.experts[1:].parameters()
    optimizer = torch.optim.SGD([{"params": list(first)}, {"params": rest}], lr=0.1)
    with pytest.raises(CheckpointError, match=r"experts\.\*\.fc1\.weight"):
        save(tmp_path, step=1, model=layer, optimizer=optimizer)
