"""Quantized parallel layers under torch's fully_shard: tp beside shards, and beside replicas."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megafsdp
from megafsdp import FusedAdam
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.buffer.dtensor.uneven import local_object
from megafsdp.fsdp.runtime.torch_fsdp import shard_of
from megafsdp.mesh.torch_private import flatten_mesh, local_of
from megafsdp.quantize.recipes import RECIPE_NAMES, recipe_of
from megafsdp.quantize.tensor import QuantizedTensor
from tests.fsdp.torch_parallel import (
    Axes,
    Mlp,
    axes_of,
    codes_of,
    histories_of,
    placements_of,
    sharded,
    states_of,
    whole_of,
)
from tests.fsdp.torch_sharded import batch, whole
from tests.pairwise import gate_of
from tests.ranks import Ranks

# Data ranks (replicas and shards, or shards), then ranks of tp.
LAYOUTS = ((2, 2), (2, 1, 2), (2, 2, 2))
PRODUCT = [(recipe, sizes) for recipe in RECIPE_NAMES for sizes in LAYOUTS]
# Eight ranks on few cores are slow: by default they quantize alone, and replicas have no shards.
SELECTED = [(recipe, (2, 2)) for recipe in RECIPE_NAMES] + [("nvfp4", (2, 1, 2))]
# torch says of tensors that two axes cut along one dim that they are gathered axis by axis.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*cpu device mesh.*:UserWarning"),
]


def _train(model: nn.Module, optimizer: FusedAdam, step: int) -> list[Tensor]:
    """Train a step on a batch that all data ranks have; return output and whole gradients."""
    torch.manual_seed(step)
    output = model(batch(step))
    output.float().square().mean().backward()
    found = [output.detach()]
    for parameter in model.parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor) and placements_of(grad) == placements_of(parameter)
        found.append(whole_of(grad, local_object(grad)))
    optimizer.step()
    optimizer.zero_grad()
    return found


def _equals_tp_alone(recipe: str, sizes: tuple[int, ...]) -> None:
    axes = axes_of(*sizes)
    alone = megafsdp.quantize_(Mlp(axes.tp), recipe)
    model = sharded(recipe, axes)
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def note(name: str, layer: nn.Module) -> None:
        own = local_of(layer.weight)
        assert isinstance(own, QuantizedTensor) and layer.weight.requires_grad
        seen.setdefault(name, []).append((id(layer.weight), id(own), id(own.codes)))
        # The whole of the part that tp gives, as gathered values would be if they were plain.
        shard = shard_of(parameters[f"{name}.weight"])
        assert shard is not None
        rows = shard.detach().decode()
        data = axes.data if axes.data.ndim == 1 else axes.data[axes.data.mesh_dim_names[-1]]
        parts = [torch.empty_like(rows) for _ in range(data.size())]
        dist.all_gather(parts, rows, group=data.get_group())
        assert torch.equal(own.decode(), torch.cat(parts))
        by_itself = shard_of(alone.get_submodule(name).weight)
        assert by_itself is not None and torch.equal(own.codes, by_itself.codes)
        # What stands behind the scales is undefined where torch allocates the table again.
        form, shape = own.recipe.weight, own.stored_shape
        nbytes = form.coding.table_nbytes(shape)
        assert torch.equal(own.table[:nbytes], by_itself.table[:nbytes])

    parameters = dict(model.named_parameters())
    assert {n for n, p in parameters.items() if shard_of(p) is not None} == {
        "up.weight",
        "down.weight",
        "whole.weight",
    }
    for name, layer in model.named_children():
        layer.register_forward_pre_hook(lambda layer, _, name=name: note(name, layer))
    optimizers = [FusedAdam(each.parameters(), lr=1e-2) for each in (model, alone)]
    outputs = []
    for step in range(3):
        found = _train(model, optimizers[0], step)
        expected = _train(alone, optimizers[1], step)
        assert all(map(torch.equal, found, expected))
        outputs.append(found[0])
    assert not torch.equal(outputs[0], outputs[1])
    # A reference that a graph has saved is one to what the next gather fills.
    assert all(len(of_layer) == 3 and len(set(of_layer)) == 1 for of_layer in seen.values())


@pytest.mark.parametrize(("recipe", "sizes"), gate_of(PRODUCT, "quantized_tp", SELECTED))
def test_training_equals_tensor_parallelism_alone(
    ranks: Ranks, recipe: str, sizes: tuple[int, ...]
) -> None:
    """Bit for bit, three steps: gathered codes, scales, outputs, gradients; objects stay."""
    ranks(int(torch.Size(sizes).numel())).run(_equals_tp_alone, recipe, sizes)


def _maxima_over(recipe: str, names: tuple[str, ...]) -> None:
    axes = axes_of(2, 2, 2, names=names)
    replicas, shards, tp = (axes.root[name] for name in names)
    joined = flatten_mesh(axes.root[names[1:]])
    full = {name: p.detach().clone() for name, p in Mlp(None).named_parameters()}
    form = recipe_of(recipe).weight
    # The layers' mesh, the ranks that combine maxima, whether these are all that have a part.
    cases: list[tuple[DeviceMesh | None, tuple[DeviceMesh, ...], bool]] = [
        (None, (shards, tp), True),
        (shards, (shards,), False),
        (joined, (joined,), True),
    ]
    for weight_mesh, combined, is_whole in cases:
        model, calls = sharded_with_record(recipe, axes, weight_mesh)
        wanted = {mesh.get_group().group_name for mesh in combined}
        assert calls == (wanted if form.has_shared_scale((1, 1)) else set())
        assert replicas.get_group().group_name not in calls
        for name, parameter in model.named_parameters():
            own = shard_of(parameter)
            if own is None:
                continue
            source = full[name]
            dim = {"up.weight": 0, "down.weight": 1, "whole.weight": None}[name]
            rank = tp.get_local_rank()
            is_part = dim is not None and not (is_whole and form.has_shared_scale((1, 1)))
            if is_part:
                source = source.chunk(2, dim)[rank].contiguous()
            codes = whole(source, recipe).codes.view(source.shape[0], -1)
            if dim is not None and not is_part:
                codes = codes.chunk(2, dim)[rank]
            rows = codes.chunk(2)[shards.get_local_rank()]
            assert torch.equal(own.codes, rows.flatten()), (name, weight_mesh)
            shared = torch.cat([each.flatten() for each in (*own.scales().shared, torch.ones(1))])
            by_rank = [torch.empty_like(shared) for _ in range(8)]
            dist.all_gather(by_rank, shared)
            if is_whole or dim is None:
                assert all(torch.equal(other, shared) for other in by_rank)
            elif form.has_shared_scale((1, 1)):
                assert any(not torch.equal(other, shared) for other in by_rank)


def sharded_with_record(
    recipe: str, axes: Axes, weight_mesh: DeviceMesh | None
) -> tuple[nn.Module, set[str]]:
    """Return a quantized model, and the names of groups that quantizing has exchanged over."""
    with record_collectives() as record:
        model = sharded(recipe, axes, weight_mesh)
    return model, {name for kind, name in record.calls_by_group if kind == "all_reduce"}


MAXIMA = [
    (recipe, names)
    for recipe in RECIPE_NAMES
    for names in (("dp_replicate", "dp_shard", "tp"), ("a", "b", "c"))
]


@pytest.mark.parametrize(
    ("recipe", "names"),
    gate_of(
        MAXIMA,
        "quantized_tp",
        [("fp8_current", ("a", "b", "c")), ("nvfp4", ("dp_replicate", "dp_shard", "tp"))],
    ),
)
def test_layers_say_which_ranks_combine_maxima(
    ranks: Ranks, recipe: str, names: tuple[str, ...]
) -> None:
    """Shards, tp, both; never replicas, whatever axes are called. Scales of the ranks are equal."""
    ranks(8).run(_maxima_over, recipe, names)


def _over_tp_alone() -> None:
    axes = axes_of(2, 2)
    with pytest.raises(ValueError, match=r"a weight_mesh with all ranks that divide .*'up.weight'"):
        sharded("fp8_current", axes, axes.tp)
    # Replicas have all rows: no rank of theirs must be asked.
    axes = axes_of(2, 1, 2)
    model, calls = sharded_with_record("nvfp4", axes, axes.tp)
    assert calls == {axes.tp.get_group().group_name}
    full = whole(Mlp(None).up.weight.detach(), "nvfp4")
    own = shard_of(model.up.weight)
    codes = full.codes.view(2, -1)[axes.tp.get_local_rank()]
    assert own is not None and torch.equal(own.codes, codes)


def test_maxima_over_tp_alone_need_whole_rows(ranks: Ranks) -> None:
    """Ranks with other rows would code them by a scale of their own."""
    ranks(4).run(_over_tp_alone)


def _state(model: nn.Module, optimizer: FusedAdam) -> dict[str, object]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


def _load(model: nn.Module, optimizer: FusedAdam, path: Path) -> None:
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],  # type: ignore[arg-type]
        optim_state_dict=state["optimizer"],  # type: ignore[arg-type]
    )


def _train_apart(model: nn.Module, optimizer: FusedAdam, steps: range) -> None:
    """Train on other samples a rank, so that layers record other maxima."""
    for step in steps:
        torch.manual_seed(step)
        model(batch(10 * step + dist.get_rank())).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _run(recipe: str, sizes: tuple[int, ...]) -> tuple[nn.Module, FusedAdam]:
    model = sharded(recipe, axes_of(*sizes))
    return model, FusedAdam(model.parameters(), lr=1e-2)


def _bytes_of(model: nn.Module, optimizer: FusedAdam) -> list[Tensor]:
    """Return everything that training goes on from, whole."""
    found = [tensor for tensors in codes_of(model).values() for tensor in tensors]
    for states in states_of(model, optimizer).values():
        found += [torch.as_tensor(value).clone() for _, value in sorted(states.items())]
    return [*found, *histories_of(model)]


def _restores(recipe: str, sizes: tuple[int, ...], path: Path) -> None:
    """Save, perturb, load; and go on as without."""
    model, optimizer = _run(recipe, sizes)
    _train_apart(model, optimizer, range(2))
    dcp.save(_state(model, optimizer), checkpoint_id=path)
    saved = _bytes_of(model, optimizer)
    _train_apart(model, optimizer, range(2, 4))
    later = _bytes_of(model, optimizer)
    assert not all(map(torch.equal, saved, later))
    _load(model, optimizer, path)
    assert all(map(torch.equal, _bytes_of(model, optimizer), saved))
    _train_apart(model, optimizer, range(2, 4))
    assert all(map(torch.equal, _bytes_of(model, optimizer), later))


RESTORED = [
    (recipe, sizes)
    for recipe in RECIPE_NAMES
    for sizes in ((2, 1), (2, 2, 1), (2, 2), (2, 1, 2), (2, 2, 2))
]


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    gate_of(
        RESTORED,
        "quantized_tp",
        [
            ("fp8_current", (2, 1)),
            ("mxfp8", (2, 2, 1)),
            ("nvfp4", (2, 2)),
            ("fp8_delayed", (2, 1, 2)),
        ],
    ),
)
def test_loads_of_dcp_restore_all_that_training_goes_on_from(
    ranks: Ranks, tmp_path: Path, recipe: str, sizes: tuple[int, ...]
) -> None:
    """Shards, replicas, each beside tp: codes, scales, main weights, moments, histories."""
    ranks(int(torch.Size(sizes).numel())).run(_restores, recipe, sizes, tmp_path / "dcp")


def _move(recipe: str, sizes: tuple[int, ...], source: Path | None, target: Path) -> list[Tensor]:
    model, optimizer = _run(recipe, sizes)
    _train_apart(model, optimizer, range(2 if source is None else 1))
    if source is not None:
        _load(model, optimizer, source)
    dcp.save(_state(model, optimizer), checkpoint_id=target)
    return _bytes_of(model, optimizer)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_loads_of_dcp_change_the_degree_of_tp(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    """Two, one, two; other columns of a weight come from other files, bit for bit."""
    found, source = [], None
    for number, sizes in enumerate(((2, 2), (2, 1), (1, 2))):
        target = tmp_path / str(number)
        pool = ranks(int(torch.Size(sizes).numel()))
        answers = pool.run(_move, recipe, sizes, source, target)
        assert all(all(map(torch.equal, answer, answers[0])) for answer in answers)
        found.append(answers[0])
        source = target
    for each in found[1:]:
        assert all(map(torch.equal, each, found[0]))


def _save_own_scales(path: Path) -> None:
    axes = axes_of(2, 2)
    model = sharded("fp8_current", axes, axes.data)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def _load_own_scales(path: Path) -> None:
    model = sharded("fp8_current", axes_of(2, 1))
    state = {"model": {"up.weight": model.state_dict()["up.weight"]}}
    with pytest.raises(dcp.CheckpointException, match="one scale of a matrix of shape"):
        dcp.load(state, checkpoint_id=path)


def test_parts_with_scales_of_their_own_do_not_become_one(ranks: Ranks, tmp_path: Path) -> None:
    """As a layer may ask for; on all ranks, instead of codes that mean other values."""
    ranks(4).run(_save_own_scales, tmp_path / "dcp")
    ranks(2).run(_load_own_scales, tmp_path / "dcp")


def _torch_parallel(recipe: str) -> None:
    """Layers that torch's own parallelize_module has cut compute with decoded values."""
    axes = axes_of(2, 2)
    torch.manual_seed(0)
    layers = [nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU()]
    plain = nn.Sequential(*layers).bfloat16()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    models = []
    for _ in range(2):
        model = parallelize_module(copy.deepcopy(plain), axes.tp, plan)
        fully_shard(model, mesh=axes.data)
        models.append(model)
    model, dense = models
    megafsdp.quantize_(model, recipe)
    assert {n for n, p in model.named_parameters() if shard_of(p) is not None} == {
        "0.weight",
        "2.weight",
    }
    optimizer = FusedAdam(model.parameters(), lr=1e-2)
    for step in range(3):
        with torch.no_grad():
            for a, b in zip(model.parameters(), dense.parameters(), strict=True):
                own = shard_of(a)
                local_object(b).copy_(local_object(a) if own is None else own.decode())
        outputs = []
        for each in models:
            each.zero_grad()
            outputs.append(each(batch(step)))
            outputs[-1].float().square().mean().backward()
        assert torch.equal(*outputs)
        for a, b in zip(model.parameters(), dense.parameters(), strict=True):
            assert torch.equal(local_object(a.grad), local_object(b.grad))
        optimizer.step()


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_layers_of_torch_compute_with_decoded_values(ranks: Ranks, recipe: str) -> None:
    """Bit for bit what plain layers compute with these, three steps."""
    ranks(4).run(_torch_parallel, recipe)
