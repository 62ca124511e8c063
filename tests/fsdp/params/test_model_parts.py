"""DTensor parameters over a model axis: what is read of them, and what is refused on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megafsdp import (
    FSDPModule,
    clip_grad_norm_,
    full_tensor,
    fully_shard,
    fully_shard_model,
)
from megafsdp.buffer.comm.collectives import record_collectives
from megafsdp.fsdp.params.model_parts import read_placement
from megafsdp.mesh.annotation import FusedParts, annotate
from megafsdp.mesh.torch_private import StridedShard, flatten_mesh
from tests.ranks import Ranks


class Layer(nn.Module):
    """A matrix."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by it."""
        return x @ self.weight


def _grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))


def _refused(shard: Callable[[], object], error: type[Exception], words: list[str]) -> None:
    """Assert that this rank, hence each, raises an error of three parts before any collective."""
    with record_collectives() as record, pytest.raises(error) as caught:
        shard()
    message = str(caught.value)
    for word in [*words, "Expected", "got", "'weight'"]:
        assert word in message, message
    assert not record.calls


def _unsound_placements() -> None:
    grid = _grid()
    whole, data, tp = torch.arange(32.0).view(8, 4), grid["data"], grid["tp"]
    everyone = init_device_mesh("cpu", (4,))
    # Made before, for the first of each kind makes its groups.
    cases = [
        ([Partial()], tp, ValueError, ["Partial", "redistribute"]),
        ([StridedShard(0, split_factor=3)], tp, NotImplementedError, ["3 fused", "8 elements"]),
        ([StridedShard(1, split_factor=2)], tp, NotImplementedError, ["2 fused", "along dim 1"]),
        ([Shard(0), Shard(1)], grid, NotImplementedError, ["one axis", "(2, 2)"]),
        ([Replicate(), Shard(0)], grid, NotImplementedError, ["one axis", "(2, 2)"]),
        ([Shard(0)], data, ValueError, ["beside", "mesh="]),
        ([Shard(0)], everyone, ValueError, ["[0, 2] in both", "mesh="]),
    ]
    for placements, mesh, error, words in cases:
        local = whole if error is ValueError else whole[:4]
        weight = DTensor.from_local(local, mesh, placements, run_check=False)
        layer = Layer(weight)
        if "[0, 2] in both" in words and dist.get_rank() % 2:
            words = ["[1, 3] in both"]
        _refused(lambda m=layer: fully_shard(m, mesh=data), error, words)
        assert not isinstance(layer, FSDPModule), "a refused module is as it was"


def test_parameters_that_a_model_axis_cannot_cut_are_refused(ranks: Ranks) -> None:
    """Partial, in odd strides, by two axes, by the data axis or one that shares ranks with it."""
    ranks(4).run(_unsound_placements)


def _wrong_calls() -> None:
    grid = _grid()
    cut = distribute_tensor(torch.ones(8, 4), grid["tp"], [Shard(0)])
    _refused(lambda: fully_shard(Layer(cut)), ValueError, ["no mesh", "mesh="])
    # The axis of tensor parallelism in the mesh to divide over: as if it were one of replicas.
    _refused(lambda: fully_shard(Layer(cut), mesh=grid), ValueError, ["beside", "mesh="])
    expert = Layer(cut)
    annotate(expert.weight, is_expert=True)
    _refused(lambda: fully_shard(expert, mesh=grid["tp"]), ValueError, ["expert_mesh="])
    plain = Layer(torch.ones(8, 4))
    annotate(plain.weight, tp_dim=1)
    _refused(
        lambda: fully_shard(plain, mesh=grid["data"]), ValueError, ["set_device_mesh", "dim 1"]
    )
    crossed = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("rows", "tp"))["tp"]
    askew = Layer(distribute_tensor(torch.ones(8, 4), crossed, [Shard(0)]))
    with pytest.raises(ValueError, match="this rank alone in common") as caught:
        fully_shard_model(nn.Sequential(askew), [Layer], mesh=grid["data"])
    assert "Slice both" in str(caught.value)
    elsewhere = DeviceMesh("meta", grid["tp"].mesh, _init_backend=False)
    other = Layer(torch.ones(4, 4))
    foreign = DTensor.from_local(torch.ones(4, 4), elsewhere, [Shard(0)], run_check=False)
    # As nn.Parameter() makes it, which detaches: of such a mesh torch 2.14 dispatches nothing.
    foreign.requires_grad_()._is_param = True
    other.weight = foreign
    _refused(lambda: fully_shard(other, mesh=grid["data"]), ValueError, ["'cpu'", "'meta'"])
    # Of a model all units are looked at before the first is changed.
    model = nn.Sequential(Layer(cut), Layer(torch.ones(4, 4)))
    with pytest.raises(ValueError, match="no mesh"):
        fully_shard_model(model, [Layer])
    assert not any(isinstance(layer, FSDPModule) for layer in model)


def test_calls_that_do_not_fit_the_parameters_are_refused(ranks: Ranks) -> None:
    """No mesh, a mesh with the model axis in it, experts without theirs, a plain part, a device."""
    ranks(4).run(_wrong_calls)


def _wrong_expert_meshes() -> None:
    grid, layer = _grid(), Layer(torch.ones(8, 4))
    flat = init_device_mesh("cpu", (4,))
    for mesh, options, words in [
        (DeviceMesh("meta", torch.arange(4), _init_backend=False), {}, ["'cpu'", "'meta'"]),
        (flat, {"mesh": grid, "outer_strategy": "optim"}, ["2 axes", "(4,)"]),
        (init_device_mesh("cpu", (2, 2)), {}, ["two named", "None"]),
    ]:
        options = {"mesh": flat, **options}
        with pytest.raises(ValueError, match="Expected") as caught:
            fully_shard(layer, expert_mesh=mesh, **options)
        assert all(word in str(caught.value) for word in words), caught.value


def test_meshes_of_experts_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    """Another device, no outer axis where main weights are divided over it, two unnamed axes."""
    ranks(4).run(_wrong_expert_meshes)


def _placements() -> None:
    grid = _grid()
    data, tp = grid["data"], grid["tp"]
    rank = tp.get_local_rank()

    def read(weight: torch.Tensor, owner: nn.Module, **annotation: object) -> object:
        weight = nn.Parameter(weight)
        annotate(weight, **annotation)
        return read_placement("weight", weight, [owner], data)

    ours, theirs = nn.Module(), nn.Module()
    ours.computes_on_part = True
    # torch cuts as torch.chunk does: 5 rows are 3 and 2.
    uneven = read(distribute_tensor(torch.ones(5, 4), tp, [Shard(0)]), theirs)
    assert uneven.part.pieces == (((0, 3), (3, 2))[rank],) and uneven.form is not None
    # A layer that declares the cut has cut each of the fused tensors.
    fused = {"fused": FusedParts(("gate", "up"), (2, 6))}
    weight = distribute_tensor(torch.ones(8, 4), tp, [Shard(0)])
    assert read(weight, theirs, **fused).part.pieces == ((4 * rank, 4),)
    gated = read(weight, ours, tp_dim=0, **fused)
    assert gated.part.pieces == ((rank, 1), (2 + 3 * rank, 3)) and gated.form is None
    # What all ranks have: torch's layers say by the gradient whether it is summed, ours before.
    norm = DTensor.from_local(torch.ones(4), tp, [Replicate()], run_check=False)
    summed = [read(norm, m, sums_over_tp=s).is_summed for m in (theirs, ours) for s in (0, 1)]
    assert summed == [True, True, False, True]
    wrong = DTensor.from_local(torch.ones(3, 4), tp, [Shard(0)], shape=(8, 4), stride=(4, 1))
    with pytest.raises(ValueError, match=r"Expected \(4, 4\) of shape \(8, 4\).*'weight'"):
        read(wrong, theirs)


def test_a_dtensor_says_its_part_its_face_and_its_sums(ranks: Ranks) -> None:
    """Torch's cuts are those of torch.chunk, a declared cut goes through each fused tensor."""
    ranks(4).run(_placements)


class Gated(nn.Module):
    """A stack of [gate; up], as transformers' tensor parallelism cuts it."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend of a function of (stack, width)."""
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        gate, up = torch.einsum("ek,enk->en", x, weight).chunk(2, 1)
        return (gate.sigmoid() * up).sum()


def _strides() -> None:
    grid = _grid()
    whole = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(0))
    tp = grid["tp"].get_local_rank()
    own = torch.cat([part.chunk(2, 1)[tp] for part in whole.chunk(2, 1)], 1)
    strided = [StridedShard(1, split_factor=2)]
    cut = DTensor.from_local(own, grid["tp"], strided, shape=whole.shape, stride=whole.stride())
    reference, layer = Gated(whole), Gated(cut)
    fully_shard(layer, mesh=grid["data"])
    assert torch.equal(full_tensor(layer.weight), whole)
    rows = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        (sum(map(reference, rows)) / 2).backward()
        layer(rows[grid["data"].get_local_rank()]).backward()
        torch.testing.assert_close(full_tensor(layer.weight.grad), reference.weight.grad)
        norm = clip_grad_norm_(layer, math.inf)
        torch.testing.assert_close(norm, reference.weight.grad.norm(), rtol=1e-6, atol=0)
        for net in (reference, layer):
            torch.optim.SGD(net.parameters(), lr=0.1 * (step + 1)).step()
            net.zero_grad()
    torch.testing.assert_close(full_tensor(layer.weight), reference.weight.detach())


# Of such gradients torch 2.11 cannot make a copy, under FSDP2 either.
@pytest.mark.skipif(not hasattr(torch_fsdp, "DataParallelMeshDims"), reason="of torch 2.12")
def test_strided_shards_are_fused_tensors_cut_by_themselves(ranks: Ranks) -> None:
    """Between the matrices and the columns of a stack."""
    ranks(4).run(_strides)


def _plain_beside_cut() -> None:
    # An axis of any name: that of the DTensors around, in the unit or in those below it.
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "width"))
    cut = distribute_tensor(torch.ones(8, 4), grid["width"], [Shard(0)])
    net = nn.Sequential(Layer(cut), nn.LayerNorm(4))
    net[0].scale = nn.Parameter(torch.ones(4))
    fully_shard(net[0], mesh=grid["data"])
    fully_shard(net, mesh=grid["data"])
    for parameter in (net[0].scale, net[1].weight, net[1].bias):
        assert parameter.placements == (Shard(0), Replicate())
        assert parameter.device_mesh.mesh_dim_names == ("data", "width")
    assert len(net[0]._fsdp_unit().groups) == 1, "one collective for both"
    # Without any, a mesh that was sliced from one with an axis of another use has no model axis.
    alone = fully_shard(nn.LayerNorm(4), mesh=grid["data"])
    assert alone.weight.placements == (Shard(0),)
    # A slice beside an axis of tensor parallelism has one, a mesh flattened over it has none.
    grid = _grid()
    beside = fully_shard(nn.LayerNorm(4), mesh=grid["data"])
    assert beside.weight.placements == (Shard(0), Replicate())
    over = fully_shard(nn.LayerNorm(4), mesh=flatten_mesh(grid))
    assert over.weight.placements == (Shard(0),)


def test_plain_parameters_are_repeated_over_the_axis_of_dtensors_around(ranks: Ranks) -> None:
    """So a checkpoint has them once, and a norm counts them once."""
    ranks(4).run(_plain_beside_cut)
