"""Fused tensors: stored in parts, joined in place, whatever cuts them in memory."""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import UnevenDTensor
from megafsdp.buffer.dtensor.uneven_layout import Region, UnevenLayout, whole
from megafsdp.checkpoint import load, save
from megafsdp.checkpoint.format.manifest import read_manifest
from megafsdp.checkpoint.format.regions import local_regions, local_view
from megafsdp.checkpoint.state.canonical import model_state
from megafsdp.checkpoint.state.fused import stored_form
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from megafsdp.fsdp import MixedPrecisionPolicy
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.mesh.model_part import whole_part
from megafsdp.optimizer.adam.fused_adam import FusedAdam
from tests.checkpoint.sharding import (
    GATE_AND_UP,
    differences,
    fill,
    fixed,
    full_state,
    whole_mesh,
)
from tests.checkpoint.state.fused_model import PARTS, Grouped, Model, build, split, step
from tests.ranks import RankPool
from tests.training.runs import stored_tensors

Ranks = Callable[[int], RankPool]

BF16 = torch.bfloat16
ADAM_STATES = ("exp_avg", "exp_avg_sq", "step")


def _adam(model: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-5)
    if kind == "remainders":
        return FusedAdam(model.parameters(), lr=0.01, eps=1e-5, store_param_remainders=True)
    dtype = {"fused-bf16": BF16, "fused-fp8": torch.float8_e4m3fn}[kind]
    return FusedAdam(
        model.parameters(), lr=0.01, eps=1e-5, exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype
    )


def _policy(kind: str) -> MixedPrecisionPolicy:
    if kind == "remainders":
        return MixedPrecisionPolicy(param_dtype=BF16, main_params_dtype=BF16)
    return MixedPrecisionPolicy()


def _canonical(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return whole weights and states in the form of checkpoints, by name; collective."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        weight, states = parameter, optimizer.state[parameter]
        if isinstance(optimizer, FusedAdam):
            weight = optimizer.canonical_weight(parameter)
            states = optimizer.canonical_state(parameter)
        for key, tensor in {"": weight, **states}.items():
            is_sharded = isinstance(tensor, DTensor)
            whole_tensor = tensor.full_tensor() if is_sharded else tensor
            found[f"{key}/{name}"] = whole_tensor.detach().clone()
    return found


def _as_stored(canonical: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of these tensors must hold, by key, sliced by hand."""
    stored: dict[str, torch.Tensor] = {}
    for key in sorted({name.split("/")[0] for name in canonical}):
        tensors = {n.split("/")[1]: t for n, t in canonical.items() if n.split("/")[0] == key}
        for name, tensor in split(tensors).items():
            stored[f"optimizer.state.{name}.{key}" if key else f"model.{name}"] = tensor
    return stored


def _save_first(root: Path, kind: str) -> dict[str, torch.Tensor]:
    model = build(0, _policy(kind))
    optimizer = _adam(model, kind)
    step(model, optimizer)
    save(root, step=2, model=model, optimizer=optimizer)
    return _canonical(model, optimizer)


def _load_and_save(source: Path, target: Path, kind: str) -> tuple[dict[str, torch.Tensor], int]:
    model = build(1, _policy(kind))
    optimizer = _adam(model, kind)
    identities = [id(parameter) for parameter in model.parameters()]
    with record_collectives() as record:
        load(source, model=model, optimizer=optimizer)
    assert identities == [id(parameter) for parameter in model.parameters()]
    save(target, step=2, model=model, optimizer=optimizer)
    return _canonical(model, optimizer), sum(record.calls.values())


def _on_disk(root: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that the manifest lists, read by torch."""
    tensors = stored_tensors(root, 2)
    return {key: tensors[key] for key in read_manifest(root / "iter_0000002").tensors}


@pytest.mark.parametrize(
    ("kind", "worlds"),
    [
        ("adamw", (4, 3, 1, 2)),
        ("fused-bf16", (2, 3)),
        ("fused-fp8", (3, 2)),
        ("remainders", (3, 2)),
    ],
)
def test_parts_go_from_world_to_world_bitwise(
    ranks: Ranks, tmp_path: Path, kind: str, worlds: tuple[int, ...]
) -> None:
    """Each world loads what the one before saved; every file is the first, tensor by tensor."""
    source = tmp_path / f"{worlds[0]}"
    saved = ranks(worlds[0]).run(_save_first, source, kind)[0]
    wanted = _as_stored(saved)
    assert differences(wanted, _on_disk(source)) == []
    assert any(t.any() for key, t in wanted.items() if key.endswith("weight.beta.exp_avg"))
    for world_size in worlds[1:]:
        target = tmp_path / f"{world_size}"
        for loaded, num_collectives in ranks(world_size).run(_load_and_save, source, target, kind):
            assert differences(saved, loaded) == []
            assert num_collectives <= 2
        assert differences(wanted, _on_disk(target)) == []
        source = target


def test_parts_are_the_slices_of_one_process(ranks: Ranks, tmp_path: Path) -> None:
    """A plain model in one process stores the same weights as four ranks that cut it."""
    ranks(4).run(_save_weights, tmp_path / "sharded")
    save(tmp_path / "plain", step=2, model=Model(3))
    plain = dict(Model(3).named_parameters())
    stored = _on_disk(tmp_path / "sharded")
    assert differences(stored, _on_disk(tmp_path / "plain")) == []
    gate, up = plain["layers.0.mlp.linear_fc1.weight"].split(7)
    assert torch.equal(stored["model.layers.0.mlp.linear_fc1.weight_w"], gate)
    assert torch.equal(stored["model.layers.0.mlp.linear_fc1.weight_v"], up)
    beta = plain["layers.1.in_proj.weight"][20:21]
    assert torch.equal(stored["model.layers.1.in_proj.weight.beta"], beta)


def _save_weights(root: Path) -> None:
    save(root, step=2, model=build(3))


def test_the_manifest_says_what_is_joined_and_tied(ranks: Ranks, tmp_path: Path) -> None:
    """Wholes name their parts, tied names their parts too; query groups stay whole."""
    ranks(2).run(_save_first, tmp_path, "adamw")
    manifest = read_manifest(tmp_path / "iter_0000002")
    for name, (template, words, dim, _) in PARTS.items():
        parts = [template.format(word) for word in words.split()]
        joined = {"parts": [f"model.{part}" for part in parts], "dim": dim}
        assert manifest.fused_into[f"model.{name}"] == joined
        for state in ADAM_STATES:
            keys = [f"optimizer.state.{part}.{state}" for part in parts]
            assert manifest.fused_into[f"optimizer.state.{name}.{state}"]["parts"] == keys
            assert set(keys) <= set(manifest.tensors)
        assert f"model.{name}" not in manifest.tensors
    assert manifest.aliases == {
        f"model.tied.linear_fc1.{n}_{s}": f"model.layers.0.mlp.linear_fc1.{n}_{s}"
        for n in ("weight", "bias")
        for s in "wv"
    }
    joined = manifest.fused_into["model.tied.linear_fc1.bias"]
    assert joined["parts"] == [f"model.tied.linear_fc1.bias_{s}" for s in "wv"]
    grouping = manifest.tensors["model.layers.0.linear_qkv.weight"].fused
    assert grouping == FusedParts(("query", "key", "value"), (1, 1, 1), num_groups=2)
    groups = stored_groups(tmp_path)
    assert [g["names"] for g in groups] == [[n for n, _ in Model().named_parameters()]]


def stored_groups(root: Path) -> list[dict]:
    """Return the stored parameter groups."""
    manifest = read_manifest(root / "iter_0000002")
    record = manifest.objects["optimizer.param_groups"]
    content = (root / "iter_0000002" / record.file).read_bytes()
    piece = root / "record"
    piece.write_bytes(content[record.offset : record.offset + record.nbytes])
    return torch.load(piece, weights_only=True)


def _load_with_torch(path: Path) -> dict[str, object]:
    model = build(1)
    dcp.load({"model": model.state_dict()}, checkpoint_id=path)
    return full_state(model, None)


def test_torch_alone_reads_parts_and_wholes(ranks: Ranks, tmp_path: Path) -> None:
    """Torch's converter gives the parts; ``dcp.load`` finds the whole names of a module."""
    saved = ranks(2).run(_save_first, tmp_path, "adamw")[0]
    path = tmp_path / "iter_0000002"
    with warnings.catch_warnings():
        # torch's converter loads without a process group and says so.
        warnings.simplefilter("ignore", UserWarning)
        dcp_to_torch_save(path, tmp_path / "whole.pt")
    converted = torch.load(tmp_path / "whole.pt", weights_only=True)
    for key, tensor in _as_stored(saved).items():
        where, state = converted["model"], None
        name = key.removeprefix("model.")
        if key.startswith("optimizer"):
            name, _, state = key.removeprefix("optimizer.state.").rpartition(".")
            where = converted["optimizer"]["state"]
        found = where[name] if state is None else where[name][state]
        assert torch.equal(found, tensor), key
    for loaded in ranks(2).run(_load_with_torch, path):
        for name, _ in Model().named_parameters():
            assert torch.equal(loaded[name], saved[f"/{name}"])


def _load_leaving(source: Path, patterns: list[str], option: str) -> tuple[dict, dict]:
    model = build(1)
    optimizer = _adam(model)
    step(model, optimizer, 1)
    before = _canonical(model, optimizer)
    load(source, model=model, optimizer=optimizer, **{option: patterns})
    return before, _canonical(model, optimizer)


def test_single_parts_and_wholes_can_be_left_out(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A part's name leaves a part of weight and states alone, the whole's name leaves all."""
    saved = ranks(2).run(_save_first, tmp_path, "adamw")[0]
    patterns = ["layers.1.in_proj.weight.z*", "layers.2.up", "layers.2.up.*"]
    for before, after in ranks(2).run(_load_leaving, tmp_path, patterns, "ignore"):
        for key in ("", "exp_avg", "exp_avg_sq"):
            own, taken = (state[f"{key}/layers.1.in_proj.weight"] for state in (before, saved))
            wanted = torch.cat((taken[:14], own[14:20], taken[20:]))
            assert torch.equal(after[f"{key}/layers.1.in_proj.weight"], wanted)
            assert not torch.equal(own[14:20], taken[14:20])
            assert torch.equal(after[f"{key}/layers.2.up"], before[f"{key}/layers.2.up"])
            name = f"{key}/layers.0.mlp.linear_fc1.weight"
            assert torch.equal(after[name], saved[name])
        assert after["step/layers.1.in_proj.weight"].item() == 2
        assert after["step/layers.2.up"].item() == 1


class _WithoutBeta(Model):
    def __init__(self) -> None:
        super().__init__(2)
        rows = nn.Linear(6, 20, bias=False)
        parts = ("query", "key", "value", "z")
        stored_as = tuple("{module}.{parameter}." + part for part in parts)
        annotate(rows.weight, fused=FusedParts(parts, (4, 4, 6, 6), stored_as=stored_as))
        self.layers[1].in_proj = rows


def test_missing_parts_are_named_and_may_be_allowed(tmp_path: Path) -> None:
    """A checkpoint without two parts is refused by their names, or leaves these rows alone."""
    smaller = _WithoutBeta()
    save(tmp_path, step=1, model=smaller)
    model = Model(0)
    own = model.layers[1].in_proj.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"2 missing.*weight\.beta, .*weight\.alpha") as error:
        load(tmp_path, model=model)
    assert "in_proj.weight.z" not in str(error.value)
    assert torch.equal(own, model.layers[1].in_proj.weight)
    for patterns in (["*.beta", "*.alpha"], ["layers.1.in_proj.weight"]):
        model = Model(0)
        load(tmp_path, model=model, allow_missing=patterns)
        wanted = torch.cat((smaller.layers[1].in_proj.weight, own[20:]))
        assert torch.equal(model.layers[1].in_proj.weight, wanted)


def test_missing_parts_of_states_are_allowed_by_the_name_of_the_whole(tmp_path: Path) -> None:
    """Rows of moments that are not stored keep their own values, as those of weights do."""
    smaller, model = _WithoutBeta(), Model(0)
    optimizers = _adam(smaller), _adam(model)
    for each, optimizer in zip((smaller, model), optimizers, strict=True):
        for parameter in each.parameters():
            parameter.grad = torch.full_like(parameter, len(parameter))
        optimizer.step()
    save(tmp_path, step=1, model=smaller, optimizer=optimizers[0])
    name = "layers.1.in_proj.weight"
    stored, own = (
        optimizer.state[each.layers[1].in_proj.weight]["exp_avg"].clone()
        for each, optimizer in zip((smaller, model), optimizers, strict=True)
    )
    patterns = [name, *(f"*.{name}.{state}" for state in ("exp_avg", "exp_avg_sq", "step"))]
    load(tmp_path, model=model, optimizer=optimizers[1], allow_missing=patterns)
    loaded = optimizers[1].state[model.layers[1].in_proj.weight]["exp_avg"]
    assert torch.equal(loaded, torch.cat((stored, own[20:])))


def test_a_fused_tensor_of_the_checkpoint_alone_is_ignored_by_its_name(tmp_path: Path) -> None:
    """The model that is loaded declares no parts of it."""
    source, model = Model(0), Model(1)
    save(tmp_path, step=1, model=source)
    del model.layers[1].in_proj
    load(tmp_path, model=model, ignore=["layers.1.in_proj.weight"])
    assert torch.equal(model.layers[1].conv1d.weight, source.layers[1].conv1d.weight)


def test_a_part_of_narrow_states_can_be_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """States that the optimizer keeps in bf16 keep the rows that are not loaded."""
    model, other = Model(0), Model(1)
    optimizer, used = _adam(model, "fused-bf16"), _adam(other, "fused-bf16")
    step(model, optimizer)
    step(other, used, 1)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    name = "exp_avg/layers.2.linear_qkv_down_proj.weight"
    saved, own = _canonical(model, optimizer)[name], _canonical(other, used)[name]
    with caplog.at_level(logging.WARNING, logger="megafsdp.checkpoint"):
        load(tmp_path, model=other, optimizer=used, ignore=["*linear_kv_down_proj*"])
    assert "linear_kv_down_proj" in caplog.text
    loaded = _canonical(other, used)[name]
    assert torch.equal(loaded, torch.cat((saved[:5], own[5:])))
    assert own[5:].any() and not torch.equal(own[5:], saved[5:])


@pytest.mark.parametrize("kind", ["Adafactor", "ASGD", "NAdam", "Rprop", "SGD"])
def test_states_unlike_the_parameter_are_stored_with_each_part(tmp_path: Path, kind: str) -> None:
    """Factors of second moments, by chance of a part's shape too, and scalars come back."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    model, other = Model(0), Model(1)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    resumed = getattr(torch.optim, kind)(other.parameters(), lr=0.01, **options)
    step(model, optimizer)
    save(tmp_path, step=2, model=model, optimizer=optimizer)
    load(tmp_path, model=other, optimizer=resumed)
    assert differences(full_state(model, optimizer), full_state(other, resumed)) == []
    for run in ((model, optimizer), (other, resumed)):
        step(*run)
    assert differences(full_state(model, optimizer), full_state(other, resumed)) == []
    if kind == "Adafactor":
        stored = read_manifest(tmp_path / "iter_0000002").tensors
        beta = "layers.1.in_proj.weight.beta"
        shape = stored[f"model.{beta}"].shape
        assert shape == stored[f"optimizer.state.{beta}.col_var"].shape == (1, 6)


def _write_whole(source: Path, target: Path) -> None:
    """Write a checkpoint with fused tensors whole and no ties, as one who knows no model would."""
    with CheckpointReader(source) as reader, CheckpointWriter(target, step=2) as writer:
        for key in reader.whole_keys():
            writer.add_tensor(key, reader.tensor(key))
        writer.add_object("optimizer.param_groups", reader.object("optimizer.param_groups"))
        writer.publish()


@pytest.mark.parametrize(
    ("kind", "world_size"), [("adamw", 3), ("fused-bf16", 2), ("remainders", 2)]
)
def test_wholes_of_a_foreign_writer_are_loaded(
    ranks: Ranks, tmp_path: Path, kind: str, world_size: int
) -> None:
    """What was written without parts is taken whole and saved in parts again."""
    saved = ranks(world_size).run(_save_first, tmp_path / "a", kind)[0]
    _write_whole(tmp_path / "a", tmp_path / "b")
    assert "model.layers.2.up" in read_manifest(tmp_path / "b/iter_0000002").tensors
    for loaded, _ in ranks(2).run(_load_and_save, tmp_path / "b", tmp_path / "c", kind):
        assert differences(saved, loaded) == []
    assert differences(_as_stored(saved), _on_disk(tmp_path / "c")) == []


def test_parts_of_different_steps_are_refused(tmp_path: Path) -> None:
    """A parameter has one count of steps; parts put together from two runs have two."""
    model = Model(0)
    optimizer = _adam(model)
    step(model, optimizer)
    save(tmp_path / "a", step=2, model=model, optimizer=optimizer)
    odd = "optimizer.state.layers.1.in_proj.weight.z.step"
    with (
        CheckpointReader(tmp_path / "a") as reader,
        CheckpointWriter(tmp_path / "b", step=2) as writer,
    ):
        for key in reader.manifest.tensors:
            writer.add_tensor(key, reader.tensor(key) + (5 if key == odd else 0))
        for alias, target in reader.manifest.aliases.items():
            writer.alias(alias, target)
        writer.add_object("optimizer.param_groups", reader.object("optimizer.param_groups"))
        writer.publish()
    other = Model(1)
    before = full_state(other, None)
    with pytest.raises(CheckpointError, match=r"in_proj\.weight\.z\.step': 7\.0"):
        load(tmp_path / "b", model=other, optimizer=_adam(other))
    assert differences(before, full_state(other, None)) == []
    load(tmp_path / "b", model=other, optimizer=_adam(other), ignore=["*.z.step"])


def test_meta_models_receive_parts(tmp_path: Path) -> None:
    """A module without memory gets it for its whole parameters, and keeps the declaration."""
    source = Grouped()
    fill(source, 4)
    save(tmp_path, step=1, model=source)
    with torch.device("meta"):
        model = Grouped()
    load(tmp_path, model=model)
    assert differences(full_state(source, None), full_state(model, None)) == []
    assert model_state(model).fused_into == model_state(source).fused_into


def _random_cuts(count: int) -> list[tuple[tuple[int, ...], FusedParts, int, int]]:
    """Return shape, parts, row length and rows of padding of tensors; alike in every process."""
    rng = random.Random(5)
    cuts = []
    for _ in range(count):
        ndim = rng.randint(1, 3)
        dim = rng.randrange(ndim)
        sizes = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 4)))
        names = tuple(f"p{i}" for i in range(len(sizes)))
        stored_as = tuple(f"{{module}}.{name}" for name in names)
        fused = FusedParts(names, sizes, dim, rng.randint(1, 2), stored_as)
        shape = [rng.randint(1, 4) for _ in range(ndim)]
        shape[dim] = fused.extent
        row_numel = rng.choice([math.prod(shape[1:]), 1])
        cuts.append((tuple(shape), fused, row_numel, rng.randint(0, 5)))
    return cuts


def _views_of_parts() -> list[list[list[tuple[Region, torch.Tensor]]]]:
    """Return what this rank's views of each part of each tensor show, and zero them."""
    seen = []
    for shape, fused, row_numel, padding_rows in _random_cuts(60):
        values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        tensor = _uneven(values, row_numel, padding_rows)
        annotate(tensor, fused=fused)
        views = [
            [(r, local_view(piece, r)) for r in local_regions("layer.weight", piece)]
            for piece in stored_form("layer.weight", tensor).pieces(tensor)
        ]
        seen.append([[(r, view.clone()) for r, view in part] for part in views])
        if fused.dim == 0:
            assert all(view.is_contiguous() for part in views for _, view in part)
        for part in views:
            for _, view in part:
                view.zero_()
        assert not tensor.local.any()
    return seen


def _uneven(values: torch.Tensor, row_numel: int, padding_rows: int) -> UnevenDTensor:
    shape, mesh = tuple(values.shape), whole_mesh()
    num_rows = values.numel() // row_numel
    layout = UnevenLayout(
        part=whole_part(shape),
        row_numel=row_numel,
        buffer_offset=padding_rows * row_numel,
        shard_numel=-(-(num_rows + padding_rows) // mesh.size()) * row_numel,
        num_shards=mesh.size(),
        shard=mesh.get_local_rank(),
    )
    start, stop = layout.element_range()
    local = values.flatten()[start:stop].clone().view(layout.local_shape())
    return UnevenDTensor.from_local_rows(local, mesh, layout)


def test_parts_of_any_cut_are_views_that_cover_the_slices(ranks: Ranks) -> None:
    """Views of all shards together show each part once, along any dim; some ranks have no row."""
    by_rank = ranks(3).run(_views_of_parts)
    num_empty = 0
    for index, (shape, fused, _, _) in enumerate(_random_cuts(60)):
        values = torch.arange(1.0, 1 + math.prod(shape)).view(shape)
        groups = values.split(sum(fused.sizes), fused.dim)
        for part in range(len(fused.sizes)):
            pieces = [group.split(fused.sizes, fused.dim)[part] for group in groups]
            wanted = torch.cat(pieces, fused.dim)
            found = torch.zeros_like(wanted)
            for seen in by_rank:
                num_empty += not seen[index][part]
                for region, view in seen[index][part]:
                    slot = found[region.slices_in(whole(tuple(wanted.shape)))]
                    assert not slot.any()
                    slot.copy_(view)
            assert torch.equal(found, wanted), (shape, fused)
    assert num_empty > 20


class _Cut(nn.Module):
    """[gate; up] of (12, 3), cut by rows for tensor parallelism: each rank has some of both."""

    def __init__(self, salt: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 12, bias=False)
        degree, rank = dist.get_world_size(), dist.get_rank()
        whole_weight = fixed("fc1.weight", (12, 3), salt)
        gate, up = (half.chunk(degree)[rank] for half in whole_weight.split(6))
        mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
        weight = DTensor.from_local(torch.cat((gate, up)), mesh, [Shard(0)])
        self.fc1.weight = nn.Parameter(weight)
        rows = 6 // degree
        fused = FusedParts(("gate", "up"), (rows, rows), num_groups=degree, stored_as=GATE_AND_UP)
        annotate(self.fc1.weight, tp_dim=0, fused=fused)


def _save_cut(root: Path) -> None:
    model = _Cut(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.fc1.weight.grad = _Cut(5).fc1.weight.detach()
    optimizer.step()
    save(root, step=2, model=model, optimizer=optimizer)


def _load_cut(root: Path, target: Path) -> None:
    model = _Cut(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    load(root, model=model, optimizer=optimizer)
    save(target, step=2, model=model, optimizer=optimizer)


def test_another_tensor_parallel_cut_gives_the_same_logical_tensors(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Two ranks with [gate0; up0] and [gate1; up1] save what one, two and three ranks load."""
    ranks(2).run(_save_cut, tmp_path / "first")
    stored = _on_disk(tmp_path / "first")
    gradient = fixed("fc1.weight", (12, 3), 5)
    for part, rows in zip("wv", gradient.split(6), strict=True):
        average = stored[f"optimizer.state.fc1.weight_{part}.exp_avg"]
        torch.testing.assert_close(average, 0.1 * rows, rtol=1e-6, atol=0)
    for degree in (1, 2, 3):
        ranks(degree).run(_load_cut, tmp_path / "first", tmp_path / f"{degree}")
        assert differences(stored, _on_disk(tmp_path / f"{degree}")) == []


def test_a_declaration_that_does_not_fit_names_both_shapes() -> None:
    """A tensor that changed its extent after it was declared is refused, in every room."""
    layer = nn.Linear(6, 10, bias=False)
    annotate(layer.weight, fused=FusedParts(("gate", "up"), (5, 5), stored_as=GATE_AND_UP))
    other = nn.Parameter(torch.zeros(12, 6))
    other._megafsdp_annotation = layer.weight._megafsdp_annotation
    layer.weight = other
    with pytest.raises(CheckpointError, match=r"shape \(10, 6\) for .*got shape \(12, 6\)"):
        model_state(layer)
    flat = nn.Parameter(torch.zeros(60))
    flat._megafsdp_annotation = other._megafsdp_annotation
    with pytest.raises(CheckpointError, match=r"\(60,\)"):
        stored_form("fc1.weight", flat)


def test_names_that_meet_are_refused() -> None:
    """A part never hides another parameter."""
    model = Model(0)
    model.layers[2].up_left = nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.up_left"):
        model_state(model)


def test_a_parameter_of_the_root_has_parts_too() -> None:
    """Without a module before the parameter its templates leave out the module."""
    weight = torch.zeros(4, 2)
    annotate(weight, fused=FusedParts(("gate", "up"), (2, 2), stored_as=GATE_AND_UP))
    assert stored_form("weight", weight).parts == ("weight_w", "weight_v")
    assert stored_form("fc1.weight", weight).parts == ("fc1.weight_w", "fc1.weight_v")
    assert stored_form("a.b.fc1.weight", weight).parts == ("a.b.fc1.weight_w", "a.b.fc1.weight_v")
